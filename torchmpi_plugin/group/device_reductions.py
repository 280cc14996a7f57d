"""Reductions of CUDA tensors that stay on their devices: MPI exchanges blocks, torch's kernels combine them.

MPI's own reductions are not used for this: Open MPI crashes in nonblocking ones of device memory, and none knows
bfloat16. Instead, as in Rabenseifner's all-reduce ("Optimization of Collective Reduction Operations", 2004): the tensor
is cut into one block per rank; every rank receives its block of everybody's tensor, combines these as a tree, and
sends the result to those who want it. A rank sends and receives at most twice its tensor, and needs temporary memory of
its size. Each block is combined on one rank, so all get the same bits.

It is two exchanges with kernels in between (see ``then`` of :class:`~torchmpi_plugin.engine.work.PendingWork`), whose
tags are both taken when the ranks' calls have been compared: so neither the time at which a rank gets to the second one
matters, nor what else it has begun meanwhile.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import cuda

from ..errors import DistBackendError
from ..tensors import device
from ..tensors.arguments import blocks_of
from ..tensors.dtypes import MPI_OPERATIONS
from .group import ProcessGroupMPI as Group

#: Shorter tensors are staged: two rounds of messages and their kernels cost more than the copies. At 1 MiB they did on
#: an H200, from 4 MiB on no longer. The same on all ranks.
smallest_bytes = 2 << 20
_ALIGNMENT = 64  # elements: kernels are slower elsewhere


#: An operation in two halves, of which the first is an exchange: C's function for that and its operands; what begins
#: the second half, when the first one is complete, and returns C's handle, 0 if it is complete; tensors that must live.
Halves = tuple[Callable[..., int], tuple[Any, ...], Callable[[], int], Any]

_WIDE = {torch.float16: torch.float32, torch.bfloat16: torch.float32}
_FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
_COMPLEX = (torch.complex64, torch.complex128)

# By enum mpp_redop of c_src/arith/reduce.h.
_KERNELS: tuple[Callable[..., torch.Tensor], ...] = (
    *(torch.add, torch.mul, torch.minimum, torch.maximum),
    *(torch.bitwise_and, torch.bitwise_or, torch.bitwise_xor),
)
_KERNELS_OF_BOOL = (
    *(torch.bitwise_or, torch.bitwise_and, torch.bitwise_and, torch.bitwise_or),
    *(torch.bitwise_and, torch.bitwise_or, torch.bitwise_xor),
)


def stage(group: Group, tensor: torch.Tensor, moves: bool) -> int:
    """C's handle of the staging of an operation on ``tensor``; what only ``moves`` MPI may do on the device."""
    return device.stage(group._lib, group._ffi, tensor, moves and group._direct, group.communicator.place.local_rank)


def suits(tensor: torch.Tensor, nbytes: int, how: Any) -> bool:
    """Return whether a reduction of ``nbytes`` on this rank is done here rather than staged. All ranks find the same.

    What torch has no kernels for, or none that agree with mpiplus's own arithmetic, is staged; and so is PREMUL_SUM:
    each rank has its own factor, which the one that combines the blocks does not know.
    """
    if tensor.is_cpu or nbytes < smallest_bytes or how.has_premul:
        return False
    if tensor.dtype in _COMPLEX:
        return bool(MPI_OPERATIONS[how.op] == "SUM")
    return tensor.dtype in _FLOATS or tensor.dtype is torch.bool or tensor.dtype in _INTEGERS


def spaces_for(target: torch.Tensor, ranks: int) -> list[torch.Tensor]:
    """Return what :func:`combine` computes in, for as many sources: a tensor for each level of their tree."""
    levels = max(1, (ranks - 1).bit_length())
    return [target.new_empty(target.shape, dtype=_WIDE.get(target.dtype, target.dtype)) for _ in range(levels)]


def combine(
    sources: Sequence[torch.Tensor], target: torch.Tensor, how: Any, spaces: Sequence[torch.Tensor] = ()
) -> None:
    """Reduce equally long tensors elementwise, in their order; ``target`` may be one of them.

    With mpiplus's own arithmetic (``mpp_reduce`` of arith/reduce.h): narrow floats are computed in float32 and rounded
    once, integers wrap, NaN wins in MIN and MAX, averages of integers are truncated toward zero.

    Args:
        spaces: of :func:`spaces_for`; none: they are made now.
    """
    spaces = spaces or spaces_for(target, len(sources))
    if target.dtype in _COMPLEX:  # sums of parts
        sources, spaces = [[torch.view_as_real(each) for each in given] for given in (sources, spaces)]
        target = torch.view_as_real(target)
    kernel = (_KERNELS_OF_BOOL if target.dtype is torch.bool else _KERNELS)[how.op]
    total = _added_up(sources, kernel, spaces)
    if how.divisor != 1:
        # A number would be replaced by its reciprocal on a GPU, which may be off by one bit.
        divisor = total.new_full((), how.divisor)
        mode = None if total.is_floating_point() else "trunc"
        total = torch.div(total, divisor, rounding_mode=mode, out=spaces[0])
    target.copy_(total)


