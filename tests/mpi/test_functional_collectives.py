"""The functional collectives, which reach the backend through C++, and both names of renamed methods."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch.distributed.distributed_c10d import AllgatherOptions, AllToAllOptions, ReduceScatterOptions

FAMILIES = ("world", "reversed", "even_odd")


def groups_of(all_groups):
    return [all_groups[family] for family in FAMILIES if family in all_groups]


def mine(group, rows: int) -> torch.Tensor:
    return torch.arange(rows * 2.0).reshape(rows, 2) + 100 * group.rank


def test_all_reduce(all_groups) -> None:
    for group in groups_of(all_groups):
        given = mine(group, 3)
        result = functional.all_reduce(given, "sum", group.process_group)
        expected = group.size * mine(group, 3) + 100 * (sum(range(group.size)) - group.size * group.rank)
        torch.testing.assert_close(functional.wait_tensor(result), expected)
        assert torch.equal(given, mine(group, 3)), "the input was changed"


def test_all_gather_tensor(all_groups) -> None:
    for group in groups_of(all_groups):
        for dim in (0, 1):
            result = functional.all_gather_tensor(mine(group, 3), dim, group.process_group)
            parts = [torch.arange(6.0).reshape(3, 2) + 100 * rank for rank in range(group.size)]
            assert torch.equal(functional.wait_tensor(result), torch.cat(parts, dim))


def test_reduce_scatter_tensor(all_groups) -> None:
    for group in groups_of(all_groups):
        result = functional.reduce_scatter_tensor(mine(group, 3 * group.size), "sum", 0, group.process_group)
        total = sum(mine(group, 3 * group.size) + 100 * (rank - group.rank) for rank in range(group.size))
        assert torch.equal(functional.wait_tensor(result), total.chunk(group.size)[group.rank])


def test_all_to_all_single(all_groups) -> None:
    for group in groups_of(all_groups):
        sends = [(group.rank + peer) % 3 for peer in range(group.size)]  # symmetric, so it receives the same
        given = torch.full((sum(sends), 2), float(group.rank))
        result = functional.all_to_all_single(given, sends, sends, group.process_group)
        expected = torch.cat([torch.full((rows, 2), float(peer)) for peer, rows in enumerate(sends)])
        assert torch.equal(functional.wait_tensor(result), expected)


def test_broadcast(all_groups) -> None:
    for group in groups_of(all_groups):
        root = group.size - 1  # here torch means the rank in the group
        result = functional.broadcast(mine(group, 2), root, group.process_group)
        assert torch.equal(functional.wait_tensor(result), torch.arange(4.0).reshape(2, 2) + 100 * root)


def test_coalesced(all_groups) -> None:
    for group in groups_of(all_groups):
        given = [torch.full((3,), float(group.rank)), torch.full((2, 2), 1.0 + group.rank)]
        ranks = sum(range(group.size))
        first, second = functional.all_reduce_coalesced(given, "sum", group.process_group)
        assert functional.wait_tensor(first).unique().tolist() == [ranks]
        assert functional.wait_tensor(second).unique().tolist() == [ranks + group.size]
        gathered = functional.all_gather_into_tensor_coalesced(given, group.process_group)
        expected = torch.arange(float(group.size)).repeat_interleave(3)
        assert torch.equal(functional.wait_tensor(gathered[0]), expected)
        inputs = [torch.arange(float(group.size)), torch.ones(2 * group.size)]
        scattered = functional.reduce_scatter_tensor_coalesced(inputs, "sum", [0, 0], group.process_group)
        assert functional.wait_tensor(scattered[0]).tolist() == [group.rank * group.size]
        assert functional.wait_tensor(scattered[1]).tolist() == [group.size] * 2


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
