"""Several tensors for a rank, which c10d's oldest operations take: what gloo makes of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ..tensors import arguments, device
from ..tensors.arguments import ArgumentError, Finish, NoTensorsError, check, readable
from ..tensors.dtypes import PREMUL_SUM, kind_of
from .group import ProcessGroupMPI as Group
from .starting import reduction


def _check_alike(tensors: Sequence[torch.Tensor], like: torch.Tensor, operation: str) -> None:
    for tensor in tensors:
        arguments.check_alike(check(tensor, operation), check(like, operation), operation)
        if tensor.shape != like.shape:
            raise ArgumentError(
                f"{operation}: a rank's tensors must have one shape, not {tuple(like.shape)} and {tuple(tensor.shape)}"
            )


def one_of(tensors: Sequence[torch.Tensor], index: int, operation: str) -> tuple[torch.Tensor, Sequence[torch.Tensor]]:
    """The tensor that the options name by their ``rootTensor``, and the others."""
    if not tensors:
        raise NoTensorsError(f"{operation}: the list of tensors is empty")
    if not 0 <= index < len(tensors):
        raise ArgumentError(f"{operation}: invalid root tensor: {index}; this rank has {len(tensors)}")
    tensor = check(tensors[index], operation)
    if len(tensors) == 1:
        return tensor, ()
    _check_alike(tensors, tensor, operation)
    return tensor, [*tensors[:index], *tensors[index + 1 :]]


def copied(buffer: torch.Tensor, others: Sequence[torch.Tensor], operation: str, finish: Finish) -> Finish:
    """``finish``, and then the result copied from the memory that it is in to other tensors."""
    if not others:
        return finish
    for other in others:
        arguments.writable(other, operation)  # an error now if it is none that can be written to
    targets = [other.detach() for other in others]

    def copy() -> None:
        for target in targets:
            device.copy(buffer, target)

    return arguments.all_of([finish, copy])


def joined(group: Group, tensors: Sequence[torch.Tensor], op: Any) -> torch.Tensor:
    """The tensors of a rank reduced to one, still to be reduced with those of others. AVG divides by the ranks only.

    Raises:
        TypeError, ValueError: they are not alike, or not in host memory.
    """
    _check_alike(tensors, tensors[0], "all_reduce")
    if not tensors[0].is_cpu:
        raise ArgumentError(f"all_reduce: mpiplus takes one CUDA tensor per rank, not {len(tensors)}")
    if kind_of(op) == PREMUL_SUM:
        raise ArgumentError(f"all_reduce: PREMUL_SUM takes one tensor per rank, not {len(tensors)}")

    ffi, reduced = group._ffi, reduction(group, tensors[0].dtype, op, "all_reduce")
    reduced.divisor = 1
    sources = [readable(tensor.detach()) for tensor in tensors]
    joint = torch.empty_like(sources[0], memory_format=torch.contiguous_format)
    addresses = ffi.new("void *[]", [ffi.cast("void *", source.data_ptr()) for source in sources])
    group._lib.mpp_reduce(reduced, ffi.cast("void *", joint.data_ptr()), addresses, len(sources), joint.numel())
    return joint


def packed(
    size: int, output_lists: Sequence[Sequence[torch.Tensor]], inputs: Sequence[torch.Tensor]
) -> tuple[list[torch.Tensor], torch.Tensor, Finish, list[torch.Tensor]]:
    """An all_gather of several tensors for each of ``size`` ranks as one of one tensor.

    Each of the output lists, one for each input, receives every rank's inputs, the ranks one after the other.

    Returns:
        Where it gathers, and what; what then puts the results in place, and these.
    """
    name = "all_gather"
    _check_alike(inputs, inputs[0], name)
    if len(output_lists) != len(inputs):
        raise ArgumentError(f"{name}: {len(inputs)} inputs want as many output lists, not {len(output_lists)}")
    for outputs in output_lists:
        if len(outputs) != len(inputs) * size:
            raise ArgumentError(
                f"{name}: {len(inputs)} inputs on {size} ranks want lists of {len(inputs) * size} outputs, not "
                f"{len(outputs)}"
            )
        _check_alike(outputs, inputs[0], name)
    length = inputs[0].numel()
    all_of_them = inputs[0].detach().new_empty(len(inputs) * length)
    for i, tensor in enumerate(inputs):
        device.copy(readable(tensor).reshape(-1), all_of_them[i * length : (i + 1) * length])
    buffers = [torch.empty_like(all_of_them) for _ in range(size)]
    parts = [part.reshape(inputs[0].shape) for buffer in buffers for part in buffer.split(length)] if length else []
    # List by list, as gloo does: where lists overlap, that is seen.
    finishes = [copied(part, [outputs[i]], name, None) for outputs in output_lists for i, part in enumerate(parts)]
    results = [output for outputs in output_lists for output in outputs]
    return buffers, all_of_them, arguments.all_of(finishes), results
