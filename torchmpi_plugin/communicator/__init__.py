"""A group's communicator and its shared memory.

How the members of a new group meet, and what fails on one fails on all. Uses ``mpi`` and ``store``. Start with
``membership.py``, which makes a :class:`~.communicator.Communicator`.
"""
