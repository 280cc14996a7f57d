"""Messages between ranks through torch's store.

Uses ``mpi``, over which the address of the store of ``mpi://`` travels, and ``node``. Start with ``checkin.py``: who
has come, who waits and who has left.
"""
