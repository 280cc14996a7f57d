"""Windows (c10d's one-sided communication) and tensors in memory that the ranks of a node share.

A window is a tensor of each rank that the others may write to. A rank that can map another's tensor writes there
itself; to all others it sends messages, which the engine of the receiving rank takes (p2p/windows.c). Either way what
a rank has put is there when its next signal is.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch.distributed import distributed_c10d as c10d

from .. import _bridge, torch_internals
from ..engine.work import Work
from ..errors import DistBackendError
from ..mpi import runtime
from ..tensors import allocation, arguments
from .group import Group
from .operands import plain
from .registration import Peer, Record, Registration

#: Kinds of signals: the user's, and those that say that no more will come.
_SIGNAL, _FAREWELL = 0, 1
#: c10d's types.
_OF_ATTRIBUTES = "WindowAttr", "WindowAccessType"
_REGISTER = _bridge.Method(None, "tensor_register", "allgather", "out*+in")
_MEET = _bridge.Method(None, "tensor_deregister", "barrier", "")
_PUT, _SEND, _WAIT = (_bridge.Method(None, name, name, "in@window") for name in ("put", "signal", "wait_signal"))
#: Nothing comes after these.
_LAST = [_bridge.Method(None, "tensor_deregister", start, "in@window") for start in ("signal", "wait_signal")]


class Window:
    """A tensor of each rank of a group that the others may write to.

    The interface of ``torch._C._distributed_c10d.Window``, which cannot be subclassed in Python; an instance passes for
    one. Ranks are ranks of the group. All errors of arguments are raised before anything is sent.
    """

    def __init__(self, group: Group, number: int) -> None:
        # Not a cycle, and no claim: a destroyed group must go at once.
        self._group = weakref.ref(group)
        self._number = number
        self._registration: Registration | None = None

    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        """For ``isinstance`` only."""
        return torch_internals.find(f"{torch_internals.C10D}:Window")

    # ---- the tensor ----

    def tensor_register(self, tensor: torch.Tensor, owning: bool = True) -> None:
        """Let the others write to ``tensor``; collective.

        The tensor's memory is kept until ``tensor_deregister`` or the end of the group. Sizes and dtypes may differ
        between ranks.

        Args:
            tensor: a contiguous CPU tensor. One from ``allocate_tensor`` can be mapped by ranks on the same node.
            owning: without effect, as others may write for as long as the tensor is registered.

        Raises:
            TypeError, ValueError: a tensor that cannot be written to.
            RuntimeError: the window has a tensor already.
            DistBackendError: the others do not come, or register another window.
        """
        group = self._living_group("tensor_register")
        if self._registration is not None:
            raise RuntimeError(
                "tensor_register: the window has a tensor already; call tensor_deregister(), on all ranks, first"
            )
        arguments.check(tensor, "tensor_register")
        if not tensor.is_cpu:
            raise ValueError(f"tensor_register: windows of mpiplus have CPU tensors; this one is on {tensor.device}")
        if not tensor.is_contiguous() or tensor.is_conj() or tensor.is_neg():
            raise ValueError("tensor_register: offsets count elements in memory, so the tensor must be contiguous")
        self._registration = _register(group, self._number, tensor.detach())

    def tensor_deregister(self) -> None:
        """Take the tensor back, when all ranks have called this and all that was put is there; collective.

        Raises:
            RuntimeError: the window has no tensor.
            DistBackendError: the others do not come.
        """
        group, registration = self._open("tensor_deregister")
        _deregister(group, registration)
        self._registration = None

    def map_remote_tensor(self, rank: int) -> torch.Tensor:
        """Another rank's tensor itself, to read and write, as long as it is registered.

        Raises:
            ValueError: it cannot be mapped: ``get_attr(rank)`` tells.
        """
        peer = self._peer(rank, "map_remote_tensor")
        if peer.tensor is None:
            raise ValueError(
                f"map_remote_tensor: the tensor of rank {rank} cannot be mapped here. It can if both ranks are on one "
                f"node and rank {rank} has its tensor from allocate_tensor()"
            )
        return peer.tensor.detach()

    def get_attr(self, peer_rank: int) -> Any:
        """A WindowAttr whose ``access_type`` is UNIFIED if ``map_remote_tensor(peer_rank)`` works, else SEPARATE."""
        attributes, kinds = (torch_internals.find(f"{torch_internals.C10D}:{name}") for name in _OF_ATTRIBUTES)
        found = attributes()
        found.access_type = kinds.SEPARATE if self._peer(peer_rank, "get_attr").tensor is None else kinds.UNIFIED
        return found

    # ---- communication ----

    def put(
        self, tensor: torch.Tensor, dst_rank: int, target_offset_nelems: int, async_op: bool, opts: Any = None
    ) -> Work:
        """Write ``tensor`` into another rank's. The Work is complete when ``tensor`` may be changed again.

        Args:
            tensor: a CPU tensor of the dtype of the other rank's.
            dst_rank: the other rank, or this one.
            target_offset_nelems: where to begin, in elements.
            async_op: return at once.
            opts: a PutOptions with a timeout.

        Raises:
            TypeError: another dtype.
            ValueError: no such rank, or elements that are not there.
        """
        group, registration = self._open("put")
        peer = self._peer(dst_rank, "put")
        arguments.check(tensor, "put")
        if not tensor.is_cpu:
            raise ValueError(f"put: windows of mpiplus take CPU tensors; this one is on {tensor.device}")
        if tensor.dtype != peer.dtype:
            raise TypeError(f"put: the tensor of rank {dst_rank} is of {peer.dtype}, not of {tensor.dtype}")
        begin, end = target_offset_nelems, target_offset_nelems + tensor.numel()
        if not 0 <= begin <= end <= peer.shape.numel():
            raise ValueError(
                f"put: elements {begin} to {end} are not in the tensor of rank {dst_rank}, which has "
                f"{peer.shape.numel()}"
            )
        source, where = arguments.readable(tensor.detach()), begin * tensor.element_size()
        operands = group, plain(tensor, source), dst_rank, where, 0, registration.handle, async_op, opts
        return _bridge.start_plain(_PUT, operands, None, source, None, 1)

    def signal(self, peer_rank: int, async_op: bool, opts: Any = None) -> Work:
        """Add one to the signals that ``peer_rank`` can wait for; what this rank has put there comes before it."""
        group, registration = self._open("signal")
        self._peer(peer_rank, "signal")
        return _signal(group, registration, _SEND, peer_rank, _SIGNAL, async_op, opts)

    def wait_signal(self, peer_rank: int, async_op: bool, opts: Any = None) -> Work:
        """Wait for one signal from ``peer_rank``, and take it. Those that came earlier count."""
        group, registration = self._open("wait_signal")
        self._peer(peer_rank, "wait_signal")
        return _signal(group, registration, _WAIT, peer_rank, _SIGNAL, async_op, opts)

    # ---- checks ----

    def _living_group(self, operation: str) -> Group:
        group = self._group()
        if group is None or group.closed:
            raise DistBackendError(f"{operation}: the window's group is destroyed; make a new group and a new window")
        return group

    def _open(self, operation: str) -> tuple[Group, Registration]:
        group = self._living_group(operation)
        if self._registration is None:
            raise RuntimeError(f"{operation}: the window has no tensor; call tensor_register(), on all ranks, first")
        return group, self._registration

    def _peer(self, rank: int, operation: str) -> Peer:
        group, registration = self._open(operation)
        return registration.peers[arguments.check_peer(rank, group.size(), operation)]


# ---- collective ----


def _register(group: Group, window: int, tensor: torch.Tensor) -> Registration:
    """Meet the others, and tell each other where the tensors are."""
    counters = allocation.allocate(group._lib.mpp_counters_size(group.size()))
    mine = Record.of(group.next_registration, window, tensor, counters)
    records = [Record.decoded(row) for row in _tell(group, mine.encoded())]
    _check_agreement(group, records)
    number = max(record.number for record in records)  # they differ after a failure that not all have seen
    group.next_registration = number + 1
    registration = Registration(group._engine, group._handle, number, tensor, counters)
    try:
        mapped = _tell(group, registration.meet(group.rank(), group.communicator.processes, records))
        registration.takes_messages = not bool(mapped.all())
        if not bool(mapped[:, group.rank()].all()):
            registration.listen()
    except BaseException:
        registration.close("tensor_register failed")
        raise
    group.registrations.append(registration)
    return registration


def _tell(group: Group, mine: torch.Tensor) -> torch.Tensor:
    """Every rank's bytes, one row each."""
    everybody = torch.empty(group.size(), mine.numel(), dtype=torch.uint8, device="cpu")
    operands = group, plain(everybody, everybody), plain(mine, mine), c10d.AllgatherOptions()
    _bridge.start_plain(_REGISTER, operands, None, (mine, everybody), None, 1).wait()
    return everybody


