"""Of tests that take long, which part a change runs: a share that a seed picks, and at night all of it.

The seed is ``MPIPLUS_TEST_SEED``, else made of the commit, else of the files: it moves with each change, and every rank
of a launch finds the same. A failure is had again by its seed, which pytest prints. ``MPIPLUS_TEST_FULL=1``
leaves out nothing.
"""

from __future__ import annotations

import functools
import hashlib
import os
import random
import subprocess
import zlib
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:  # .ci/report.py runs where there is no pytest
    import pytest

ROOT = Path(__file__).resolve().parents[1]
FULL = os.environ.get("MPIPLUS_TEST_FULL") == "1"
SEED = "MPIPLUS_TEST_SEED"
#: One of so many, unless a test says another number; also of what is marked slow, and of what computes.
SHARE = 10
#: Of ten parts of the tests that start jobs, those that a change runs under either MPI; the rest is for other changes.
#: Jobs start and end processes, whatever their tests look at: seconds of CPU each. Those that run what few others do
#: are marked `every_change`. What is marked `under_each` runs under both MPIs or under none. Under Open MPI slow ones
#: are chosen by their own share only.
JOB_PARTS = {"Open MPI": range(5), "MPICH": range(5, 6)}
STARTING_JOBS = ("tests/jobs", "tests/hosts", "tests/slurm")
COMPUTING = (
    *("tests/model", "tests/fork_server", "tests/unit/test_reduce_kernels", "tests/unit/test_many_ranks"),
    *("tests/unit/test_repro", "tests/unit/test_direct_chunks"),
)
#: Which of tests/mpi run on so many ranks: those between two points of the circle that they all lie on. Each runs in a
#: change, a fifth of them on one rank. The table of operations is not among them: it shares its own cases.
PARTS = {1: (0.8, 1.0), 2: (0.0, 0.4), 3: (0.4, 0.6), 4: (0.4, 0.6), 5: (0.6, 0.8)}
#: Of a launch's part one of so many.
LAUNCH = "MPIPLUS_TEST_LAUNCH_SHARE"
THE_TABLE = "test_operations.py"
T = TypeVar("T")


def _of_the_commit() -> str:
    command = ["git", "-c", "safe.directory=*", "-C", str(ROOT), "rev-parse", "HEAD"]
    # Elsewhere (an unpacked sdist within another checkout) git would answer for that one.
    if not (ROOT / ".git").exists():
        return ""
    try:
        return subprocess.run(command, check=False, capture_output=True, text=True, timeout=20).stdout.strip()
    except (OSError, subprocess.TimeoutExpired):
        return ""


def _of_the_files() -> str:
    digest = hashlib.sha256()
    for file in sorted(path for part in ("tests", "c_src") for path in (ROOT / part).rglob("*.[pch]*")):
        if file.suffix in (".py", ".c", ".h"):
            digest.update(file.read_bytes())
    return digest.hexdigest()


@functools.cache
def seed() -> int:
    """The same in all processes of a session: those that pytest or a launcher starts inherit it."""
    given = os.environ.get(SEED)
    if given is None:
        given = os.environ[SEED] = str(int((_of_the_commit() or _of_the_files())[:8], 16))
    return int(given)


def number(name: str, below: int) -> int:
    """One of 0 to ``below - 1``, for this seed and name."""
    return zlib.crc32(f"{seed()} {name}".encode()) % below


def dice(name: str) -> random.Random:
    """Random numbers for this seed and name."""
    return random.Random(f"{seed()} {name}")


