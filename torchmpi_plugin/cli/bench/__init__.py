"""``mpiplus bench``: raw MPI, mpiplus and gloo side by side.

Start with ``command.py``; ``operations.py`` is the table of what is measured, ``training/`` is ``--train``.
"""
