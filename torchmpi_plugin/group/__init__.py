"""The process group: the c10d methods on one communicator.

Uses all layers below: a method checks its arguments (``tensors``), starts an operation of the C code and makes its Work
(``engine``). Start with ``process_group.py``, which says where each family of operations is, then ``group.py``: how an
operation is started.
"""
