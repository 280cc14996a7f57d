"""The methods of :class:`ProcessGroupMPI`: plain functions that take the group, each family in a file of its own.

Each method checks the arguments and makes operands of them, which ``starting.py`` hands over to C, and returns a Work.
With ``asyncOp`` false the operation is complete when it returns. Each is written for one form of its arguments, the one
that torch itself calls; ``forms.py`` makes that of all others, and ``call_path.py`` gives methods their other names.

- ``exchanging.py``: barrier, broadcast, all_gather, gather, scatter, all_to_all
- ``reducing.py``: all_reduce, reduce, reduce_scatter; ``sparse.py`` and ``device_reductions.py`` beside it
- ``several.py``: several tensors for a rank
- ``messages.py``: send, recv, and exchanges made of messages
- ``windows.py``: one-sided communication; ``splitting.py``: groups made of the group's ranks
- ``ending.py``: the end of a group; ``failures.py``: what becomes of operations that fail
"""

from __future__ import annotations

import torch.distributed as dist

from .. import torch_internals
from ..operations import ROWS
from . import call_path, ending, exchanging, messages, reducing, splitting, starting, windows
from .group import ProcessGroupMPI

__all__ = ["ProcessGroupMPI"]

_functions = {**vars(exchanging), **vars(messages), **vars(reducing)}
for _row in ROWS:
    if "@" not in _row.roles:  # all ranks call it
        _functions[_row.method] = starting.telling_of_no_memory(_functions[_row.method])
call_path.install(ProcessGroupMPI, _functions)
for _method in (
    *(ending.shutdown, splitting.split_group, splitting.merge_remote_group, splitting.shrink),
    *(windows.new_window, windows.allocate_tensor, windows.supports_tensor_alloc),
):
    setattr(ProcessGroupMPI, _method.__name__, _method)
#: Where a group has no backend in C++ to say so itself, these end in words from inside torch.
_OF_BACKENDS = () if torch_internals.has_python_backends() else splitting.LEFT_TO_BACKENDS
for _name, _what in {**vars(dist.ProcessGroup), **vars(torch_internals.backend_class())}.items():
    if _name in _OF_BACKENDS or not (isinstance(_what, type) or hasattr(ProcessGroupMPI, _name)):
        _refusal = splitting.refusal(_name)
        setattr(ProcessGroupMPI, _name, property(_refusal) if isinstance(_what, property) else _refusal)
