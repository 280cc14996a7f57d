"""``mpiplus status``: what ranks answer, and who asks them.

Each rank answers on a socket of its own (``files.py`` has the names, ``answering.py`` begins it). ``asking.py`` asks
the ranks of this node, and those of a whole job. Only ``answering.py`` imports torch.

Uses ``engine``, whose C answers. Start with ``command.py``.
"""
