"""This node.

Its name, addresses, cores and processes, and connections to other nodes of the job.
Neither torch nor MPI is imported here, so that what runs before them can use it. Uses the table of settings only.
Start with ``node.py``.
"""
