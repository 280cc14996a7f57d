"""Blocks that the main rank runs first, and the barrier: order, errors, patience and sleep."""

from __future__ import annotations

import contextlib
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import groups
import pytest
import torch.distributed as dist
from dist_groups import Talk, expect_failure, in_each_group, talk_of_family  # noqa: F401 - a fixture

from torchmpi_plugin import dist as helpers
from torchmpi_plugin.errors import RankFailedError

pytestmark = [pytest.mark.timeout(90), groups.only_up_to(4)]


@pytest.fixture
def shared_file(world, tmp_path_factory):
    return helpers.compute_and_broadcast(lambda: tmp_path_factory.mktemp("turns") / "file")


@in_each_group
def test_the_main_rank_goes_first(talk: Talk, tmp_path_factory) -> None:
    for turn, main in enumerate(talk.ranks * 2):
        path = helpers.compute_and_broadcast(lambda: tmp_path_factory.mktemp("turn") / "ready", group=talk.group)
        with helpers.zero_first(talk.rank == main, group=talk.group):
            if talk.rank == main:
                time.sleep(0.02)
                path.write_text(f"{turn}")
            assert path.read_text() == f"{turn}"


@in_each_group
def test_the_block_fails_on_the_main_rank(talk: Talk) -> None:
    for main in talk.ranks:

        def block(main=main):
            with helpers.zero_first(talk.rank == main, group=talk.group):
                assert talk.rank == main, "an error keeps the others out"
                raise LookupError("on purpose")

        error = expect_failure(main, "zero_first: rank", block)
        assert "LookupError: on purpose" in str(error)
        assert isinstance(error.__cause__, LookupError) == (talk.rank == main)
        helpers.barrier(talk.group)
        with helpers.zero_first(talk.rank == main, group=talk.group):
            pass


@in_each_group
def test_the_block_fails_on_another_rank(talk: Talk) -> None:
    """It concerns that rank only, and keeps its type."""
    last = talk.ranks[-1]
    failing = talk.rank == last and talk.size > 1
    outcome = pytest.raises(LookupError) if failing else contextlib.nullcontext()
    with outcome, helpers.zero_first(talk.place == 0, group=talk.group):
        if failing:
            raise LookupError("on purpose")
    helpers.barrier(talk.group, timeout=20)


def test_several_main_ranks_of_which_one_fails(world, shared_file) -> None:
    """As with is_main_process(local=True) on several nodes: the others wait for all of them."""
    mains = [rank for rank in range(world.size) if rank % 2 == 0]
    with helpers.zero_first(world.rank in mains):
        if world.rank in mains:
            time.sleep(0.05 * world.rank)
            shared_file.with_name(str(world.rank)).touch()
        else:
            assert all(shared_file.with_name(str(rank)).exists() for rank in mains)
    failing, outcome = mains[-1], contextlib.nullcontext()
    if world.rank == failing or world.rank not in mains:
        outcome = pytest.raises(RankFailedError, match=f"rank {failing} failed: LookupError")
    with outcome, helpers.zero_first(world.rank in mains):
        if world.rank == failing:
            raise LookupError("on purpose")
    helpers.barrier(timeout=20)


def test_a_failure_outside_a_nested_block(world, new_group) -> None:
    """The others never come to the inner one; nobody waits for them there, then or later."""
    group = new_group(list(range(world.size)))
    main = world.rank == 0
    with pytest.raises(RankFailedError, match="rank 0 failed: LookupError"), helpers.zero_first(main, group):
        with helpers.run_local_rank_zero_first(group):
            pass
        raise LookupError("on purpose")
    with helpers.zero_first(main, group), helpers.run_local_rank_zero_first(group):
        pass
    with helpers.zero_first(main), helpers.zero_first(main), helpers.run_local_rank_zero_first():
        pass
    helpers.barrier(group, timeout=20)


def test_another_thread_meets_the_others_from_within_a_block(world, new_group) -> None:
    """It is in no block itself, and on the other ranks nobody is yet."""
    group, main = new_group(list(range(world.size))), world.rank == 0
    with ThreadPoolExecutor(1) as thread, helpers.zero_first(True, group) if main else contextlib.nullcontext():
        thread.submit(helpers.barrier, group, timeout=20).result()
    if not main:
        with helpers.zero_first(False, group):
            pass


@pytest.mark.parametrize("local", [False, True])
def test_rank_0_does_not_leave_before_the_others_have_come(world, local: bool) -> None:
    """Else it might end, and take the store along, while they wait for it."""
    helpers.barrier(timeout=20)
    start = time.monotonic()
    late = 1.5  # s: a busy machine may take a good part of it before rank 0 is in
    if world.rank != 0:
        time.sleep(late)
    with helpers.run_local_rank_zero_first() if local else helpers.zero_first(world.rank == 0):
        entered = time.monotonic() - start
    if world.rank == 0 and world.size > 1:
        assert entered < 0.8 * late < time.monotonic() - start
    helpers.barrier(timeout=20)


@pytest.mark.parametrize(("backend", "local"), [("mpiplus", True), ("gloo", False)])
def test_the_wait_outlasts_the_groups_timeout_and_sleeps(world, new_group, backend: str, local: bool) -> None:
    seconds = 2.0
    group = new_group(list(range(world.size)), timeout=timedelta(seconds=1), backend=backend)
    helpers.get_local_rank(group)
    helpers.barrier(timeout=30)
    start, used = time.monotonic(), time.process_time()
    waiting = helpers.run_local_rank_zero_first(group) if local else helpers.zero_first(world.rank == 0, group)
    with waiting:
        used = time.process_time() - used
        if world.rank == 0:
            time.sleep(seconds)
        else:
            assert time.monotonic() - start > 0.9 * seconds
            assert used < 0.05 * seconds
    helpers.barrier(timeout=30)


@in_each_group
def test_zero_only(talk: Talk) -> None:
    with helpers.zero_only(talk.group) as main:
        assert main == (talk.place == 0)

    calls = []

    @helpers.zero_only(talk.group)
    def save(path: str) -> str:
        """Its docstring."""
        calls.append(path)
        return "saved"

    assert save("x") == ("saved" if talk.place == 0 else None)
    assert calls == (["x"] if talk.place == 0 else [])
    assert save.__doc__ == "Its docstring."


@in_each_group
def test_barrier(talk: Talk) -> None:
    for timeout in (None, 20, 20.0, timedelta(seconds=20)):
        assert helpers.barrier(talk.group, timeout=timeout) is None


@pytest.mark.parametrize("family", ["world", "without rank 0", "gloo without rank 0"])
def test_a_barrier_in_vain_names_the_missing(talk: Talk) -> None:
    for missing in sorted({talk.ranks[0], talk.ranks[-1]}):
        if talk.rank == missing:
            time.sleep(2.5)
        elif talk.size > 1:
            with pytest.raises(
                dist.DistBackendError, match=rf"barrier: rank {talk.rank} gave up.*: rank {missing} did"
            ):
                helpers.barrier(talk.group, timeout=1.5)
        if talk.rank == missing and talk.size > 1:  # it comes late, and finds nobody
            helpers.barrier(talk.group, timeout=20)
        helpers.barrier(talk.group, timeout=groups.GROUP_TIMEOUT)
