"""Reductions of CUDA tensors on their devices: the ranks exchange blocks, and torch's kernels combine them.

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
from .group import Group

_ALIGNMENT = 64  # elements: kernels are slower elsewhere


#: An operation in two halves: the name of C's function that starts the first, and what it takes besides the call; what
#: begins the second half, when the first one, whose handle it gets, is complete, and returns C's, 0 if it is complete;
#: what must live.
Halves = tuple[str, Any, Callable[[int], int], Any]

Tensors = Sequence[torch.Tensor | None]

_WIDE = {torch.float16: torch.float32, torch.bfloat16: torch.float32}
_FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
_COMPLEX = (torch.complex64, torch.complex128)

# By enum mpp_redop of c_src/arith/reduce.h.
_BITWISE = (torch.bitwise_and, torch.bitwise_or, torch.bitwise_xor)
_KERNELS: tuple[Callable[..., torch.Tensor], ...] = (torch.add, torch.mul, torch.minimum, torch.maximum, *_BITWISE)
_KERNELS_OF_BOOL = (torch.bitwise_or, torch.bitwise_and, torch.bitwise_and, torch.bitwise_or, *_BITWISE)


def stage(group: Group, tensor: torch.Tensor, moves: bool) -> int:
    """C's handle of the staging of an operation on ``tensor``; what only ``moves`` MPI may do on the device."""
    lib = group._lib
    way = lib.MPP_PATH_PEERS if group._reads_devices else lib.MPP_PATH_STAGED
    way = lib.MPP_PATH_DIRECT if moves and group._direct else way
    return device.stage(lib, group._ffi, tensor, way, group.rank(), group.communicator.place.local_rank)


