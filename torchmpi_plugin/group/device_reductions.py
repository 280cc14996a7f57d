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

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import cuda

from ..errors import DistBackendError
from ..tensors import device
from ..tensors.arguments import blocks_of
from ..tensors.dtypes import MPI_OPERATIONS
from .group import ProcessGroupMPI as Group

_ALIGNMENT = 64  # elements: kernels are slower elsewhere


#: An operation in two halves: the name of C's function that starts the first, and what it takes besides the call; what
#: begins the second half, when the first one, whose handle it gets, is complete, and returns C's, 0 if it is complete;
#: what must live.
Halves = tuple[str, Any, Callable[[int], int], Any]

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
    lib = group._lib
    way = lib.MPP_PATH_PEERS if group._reads_devices else lib.MPP_PATH_STAGED
    way = lib.MPP_PATH_DIRECT if moves and group._direct else way
    return device.stage(lib, group._ffi, tensor, way, group.rank(), group.communicator.place.local_rank)


def suits(tensor: torch.Tensor, nbytes: int, how: Any, longest_staged: int | None) -> bool:
    """Return whether a reduction of ``nbytes`` on this rank is done here rather than staged. All ranks find the same.

    What torch has no kernels for, or none that agree with mpiplus's own arithmetic, is staged; and so is PREMUL_SUM:
    each rank has its own factor, which the one that combines the blocks does not know.

    Args:
        longest_staged: bytes that are staged all the same, as the group has chosen (choice.SELECTION); None: all are.
    """
    if tensor.is_cpu or longest_staged is None or nbytes <= longest_staged or how.has_premul:
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


def to_ranks(group: Group, tensor: torch.Tensor, how: Any, root: int) -> Halves:
    """Reduce every rank's contiguous tensor, in place: on the root, or everywhere if that is -1."""
    size, flat = group.size(), tensor.detach().view(-1)
    length = _block_length(flat, size)
    blocks = [flat[r * length : (r + 1) * length] for r in range(size)]
    wanted = range(size) if root < 0 else (root,)
    mine = blocks[group.rank()]
    result = mine if group.rank() in wanted else mine.new_empty(mine.numel())
    kind = group._lib.MPP_ALL_REDUCE if root < 0 else group._lib.MPP_REDUCE
    return _begin(group, blocks, result, wanted, how, (kind, flat.numel(), None))


def to_one(group: Group, inputs: Any, counts: Sequence[int], output: torch.Tensor, how: Any) -> Halves:
    """Reduce block ``r`` of every rank's input on rank ``r``.

    Args:
        inputs: contiguous tensors, one for each block, or one with all blocks in it.
        counts: elements of each block.
        output: contiguous.
    """
    call = group._lib.MPP_REDUCE_SCATTER, max(counts), counts
    return _begin(group, _blocks_of(inputs, counts), output.detach().view(-1), (), how, call)


def _blocks_of(inputs: Any, counts: Sequence[int]) -> list[torch.Tensor]:
    if isinstance(inputs, list):
        return [block.detach().view(-1) for block in inputs]
    flat, ends = inputs.detach().view(-1), itertools.accumulate(counts)
    return [flat[end - count : end] for end, count in zip(ends, counts, strict=True)]


def _begin(
    group: Group,
    blocks: Sequence[torch.Tensor],
    result: torch.Tensor,
    wanted: Sequence[int],
    how: Any,
    call: tuple[int, int, Sequence[int] | None],
) -> Halves:
    """Send ``blocks[r]`` to rank ``r``; later what has become of this rank's to the ranks in ``wanted``.

    All memory is asked for now, before the others are told of the call.

    Args:
        call: C's kind, elements, and those of each block, if these differ: all ranks must agree on them.
    """
    rank, size = group.rank(), group.size()
    received = result.new_empty((size, blocks[rank].numel()))
    sources = [blocks[r] if r == rank else received[r] for r in range(size)]
    lib, ffi, handle = group._lib, group._ffi, group._handle
    spaces, later_tag = spaces_for(result, size), ffi.new("int *")

    def share(_: int) -> int:
        combine(sources, result, how, spaces)
        send = [result if r in wanted and r != rank else None for r in range(size)]
        receive = [block if rank in wanted and r != rank else None for r, block in enumerate(blocks)]
        staging = 0 if result.is_cpu else stage(group, result, moves=True)
        return int(lib.mpp_exchange(handle, *blocks_of(send), *blocks_of(receive), later_tag[0], staging, 0))

    (send, send_bytes), (recv, recv_bytes), (kind, count, counts) = blocks_of(blocks), blocks_of(sources), call
    addresses = [ffi.new("uintptr_t[]", each) for each in (send, recv)]
    lengths = [ffi.NULL if each is None else ffi.new("size_t[]", each) for each in (send_bytes, recv_bytes, counts)]
    first = ffi.new("mpp_exchange_operands *", (*addresses, *lengths, count, kind, later_tag))
    kept = received, blocks, result, addresses, lengths
    return "exchange_to_reduce", first, _second_half(group, result, share), kept


