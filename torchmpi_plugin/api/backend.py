"""``api_mode="dispatcher"``: a backend below torch's own process group.

From torch 2.15 on a backend may be a Python subclass of c10d's Backend. torch's process group, which is C++, then runs
the hooks and hands each operation to the backend of the tensor's device. That is how mpiplus shares a group with other
backends, and how a group of its own serves hooks. Each operation is written once, in :class:`ProcessGroupMPI`; what is
here hands over to it.
"""

from __future__ import annotations

import functools
import operator
import os
import weakref
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from .. import operations, torch_internals
from ..errors import DistBackendError
from ..group import splitting
from ..group.process_group import ProcessGroupMPI
from . import dispatcher

#: The operations, by the names that torch's dispatcher calls them.
OPERATIONS = tuple(row.newer or row.method for row in operations.ROWS)
#: Older names of some of them, which Python code may still call.
ALIASES = {
    alias: name
    for name in OPERATIONS
    for alias, method in vars(ProcessGroupMPI).items()
    if method is vars(ProcessGroupMPI)[name] and alias != name
}
#: What torch asks a backend besides, answered by the group.
_QUESTIONS = (
    *("_add_ephemeral_timeout", "_get_sequence_number_for_group", "abort", "allocate_tensor"),
    *("get_error", "set_timeout", "shrink", "supports_tensor_alloc"),
)
_PROPERTIES = (
    *("options", "supports_coalescing", "supports_shrinking", "supports_splitting"),
    *("supports_reconfigure", "supports_completion_hooks", "_supports_time_estimate"),
)

#: Those below torch's wrapper of DETAIL are otherwise held by C++ alone, where a Python object is forgotten.
_open: set[Any] = set()


def _hand_over(name: str) -> Callable[..., Any]:
    def operation(self: Any, *arguments: Any) -> Any:
        return dispatcher.issued.note(getattr(ProcessGroupMPI, name)(self.group, *arguments))

    operation.__name__ = name
    return operation


def _ask(name: str) -> Callable[..., Any]:
    def question(self: Any, *arguments: Any, **named: Any) -> Any:
        return getattr(self.group, name)(*arguments, **named)

    question.__name__ = name
    return question


class _Backend:
    """Mixed with c10d's Backend by :func:`backend_type`.

    Args:
        group: does the work.
        owned: this object keeps the group alive; else the group keeps this one.
    """

    def __init__(self, group: ProcessGroupMPI, owned: bool) -> None:
        super().__init__(group.rank(), group.size())  # type: ignore[call-arg]
        self._find: Callable[[], ProcessGroupMPI | None] = (lambda: group) if owned else weakref.ref(group)

    #: torch does not pass them on to a backend in Python. All of torch's questions have an answer here or in
    #: _PROPERTIES: to one that has none torch's trampoline calls itself for ever.
    supports_window = supports_abort_hooks = False

    @property
    def group(self) -> ProcessGroupMPI:
        found = self._find()
        if found is None:
            raise DistBackendError("the mpiplus group of this backend is destroyed; make a new group")
        return found

    def getBackendName(self) -> str:  # noqa: N802 - the names of the C++ virtual functions
        return "mpiplus"

    name = getBackendName

    def allreduce_sparse(self, tensors: Any, opts: Any = None) -> Any:
        """``allreduce`` of sparse tensors, which torch's dispatcher calls by another name."""
        return self.allreduce(tensors, opts)  # type: ignore[attr-defined]

    def start_coalescing(self) -> None:
        """Operations from here to ``end_coalescing`` become one Work."""
        self.group._start_coalescing(torch.device("cpu"))

    def end_coalescing(self) -> Any:
        """The Work of the operations since ``start_coalescing``."""
        return self.group._end_coalescing(torch.device("cpu"))

    def _set_group_uid(self, name: str) -> None:
        super()._set_group_uid(name)  # type: ignore[misc]
        self.group.setGroupName(name)

    def shutdown(self) -> None:
        self.group.shutdown()
        _open.discard(self)

    def split(self, store: dist.Store, ranks: list[int], opts: Any) -> Any:
        """A backend of some of the ranks, for torch's ``split_group``; a NotImplementedError on the others."""
        part = splitting.part(self.group, store, ranks, opts.group_name or "split", opts._timeout)
        if part is None:  # torch 2.15 crashes where a backend in Python gives it no backend
            raise NotImplementedError(
                f"split_group of {self.group.label}: rank {self.group.rank()} is in no part, which torch's own process "
                f"group cannot have with mpiplus below it. Name all ranks, or use new_group"
            )
        return as_backend(part)


@functools.cache
def backend_type() -> Any:
    """The class of mpiplus backends, made when it is first needed: an older torch has nothing to make it from."""
    members: dict[str, Any] = {name: _hand_over(name) for name in OPERATIONS}
    members |= {old: members[new] for old, new in ALIASES.items()}
    members |= {name: _ask(name) for name in _QUESTIONS}
    members |= {name: property(operator.attrgetter(f"group.{name}")) for name in _PROPERTIES}
    return type("BackendMPI", (_Backend, torch_internals.backend_class()), members)


def group_of(group: Any) -> ProcessGroupMPI | None:
    """The group of mpiplus's own that is, or works for, one of torch's; None if there is none."""
    if isinstance(group, ProcessGroupMPI):
        return group
    if torch_internals.has_python_backends() and isinstance(group, dist.ProcessGroup):
        for device in group._device_types:
            backend = torch_internals.unwrapped(group._get_backend(device))
            if isinstance(backend, _Backend):
                return backend.group
    return None


# ---- hooks on a group of mpiplus's own ----


def _dispatch(name: str) -> Callable[..., Any]:
    def operation(self: Any, *arguments: Any, **named: Any) -> Any:
        with dispatcher.issued.asked() as works:
            held = getattr(dist.ProcessGroup, name)(self, *arguments, **named)  # from here: see below
        return works[-1] if works else held

    # By the code's name pybind11 sees that it is called by the very method that it would call again.
    operation.__code__ = operation.__code__.replace(co_name=name)
    return operation


class HookedProcessGroupMPI(ProcessGroupMPI):
    """A group with hooks: its operations take the way through torch's dispatcher, which runs them."""


for _name in OPERATIONS:
    # torch does not hand gather_single over to a backend in Python.
    if hasattr(dist.ProcessGroup, _name) and _name != "gather_single":
        setattr(HookedProcessGroupMPI, _name, _dispatch(_name))
for _old, _new in ALIASES.items():
    # torch's own, which come to the newer name: in Python they would pass for what the dispatcher is to call.
    if hasattr(dist.ProcessGroup, _old) and _new != "gather_single":
        setattr(HookedProcessGroupMPI, _old, vars(dist.ProcessGroup)[_old])  # getattr's would take no self


def attach(group: ProcessGroupMPI) -> None:
    """Give a group what hooks are attached to, and let its operations run them from the first hook on."""
    group.attach, group.as_backend, group.run_hooks = attach, as_backend, _run_hooks
    group._show_to_modes = dispatcher.show_to_modes
    torch_internals.register_backend(group, group._device_types, backend_type()(group, owned=False))
    if os.environ.get("TORCH_DIST_NAN_CHECK", "0") == "1":  # torch attaches its check to new groups
        _run_hooks(group)


def _run_hooks(group: ProcessGroupMPI) -> None:
    group.__class__ = HookedProcessGroupMPI


def as_backend(group: ProcessGroupMPI) -> Any:
    """A backend for a group of torch's own."""
    group.attach, group.as_backend = attach, as_backend
    made = backend_type()(group, owned=True)
    _open.add(made)
    return made
