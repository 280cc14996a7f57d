"""The helpers of a single process, without a launcher and without initialisation; torchmpi_plugin.launch there."""

from __future__ import annotations

import inspect
import os
import threading
from dataclasses import fields
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch
import torch.distributed as dist
from plain_python import printed

from torchmpi_plugin import dist as helpers
from torchmpi_plugin import launch
from torchmpi_plugin.dist import members, starting
from torchmpi_plugin.dist.waiting import StoreBarrier
from torchmpi_plugin.errors import RankFailedError
from torchmpi_plugin.launch import MultiprocessConfig

VALUES = [2**53 + 1, None, {"a": [1, (2, 3)]}, torch.ones(2), threading.Lock()]
LAUNCHERS = ("OMPI_", "PMI_", "MPI_LOCAL", "MV2_", "SLURM_", "PALS_", "FLUX_", "PMIX_")
TORCHRUN = {
    "TORCH_DISTRIBUTED_BACKEND",
    "RANK",
    "WORLD_SIZE",
    "LOCAL_RANK",
    "LOCAL_WORLD_SIZE",
    "NODE_RANK",
    "GROUP_RANK",
    "MASTER_ADDR",
}


@pytest.fixture(autouse=True)
def nobody_launched_us(monkeypatch) -> None:
    for name in list(os.environ):
        if name.startswith(LAUNCHERS) or name in TORCHRUN:
            monkeypatch.delenv(name)
    monkeypatch.setattr(members, "running_mpi", lambda: None)


@pytest.mark.parametrize("value", VALUES, ids=lambda value: type(value).__name__)
def test_values_are_themselves(value) -> None:
    assert helpers.compute_and_broadcast(lambda: value) is value
    assert helpers.gather_from_all_ranks(lambda: value)[0] is value
    assert helpers.gather_scalar_from_all_ranks(lambda: value, 1)[0] is value
    assert helpers.reduce_and_broadcast(lambda: value, lambda values: values)[0] is value
    assert helpers.all_gather_object(value)[0] is value
    objects = [value]
    assert helpers.broadcast_object_list(objects) is None
    assert objects[0] is value


def test_tensors() -> None:
    tensor = torch.arange(3.0)
    assert helpers.all_reduce(tensor) is None
    assert helpers.broadcast(tensor, 0) is None
    assert tensor.tolist() == [0, 1, 2]
    assert helpers.all_gather(tensor)[0] is tensor
    assert helpers.all_to_all(tensor) is tensor
    with pytest.raises(ValueError, match="must be one of SUM"):
        helpers.all_reduce(tensor, "MEDIAN")


def test_failures() -> None:
    def fail():
        raise LookupError("on purpose")

    def block(turn):
        with turn:
            fail()

    for call in (
        lambda: helpers.compute_and_broadcast(fail),
        lambda: helpers.gather_from_all_ranks(fail),
        lambda: helpers.reduce_and_broadcast(lambda: 1, lambda values: fail()),
        lambda: block(helpers.zero_first(True)),
        lambda: block(helpers.run_local_rank_zero_first()),
    ):
        with pytest.raises(RankFailedError, match="rank 0 failed: LookupError: on purpose") as caught:
            call()
        assert isinstance(caught.value.__cause__, LookupError)
    with pytest.raises(ValueError, match="world_size is 2, but the group has 1 rank;"):
        helpers.gather_from_all_ranks(lambda: 1, world_size=2)
    for call in (
        lambda: helpers.compute_and_broadcast(lambda: 1, rank=1),
        lambda: helpers.gather_from_all_ranks(lambda: 1, rank=1),
        lambda: helpers.broadcast_object_list([1], src=1),
    ):
        with pytest.raises(ValueError, match=r"rank 1 is not in the group, whose global ranks are \[0\]"):
            call()
    with pytest.raises(TypeError, match=r"write @zero_only\(\)"):
        helpers.zero_only(print)


def test_who_comes_as_the_time_runs_out_is_not_missing() -> None:
    """All have come, and the last of them has not let them go on yet."""
    store = dist.HashStore()
    members = SimpleNamespace(group=Mock(get_group_store=lambda: store), ranks=[0, 1], rank=1, size=2)
    waiting = StoreBarrier(members, "barrier")
    waiting.arrive()
    dist.PrefixStore("mpiplus-dist/barrier/1", store).set("came/0", "")
    threading.Timer(0.2, lambda: dist.PrefixStore("mpiplus-dist/barrier/1", store).set("door", "")).start()
    assert waiting.wait("barrier", 0.05) == b""


OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "5",
    "OMPI_COMM_WORLD_SIZE": "8",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "4",
    "OMPI_COMM_WORLD_NODE_RANK": "1",
}
HYDRA = {"PMI_RANK": "5", "PMI_SIZE": "8", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "4"}
SLURM = {"SLURM_STEP_NUM_TASKS": "8", "SLURM_PROCID": "5", "SLURM_LOCALID": "1", "SLURM_NODEID": "1"}
TORCH = {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4", "GROUP_RANK": "1"}
MVAPICH = {name.replace("OMPI", "MV2"): text for name, text in OPEN_MPI.items()}
PALS = {"PALS_RANKID": "5", "PALS_SIZE": "8", "PALS_LOCAL_RANKID": "1", "PALS_LOCAL_SIZE": "4", "PALS_NODEID": "1"}
FLUX = {"FLUX_TASK_RANK": "5", "FLUX_JOB_SIZE": "8", "FLUX_TASK_LOCAL_ID": "1"}


@pytest.mark.parametrize(
    ("variables", "wanted"),
    [
        ({}, (0, 1, 0, 1, 0)),
        (OPEN_MPI, (5, 8, 1, 4, None)),
        (HYDRA, (5, 8, 1, 4, None)),
        (SLURM, (5, 8, 1, None, 1)),
        (TORCH, (5, 8, 1, 4, 1)),
        (MVAPICH, (5, 8, 1, 4, None)),
        (PALS, (5, 8, 1, 4, 1)),
        (FLUX, (5, 8, 1, None, None)),
        ({**OPEN_MPI, **TORCH}, (5, 8, 1, 4, 1)),
        ({**OPEN_MPI, **TORCH, "RANK": "4"}, (5, 8, 1, 4, None)),
        ({**OPEN_MPI, "WORLD_SIZE": "1", "RANK": "0"}, (5, 8, 1, 4, None)),
        # Open MPI's own order on one node, where everybody else has 0 1 2 3.
        ({"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_LOCAL_RANK": "2",
          "OMPI_COMM_WORLD_LOCAL_SIZE": "4"}, (1, 4, 1, 4, 0)),
        # srun has started a torchrun on each of two nodes
        ({**TORCH, **SLURM, "SLURM_STEP_NUM_TASKS": "2", "SLURM_PROCID": "1", "TORCHELASTIC_RUN_ID": "x"},
         (5, 8, 1, 4, 1)),
        ({"PMI_SIZE": "1"}, (0, 1, 0, 1, 0)),
        ({"SLURM_NTASKS": "8", "SLURM_PROCID": "0"}, (0, 1, 0, 1, 0)),  # sbatch: an allocation, not a step
    ],
)  # fmt: skip
def test_launchers_variables(variables, wanted, monkeypatch) -> None:
    assert tuple(members.launched(variables)) == wanted
    with pytest.raises(RuntimeError, match="which of them this is, is unknown: PMI_RANK is not set"):
        members.launched({"PMI_SIZE": "2"})
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert helpers.get_global_rank() == wanted[0]
    assert helpers.get_world_size() == wanted[1]
    for query, value in zip(
        (helpers.get_local_rank, helpers.get_local_world_size, helpers.get_node_rank), wanted[2:], strict=True
    ):
        if value is not None:
            assert query() == value
        else:
            with pytest.raises(RuntimeError, match="not known before initialisation"):
                query()
    assert list(helpers.get_sampler(range(16))) == list(range(wanted[0], 16, wanted[1]))


@pytest.mark.parametrize("variables", [OPEN_MPI, TORCH], ids=["Open MPI", "torchrun"])
def test_one_of_many_that_has_not_initialised_is_not_a_single_process(variables, monkeypatch) -> None:
    """The originals would run so many independent jobs."""
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert not helpers.is_distributed()
    for call in (
        helpers.barrier,
        lambda: helpers.all_reduce(torch.ones(1)),
        lambda: helpers.compute_and_broadcast(lambda: 1),
        lambda: helpers.gather_from_all_ranks(lambda: 1),
        lambda: helpers.zero_first(True).__enter__(),
        lambda: helpers.run_local_rank_zero_first().__enter__(),
    ):
        with pytest.raises(RuntimeError, match=r"process 5 of 8.*call torchmpi_plugin.dist.initialize_dist"):
            call()


def test_arguments_of_initialize_dist() -> None:
    with pytest.raises(ValueError, match="device must be one of cpu, gpu, cuda or None, not 'tpu'"):
        helpers.initialize_dist("tpu")
    if not torch.cuda.is_available():
        with pytest.raises(RuntimeError, match="torch sees no GPU"):
            helpers.initialize_dist("cuda:1")
    assert not dist.is_initialized()


QUERIES_AND_HELPERS = """
import sys
import torchmpi_plugin.dist as helpers
assert helpers.get_world_size() == {size} and helpers.get_global_rank() == {rank}
helpers.is_distributed(), helpers.is_main_process(), helpers.get_local_rank(), helpers.get_sampler(range(9))
import torch.distributed as dist
assert not dist.is_initialized() and "mpi4py.MPI" not in sys.modules
"""
INITIALISE = """
import torch, torch.distributed as dist
import torchmpi_plugin.dist as helpers
helpers.initialize_dist(*{arguments})
helpers.initialize_dist(*{arguments})
assert (dist.get_backend(), dist.get_rank(), dist.get_world_size()) == ({backend!r}, 0, 1)
assert helpers.get_local_rank() == helpers.get_node_rank() == 0 and helpers.get_local_world_size() == 1
helpers.barrier(), helpers.barrier(timeout=5)
assert helpers.compute_and_broadcast(lambda: 0.1) == 0.1
rows = torch.ones(2, requires_grad=True)
helpers.all_to_all(rows).sum().backward()
assert rows.grad.tolist() == [1, 1]
dist.destroy_process_group()
"""


def test_a_query_initialises_nothing() -> None:
    printed(QUERIES_AND_HELPERS.format(size=8, rank=5), **OPEN_MPI)


def test_initialize_a_single_process() -> None:
    for_each = (INITIALISE.format(arguments=("cpu", 30.0, name), backend=name.lower()) for name in ("mpiplus", "GLOO"))
    printed("".join(for_each))


@pytest.mark.parametrize(
    ("launcher", "world_size", "wanted"),
    [
        ({}, "4", {}),
        (OPEN_MPI, "1", {"init_method": "mpi://"}),  # as a single process leaves them behind
        (HYDRA, "4", {"init_method": "mpi://"}),
        ({"PMI_SIZE": "1", "PMI_RANK": "0"}, "4", {}),
    ],
)
def test_variables_that_contradict_mpi_are_not_used(launcher, world_size, wanted, monkeypatch, caplog) -> None:
    """Else mpirun would start so many jobs of their own, and nobody would notice."""
    torch_variables = {"RANK": "0", "WORLD_SIZE": world_size, "MASTER_ADDR": "localhost", "MASTER_PORT": "29500"}
    for name, value in {**launcher, **torch_variables}.items():
        monkeypatch.setenv(name, value)
    assert starting._how_to_meet("mpiplus") == wanted == starting._how_to_meet("gloo")
    assert bool(wanted) == (f"MPI has started 8 processes; RANK and WORLD_SIZE={world_size} are not" in caplog.text)


@pytest.mark.parametrize(("device", "number"), [("gpu", 1), ("cuda:0", 0), (torch.device("cuda", 3), 3), ("cpu", None)])
def test_the_gpu_is_that_of_the_local_rank_or_the_one_that_is_named(device, number, monkeypatch) -> None:
    chosen = []
    monkeypatch.setattr(starting.members, "initialized", lambda: True)
    monkeypatch.setattr(starting.dist, "get_backend", lambda: "gloo")
    monkeypatch.setattr(starting, "get_local_rank", lambda: 5)
    monkeypatch.setattr(starting.torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(starting.torch.cuda, "device_count", lambda: 4)
    monkeypatch.setattr(starting.torch.cuda, "set_device", chosen.append)
    helpers.initialize_dist(device, backend="gloo")
    assert chosen == ([] if number is None else [number])


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
     (OPEN_MPI, 8, 4)],
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
