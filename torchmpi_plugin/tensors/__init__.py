"""Tensors as memory: checks, buffers, dtypes and devices.

What an operation needs to know of the tensors it was given, before anything is sent. Uses ``node``, for memory that
other processes can map. Start with ``arguments.py``.
"""
