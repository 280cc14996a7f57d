"""What the whole suite shares: which tests run in this process, which under mpiexec, and which side by side."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import fork_server
import pytest
from mpi_installations import find_installations
from rank_runs import no_mpi_message
from xdist.scheduler import LoadScopeScheduling

HERE = Path(__file__).parent
#: Which share of long tests is run, its seed and its sum; and how long tests may take.
pytest_plugins = ["sampling", "patience"]
#: Those of one lane run one after another, beside all others. What keeps all cores busy has one lane, so that what
#: mostly waits has the rest; and the tests of one process share what they compile.
LANES = {
    "test_under_mpiexec.py": "ranks",
    "faults": "faults",
    "hosts": "hosts",
    "slurm": "slurm",
    "frameworks": "frameworks",
    "unit": "unit",
    "processors": "unit",
    "fork_server": "fork_server",
}


#: Of which every test runs under each MPI of this machine.
UNDER_EACH_MPI = ("jobs", "hosts", "slurm", "faults", "soak")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--rank-reports",
        metavar="DIR",
        help="directory where each rank under mpiexec leaves its report (set by the driver)",
    )
    parser.addoption(
        "--launch-part",
        nargs=2,
        type=float,
        metavar=("START", "END"),
        help="run only this part of tests/mpi under mpiexec (set by the driver; sampling.py)",
    )
    parser.addoption(
        "--mpi-keyword",
        metavar="EXPRESSION",
        default="",
        help="run only these tests of tests/mpi under mpiexec (as -k does in this process)",
    )


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Plain pytest leaves tests/mpi to the driver; a rank under mpiexec leaves out the driver.

    tests/frameworks needs much that the rest does not, and is run by name only.
    """
    if collection_path == HERE / "frameworks":
        return True if not any("frameworks" in argument for argument in config.args) else None
    if config.getoption("--with-mpi"):
        return True if collection_path.name == "test_under_mpiexec.py" else None
    return True if collection_path == HERE / "mpi" else None


def first_part(path: Path) -> str:
    return path.relative_to(HERE).parts[0] if path.is_relative_to(HERE) else ""


@pytest.hookimpl(tryfirst=True)
def pytest_cmdline_main(config: pytest.Config) -> None:
    """A rank under mpiexec is one process."""
    if config.getoption("--with-mpi"):
        config.option.numprocesses = 0


def pytest_configure(config: pytest.Config) -> None:
    """The MPIs are looked for once, not by each worker; those start with this environment. One fork server does too."""
    config.addinivalue_line("markers", "fresh(reason): its ranks are fresh processes, not forks (tests/fork_server)")
    if not config.getoption("--with-mpi") and config.getoption("numprocesses", None):
        find_installations()
        fork_server.start()


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "installation" in metafunc.fixturenames and first_part(metafunc.definition.path) in UNDER_EACH_MPI:
        found = {one.name: one for one in find_installations()[0]} or {"no-MPI": None}
        metafunc.parametrize("installation", found.values(), ids=found, scope="session")


@pytest.fixture(autouse=True)
def _fresh(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if "installation" in request.fixturenames and request.getfixturevalue("installation") is None:
        pytest.fail(no_mpi_message(), pytrace=False)
    if request.node.get_closest_marker("fresh"):
        monkeypatch.setenv(fork_server.FRESH, "1")


class LaneScheduling(LoadScopeScheduling):
    """One worker for all tests of a lane; for each of the others whichever is free.

    By the place of the file: xdist's own groups (3.8) write into what pytest 9.2 no longer has.
    """

    def _split_scope(self, nodeid: str) -> str:
        return LANES.get(first_part((HERE.parent / nodeid.partition("::")[0]).resolve()), nodeid)


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> LaneScheduling:
    return LaneScheduling(config, log)
