"""Tensors of one operation that share memory.

The rule is that an operation reads all of its inputs first, and then writes its results one after the other, in the
order of their list. It is gloo's, which makes copies of everything, wherever gloo's result is defined. The C code
writes results while it still reads, and in any order. So results that share memory get memory of their own here, and
are put in place in their order. Inputs in the memory of results are found by C, which refuses the call
(python/overlaps.c); then inputs are copied before the operation begins, or its one result gets memory of its own.

One overlap is no conflict: a rank's own part that is input and result at once, at the same place, as in FSDP.
"""

from __future__ import annotations

import itertools
import threading
from bisect import bisect_left
from collections.abc import Sequence

import torch

from .arguments import Finish, all_of, writable

#: The first byte of a tensor's elements, and the one after the last; gaps lie within.
Span = tuple[int, int]
#: Where C is to write the results of one operation, and what then puts them into the user's tensors.
Memory = tuple[list[torch.Tensor], Finish]


def span_of(tensor: torch.Tensor) -> Span:
    """Of no length where there are no elements."""
    begin = tensor.data_ptr()
    if not tensor.numel() or tensor.is_contiguous():
        return begin, begin + tensor.nbytes
    last = sum((length - 1) * stride for length, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return begin, begin + (last + 1) * tensor.element_size()


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


def results(tensors: Sequence[torch.Tensor], operation: str, apart: bool) -> Memory:
    """Memory for the results of one operation, each apart from the others; from all of the tensors too if ``apart``."""
    sharing = range(len(tensors)) if apart else share_memory(tensors)
    pairs = [writable(tensor, operation, apart=place in sharing) for place, tensor in enumerate(tensors)]
    return [buffer for buffer, _ in pairs], all_of([finish for _, finish in pairs])


# ---- several operations as one ----


def results_of_all(operations: Sequence[Sequence[torch.Tensor]], operation: str, load: bool = False) -> list[Memory]:
    """Memory for the results of several operations that may be under way at once; none where they share no memory.

    Args:
        operations: the results of each; those of one place in all of them come before those of the next.
        load: the memory must hold the tensors' elements already.
    """
    if not share_memory([tensor for tensors in operations for tensor in tensors]):
        return []
    pairs = [[writable(tensor, operation, load, apart=True) for tensor in tensors] for tensors in operations]
    in_order = [finish for place in zip(*pairs, strict=True) for _, finish in place]
    finish_all, left, lock = all_of(in_order), itertools.count(len(operations) - 1, -1), threading.Lock()

    def finish() -> None:
        """Called for each: once the last is complete, put the results of all in place, in their order."""
        with lock:
            if not next(left) and finish_all is not None:
                finish_all()

    return [([buffer for buffer, _ in each], finish) for each in pairs]


def inputs_of_all(sources: Sequence[torch.Tensor], operations: Sequence[Sequence[torch.Tensor]]) -> list[torch.Tensor]:
    """The sources of several operations, as copies where they lie in results of another one. Those are apart."""
    every = ((place, tensor) for place, tensors in enumerate(operations) for tensor in tensors)
    spans = sorted((*span_of(tensor), place) for place, tensor in every if tensor.numel())

    def lies_in_another(span: Span, own: int) -> bool:
        place = bisect_left(spans, (span[1],)) - 1  # the last one that begins before the end
        while place >= 0 and spans[place][1] > span[0]:
            if spans[place][2] != own and span[0] < span[1]:
                return True
            place -= 1
        return False

    return [
        source.detach().clone() if lies_in_another(span_of(source), place) else source
        for place, source in enumerate(sources)
    ]
