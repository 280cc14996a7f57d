"""Functions that launch_subprocesses runs: from a plain process, and in place under mpirun."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path

import forked_ranks  # noqa: F401
import steps
import torch
import torch.distributed as dist
from steps import say

from torchmpi_plugin import launch
from torchmpi_plugin.launch import MultiprocessConfig, RankFailedError, launch_subprocesses

FACTOR = 3


@dataclass
class Sample:
    """Of __main__, like the functions: the ranks do not run this script, and must have it all the same."""

    number: int


def train(sample: Sample, *, ranks: int, backend: str = "mpiplus") -> None:
    torch.set_num_threads(1)
    total = torch.tensor([float(sample.number * FACTOR)])
    dist.all_reduce(total)
    assert total.tolist() == [sample.number * FACTOR * ranks]
    assert (dist.get_world_size(), dist.get_backend()) == (ranks, backend)
    assert os.environ["SET_UP"] == "yes"
    info = launch.parallel_group_info()
    assert info.dp.world_size == ranks
    say("end")


def set_up() -> None:
    assert not dist.is_initialized()
    os.environ["SET_UP"] = "yes"


def from_a_plain_process() -> None:
    config = MultiprocessConfig(world_size=4)
    assert launch_subprocesses(train, config, set_up, 0, Sample(5), ranks=4) is None
    assert not dist.is_initialized() and "RANK" not in os.environ and "SET_UP" not in os.environ
    launch.launch_subprocess(lambda: say("again"), config, daemon=True)  # a second time, and a lambda


def on_gloo_over_tcp(port: str) -> None:
    """As ml's own examples do it."""
    config = MultiprocessConfig(
        world_size=2, master_port=int(port), init_method=f"tcp://127.0.0.1:{port}", backend="gloo"
    )
    launch_subprocesses(train, config, set_up, 0, Sample(1), ranks=2, backend="gloo")


def in_place(ranks: str) -> None:
    """Under mpirun: this very process makes the call, twice, and once with an initialised world."""
    here = os.getpid()

    def function() -> None:
        assert os.getpid() == here
        train(Sample(2), ranks=int(ranks))

    config = MultiprocessConfig()
    launch_subprocesses(function, config, set_up)
    assert not dist.is_initialized()
    assert (config.rank, config.world_size) == (steps.ME, int(ranks))
    launch_subprocesses(function, MultiprocessConfig(world_size=int(ranks)), set_up)
    dist.init_process_group("mpiplus")
    launch_subprocesses(function, MultiprocessConfig())
    assert dist.is_initialized()


def of_another_size() -> None:
    with steps.raises(ValueError, "world_size is 7, but this program is one of 2 ranks that its launcher started"):
        launch_subprocesses(train, MultiprocessConfig(world_size=7))


def fail(who: int, how: str) -> None:
    if dist.get_rank() == who:
        if how == "raise":
            raise ArithmeticError("this one is meant")
        if how == "exit":
            sys.exit(7)
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()
    say("came out")


def one_fails(who: str, how: str, code: str) -> None:
    with steps.raises(RankFailedError, f"rank {who} on node .* failed first") as caught:
        launch_subprocesses(fail, MultiprocessConfig(world_size=3), None, 0, int(who), how)
    error = caught[0]
    assert isinstance(error, RankFailedError)
    assert (error.rank, error.ranks, error.exit_code) == (int(who), [int(who)], int(code)), vars(error)
    assert error.node
    if how == "raise":
        assert "in fail\n" in error.traceback and "ArithmeticError: this one is meant" in error.traceback
    say("parent end")


def wait_for_ever(directory: str) -> None:
    (Path(directory) / f"rank{dist.get_rank()}").touch()
    dist.barrier() if dist.get_rank() else time.sleep(600)


def interrupted(directory: str) -> None:
    def interrupt() -> None:
        while not all((Path(directory) / f"rank{rank}").exists() for rank in range(3)):
            time.sleep(0.05)
        time.sleep(0.2)
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=interrupt, daemon=True).start()
    with steps.raises(KeyboardInterrupt):
        launch_subprocesses(wait_for_ever, MultiprocessConfig(world_size=3), None, 0, directory)
    say("parent end")


def alone() -> None:
    """One rank needs no mpirun; afterwards nothing is left, and more ranks can be started."""
    for config in (MultiprocessConfig(world_size=1), MultiprocessConfig(world_size="???")):
        launch_subprocesses(train, config, set_up, 0, Sample(1), ranks=1)
        assert config.rank == 0 and not dist.is_initialized() and "WORLD_SIZE" not in os.environ
    launch_subprocesses(train, MultiprocessConfig(world_size=2), set_up, 0, Sample(1), ranks=2)


def factorisations() -> None:
    """Right members for all ways to share out the ranks."""
    dist.init_process_group("mpiplus")
    rank, size = dist.get_rank(), dist.get_world_size()
    for model in range(1, size + 1):
        for pipeline in range(1, size + 1):
            if size % (model * pipeline):
                continue
            launch.init_parallelism(model, pipeline)
            info = launch.parallel_group_info()
            place, stage, copy = rank % model, rank // model % pipeline, rank // (model * pipeline)
            everybody = [(r % model, r // model % pipeline, r // (model * pipeline)) for r in range(size)]
            mates = (
                (info.mp, [r for r, (_, s, c) in enumerate(everybody) if (s, c) == (stage, copy)]),
                (info.pp, [r for r, (p, _, c) in enumerate(everybody) if (p, c) == (place, copy)]),
                (info.dp, [r for r, (p, s, _) in enumerate(everybody) if (p, s) == (place, stage)]),
            )
            for group, members in mates:
                assert group.global_ranks == members == dist.get_process_group_ranks(group.group)
                assert (group.rank, group.world_size) == (members.index(rank), len(members))
                total = torch.tensor([rank])
                dist.all_reduce(total, group=group.group)
                assert total.item() == sum(members)
            assert info.mesh.mesh.shape == (size // (model * pipeline), pipeline, model)
            assert list(info.mesh.get_coordinate()) == [copy, stage, place]
            assert info.mesh.get_group("model") is info.mp.group
            launch.reset_parallelism()
    dist.destroy_process_group()


if __name__ == "__main__":
    scenarios = {name: function for name, function in globals().items() if callable(function)}
    scenarios[sys.argv[1]](*sys.argv[2:])
    say("end")
