"""The functional collectives, which reach the backend through C++, and both names of renamed methods."""

from __future__ import annotations

import functools

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch.distributed.distributed_c10d import AllgatherOptions, AllToAllOptions, ReduceScatterOptions

FAMILIES = ("world", "reversed", "even_odd")


def groups_of(all_groups):
    return [all_groups[family] for family in FAMILIES if family in all_groups]


def sent(tensor: torch.Tensor, rank: int, size: int) -> list[torch.Tensor]:
    """Parts of a rank's tensor for each other one, which sends as many rows back."""
    rows = [(rank + peer) % 3 for peer in range(size)]
    return list(tensor[: sum(rows)].split(rows))


def exchanged(tensor: torch.Tensor, group) -> torch.Tensor:
    parts = sent(tensor, dist.get_rank(group), dist.get_world_size(group))
    rows = [len(part) for part in parts]
    return functional.all_to_all_single(torch.cat(parts), rows, rows, group)


def joined(tensors: list[torch.Tensor]) -> torch.Tensor:
    return torch.cat([functional.wait_tensor(tensor) for tensor in tensors])


#: Each with what a rank gets of everybody's tensors. To broadcast the root is the rank in the group.
def added(every: list[torch.Tensor]) -> torch.Tensor:
    return functools.reduce(torch.add, every)


CALLS = {
    "all_reduce": (lambda t, g: functional.all_reduce(t, "sum", g), lambda every, me: added(every)),
    "all_gather 0": (lambda t, g: functional.all_gather_tensor(t, 0, g), lambda every, me: torch.cat(every)),
    "all_gather 1": (lambda t, g: functional.all_gather_tensor(t, 1, g), lambda every, me: torch.cat(every, 1)),
    "reduce_scatter": (
        lambda t, g: functional.reduce_scatter_tensor(t, "sum", 0, g),
        lambda every, me: torch.stack(every).sum(0).chunk(len(every))[me],
    ),
    "broadcast": (lambda t, g: functional.broadcast(t, dist.get_world_size(g) - 1, g), lambda every, me: every[-1]),
    "all_to_all": (exchanged, lambda every, me: torch.cat([sent(t, r, len(every))[me] for r, t in enumerate(every)])),
    "all_reduce of two": (
        lambda t, g: joined(functional.all_reduce_coalesced([t, t + 1], "sum", g)),
        lambda every, me: torch.cat([added(every), added(every) + len(every)]),
    ),
    "all_gather of two": (
        lambda t, g: joined(functional.all_gather_into_tensor_coalesced([t, t + 1], g)),
        lambda every, me: torch.cat([*every, *(t + 1 for t in every)]),
    ),
    "reduce_scatter of two": (
        lambda t, g: joined(functional.reduce_scatter_tensor_coalesced([t, t * 2], "sum", [0, 0], g)),
        lambda every, me: torch.cat([added(every).chunk(len(every))[me] * times for times in (1, 2)]),
    ),
}


@pytest.mark.parametrize("name", CALLS)
def test_results(name: str, all_groups) -> None:
    call, wanted = CALLS[name]
    for group in groups_of(all_groups):
        every = [torch.arange(6.0 * group.size).reshape(-1, 2) + 100 * rank for rank in range(group.size)]
        given = every[group.rank].clone()
        found = functional.wait_tensor(call(given, group.process_group))
        assert torch.equal(found, wanted(every, group.rank))
        assert torch.equal(given, every[group.rank]), "the input was changed"


def test_gradients_flow_through_all_reduce() -> None:
    from torch.distributed.nn.functional import all_reduce

    tensor = torch.ones(3, requires_grad=True)
    (all_reduce(tensor) * (dist.get_rank() + 1)).sum().backward()
    size = dist.get_world_size()
    assert tensor.grad.tolist() == [size * (size + 1) / 2] * 3


#: By what they do, the names of methods, and their options.
NAMES = {
    "gather": (
        "_allgather_base",
        "all_gather_single",
        "allgather_into_tensor_coalesced",
        "all_gather_single_coalesced",
    ),
    "scatter": (
        *("_reduce_scatter_base", "reduce_scatter_single"),
        *("reduce_scatter_tensor_coalesced", "reduce_scatter_single_coalesced"),
    ),
    "exchange": ("alltoall_base", "all_to_all_single"),
}
OPTIONS = {"gather": AllgatherOptions, "scatter": ReduceScatterOptions, "exchange": AllToAllOptions}


@pytest.mark.parametrize(("kind", "name"), [(kind, name) for kind, names in NAMES.items() for name in names])
def test_old_and_new_method_names(kind: str, name: str, all_groups) -> None:
    for group in groups_of(all_groups):
        ranks = torch.arange(float(group.size))
        if kind == "gather":
            given, output, expected = torch.tensor([float(group.rank)]), torch.empty(group.size), ranks
        elif kind == "scatter":
            given, output, expected = ranks.clone(), torch.empty(1), torch.tensor([group.rank * float(group.size)])
        else:
            given, output, expected = torch.full((group.size,), float(group.rank)), torch.empty(group.size), ranks
        operands = ([output], [given]) if "coalesced" in name else (output, given)
        splits = ([], []) if kind == "exchange" else ()
        getattr(group.process_group, name)(*operands, *splits, OPTIONS[kind]()).wait()
        assert torch.equal(output, expected), f"{name} in {group}"