def share(name: str, things: Sequence[T], one_of: int = SHARE, least: int = 1) -> list[T]:
    """Some of the things, in their order; at night all."""
    if FULL:
        return list(things)
    count = min(len(things), max(least, -(-len(things) // one_of)))
    chosen = sorted(dice(name).sample(range(len(things)), count))
    return [things[place] for place in chosen]


def part_of_the_launch(config: pytest.Config, ranks: int) -> tuple[float, float] | None:
    """The part (`PARTS`) that so many ranks run; None: all, as where a launch is asked for by name."""
    shares = os.environ.get(LAUNCH)
    if FULL or (shares is None and _is_chosen_by_name(config)):
        return None
    start, end = PARTS[ranks]
    return start, start + (end - start) / int(shares or 1)


def is_in_share(thing: str, share: int, shares: int) -> bool:
    """Every thing is in one of the shares, and always in the same."""
    return zlib.crc32(thing.encode()) % shares == share


def count(in_full: int, some: int) -> int:
    """How many of something: at night ``in_full``."""
    return in_full if FULL else min(some, in_full)


# ---- what pytest runs ----


def _is_chosen_by_name(config: pytest.Config) -> bool:
    return bool(config.option.keyword) or any("::" in argument for argument in config.args)


def _of_the_launch(items: list[pytest.Item], part: Sequence[float]) -> set[str]:
    """What the ranks of a launch leave out, each the same. The seed turns the circle, so that all have their turn."""
    start, end = part
    turned = number("tests under mpiexec", 1000) / 1000
    rest = [item.nodeid for item in items if item.path.name != THE_TABLE]
    left_out = {test for test in rest if not start <= (zlib.crc32(test.encode()) / 2**32 + turned) % 1 < end}
    return left_out | _of_many_cases([item for item in items if item.nodeid not in left_out])


def _of_many_cases(items: Sequence[pytest.Item]) -> set[str]:
    """Of a test with many cases one of so many as it is marked with, and at least one: the others are left out."""
    cases: dict[tuple[str, int], list[str]] = {}
    for item in items:
        if mark := item.get_closest_marker("cases"):
            cases.setdefault((item.nodeid.partition("[")[0], mark.args[0]), []).append(item.nodeid)
    chosen = [name for (test, one_of), names in cases.items() for name in share(f"cases of {test}", names, one_of)]
    return {name for names in cases.values() for name in names} - {*chosen}


def _installation(item: pytest.Item) -> Any:
    return getattr(item, "callspec", SimpleNamespace(params={})).params.get("installation")


def _is_in_every_change(item: pytest.Item) -> bool:
    """Where coverage is measured, as what the others leave out is more than the gate leaves room for; or no MPI is."""
    marked = item.get_closest_marker("every_change") is not None
    return marked and getattr(_installation(item), "vendor", "") in ("", "Open MPI")


def _is_anothers(item: pytest.Item) -> bool:
    """Whether a test of jobs is left to the other of the two MPIs in this change, or to another change."""
    installation = _installation(item)
    vendor = getattr(installation, "vendor", "")
    marks = ("slow", "every_change") if vendor == "Open MPI" else ()
    if vendor not in JOB_PARTS or any(map(item.get_closest_marker, marks)):
        return False
    parts = JOB_PARTS["Open MPI" if item.get_closest_marker("under_each") else vendor]
    return number(f"part of jobs: {item.nodeid.replace(installation.name, '')}", 10) not in parts


def _of_the_session(items: list[pytest.Item]) -> set[str]:
    """What this run leaves out of the tests that take long, of those that start jobs, and of those that compute."""
    jobs = [item for item in items if item.nodeid.startswith(STARTING_JOBS)]
    others = {item.nodeid for item in jobs if _is_anothers(item)}
    rest = [item for item in items if not _is_in_every_change(item)]
    slow = [item.nodeid for item in rest if item.get_closest_marker("slow")]
    computing = [item.nodeid for item in rest if item.nodeid.startswith(COMPUTING) and item.nodeid not in slow]
    chosen = [*share("slow tests", slow), *share("tests that compute", computing)]
    many = _of_many_cases([item for item in items if item.nodeid not in others])
    return others | many | {*slow, *computing} - {*chosen}


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out most of the slow tests, and of the others what a run says; not what is asked for by name."""
    if config.getoption("--with-mpi", False):
        part = config.getoption("--launch-part")
        left_out = _of_the_launch(items, part) if part else set()
    else:
        left_out = set() if FULL or _is_chosen_by_name(config) else _of_the_session(items)
    config.hook.pytest_deselected(items=[item for item in items if item.nodeid in left_out])
    items[:] = [item for item in items if item.nodeid not in left_out]


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "slow: over 8 s; a change runs a share of these, the night all")
    config.addinivalue_line("markers", "cases(one_of): a change runs one of so many of its cases, the night all")
    config.addinivalue_line("markers", "every_change: under Open MPI, as it runs modules that few other tests run")
    config.addinivalue_line("markers", "under_each: in the same changes under both MPIs, which differ in it")
    seed()


def pytest_report_header(config: pytest.Config) -> str:
    return f"{SEED}={seed()}: " + ("all is tried" if FULL else "a share of what takes long; all: MPIPLUS_TEST_FULL=1")
