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
    """Whether the user asked this rank for it."""
    return dist.get_debug_level() == dist.DebugLevel.DETAIL


def essence(operation: str, tensors: Sequence[torch.Tensor]) -> str:
    """What of a call is equal on ranks that agree, as far as the tensors it returns tell.

    Shapes are not: (2, 3) and (6,) go together, and the parts of an all_gather may differ in length.
    """
    if not tensors:
        return operation
    row = BY_NAME.get(operation)
    count = f" {tensors[0].numel()}" if row and row.equal_counts else ""
    return f"{operation}{count} {tensors[0].dtype}"


class Call(NamedTuple):
    """What must agree between the ranks.

    Attributes:
        tensor: one of its tensors: their dtype must be the same, in some groups their kind of device too.
        counts: their numbers of elements, where those are the same on every rank.
        op, root: of a reduction, of a rooted operation.
        send, receive: bytes to and from each rank: what one sends the other must expect.
        as_messages: so that host memory on one rank and a device's on another go together in any group.
    """

    tensor: torch.Tensor | None = None
    counts: Sequence[int] = ()
    op: Any = None
    root: int | None = None
    send: Sequence[int] = ()
    receive: Sequence[int] = ()
    as_messages: bool = False

    def describe(self, operation: str, with_device: bool) -> str:
        """One line, equal on ranks that agree.

        Args:
            with_device: host memory on one rank and a device's on another do not go together.
        """
        text = operation if self.op is None else f"{operation} ({kind_of(self.op).name})"
        if self.counts:
            even = len({*self.counts}) == 1
            counts = str(self.counts[0]) if even else ", ".join(map(str, self.counts))
            text += f" of {counts}" + (f" x {len(self.counts)}" if even and len(self.counts) > 1 else "")
        elif self.tensor is not None:
            text += " of"
        if self.tensor is not None:
            text += f" {str(self.tensor.dtype).removeprefix('torch.')}"
            if with_device and not self.tensor.is_cpu:
                text += f" on {self.tensor.device.type}"
        return text if self.root is None else f"{text} with root {self.root}"


def record(text: str, call: Call, size: int) -> torch.Tensor:
    """What this rank is about to call, as bytes; as many on each of ``size`` ranks."""
    head = text.encode()[:_TEXT_BYTES].ljust(_TEXT_BYTES)
    lengths = [*(call.send or [0] * size), *(call.receive or [0] * size)]
    return torch.cat(
        [
            torch.frombuffer(bytearray(head), dtype=torch.uint8),
            torch.tensor(lengths, dtype=torch.int64, device="cpu").view(torch.uint8),
        ]
    )


def disagreement(everybody: torch.Tensor) -> str:
    """What the records of all ranks, a row each, say against each other; nothing where they agree."""
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
