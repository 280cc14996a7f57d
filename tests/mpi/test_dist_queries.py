"""Ranks and sizes come from the group; node-local helpers know the nodes."""

from __future__ import annotations

import contextlib

import pytest
import torch.distributed as dist
from dist_groups import Talk, in_each_group, talk_of_family  # noqa: F401 - a fixture
from groups import only_up_to

from torchmpi_plugin import dist as helpers
from torchmpi_plugin.dist import queries, waiting
from torchmpi_plugin.errors import RankFailedError
from torchmpi_plugin.node import node

pytestmark = [pytest.mark.timeout(60), only_up_to(4)]


@in_each_group
def test_sizes_and_ranks_are_the_groups(talk: Talk) -> None:
    """All ranks are on this node."""
    assert helpers.get_world_size(talk.group) == talk.size
    assert helpers.get_global_rank(talk.group) == talk.place
    assert helpers.get_local_rank(talk.group) == talk.place
    assert helpers.get_local_world_size(talk.group) == talk.size
    assert helpers.get_node_rank(talk.group) == 0
    assert helpers.is_main_process(group=talk.group) == (talk.place == 0)
    assert helpers.is_main_process(local=True, group=talk.group) == (talk.place == 0)
    assert helpers.is_distributed(talk.group) == (talk.size > 1)
    assert helpers.is_available() and helpers.is_initialized()


def test_initialize_again(world) -> None:
    group = dist.group.WORLD
    helpers.initialize_dist()
    helpers.initialize_dist("cpu", timeout=5)
    with pytest.raises(ValueError, match="twice"):
        dist.init_process_group("mpiplus")
    assert dist.group.WORLD is group
    with pytest.raises(RuntimeError, match="has the backend 'mpiplus', not 'gloo'"):
        helpers.initialize_dist(backend="gloo")


def test_who_is_not_in_the_group(world, new_group) -> None:
    group = new_group([0])
    if world.rank == 0:
        return
    assert helpers.get_global_rank(group) == -1
    assert helpers.get_local_rank(group) == -1
    for call in (
        lambda: helpers.all_gather_object(1, group),
        lambda: helpers.compute_and_broadcast(lambda: 1, group=group),
        lambda: helpers.zero_first(True, group).__enter__(),
    ):
        with pytest.raises(ValueError, match=f"rank {world.rank}\\) is not a member"):
            call()


def test_what_is_no_group(world) -> None:
    with pytest.raises(TypeError, match=r"the group must be a .*, not 3"):
        helpers.all_gather_object(1, 3)


def test_sampler(world) -> None:
    data = list(range(23))
    mine = list(helpers.get_sampler(data, drop_last=True))
    everybody = helpers.all_gather_object(mine)
    assert {len(part) for part in everybody} == {23 // world.size}
    assert len({sample for part in everybody for sample in part}) == 23 // world.size * world.size
    assert helpers.get_sampler(data, num_replicas=7, rank=5, seed=3).num_replicas == 7


# ---- several nodes ----
#
# Two nodes are two names here: what tells nodes apart is replaced while the group is made.


@pytest.fixture(params=["mpiplus", "gloo"])
def on_nodes(request, world, new_group, monkeypatch):
    """Makes a group whose ranks live on the nodes of the given numbers; returns it, and the mates' places."""

    def make(node_of_rank: list[int], ranks: list[int]):
        name = f"node {node_of_rank[world.rank]}"
        monkeypatch.setattr(node, "identity", lambda: name)
        monkeypatch.setattr(queries.members, "launched", lambda: queries.members.Launched(0, 99, None, None, None))
        group = new_group(ranks, backend=request.param)
        return group if world.rank in ranks else None

    return make


def expected(node_of_rank: list[int], ranks: list[int], me: int) -> tuple[int, int, int]:
    mates = [rank for rank in ranks if node_of_rank[rank] == node_of_rank[me]]
    nodes = list(dict.fromkeys(node_of_rank[rank] for rank in ranks))
    return mates.index(me), len(mates), nodes.index(node_of_rank[me])


@pytest.mark.parametrize("layout", ["blocks", "cyclic", "backwards", "one alone"])
@pytest.mark.parametrize("first", [0, 1])
def test_nodes(on_nodes, world, layout: str, first: int) -> None:
    ranks = list(range(first, world.size))
    if not ranks:
        return
    node_of_rank = {
        "blocks": [rank // 2 for rank in range(world.size)],
        "cyclic": [rank % 2 for rank in range(world.size)],
        "backwards": [(world.size - rank) // 2 for rank in range(world.size)],
        "one alone": [int(rank == world.size - 1) for rank in range(world.size)],
    }[layout]
    group = on_nodes(node_of_rank, ranks)
    if group is None:
        return
    local_rank, local_size, node = expected(node_of_rank, ranks, world.rank)
    assert helpers.get_local_rank(group) == local_rank
    assert helpers.get_local_world_size(group) == local_size
    assert helpers.get_node_rank(group) == node
    assert helpers.is_main_process(local=True, group=group) == (local_rank == 0)


@pytest.mark.parametrize("guilty_node", [None, 0, 1])
def test_local_rank_zero_goes_first_on_each_node(on_nodes, world, guilty_node, tmp_path_factory) -> None:
    """A node hears of its own first rank, and does not care for other nodes."""
    node_of_rank = [rank % 2 for rank in range(world.size)]
    group = on_nodes(node_of_rank, list(range(world.size)))
    node, first = node_of_rank[world.rank], world.rank < 2
    base = helpers.compute_and_broadcast(lambda: tmp_path_factory.mktemp("nodes"), group=group)
    done = base / f"{node}"
    failing = node == guilty_node
    outcome = pytest.raises(RankFailedError, match=f"rank {node} failed") if failing else contextlib.nullcontext()
    with outcome, helpers.run_local_rank_zero_first(group):
        if first and failing:
            raise OSError("disk full")
        if first:
            done.touch()
        assert done.exists()
    helpers.barrier(group, timeout=30)


def test_meetings_leave_no_keys(world) -> None:
    store = dist.group.WORLD.get_group_store()
    for _ in range(3):
        helpers.barrier(timeout=20)
        with helpers.zero_first(helpers.is_main_process()):
            pass
    helpers.barrier()
    for name, last in waiting._numbers.get(dist.group.WORLD, {}).items():
        keys = [f"mpiplus-dist/{name}/{n}/{key}" for n in range(1, last) for key in ("door", "count", "left")]
        assert not any(store.check([key]) for key in keys)