def suits(tensor: torch.Tensor, nbytes: int, how: Any, longest_staged: int | None) -> bool:
    """Return whether a reduction of ``nbytes`` on this rank is done here rather than staged. All ranks find the same.

    What torch has no kernels for, or none that agree with mpiplus's own arithmetic, is staged; and so is PREMUL_SUM:
    each rank has its own factor, which the one that combines the blocks does not know. Up to ``longest_staged`` bytes
    are staged all the same, as the group has chosen (choice.SELECTION); None: all are.
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
    once, integers wrap, NaN wins in MIN and MAX, averages of integers are truncated toward zero. The spaces are of
    :func:`spaces_for`, and made now where there are none.
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


def _lists_of(ffi: Any, send: Tensors, receive: Tensors) -> dict[str, Any]:
    """Return the operands of an exchange of these."""
    (inputs, input_sizes), (outputs, output_sizes) = blocks_of(send), blocks_of(receive)
    addresses = {"inputs": ffi.new("uintptr_t[]", inputs), "outputs": ffi.new("uintptr_t[]", outputs)}
    sizes = {"input_sizes": ffi.new("size_t[]", input_sizes), "output_sizes": ffi.new("size_t[]", output_sizes)}
    return addresses | sizes


class _Reduction:
    """A rank's part: it gets its block of everybody's tensor, combines them, and those who want the result get it.

    All memory is asked for now, before the others are told of the call.

    Args:
        counts: elements of each rank's block, whose result that rank alone wants; none: the blocks are parts of one
            tensor, which is reduced in place.
        keep: contiguous: that tensor, or what is read, a tensor or one for each block, and the one that is written.
    """

    def __init__(self, group: Group, root: int, counts: Sequence[int], how: Any, keep: Any) -> None:
        self._group, self._how, self._counts = group, how, counts
        rank, size, lib = group.rank(), group.size(), group._lib
        self._length = 0  # of a block, where all but the last are as long
        if counts:
            self._kind, self._wanted = lib.MPP_REDUCE_SCATTER, range(0)
            inputs, [output] = keep
            flat = [each.detach().view(-1) for each in inputs]
            self._blocks = flat if len(flat) > 1 else [*flat[0].split(list(counts))]
            self._result = output.detach().view(-1)
        else:
            self._kind, self._wanted = lib.MPP_REDUCE, range(root, root + 1)
            if root < 0:
                self._kind, self._wanted = lib.MPP_ALL_REDUCE, range(size)
            flat = keep.detach().view(-1)
            self._length = length = -(-flat.numel() // (size * _ALIGNMENT)) * _ALIGNMENT
            self._blocks = [flat[r * length : (r + 1) * length] for r in range(size)]
            mine = self._blocks[rank]
            self._result = mine if rank in self._wanted else mine.new_empty(mine.numel())
        self._received = self._result.new_empty((size, self._blocks[rank].numel()))
        self._sources = [self._blocks[r] if r == rank else self._received[r] for r in range(size)]
        self._spaces = spaces_for(self._result, size)

    def by_messages(self) -> Halves:
        """Send each rank its block; later what has become of this rank's to those who want it."""
        group, blocks, result, wanted, counts = self._group, self._blocks, self._result, self._wanted, self._counts
        lib, ffi, handle, rank, later_tag = group._lib, group._ffi, group._handle, group.rank(), group._ffi.new("int *")

        def share(_: int) -> int:
            self._combine()
            send = [result if r in wanted and r != rank else None for r in range(len(blocks))]
            receive = [block if rank in wanted and r != rank else None for r, block in enumerate(blocks)]
            staging = 0 if result.is_cpu else stage(group, result, moves=True)
            lists = _lists_of(ffi, send, receive)
            operands = {"of": handle, **lists, "root": -1, "tag": later_tag[0], "staging": staging}
            return int(lib.mpp_exchange(ffi.new("mpp_operands *", operands)))

        lists, lengths = _lists_of(ffi, blocks, self._sources), ffi.new("size_t[]", counts) if counts else ffi.NULL
        count = max(counts) if counts else sum(block.numel() for block in blocks)
        first = ffi.new("mpp_exchange_operands *", (*lists.values(), lengths, count, self._kind, later_tag))
        return "exchange_to_reduce", first, self._second_half(share), (self, lists, lengths)

    def on_node(self, start: str) -> Halves:
        """Get the blocks from the others' devices, or from slots, later the results.

        C does without a second half where a rank cannot, or has its tensor elsewhere: then the first one has reduced.
        """
        lib, result = self._group._lib, self._result

        def share(first: int) -> int:
            if not lib.mpp_is_left_to_reduce(first):
                return 0
            self._combine()
            if not self._counts:
                return int(lib.mpp_second_half(first, stage(self._group, result, moves=False)))
            cuda.current_stream(result.device).synchronize()
            return 0

        shown = result if result.numel() else self._blocks[0]  # others read nothing of it, and it has an address
        block = (self._length, self._received.data_ptr(), 0 if self._counts else shown.data_ptr())
        return start, self._group._ffi.new("mpp_block *", block), self._second_half(share), self

    def _combine(self) -> None:
        combine(self._sources, self._result, self._how, self._spaces)

    def _second_half(self, begin: Callable[[int], int]) -> Callable[[int], int]:
        """Return what calls ``begin`` on a stream of mpiplus's own, and gives the group up if that fails."""
        group, where = self._group, self._result.device
        what = f"a reduction on {where}"

        def then(first: int) -> int:
            if then not in group.second_halves:
                raise DistBackendError(f"{what} was interrupted between its halves on rank {group.rank()}")
            try:
                with device.on_own_stream(where):
                    return begin(first)
            except Exception as error:  # the other ranks cannot get this one's block
                group.break_off("a reduction on the device failed")
                group._lib.mpp_group_fail(group._handle, device.code_of(error) or 2)  # out of memory
                raise DistBackendError(f"{what} failed on rank {group.rank()}: {error}") from error
            except BaseException:
                group.break_off("a reduction on the device was interrupted")
                raise
            finally:
                group.second_halves.discard(then)

        return then


def halves_of(
    group: Group,
    start: str,
    output: torch.Tensor,
    root: int,
    lengths: Sequence[int],
    elements: int,
    how: Any,
    keep: Any,
) -> Halves | None:
    """Return what reduces where the tensors lie; None: C does, in host memory, or there is nothing to reduce.

    The arguments are those of ``starting.prepare``.
    """
    if not how or start not in ("allreduce", "reduce_to", "reduce_scatter"):
        return None
    lib = group._lib
    how = group._ffi.new("mpp_reduction *", group._ffi.cast("mpp_reduction *", how)[0])
    counts = lengths[: group.size()]
    nbytes = (sum(counts) if counts else elements) * output.dtype.itemsize
    rows = {lib.MPP_BETWEEN_DEVICES: "cuda_sums", lib.MPP_ON_BUS: "cuda_slot_sums"}
    row = "cuda_reductions" if group._direct else rows.get(lib.mpp_group_reach(group._handle))
    if not row or not suits(output, nbytes, how, group.communicator.choice.limit(row)):
        return None
    try:
        reduction = _Reduction(group, root, counts, how, keep)
        return reduction.by_messages() if group._direct else reduction.on_node(start)
    except torch.OutOfMemoryError:
        if group._direct:
            raise
        return None  # processors reduce it, in shared memory
