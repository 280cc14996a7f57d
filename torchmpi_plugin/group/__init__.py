"""The process group: the c10d methods on one communicator.

Uses all layers below: a method checks its arguments (``tensors``) and passes operands to C, which makes a Work
(``engine``). Start with ``process_group.py``, which says where each family of operations is, then ``starting.py``: how
an operation is started.
"""
