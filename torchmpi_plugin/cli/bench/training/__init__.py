"""``mpiplus bench --train``: whole networks. Start with ``training.py``."""
