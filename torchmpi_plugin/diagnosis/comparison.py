"""TORCH_DISTRIBUTED_DEBUG=DETAIL: before a collective runs, all ranks compare what they are about to call.

The comparison is a collective itself, an all_gather of a record of fixed length, so that ranks that call
different operations still meet in it. torch's own check of this kind wraps C++ groups only.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from ..names import describe_ranks
from ..operations import BY_NAME
from ..tensors.dtypes import kind_of

_TEXT_BYTES = 384
#: At the end of the name of an operation that compares.
COMPARING = " (comparing the calls)"


def wanted() -> bool:
    """Return whether the user asked this rank for it."""
    return dist.get_debug_level() == dist.DebugLevel.DETAIL


def essence(operation: str, tensors: Sequence[torch.Tensor]) -> str:
    """Return what of a call is equal on ranks that agree, as far as the tensors it returns tell.

    Shapes are not: (2, 3) and (6,) go together, and the parts of an all_gather may differ in length.
    """
    if not tensors:
        return operation
    row = BY_NAME.get(operation)
    count = f" {tensors[0].numel()}" if row and row.equal_counts else ""
    return f"{operation}{count} {tensors[0].dtype}"


class Call(NamedTuple):
    """A call as C has read it.

    Attributes:
        group, operation: of which group, and its name.
        start: the name of the function of C's that starts it; None: it is one of mpiplus's own.
        peer: of a message; -1: any.
        inputs, outputs: its tensors; None: what it reads is what it writes.
        root: -1: none.
        lengths: of two lists, one after the other, of one for each rank; none where it has no such lists.
        elements: of its tensor, where there is one.
        how: the address of the ``mpp_reduction``; 0: it reduces nothing.
        keep: the memory that C was given, by group/operands.py.
    """

    group: Any
    operation: str
    start: str | None
    peer: int | None
    opts: Any
    inputs: list[torch.Tensor] | None
    outputs: list[torch.Tensor]
    root: int
    lengths: list[int]
    elements: int
    how: int
    keep: Any

    def signature(self, mixes_devices: bool) -> tuple[str, torch.Tensor]:
        """One line, equal on ranks that agree; and that with the bytes to and from each rank, as bytes.

        Args:
            mixes_devices: host memory on one rank and a device's on another go together.
        """
        size, text = self.group.size(), self.operation
        first, second, counts = self.lengths[:size], self.lengths[size:], [self.elements]
        tensors = self.outputs if self.how or self.start == "exchange" else self.inputs or self.outputs
        if self.how:
            text += f" ({kind_of(self.opts.reduceOp).name})"
        if self.start == "allgather_list":
            first, second, counts = [self.elements * tensors[0].element_size()] * size, first, []
        elif self.start == "exchange":
            counts = []
        elif first:
            first, second, counts = [], [], first
        if tensors and self.start:
            even = len({*counts}) == 1
            text += f" of {counts[0] if even else ', '.join(map(str, counts))}".rstrip()
            text += f" x {len(counts)}" if even and len(counts) > 1 else ""
            text += f" {str(tensors[0].dtype).removeprefix('torch.')}"
            if not (tensors[0].is_cpu or mixes_devices or self.start == "exchange"):
                text += f" on {tensors[0].device.type}"
        text += "" if self.root < 0 else f" with root {self.root}"
        head = text.encode()[:_TEXT_BYTES].ljust(_TEXT_BYTES)
        lengths = torch.tensor([*(first or [0] * size), *(second or [0] * size)], dtype=torch.int64, device="cpu")
        return text, torch.cat([torch.frombuffer(bytearray(head), dtype=torch.uint8), lengths.view(torch.uint8)])


def disagreement(everybody: torch.Tensor) -> str:
    """Return how the records of all ranks, a row each, differ; nothing where they agree."""
    texts = [bytes(row[:_TEXT_BYTES].tolist()).decode(errors="replace").strip() for row in everybody]
    lengths = everybody[:, _TEXT_BYTES:].contiguous().view(torch.int64)
    return _different_calls(texts) or _different_lengths(lengths)


def _different_calls(texts: list[str]) -> str:
    if len({*texts}) == 1:
        return ""
    callers = {text: [rank for rank, other in enumerate(texts) if other == text] for text in dict.fromkeys(texts)}
    return "; ".join(
        f"{describe_ranks(ranks)} {'calls' if len(ranks) == 1 else 'call'} {text}" for text, ranks in callers.items()
    )


def _different_lengths(lengths: torch.Tensor) -> str:
    """``lengths[rank]`` holds what it sends to each rank, then what it expects from each."""
    size = lengths.shape[0]
    send, receive = lengths[:, :size], lengths[:, size:]
    wrong = (send != receive.T).nonzero().tolist()
    return "; ".join(
        f"rank {a} sends {send[a, b]} bytes to rank {b}, which expects {receive[b, a]}" for a, b in wrong[:4]
    )
