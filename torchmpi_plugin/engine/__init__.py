"""Pending operations: the Python side of the C engine.

Who waits and who completes, deadlines, and the Work that a user holds. Uses ``mpi`` and ``tensors``. Start with
``engine.py``, then ``work.py``.
"""
