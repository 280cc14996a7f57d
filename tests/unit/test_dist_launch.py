"""torchmpi_plugin.launch in a single process: the configuration, the backends, and what is refused."""

from __future__ import annotations

import inspect
from dataclasses import fields

import pytest
import torch
import torch.distributed as dist

from torchmpi_plugin import launch
from torchmpi_plugin.dist import members
from torchmpi_plugin.launch import MultiprocessConfig, RankFailedError

UNDER_MPIRUN = {
    "OMPI_COMM_WORLD_RANK": "3",
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
}


@pytest.fixture(autouse=True)
def nobody_launched_us(monkeypatch) -> None:
    for name in (*UNDER_MPIRUN, "PMI_SIZE", "PMI_RANK", "WORLD_SIZE", "RANK", "TORCH_DISTRIBUTED_BACKEND"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(members, "running_mpi", lambda: None)


def test_resolve() -> None:
    config = MultiprocessConfig(world_size="???", local_world_size=None, master_port="???")
    MultiprocessConfig.resolve(config)
    assert config.world_size == config.local_world_size == max(torch.cuda.device_count(), 1)
    assert (config.init_method, config.master_port) == ("mpi://", None)
    given = MultiprocessConfig(world_size=8, local_world_size=4, master_port=29501, init_method="env://")
    given.resolve()
    assert (given.world_size, given.local_world_size, given.init_method, given.master_port) == (8, 4, "env://", 29501)


ALONE = {"RANK": "0", "WORLD_SIZE": "1"}


@pytest.mark.parametrize(
    ("launcher", "size", "local_size"),
    [({**ALONE, "PMI_SIZE": "1", "PMI_RANK": "0"}, 1, 1), ({**ALONE, "TORCHELASTIC_RUN_ID": "x"}, 1, 1),
     (UNDER_MPIRUN, 4, 2)],
)  # fmt: skip
def test_resolve_under_a_launcher(launcher, size: int, local_size: int, monkeypatch) -> None:
    for name, value in launcher.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    config = MultiprocessConfig()
    config.resolve()
    assert (config.world_size, config.local_world_size) == (size, local_size)
    with pytest.raises(ValueError, match=f"world_size is 3, but this program is one of {size} ranks"):
        MultiprocessConfig(world_size=3).resolve()


def test_backends(monkeypatch) -> None:
    assert launch.default_backend() == launch.get_distributed_backend() == "mpiplus"
    monkeypatch.setenv("TORCH_DISTRIBUTED_BACKEND", "")
    assert launch.get_distributed_backend() == "mpiplus"
    launch.set_distributed_backend("gloo")
    assert launch.get_distributed_backend() == dist.Backend.GLOO


def test_groups_of_a_world_of_one() -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        for wrong in ((0, 1), (1, 0), (1, -1)):
            with pytest.raises(ValueError, match="must be at least 1"):
                launch.init_parallelism(*wrong)
        with pytest.raises(ValueError, match=r"1 ranks cannot be shared out.*\(1\) x pipeline_parallelism \(2\)"):
            launch.init_parallelism(1, 2)
        launch.init_parallelism(model_parallelism=4)  # cut to the world's size
        info = launch.parallel_group_info()
        assert info.mp.world_size == info.pp.world_size == info.dp.world_size == 1
        assert info.mesh.mesh_dim_names == ("data", "pipeline", "model")
        with pytest.raises(RuntimeError, match="exist already"):
            launch.init_parallelism()
        launch.reset_parallelism()
        assert not launch.parallelism_is_initialized()
    finally:
        dist.destroy_process_group()


def leave(error: BaseException) -> None:
    assert dist.get_world_size() == launch.parallel_group_info().dp.world_size == 1
    raise error


@pytest.mark.parametrize(("error", "code"), [(LookupError("this one"), 1), (SystemExit(7), 7), (SystemExit("no"), 1)])
def test_one_rank_that_fails_is_like_one_of_several(error: BaseException, code: int) -> None:
    """And can be started again."""
    for _ in range(2):
        with pytest.raises(RankFailedError, match=f"rank 0 on node .* failed first: exit code {code}") as caught:
            launch.launch_subprocesses(leave, MultiprocessConfig(world_size=1, backend="gloo"), None, 0, error)
        assert (caught.value.rank, caught.value.exit_code) == (0, code)
        assert caught.value.node and "in leave\n" in caught.value.traceback
        assert caught.value.__cause__ is error
        assert not dist.is_initialized() and not launch.parallelism_is_initialized()


def test_what_is_refused() -> None:
    with pytest.raises(ValueError, match="rank_offset is 2, but MPI numbers the ranks"):
        launch.launch_subprocesses(print, MultiprocessConfig(world_size=2), None, 2)
    with pytest.raises(RuntimeError, match="no process group is initialised"):
        launch.init_parallelism()
    with pytest.raises(RuntimeError, match="there are no groups yet"):
        launch.parallel_group_info()
    assert not launch.parallelism_is_initialized()
    launch.reset_parallelism()


def test_one_rank_that_ends_early() -> None:
    config = MultiprocessConfig(world_size=1, backend="gloo")
    launch.launch_subprocesses(leave, config, None, 0, SystemExit(0))
    with pytest.raises(KeyboardInterrupt):
        launch.launch_subprocesses(leave, config, None, 0, KeyboardInterrupt())
    assert not dist.is_initialized()


def test_the_names_are_mls() -> None:
    assert " ".join(field.name for field in fields(MultiprocessConfig)) == (
        "rank local_rank world_size local_world_size master_addr master_port init_method model_parallelism "
        "pipeline_parallelism backend model_parallel_backend pipeline_parallel_backend data_parallel_backend "
        "launch_method"
    )
    parameters = list(inspect.signature(launch.launch_subprocess).parameters)
    assert parameters[:5] == ["func", "cfg", "setup", "rank_offset", "args"]
