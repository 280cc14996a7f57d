"""``mpiplus run``: programs on several ranks. Start with ``command.py``."""