def _check_agreement(group: Group, records: list[Record]) -> None:
    mine = records[group.rank()].window
    for rank, record in enumerate(records):
        if record.window != mine:
            raise DistBackendError(
                f"tensor_register ({group.label}): the ranks disagree: of the windows made with new_window(), counted "
                f"from 0, rank {group.rank()} registers a tensor with number {mine}, rank {rank} with number "
                f"{record.window}. Nothing was registered; the group can be used again"
            )


def _deregister(group: Group, registration: Registration) -> None:
    """Meet the others, then wait for the last of what they have put: nothing comes after a farewell."""
    _bridge.start_plain(_MEET, (group, c10d.BarrierOptions()), None, None, None, 1).wait()
    others = [rank for rank in range(group.size()) if rank != group.rank()]
    works = [_signal(group, registration, method, rank, _FAREWELL, True, None) for method in _LAST for rank in others]
    try:
        for work in works:
            work.wait()
    except DistBackendError:
        group.break_off("tensor_deregister failed")
        raise
    registration.close("the tensor was deregistered")
    group.registrations.remove(registration)


# ---- signals ----


def _signal(
    group: Group, registration: Registration, method: Any, peer: int, kind: int, is_async: bool, opts: Any
) -> Work:
    operands = group, None, peer, 0, kind, registration.handle, is_async, opts
    work: Work = _bridge.start_plain(method, operands, None, registration, None, 1)
    if not work.finished:
        registration.works.add(work)
    return work


