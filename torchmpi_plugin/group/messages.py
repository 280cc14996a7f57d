"""Messages between two ranks: the c10d methods for pairs, and exchanges made of messages."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ..diagnosis.comparison import Call
from ..diagnosis.flight_recorder import tensors_in
from ..engine.coalesced import CoalescedWork
from ..engine.work import Work
from ..tensors import arguments, overlaps
from ..tensors.arguments import ArgumentError, Blocks, bytes_of, check, readable, single, writable
from .group import ProcessGroupMPI as Group
from .starting import ANY_SOURCE, begin, collective, stage, start


def first_of(lists: Any, operation: str) -> Any:
    """The one inner list of an argument that c10d passes as a list of lists; a list of nothing is itself.

    Raises:
        ValueError: there are several.
    """
    if not lists or not isinstance(lists[0], (list, tuple)):
        return lists
    if len(lists) > 1:
        raise ArgumentError(f"{operation}: one tensor per rank goes with one list of tensors, not {len(lists)}")
    return lists[0]


def send(group: Group, tensors: Any, dst: int, tag: int) -> Work:
    """Send to one rank. Complete when the tensor may be written to again."""
    tensor = single(tensors, "send")
    arguments.check_peer(dst, group.size(), "send")
    arguments.check_tag(tag, group.communicator.largest_tag, "send")
    source = readable(tensor)
    begin(group, "send")
    operands = group._handle, source.data_ptr(), bytes_of(source), dst, tag, stage(group, tensor, moves=True)
    return start(group, "send", group._lib.mpp_send, operands, False, [tensor], None, None, source, dst)


def recv(group: Group, tensors: Any, src: int, tag: int) -> Work:
    """Receive from one rank a message of exactly the tensor's length."""
    arguments.check_peer(src, group.size(), "recv")
    return _recv(group, tensors, src, tag)


def recv_anysource(group: Group, tensors: Any, tag: int) -> Work:
    """Receive from whichever rank sends first; the Work's ``_source_rank()`` tells which."""
    return _recv(group, tensors, ANY_SOURCE, tag)


def _recv(group: Group, tensors: Any, src: int, tag: int) -> Work:
    tensor = single(tensors, "recv")
    arguments.check_tag(tag, group.communicator.largest_tag, "recv")
    buffer, finish = writable(tensor, "recv")
    begin(group, "recv")
    operands = group._handle, buffer.data_ptr(), bytes_of(buffer), src, tag, stage(group, tensor, moves=True)
    return start(group, "recv", group._lib.mpp_recv, operands, False, [tensor], None, finish, buffer, src)


def exchange(
    group: Group,
    name: str,
    send: Blocks,
    receive: Blocks,
    tensors: list[torch.Tensor],
    opts: Any,
    finish: arguments.Finish,
    keep: tuple[Any, Any],
    root: int | None = None,
) -> Work:
    """A collective made of one message to and from each rank.

    Args:
        keep: what is sent, and what is received: tensors, or lists of them with gaps.
    """
    call = Call(tensors[0], root=root, send=send[1], receive=receive[1], as_messages=True)
    operands, inputs = (*send, *receive, -1), tensors_in(keep[0])
    return collective(group, name, group._lib.mpp_exchange, operands, call, tensors, opts, None, finish, keep, inputs)


def each(
    operation: Callable[..., Any],
    into: Callable[..., Work],
    group: Group,
    outputs: list[Any],
    inputs: list[Any],
    opts: Any,
    name: str,
) -> CoalescedWork:
    """One operation for each pair, as one Work; ``into``: the same where outputs overlap, with their memory."""
    arguments.check_count(len(outputs), len(inputs), "the output list", name)
    for tensor in [*outputs, *inputs]:
        check(tensor, name)
    pairs = [[output] for output in outputs]
    if memories := overlaps.results_of_all(pairs, name):
        works = [into(group, *call[:2], opts, call[2]) for call in zip(outputs, inputs, memories, strict=True)]
    else:
        sources = overlaps.inputs_of_all(inputs, pairs)
        works = [operation(output, source, opts) for output, source in zip(outputs, sources, strict=True)]
    return CoalescedWork(works, list(outputs))
