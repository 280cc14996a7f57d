"""The methods of :class:`ProcessGroupMPI`: operations, and functions that take the group.

C carries each of them out (``call_path.py``, python/bridge.c). It takes one form of the arguments, the one that torch
itself calls, and plain tensors; ``forms.py`` and ``operands.py`` make that of all others. A method returns a Work. With
``asyncOp`` false the operation is complete when it returns.

- ``starting.py``: what Python has to say of a call before it begins
- ``coalesced.py``: operations that consist of others; ``several.py``: several tensors for a rank
- ``sparse.py``, ``device_reductions.py``: reductions that are not C's
- ``windows.py``: one-sided communication; ``splitting.py``: groups made of the group's ranks
- ``ending.py``: the end of a group; ``failures.py``: what becomes of operations that fail
"""

from __future__ import annotations

import torch.distributed as dist

from .. import torch_internals
from . import call_path, ending, splitting, windows
from .group import ProcessGroupMPI

__all__ = ["ProcessGroupMPI"]

call_path.install(ProcessGroupMPI)
ProcessGroupMPI._connect = staticmethod(call_path.connect)
for _method in (
    *(ending.shutdown, splitting.split_group, splitting.shrink),
    *(windows.new_window, windows.allocate_tensor, windows.supports_tensor_alloc),
):
    setattr(ProcessGroupMPI, _method.__name__, _method)
#: Where a group has no backend in C++ to say so itself, these end in words from inside torch.
_OF_BACKENDS = () if torch_internals.has_python_backends() else splitting.LEFT_TO_BACKENDS
#: With this one it would answer None.
_OF_BACKENDS += ("merge_remote_group",)
for _name, _what in {**vars(dist.ProcessGroup), **vars(torch_internals.backend_class())}.items():
    if _name in _OF_BACKENDS or not (isinstance(_what, type) or hasattr(ProcessGroupMPI, _name)):
        _refusal = splitting.refusal(_name)
        setattr(ProcessGroupMPI, _name, property(_refusal) if isinstance(_what, property) else _refusal)
