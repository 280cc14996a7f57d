"""This node and what started this process.

Its name, addresses, cores and processes; the launchers and their variables; connections to other nodes of the job.
Neither torch nor MPI is imported here, so that what runs before them can use it. Uses the table of settings only.
Start with ``launchers.py`` (who started this process, as which rank) and ``node.py`` (this node).
"""
