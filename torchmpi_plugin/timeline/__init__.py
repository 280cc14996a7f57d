"""A job as a timeline: what each rank records of its calls, and what is drawn of it.

Each rank keeps its last calls in a file that C writes to (``recording.py``, which also collects the files;
``rows.py`` has the format). ``clocks.py`` compares the nodes' clocks. From these, or from what running ranks answer,
``operations.py`` makes one table, and ``trace.py`` and ``page.py`` show that.

Uses ``engine`` and ``mpi``. Start with ``operations.py``; the commands are in ``command.py``.
"""
