"""Tensors between all ranks, on torch's own collectives."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from . import members as groups

# All that torch reduces with but PREMUL_SUM, which wants a factor.
_OPERATIONS = ("SUM", "AVG", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR")


def _in_place(tensor: torch.Tensor, collective: Callable[[torch.Tensor], Any]) -> None:
    """Some backends, gloo for one, write to the wrong places of a strided tensor."""
    if tensor.is_contiguous():
        collective(tensor)
        return
    copy = tensor.contiguous()
    collective(copy)
    tensor.detach().copy_(copy)


def all_reduce(tensor: torch.Tensor, reduce_operation: str = "SUM", group: dist.ProcessGroup | None = None) -> None:
    """Reduce a tensor over all ranks, in place. From Composer.

    Args:
        tensor: of the same shape and dtype on every rank; any strides.
        reduce_operation: SUM, AVG, PRODUCT, MIN, MAX, BAND, BOR or BXOR; case does not matter.
        group: the ranks that take part; the world if None.

    Raises:
        ValueError: another ``reduce_operation`` (Composer: AttributeError).

    Example::

        all_reduce(correct, "SUM")
    """
    name = str(reduce_operation).upper()
    if name not in _OPERATIONS:
        raise ValueError(f"reduce_operation must be one of {', '.join(_OPERATIONS)}, not {reduce_operation!r}")
    members = groups.find(group, "all_reduce")
    if members.group is not None:
        operation = getattr(dist.ReduceOp, name)
        _in_place(tensor, lambda t: dist.all_reduce(t, op=operation, group=members.group))


def broadcast(tensor: torch.Tensor, src: int, group: dist.ProcessGroup | None = None) -> None:
    """Replace every rank's tensor by that of ``src``, in place. From Composer.

    Args:
        tensor: of the same shape and dtype on every rank; any strides.
        src: a global rank of the group.
        group: the ranks that take part; the world if None.

    Example::

        broadcast(weights, src=0)
    """
    members = groups.find(group, "broadcast")
    if members.group is not None:
        _in_place(tensor, lambda t: dist.broadcast(t, src=src, group=members.group))


def all_gather(tensor: torch.Tensor, group: dist.ProcessGroup | None = None) -> Sequence[torch.Tensor]:
    """Every rank's tensor, on every rank, in the group's order.

    From Composer, whose list has the world's size in any group.

    Args:
        tensor: of the same shape and dtype on every rank; any strides.
        group: the ranks that take part; the world if None.

    Returns:
        One new tensor for each rank; ``[tensor]`` for a single process.

    Example::

        predictions = torch.cat(list(all_gather(my_predictions)))
    """
    members = groups.find(group, "all_gather")
    if members.group is None:
        return [tensor]
    mine = tensor.detach().contiguous()
    gathered = [torch.empty_like(mine) for _ in members.ranks]
    dist.all_gather(gathered, mine, group=members.group)
    return gathered


class _AllToAll(torch.autograd.Function):
    """The exchange is its own transpose: gradients take the same way back."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.group = group
        mine = tensor.contiguous()
        received = torch.empty_like(mine)
        dist.all_to_all_single(received, mine, group=group)
        return received

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        return _AllToAll.apply(gradients[0], ctx.group), None


def all_to_all(input: torch.Tensor, group: dist.ProcessGroup | None = None) -> torch.Tensor:
    """Send the i-th part of dimension 0 to the i-th rank, and join what the ranks sent, in their order.

    From ml. It can be differentiated, twice too; as in any collective, all ranks must call backward.

    Args:
        input: of the same shape and dtype on every rank; dimension 0 a multiple of the number of ranks.
        group: the ranks that take part; the world if None.

    Returns:
        A tensor like ``input``; ``input`` itself for a single process.

    Raises:
        ValueError: dimension 0 cannot be split equally.

    Example::

        heads = all_to_all(tokens)  # (ranks * n, d): n rows for each rank, n rows from each
    """
    members = groups.find(group, "all_to_all")
    if members.group is None:
        return input
    if input.dim() == 0 or input.shape[0] % members.size:
        raise ValueError(
            f"all_to_all: dimension 0 of {tuple(input.shape)} cannot be split equally over {members.size} ranks"
        )
    exchanged: torch.Tensor = _AllToAll.apply(input, members.group)
    return exchanged
