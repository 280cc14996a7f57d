"""Launchers and batch systems, and who has started this process.

``table.py`` has a row for each launcher and batch system; a new one is a row there and, if ``mpiplus run`` shall use
it, a function in ``mpirun.py``. Neither torch nor MPI is imported here.

Uses ``node`` and the table of MPI's flavours. Start with ``table.py``, then ``variables.py``.
"""