# ---- methods of a group ----


def new_window(group: Group, tensor: torch.Tensor | None = None) -> Window:
    """A new window; collective.

    Args:
        tensor: what to register with it. Without one, ``Window.tensor_register`` is the collective call.

    Raises:
        RuntimeError: a torch without windows.
    """
    runtime.refuse_without_mpi("new_window")
    if not group.supports_window:
        raise RuntimeError(f"new_window: torch {torch.__version__} has no windows; it takes 2.15 or later")
    window = Window(group, group._next_window)
    if tensor is not None:
        window.tensor_register(tensor)
    group._next_window += 1
    return window


def supports_tensor_alloc(group: Group, device: Any) -> bool:
    """Return whether ``allocate_tensor`` works there: on the CPU. A number is that of a CUDA device."""
    return not isinstance(device, int) and torch.device(device).type == "cpu"


def allocate_tensor(group: Group, size: int, *, dtype: torch.dtype, device: Any) -> torch.Tensor:
    """A tensor of one dimension, in memory that other ranks of the node can map. Not collective.

    Raises:
        ValueError: a negative size, a device other than the CPU.
        MemoryError: there is not so much.
    """
    if size < 0:
        raise ValueError(f"allocate_tensor: the size must not be negative, as {size} is")
    if not supports_tensor_alloc(group, device):
        raise ValueError(f"allocate_tensor: mpiplus allocates on the CPU, not on {device}")
    memory = allocation.allocate(max(size, 1) * dtype.itemsize)
    return memory.view(dtype)[:size]
