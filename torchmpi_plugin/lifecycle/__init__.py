"""From ``init_process_group`` to the end of the process.

How ranks find each other, how MPI is started where nobody has, and what is owed at the end. Uses all layers that a
group is made of. Start with ``creation.py``.
"""
