"""``mpiplus info``: this node, the MPI library, the launcher, and whether all ranks can talk.

Start with ``command.py``, which asks the others.
"""
