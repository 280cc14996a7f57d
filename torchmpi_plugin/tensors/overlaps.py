"""Tensors of one operation that share memory.

The rule is that an operation reads all of its inputs first, and then writes its results one after the other, in the
order of their list. It is gloo's, which makes copies of everything, wherever gloo's result is defined. The C code
writes results while it still reads, and in any order. So here an input that lies in the memory of a result is copied
before the operation begins, and results that share memory get memory of their own, and are put in place in their order.

One overlap is no conflict: a rank's own part that is input and result at once, at the same place, as in FSDP.
"""

from __future__ import annotations

import functools
import itertools
import threading
from bisect import bisect_left
from collections.abc import Sequence

import torch

from . import device
from .arguments import Finish, all_of, bytes_of, writable

#: The first byte of a tensor's elements, and the one after the last; gaps lie within.
Span = tuple[int, int]
#: Where C is to write the results of one operation, and what then puts them into the user's tensors.
Memory = tuple[list[torch.Tensor], Finish]


def span_of(tensor: torch.Tensor) -> Span:
    """Of no length where there are no elements."""
    begin = tensor.data_ptr()
    if not tensor.numel() or tensor.is_contiguous():
        return begin, begin + bytes_of(tensor)
    last = sum((length - 1) * stride for length, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return begin, begin + (last + 1) * tensor.element_size()


def _meet(one: Span, other: Span) -> bool:
    return max(one[0], other[0]) < min(one[1], other[1])


def share_memory(tensors: Sequence[torch.Tensor]) -> list[int]:
    """Return which tensors lie in the memory of another one, as far as their first and last elements tell."""
    spans = [span_of(tensor) for tensor in tensors]
    if all(before[1] <= after[0] for before, after in itertools.pairwise(spans)):
        return []
    found, farthest = set(), -1
    for place in sorted((place for place, span in enumerate(spans) if span[0] < span[1]), key=spans.__getitem__):
        if farthest >= 0 and spans[place][0] < spans[farthest][1]:
            found |= {place, farthest}
        if farthest < 0 or spans[place][1] > spans[farthest][1]:
            farthest = place
    return sorted(found)


def _apart(tensor: torch.Tensor, operation: str, load: bool = False) -> tuple[torch.Tensor, Finish]:
    """:func:`~torchmpi_plugin.tensors.arguments.writable`, never the tensor's own memory."""
    buffer, finish = writable(tensor, operation, load)
    if finish is not None:
        return buffer, finish
    target = tensor.detach()
    buffer = target.clone() if load else target.new_empty(target.shape)
    return buffer, functools.partial(device.copy, buffer, target)


def result(tensor: torch.Tensor, operation: str, sources: Sequence[torch.Tensor], own: int, address: int) -> Memory:
    """Memory for the one result of an operation on ``sources``, which are contiguous.

    Args:
        own: the source that may be the result at the same time, if its part is at ``address``.
    """
    buffer, finish = writable(tensor, operation)
    left_out = own if buffer.data_ptr() == address else -1
    span = span_of(buffer)
    if any(_meet(span_of(source), span) for place, source in enumerate(sources) if place != left_out):
        buffer, finish = _apart(tensor, operation)
    return [buffer], finish


def results(tensors: Sequence[torch.Tensor], operation: str) -> Memory:
    """Memory for the results of one operation, each apart from the others."""
    sharing = set(share_memory(tensors))
    pairs = [(_apart if place in sharing else writable)(tensor, operation) for place, tensor in enumerate(tensors)]
    return [buffer for buffer, _ in pairs], all_of([finish for _, finish in pairs])


def inputs(
    sources: Sequence[torch.Tensor], buffers: Sequence[torch.Tensor], own: int = -1, address: int = 0
) -> list[torch.Tensor]:
    """The sources, as copies where they lie in memory of the results.

    Args:
        buffers: apart from each other, as :func:`results` gives them.
        own: the source that may be a result at the same time, if it is at ``address``.
    """
    spans = sorted((*span_of(buffer), 0) for buffer in buffers if buffer.numel())
    found = list(sources)
    for place, source in enumerate(sources):
        if not (place == own and source.data_ptr() == address) and _lies_in(span_of(source), spans):
            found[place] = source.detach().clone(memory_format=torch.contiguous_format)
    return found


def _lies_in(span: Span, spans: Sequence[tuple[int, int, int]], but: int = -1) -> bool:
    """In one of several that are sorted and apart; the last number of each says whose it is. Those of ``but`` may."""
    place = bisect_left(spans, (span[1],)) - 1  # the last one that begins before the end
    while place >= 0 and spans[place][1] > span[0]:
        if spans[place][2] != but and span[0] < span[1]:
            return True
        place -= 1
    return False


# ---- several operations as one ----


class _Together:
    """Puts the results of several operations in place, in their order, once the last of them is complete."""

    def __init__(self, operations: int, finishes: Sequence[Finish]) -> None:
        self._left = operations
        self._finish = all_of(finishes)
        self._lock = threading.Lock()

    def __call__(self) -> None:
        with self._lock:
            self._left -= 1
            if not self._left and self._finish is not None:
                self._finish()


def results_of_all(operations: Sequence[Sequence[torch.Tensor]], operation: str, load: bool = False) -> list[Memory]:
    """Memory for the results of several operations that may be under way at once; none where they share no memory.

    Args:
        operations: the results of each; those of one place in all of them come before those of the next.
        load: the memory must hold the tensors' elements already.
    """
    if not share_memory([tensor for tensors in operations for tensor in tensors]):
        return []
    pairs = [[_apart(tensor, operation, load) for tensor in tensors] for tensors in operations]
    in_order = [finish for place in zip(*pairs, strict=True) for _, finish in place]
    together = _Together(len(operations), in_order)
    return [([buffer for buffer, _ in each], together) for each in pairs]


def inputs_of_all(sources: Sequence[torch.Tensor], operations: Sequence[Sequence[torch.Tensor]]) -> list[torch.Tensor]:
    """The sources of several operations, as copies where they lie in results of another one. Those are apart."""
    every = ((place, tensor) for place, tensors in enumerate(operations) for tensor in tensors)
    spans = sorted((*span_of(tensor), place) for place, tensor in every if tensor.numel())
    return [
        source.detach().clone() if _lies_in(span_of(source), spans, place) else source
        for place, source in enumerate(sources)
    ]