def _added_up(
    sources: Sequence[torch.Tensor], kernel: Callable[..., torch.Tensor], spaces: Sequence[torch.Tensor]
) -> torch.Tensor:
    """In the order of ``reduce_block`` of c_src/arith/reduce.c: the largest power of two of them with the rest.

    Returns:
        The first of the spaces, or the only source.
    """
    if len(sources) == 1:
        return spaces[0].copy_(sources[0]) if sources[0].dtype in _WIDE else sources[0]
    first = 1 << (len(sources) - 1).bit_length() - 1
    left = _added_up(sources[:first], kernel, spaces)
    alone = len(sources) - first == 1  # kernels widen the second operand themselves
    right = sources[first] if alone else _added_up(sources[first:], kernel, spaces[1:])
    return kernel(left, right, out=spaces[0])


def to_ranks(group: Group, tensor: torch.Tensor, how: Any, root: int | None) -> Halves:
    """Reduce every rank's contiguous tensor, in place: on the root, or everywhere if that is None."""
    size, flat = group.size(), tensor.detach().view(-1)
    length = -(-flat.numel() // (size * _ALIGNMENT)) * _ALIGNMENT
    blocks = [flat[r * length : (r + 1) * length] for r in range(size)]
    wanted = range(size) if root is None else (root,)
    mine = blocks[group.rank()]
    result = mine if group.rank() in wanted else mine.new_empty(mine.numel())
    kind = group._lib.MPP_ALL_REDUCE if root is None else group._lib.MPP_REDUCE
    call = kind, how, -1 if root is None else root, flat.numel(), group._ffi.NULL
    return _begin(group, blocks, result, wanted, call)


def to_one(group: Group, inputs: Any, counts: Sequence[int], output: torch.Tensor, how: Any) -> Halves:
    """Reduce block ``r`` of every rank's input on rank ``r``.

    Args:
        inputs: contiguous tensors, one for each block, or one with all blocks in it.
        counts: elements of each block.
        output: contiguous.
    """
    blocks = inputs if isinstance(inputs, list) else inputs.detach().view(-1).split(list(counts))
    call = group._lib.MPP_REDUCE_SCATTER, how, -1, max(counts), list(counts)
    return _begin(group, [block.detach().view(-1) for block in blocks], output.detach().view(-1), (), call)


def _begin(
    group: Group, blocks: Sequence[torch.Tensor], result: torch.Tensor, wanted: Sequence[int], call: tuple[Any, ...]
) -> Halves:
    """Send ``blocks[r]`` to rank ``r``; later what has become of this rank's to the ranks in ``wanted``.

    All memory is asked for now, before the others are told of the call.

    Args:
        call: what all ranks must agree on, as ``mpp_exchange_to_reduce`` takes it.
    """
    rank, size, how = group.rank(), group.size(), call[1]
    received = result.new_empty((size, blocks[rank].numel()))
    sources = [blocks[r] if r == rank else received[r] for r in range(size)]
    lib, handle = group._lib, group._handle
    spaces, later_tag = spaces_for(result, size), group._ffi.new("int *")

    def then() -> int:
        if then not in group.second_halves:
            raise DistBackendError(f"a reduction on {result.device} was interrupted between its halves on rank {rank}")
        try:
            with cuda.stream(device.own_stream(result.device)):
                combine(sources, result, how, spaces)
                send = [result if r in wanted and r != rank else None for r in range(size)]
                receive = [block if rank in wanted and r != rank else None for r, block in enumerate(blocks)]
                staging = (
                    0 if result.is_cpu else stage(group, result, moves=True)
                )  # after what is queued on the device's current stream
                return int(lib.mpp_exchange(handle, *blocks_of(send), *blocks_of(receive), later_tag[0], staging, 0))
        except Exception as error:  # the other ranks cannot get this one's block
            group.break_off("a reduction on the device failed")
            raise DistBackendError(f"a reduction on {result.device} failed on rank {rank}: {error}") from error
        except BaseException:
            group.break_off("a reduction on the device was interrupted")
            raise
        finally:
            group.second_halves.discard(then)

    operands = *blocks_of(blocks), *blocks_of(sources), *call, later_tag
    return lib.mpp_exchange_to_reduce, operands, then, (received, blocks, result)
