"""Sparse (COO) all-reduce: gather everybody's entries, add up those with equal indices."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from .. import _bridge
from ..engine.work import Work
from ..errors import DistBackendError
from ..names import describe_ranks
from ..tensors.arguments import ArgumentError, check
from ..tensors.dtypes import AVG, DTYPES, SUM, kind_of

_LOW_PRECISION = (torch.float16, torch.bfloat16)
#: Entries, the number of what follows, dtype, reduction, sparse dimensions, and the shape: at most 64 dimensions.
_LONGEST_HEADER = 5 + 64


def _gather(group: dist.ProcessGroup, tensor: torch.Tensor, shapes: list[list[int]]) -> list[torch.Tensor]:
    outputs = [tensor.new_empty(shape) for shape in shapes]
    group.allgather([outputs], [tensor]).wait()
    return outputs


def are_meant(tensors: Sequence[torch.Tensor]) -> bool:
    """Return whether a call is one for this module, by the first of its tensors."""
    return bool(tensors) and isinstance(tensors[0], torch.Tensor) and tensors[0].layout is not torch.strided


def all_reduce(group: dist.ProcessGroup, tensors: Sequence[torch.Tensor], opts: Any) -> Work:
    """Add up every rank's sparse tensors, in place; complete when it returns. AVG divides by the number of ranks.

    Args:
        tensors: COO; the same shape, dtype and number of sparse dimensions on all ranks. All receive the result.
        opts: c10d's AllreduceOptions; SUM and AVG.

    Raises:
        ValueError: another reduction, or a rank's tensors are not alike.
        DistBackendError: the ranks' tensors do not agree.
    """
    targets = [_target_of(check(tensor, "all_reduce", sparse=True)) for tensor in tensors]
    kind = kind_of(opts.reduceOp)
    if kind not in (SUM, AVG):
        raise ArgumentError(f"all_reduce: sparse tensors can be summed or averaged, not reduced with {kind.name}")
    if kind == AVG and targets[0].dtype is torch.bool:
        raise ArgumentError("all_reduce: AVG makes no sense for torch.bool")
    if any(target.layout is not torch.sparse_coo for target in targets):
        raise ArgumentError("all_reduce: a rank's tensors must be all sparse, or all dense")
    mine = [target.detach().coalesce() for target in targets]
    dimensions, shape = mine[0].sparse_dim(), mine[0].shape
    if len({(one.sparse_dim(), one.shape, one.dtype, one.device) for one in mine}) > 1:
        raise ArgumentError("all_reduce: a rank's sparse tensors must have one shape, dtype and device")
    indices, values = torch.cat([one.indices() for one in mine], dim=1), torch.cat([one.values() for one in mine])
    entries = _agree(group, [DTYPES.get(values.dtype, -1), int(kind), dimensions, *shape], len(values))
    all_indices = _gather(group, indices.contiguous(), [[dimensions, n] for n in entries])
    all_values = _gather(group, values.contiguous(), [[n, *values.shape[1:]] for n in entries])
    total = torch.cat(all_values)
    if total.dtype in _LOW_PRECISION:
        total = total.float()  # one rounding, as for dense tensors
    result = torch.sparse_coo_tensor(torch.cat(all_indices, dim=1), total, shape, device=total.device).coalesce()
    if kind == AVG:
        result = _divide(result, group.size())
    with torch.no_grad():
        for target in targets:
            target.copy_(result.to(target.dtype))  # not into .detach(): a sparse copy replaces indices and values
    work = Work()
    work._tensors = targets
    return work


def _target_of(tensor: torch.Tensor) -> torch.Tensor:
    """torch passes the real view of a complex tensor. Its new entries would not reach the tensor itself."""
    base = tensor._base
    return base if base is not None and base.is_complex() else tensor


def _divide(total: torch.Tensor, divisor: int) -> torch.Tensor:
    """Divide the entries; integers truncate toward zero, as for dense tensors."""
    exact = total.dtype.is_floating_point or total.dtype.is_complex
    values = torch.div(total.values(), divisor, rounding_mode=None if exact else "trunc")
    return torch.sparse_coo_tensor(total.indices(), values, total.shape, device=total.device, is_coalesced=True)


def _agree(group: dist.ProcessGroup, mine: list[int], entries: int) -> list[int]:
    """Everybody's number of entries, or an error on every rank alike: ``mine`` must be equal."""
    header = torch.zeros(_LONGEST_HEADER, dtype=torch.int64, device="cpu")
    header[: 2 + len(mine)] = torch.tensor([entries, len(mine), *mine], device="cpu")
    headers = [each.tolist() for each in _gather(group, header, [[_LONGEST_HEADER]] * group.size())]
    others = [rank for rank, each in enumerate(headers) if each[1:] != headers[0][1:]]
    if others:
        dtype, _, _, *shape = headers[0][2 : 2 + headers[0][1]]
        raise DistBackendError(
            f"all_reduce: {describe_ranks(others)} passed a sparse tensor of another dtype, shape or number of sparse "
            f"dimensions than rank 0 ({_bridge.DTYPES[dtype]}, {shape}), or another reduction"
        )
    return [int(each[0]) for each in headers]
