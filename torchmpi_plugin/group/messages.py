"""Messages between two ranks: the c10d methods for pairs, and exchanges made of messages."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ..diagnosis.comparison import Call
from ..diagnosis.flight_recorder import tensors_in
from ..engine.coalesced import CoalescedWork
from ..engine.engine import SLICE_NS
from ..engine.work import Work
from ..tensors import arguments, overlaps
from ..tensors.arguments import ArgumentError, Blocks, bytes_of, check, readable, single, writable
from .group import Group

ANY_SOURCE = -1


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


class Messages(Group):
    """``send``, ``recv`` and ``recv_anysource``; isend and irecv of torch come here too."""

    def send(self, tensors: Any, dst: int, tag: int) -> Work:
        """Send to one rank. Complete when the tensor may be written to again."""
        tensor = single(tensors, "send")
        arguments.check_peer(dst, self._size, "send")
        arguments.check_tag(tag, self._communicator.largest_tag, "send")
        source = readable(tensor)
        group = self._begin("send")
        staging = 0 if tensor.is_cpu else self._stage(tensor, moves=True)
        operands = group, source.data_ptr(), bytes_of(source), dst, tag, staging, 0
        return self._issue("send", self._lib.mpp_send, operands, False, [tensor], None, None, source, dst)

    def recv(self, tensors: Any, src: int, tag: int) -> Work:
        """Receive from one rank a message of exactly the tensor's length."""
        arguments.check_peer(src, self._size, "recv")
        return self._recv(tensors, src, tag)

    def recv_anysource(self, tensors: Any, tag: int) -> Work:
        """Receive from whichever rank sends first; the Work's ``_source_rank()`` tells which."""
        return self._recv(tensors, ANY_SOURCE, tag)

    def _recv(self, tensors: Any, src: int, tag: int) -> Work:
        tensor = single(tensors, "recv")
        arguments.check_tag(tag, self._communicator.largest_tag, "recv")
        buffer, finish = writable(tensor, "recv")
        group = self._begin("recv")
        staging = 0 if tensor.is_cpu else self._stage(tensor, moves=True)
        # -1: keep the operation even if it is complete, to ask it where the message came from
        wait_ns = -1 if src < 0 else 0
        operands = group, buffer.data_ptr(), bytes_of(buffer), src, tag, staging, wait_ns
        return self._issue("recv", self._lib.mpp_recv, operands, False, [tensor], None, finish, buffer, src)

    def _exchange(
        self,
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
        sync = not opts.asyncOp
        group = self._begin_collective(name)
        if self._calls.compares:
            call = Call(tensors[0], root=root, send=send[1], receive=receive[1], as_messages=True)
            self._compare(name, call, opts)
        staging = 0 if tensors[0].is_cpu else self._stage(tensors[0], moves=True)
        operands, start = (group, *send, *receive, -1, staging, SLICE_NS if sync else 0), self._lib.mpp_exchange
        return self._issue(name, start, operands, sync, tensors, opts, finish, keep, inputs=tensors_in(keep[0]))

    def _each(
        self,
        operation: Callable[..., Work],
        into: Callable[..., Work],
        outputs: list[Any],
        inputs: list[Any],
        opts: Any,
        name: str,
    ) -> CoalescedWork:
        """One operation for each pair, as one Work; ``into``: the same where outputs overlap, with their memory."""
        arguments.check_count(len(outputs), len(inputs), "the output list", name)
        for tensor in [*outputs, *inputs]:
            check(tensor, name)
        each = [[output] for output in outputs]
        if memories := overlaps.results_of_all(each, name):
            works = [into(*call[:2], opts, call[2]) for call in zip(outputs, inputs, memories, strict=True)]
        else:
            sources = overlaps.inputs_of_all(inputs, each)
            works = [operation(output, source, opts) for output, source in zip(outputs, sources, strict=True)]
        return CoalescedWork(works, list(outputs))
