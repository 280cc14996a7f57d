"""``mpiplus status``: what the ranks of running jobs are doing. Start with ``command.py``."""