def _second_half(group: Group, result: torch.Tensor, begin: Callable[[int], int]) -> Callable[[int], int]:
    """Return what calls ``begin`` on a stream of mpiplus's own, and gives the group up if that fails."""

    def then(first: int) -> int:
        if then not in group.second_halves:
            raise DistBackendError(
                f"a reduction on {result.device} was interrupted between its halves on rank {group.rank()}"
            )
        try:
            with cuda.stream(device.own_stream(result.device)):
                return begin(first)
        except Exception as error:  # the other ranks cannot get this one's block
            group.break_off("a reduction on the device failed")
            group._lib.mpp_group_fail(group._handle, device.code_of(error) or 2)  # out of memory
            raise DistBackendError(f"a reduction on {result.device} failed on rank {group.rank()}: {error}") from error
        except BaseException:
            group.break_off("a reduction on the device was interrupted")
            raise
        finally:
            group.second_halves.discard(then)

    return then


def between_devices(group: Group, tensor: torch.Tensor, how: Any, root: int) -> Halves:
    """Reduce every rank's contiguous tensor, in place, with blocks read from each other's devices.

    C does without a second half where a rank cannot, or has its tensor elsewhere: then the first one has reduced.

    Args:
        root: who gets the result; -1: everybody.
    """
    rank, size, flat, lib = group.rank(), group.size(), tensor.detach().view(-1), group._lib
    length = _block_length(flat, size)
    mine = flat[rank * length : (rank + 1) * length]
    result = mine if root in (-1, rank) else mine.new_empty(mine.numel())
    received, combine_all = _to_combine(group, mine, result, how)

    def share(first: int) -> int:
        if not lib.mpp_is_left_to_reduce(first):
            return 0
        combine_all()
        return int(lib.mpp_second_half(first, stage(group, flat, moves=False)))

    shown = result if result.numel() else flat  # others read nothing of it, and it has an address
    own = group._ffi.new("mpp_block *", (length, received.data_ptr(), shown.data_ptr()))
    return "sum_between_devices", own, _second_half(group, flat, share), (received, flat, result)


def scatter_between_devices(group: Group, inputs: Any, counts: Sequence[int], output: torch.Tensor, how: Any) -> Halves:
    """The same as :func:`to_one` with the blocks read from each other's devices."""
    lib, result, blocks = group._lib, output.detach().view(-1), _blocks_of(inputs, counts)
    received, combine_all = _to_combine(group, blocks[group.rank()], result, how)

    def finish(first: int) -> int:
        if lib.mpp_is_left_to_reduce(first):
            combine_all()
            device.own_stream(result.device).synchronize()
        return 0

    own = group._ffi.new("mpp_block *", {"received": received.data_ptr()})
    return "scatter_between_devices", own, _second_half(group, result, finish), (received, blocks, result)


def _to_combine(
    group: Group, mine: torch.Tensor, result: torch.Tensor, how: Any
) -> tuple[torch.Tensor, Callable[[], None]]:
    """Return memory for all ranks' blocks like ``mine``, and what combines them, with this one, into ``result``."""
    received = mine.new_empty((group.size(), mine.numel()))
    sources = [mine if r == group.rank() else received[r] for r in range(group.size())]
    spaces = spaces_for(mine, group.size())
    return received, lambda: combine(sources, result, how, spaces) if mine.numel() else None


def _block_length(flat: torch.Tensor, ranks: int) -> int:
    return -(-flat.numel() // (ranks * _ALIGNMENT)) * _ALIGNMENT
