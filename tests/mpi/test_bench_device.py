"""`mpiplus bench --device cuda` over a stand-in for the driver: each way of a tensor is the one that it is called.

torch makes no tensors and streams on a device here, so the benchmark is given a place that makes them elsewhere.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from fake_cuda import DeviceTensor, Driver, on_device

from torchmpi_plugin.cli.bench import tune
from torchmpi_plugin.cli.bench.device import Device
from torchmpi_plugin.cli.bench.operations import OPERATIONS, plan
from torchmpi_plugin.cli.bench.results import RAW
from torchmpi_plugin.cli.bench.session import Session, by_path
from torchmpi_plugin.communicator import cuda_path


class InStandIn(Device):
    """Tensors and copies of the stand-in."""

    def tensor(self, count: int, dtype: torch.dtype) -> torch.Tensor:
        return on_device(DeviceTensor.driver, torch.zeros(count, dtype=dtype))

    def settle(self) -> None:
        DeviceTensor.driver.drain()


@pytest.fixture
def session(world, channel, new_group, driver: Driver) -> Iterator[Session]:
    """All paths, as under a CUDA-aware MPI, and what may be gloo."""
    if world.size != 2:
        pytest.skip("on 2 ranks: the device's threads need cores too")
    with cuda_path.taking(cuda_path.Path(True, "the stand-in's memory is the host's")):
        groups = by_path(new_group(None))
    yield Session(channel, ["here"] * 2, [RAW], {**groups, "gloo": new_group(None)}, InStandIn(torch.device("cuda")))
    for path in groups.keys() - {"direct"}:  # that one is new_group's to destroy
        dist.destroy_process_group(groups[path])


def test_each_path_is_the_one_that_it_is_called(session: Session, driver: Driver) -> None:
    """Only what is staged is copied to a device from the host."""
    (case,) = plan([OPERATIONS["broadcast"]], (512 << 10,), 2)
    calls, _ = session.calls(case)
    copies = {}
    for path in ("direct", "ipc", "staged"):
        calls[path]()  # the ranks find out whether they can read each other's devices
        driver.calls()
        calls[path]()
        copies[path] = {name for name in driver.calls() if name.startswith("Memcpy")}
    root = session.rank == 0
    assert copies["direct"] == set()
    assert copies["ipc"] == ({"MemcpyDtoHAsync"} if root else {"MemcpyDtoDAsync"})  # of the first chunk, to compare
    assert copies["staged"] == ({"MemcpyDtoHAsync"} if root else {"MemcpyHtoDAsync"})


@pytest.mark.parametrize("name", ["broadcast", "all_reduce"])
def test_tuning_compares_two_ways(name: str, session: Session, driver: Driver, monkeypatch) -> None:
    """Each of the groups that it makes goes one of them, at any size."""
    monkeypatch.setenv("MPIPLUS_CUDA", "ipc")
    with cuda_path.taking(cuda_path.Path(False, "asked for", ipc=True)):
        groups = tune.by_way(tune.table(session.nodes, "cuda"), session.nodes)
    tuned = Session(session.comm, session.nodes, [], groups, session.device)
    (case,) = plan([OPERATIONS[name]], (512 << 10,), 2)[:1]
    calls, _ = tuned.calls(case)
    for way in groups:
        for _ in range(2):
            driver.calls()
            calls[way]()
        copies = {each for each in driver.calls() if each.startswith("Memcpy")}
        assert ("MemcpyDtoDAsync" in copies) == (way == "between_devices" and (name != "broadcast" or session.rank > 0))
    for group in groups.values():
        dist.destroy_process_group(group)
