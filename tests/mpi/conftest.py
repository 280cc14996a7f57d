"""The world, its groups, and the rule that all ranks run the same test at the same time."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import fake_cuda
import groups
import numpy as np
import pytest
import torch
import torch.distributed as dist
import windows
from patience import patient
from placements import placed  # noqa: F401 - a fixture
from rank_reports import RankReporter
from started import Failures

from torchmpi_plugin import Options
from torchmpi_plugin.mpi import runtime

LONGEST_WAIT_BETWEEN_TESTS = patient(100)  # less than the time limit of a test


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(Health(), "health")
    directory = config.getoption("--rank-reports")
    if directory and config.getoption("--with-mpi"):
        from mpi4py import MPI

        config.pluginmanager.register(RankReporter(Path(directory), MPI.COMM_WORLD.rank), "rank-reporter")


@pytest.hookimpl(hookwrapper=True)
def pytest_collection() -> Iterator[None]:
    """Not measured (.ci/measured_process.py): of the package it only imports what other processes import as well."""
    current = sys.modules["coverage"].Coverage.current() if "coverage" in sys.modules else None
    if current is not None:
        current.stop()
        current.save()  # or it would begin anew
    yield
    if current is not None:
        current.start()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    for item in items:
        if item.path.is_relative_to(here):
            item.add_marker(pytest.mark.mpi)


@pytest.fixture(scope="session")
def channel() -> Iterator:
    """An mpi4py communicator of the tests' own, to compare notes past the backend under test."""
    from mpi4py import MPI

    communicator = MPI.COMM_WORLD.Dup()
    yield communicator
    communicator.Free()


@pytest.fixture(scope="session")
def world(channel) -> Iterator[groups.Group]:
    """The default process group, initialised with nothing but the backend's name."""
    torch.set_num_threads(1)
    groups.pretend_hosts()
    # With nothing but the name, unless the mode is another one.
    options = Options(api_mode=groups.API_MODE) if groups.API_MODE == "dispatcher" else None
    dist.init_process_group(groups.BACKEND, timeout=groups.GROUP_TIMEOUT, pg_options=options)
    assert dist.get_world_size() == channel.size
    yield groups.Group("world", dist.group.WORLD, tuple(range(channel.size)), dist.get_rank())
    dist.destroy_process_group()


@pytest.fixture(scope="session")
def all_groups(world) -> dict[str, groups.Group]:
    return groups.make_groups()


class Health:
    """Whether the backend has failed where a test did not want it to.

    A failed group stays failed, so what came after would only tell the same again.
    """

    def __init__(self) -> None:
        self.failed_in: str | None = None

    def pytest_runtest_makereport(self, item: pytest.Item, call: pytest.CallInfo) -> None:
        if call.excinfo is not None and call.excinfo.errisinstance(dist.DistBackendError):
            self.failed_in = self.failed_in or item.name


@pytest.fixture(autouse=True)
def in_step(channel, world, request) -> None:
    """Start every test together; stop where the backend has failed or a rank never comes."""
    plugins = request.config.pluginmanager
    failed_in = plugins.get_plugin("health").failed_in
    anyone = np.zeros(1, dtype=np.int32)
    start = channel.Iallreduce(np.array([failed_in is not None], dtype=np.int32), anyone)
    give_up = time.monotonic() + LONGEST_WAIT_BETWEEN_TESTS
    while not start.Test():
        if time.monotonic() > give_up:
            if reporter := plugins.get_plugin("rank-reporter"):
                reporter.note("waited in vain for the other ranks to come to this test")
            os._exit(3)  # an orderly exit would wait for those ranks in MPI_Finalize
        time.sleep(0.0005)
    if anyone[0]:
        pytest.exit(f"the backend failed in {failed_in or 'a test on another rank'}", returncode=4)


@pytest.fixture(scope="session")
def compiled_code(channel, tmp_path_factory) -> Path:
    """Inductor's directory, which all ranks and tests of a launch share: each piece of C++ is compiled once."""
    return channel.bcast(tmp_path_factory.mktemp("compiled") if channel.rank == 0 else None)


@pytest.fixture
def fresh_compiler(compiled_code, monkeypatch) -> Iterator[None]:
    """torch.compile as in a new process, but for what C++ has been compiled: a cached graph would tell no code."""
    from torch._functorch import config as autograd  # slow to import
    from torch._inductor import config as inductor

    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(compiled_code))
    torch._dynamo.reset()
    with inductor.patch(fx_graph_cache=False), autograd.patch(enable_autograd_cache=False):
        yield
    torch._dynamo.reset()


@pytest.fixture
def group(world):
    return world.process_group


@pytest.fixture(params=windows.KINDS)
def kind(request) -> str:
    """Of a window's memory."""
    return request.param


@pytest.fixture
def new_group(world) -> Iterator:
    """Makes groups as dist.new_group does, and destroys them after the test."""
    made = []

    def make(ranks: list[int] | None, timeout: timedelta = groups.GROUP_TIMEOUT, **options):
        group = groups.new_group(ranks, timeout, **options)
        if group != dist.GroupMember.NON_GROUP_MEMBER:
            made.append(group)
        return group

    yield make
    for group in made:
        dist.destroy_process_group(group)


@pytest.fixture
def failures() -> Iterator[Failures]:
    """Of the cases that a test runs, told at its end."""
    found = Failures()
    yield found
    found.report()


@pytest.fixture(scope="session")
def library(tmp_path_factory, world):
    return tmp_path_factory.mktemp(f"driver{world.rank}")


@pytest.fixture
def driver(library, world) -> Iterator[fake_cuda.Driver]:
    """The stand-in; at the end nothing forbidden has been done to it, and this thread's context is as it was."""
    lib = runtime.shim().lib
    before = lib.mpp_get_stage_bytes()
    lib.mpp_set_stage_bytes(fake_cuda.STAGE_BYTES)
    with fake_cuda.cuda_without_gpu(library) as found:
        yield found
        dist.barrier()
        found.drain()
        problems = found.violations()
        entered = found.lib.fake_entered()
    lib.mpp_set_stage_bytes(before)
    assert problems == []
    assert entered == 0
