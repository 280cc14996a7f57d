"""Runs tests of PyTorch's own on gloo and with mpiplus in gloo's place, compares, and writes docs/pytorch-tests.md.

    python tests/tools/run_pytorch_tests.py                                # what torch's wheel has: distributed_test.py
    python tests/tools/run_pytorch_tests.py ~/pytorch                      # and test/distributed of a checkout
    python tests/tools/run_pytorch_tests.py --page - --only test_device_mesh.py -- ~/pytorch
    python tests/tools/run_pytorch_tests.py --page - --keyword "all_reduce or broadcast"

MPIPLUS_TEST_PYTORCH may name the checkout as well. It should be at the tag of the installed torch: its tests are not in
the wheel. Where it is no checkout, but some of its files, the first line of each may have the commit. The tests start
their own processes, so the MPI must be one that such processes can join: MPICH. They need expecttest. mpiplus takes
gloo's place by MPIPLUS_REPLACE, and that of its class here. A run of some files leaves the page's rows of the others.
The exit code is 1 where a test passes on gloo alone, and REASONS has none for it.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import multiprocessing.context
import os
import re
import signal
import subprocess
import sys
import tempfile
import unittest
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

PAGE = Path(__file__).parents[2] / "docs" / "pytorch-tests.md"
#: Its tests are in torch's wheel; what starts them is not.
BODY = "distributed_test.py"
START_BODY = """
from torch.testing._internal.distributed.distributed_test import DistributedTest, TestDistBackend

class TestDistBackendWithSpawn(TestDistBackend, DistributedTest._DistTestBase):
    def setUp(self):
        super().setUp()
        self._spawn_processes()

del TestDistBackend
"""
#: Of test/distributed, by folder.
FILES = {
    "": (
        "c10d_object_collectives collective_utils c10d_functional_native functional_api device_mesh c10d_gloo "
        "c10d_spawn_gloo c10d_logger dist2 store backends multi_threaded_pg fake_pg launcher"
    ),
    "algorithms/": "join",
    "pipelining/": "schedule_multiproc",
    "tensor/": "api dtensor redistribute embedding_ops init math_ops matrix_ops random_ops utils",
    "tensor/parallel/": "parallelize_api tp_examples tp_style tp_random_state",
    "checkpoint/": (
        "checkpoint dtensor_checkpoint file_system_checkpoint_cpu planner save_load_api state_dict_utils "
        "utils compatibility dedup_tensors dtensor_resharding file_system_checkpoint format_utils "
        "fsdp_model_state fsdp_optim_state fsspec hsdp_checkpoint nested_dict state_dict tp_checkpoint "
        "traverse"
    ),
    "_composable/": "replicate checkpoint contract",
    "_composable/fsdp/": (
        "fully_shard_init fully_shard_training fully_shard_autograd fully_shard_clip_grad_norm_ "
        "fully_shard_comm fully_shard_extensions fully_shard_frozen fully_shard_mixed_precision "
        "fully_shard_state fully_shard_state_dict"
    ),
    "optim/": "zero_redundancy_optimizer named_optimizer",
    "_composable/test_composability/": "2d_composability",
}
#: Of some, the tests that a keyword of pytest picks.
KEYWORDS = {"test_c10d_functional_native.py": "not Nccl and not nccl"}
#: Why a test that passes on gloo does not with mpiplus in its place: file, pattern of its name, reason.
REASONS: tuple[tuple[str, str, str], ...] = (
    (BODY, "test_ddp_logging_data_cpu", "the name: DDP's log has the group's own, `mpiplus`"),
    (BODY, "test_monitored_barrier_gloo", "gloo's words: mpiplus raises as well, and names the ranks in its own"),
    ("test_c10d_gloo.py", "test_allgather_checks$", "gloo's words; and mpiplus takes outputs of several lengths"),
    ("test_c10d_gloo.py", "test_allreduce_coalesced_checks$", "gloo's words; and mpiplus takes several dtypes"),
    ("test_c10d_gloo.py", "_checks$", "gloo's words: mpiplus raises errors of the same types"),
    ("test_c10d_gloo.py", "test_all_to_all_single$", "mpiplus takes a strided tensor, which the test wants refused"),
    ("test_c10d_gloo.py", "test_init_process_group_gloo$", "the name: `name()` says `mpiplus`"),
    ("test_c10d_logger.py", "test_exception_logger", "the name: the log says `mpiplus`"),
    ("test_backends.py", "test_create_pg", "the name: `_get_backend_name()` says `mpiplus`"),
    ("test_pg_wrapper.py", "debug_mode$", "gloo's wrapper raises in the call: a mismatch is told in `wait()`"),
    ("test_pg_wrapper.py", "", "the test makes a group of gloo's class beside the world"),
)
#: Or a release.
COMMIT = r"[0-9a-f]{40}\b|\d+\.\d+\.\d+\b"
RECORD = "MPIPLUS_TEST_PYTORCH_TESTS"
FORKING = "MPIPLUS_TEST_PYTORCH_FORKING"
CHECKOUT = "MPIPLUS_TEST_PYTORCH"


# ---- in the pytest that runs the tests, and in their processes ----


class WorldInstead:
    """Takes the place of gloo's class, of which tests make groups: what it is called for is the world's group.

    It has no group of its own to make: mpiplus is reached by init_process_group.
    """

    def __init__(self, replaced: Any) -> None:
        self._replaced = replaced

    def __getattr__(self, name: str) -> Any:
        return getattr(self._replaced, name)  # its options and devices

    def __call__(self, store: Any, rank: int, size: int, options: Any = None) -> Any:
        import torch.distributed as dist

        if isinstance(options, timedelta):  # of torch's own: RPC has a group beside the world's
            return self._replaced(store, rank, size, options)
        timeout = {} if options is None else {"timeout": options._timeout}
        dist.init_process_group("gloo", store=store, rank=rank, world_size=size, **timeout)
        return dist.group.WORLD


class Forked(multiprocessing.context.ForkServerProcess):
    """A process of a test, forked of one that has imported torch: that is most of what such a process costs."""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self._environment = dict(os.environ)

    def run(self) -> None:
        """As in a new process: with the environment of this moment, not that of the one it was forked of."""
        os.environ.update(self._environment)
        super().run()


def pytest_configure(config: Any) -> None:
    """Where the run wants that: PyTorch's own way is a new process for each rank of each test."""
    if FORKING not in os.environ:
        return
    from torch.testing._internal.common_distributed import MultiProcessTestCase

    multiprocessing.set_forkserver_preload([Path(__file__).stem, os.environ[FORKING]])
    MultiProcessTestCase._spawn_processes = spawn_processes


def spawn_processes(case: Any) -> None:
    """In place of that method: a test of no processes, with as many ranks as there are GPUs, would pass of itself."""
    if int(case.world_size) < 1:  # distributed_test.py has it from a variable, as text
        raise unittest.SkipTest("its ranks are as many as the GPUs")
    case._start_processes(Forked)


def pytest_runtest_logreport(report: Any) -> None:
    """Note the outcome at once: a run that is ended has those before it."""
    if RECORD not in os.environ or (report.when != "call" and report.outcome == "passed"):
        return
    text = report.longreprtext if report.outcome == "failed" else ""
    lines = [line.removeprefix("E").strip() for line in text.splitlines()]
    lines = [line for line in lines if re.match(r"[\w.]*(Error|Exception|Failed|exit code)\b", line)] or lines[-1:]
    with Path(os.environ[RECORD]).open("a") as record:
        record.write(json.dumps([report.nodeid.partition("::")[2], report.outcome, "; ".join(lines)[-300:]]) + "\n")


# ---- runs ----


class Outcome(NamedTuple):
    result: str
    words: str


class Compared(NamedTuple):
    """One file, on both."""

    file: str
    origin: str
    keyword: str
    gloo: dict[str, Outcome]
    ours: dict[str, Outcome]

    def differences(self) -> dict[str, Outcome]:
        """The tests that gloo passes and mpiplus does not."""
        missing = Outcome("not run", "")
        found = {test: self.ours.get(test, missing) for test, its in self.gloo.items() if its.result == "passed"}
        return {test: outcome for test, outcome in found.items() if outcome.result != "passed"}


def environment_of(path: Path, work: Path, ours: bool, forks: bool) -> dict[str, str]:
    """What the tests of a file ask for: distributed_test.py wants directories, and the backend's name."""
    for part in ("barrier", "test_dir", "init_dir"):
        (work / part).mkdir(parents=True)
    own = {
        RECORD: str(work / "record"),
        "BACKEND": "gloo",
        "WORLD_SIZE": "3",
        "TEMP_DIR": str(work),
        "TMPDIR": str(work),
        "DISTRIBUTED_TESTS_DEFAULT_TIMEOUT": "300",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), str(path.parent), os.environ.get("PYTHONPATH", "")]),
    }
    return os.environ | own | ({FORKING: path.stem} if forks else {}) | ({"MPIPLUS_REPLACE": "gloo"} if ours else {})


def run(path: Path, place: Path, ours: bool, keyword: str, given: argparse.Namespace) -> dict[str, Outcome]:
    """The tests of a file, each in processes of its own."""
    work = place / ("mpiplus" if ours else "gloo") / path.stem
    environment = environment_of(path, work, ours, not given.fresh)
    command = [sys.executable, "-m", "pytest", "-q", "-p", Path(__file__).stem, "-p", "no:cacheprovider"]
    command += ["-p", "no:xdist", "--noconftest", "--rootdir", str(path.parent), "-c", os.devnull]
    command += [*(["-k", keyword] if keyword else []), str(path)]
    with (work / "output").open("w") as output:
        process = subprocess.Popen(
            command, env=environment, stdout=output, stderr=output, cwd=work, start_new_session=True
        )
        try:
            process.wait(given.seconds)
        except subprocess.TimeoutExpired:
            print(f"{path.name}: not through in {given.seconds:.0f} s", flush=True)
        with contextlib.suppress(ProcessLookupError):  # also what a test has left behind
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    if not (work / "record").exists():
        print((work / "output").read_text()[-2000:], flush=True)
        return {}
    found: dict[str, Outcome] = {}
    for test, result, words in map(json.loads, (work / "record").read_text().splitlines()):
        if test not in found or result == "failed":  # also a failure of what comes before or after it
            found[test] = Outcome(result, words)
    return found


# ---- the page ----


def reason_of(file: str, test: str) -> str:
    return next((why for name, pattern, why in REASONS if name == file and re.search(pattern, test)), "")


def row(compared: Compared) -> str:
    skipped, gloo, ours = (
        sum(outcome.result == result for outcome in found.values())
        for result, found in (("skipped", compared.gloo), ("passed", compared.gloo), ("passed", compared.ours))
    )
    keyword = f", `-k '{compared.keyword}'`" if compared.keyword else ""
    file = f"`{compared.file}`{keyword}{compared.origin}"
    return f"| {file} | {len(compared.gloo)} | {skipped} | {gloo} | {ours} | {len(compared.differences()) or 'none'} |"


INTRODUCTION = """# PyTorch's own tests

`tests/tools/run_pytorch_tests.py` writes this page. It runs tests of PyTorch's own on gloo, and once more with mpiplus
in gloo's place (`MPIPLUS_REPLACE=gloo`), on one node without a GPU. Here: torch {torch}, {mpi}.

`distributed_test.py` is in torch's wheel. The others are files of `test/distributed` in PyTorch's repository, which CI
cannot download: they run where the script, or `MPIPLUS_TEST_PYTORCH`, is given a checkout at the tag of the
installed torch. Here that was {revision}. A file that has no row was not run.
Files of a directory of which nothing passes on gloo only have one row: in parentheses tests, skipped, and passed on
gloo and on mpiplus. `tensor/test_dtensor_ops.py` and `tensor/test_pointwise_ops.py` of 2.6.0 call no backend.

"""
FILES_TABLE = """| file | tests | skipped | passed on gloo | passed on mpiplus | passed on gloo only |
|---|---|---|---|---|---|
"""
TESTS_TABLE = """
| file | passed on gloo only | on mpiplus | reason |
|---|---|---|---|
"""


def origin_of(path: Path, checkout: Path) -> str:
    """The release whose source this is, or the commit in the first line of a file that was fetched alone.

    What else that line has before the commit is said as well.
    """
    if (release := checkout / "version.txt").exists() and not (checkout / ".git").exists():
        return f", {release.read_text().strip().removesuffix('a0')}"
    with path.open() as lines:
        first = lines.readline()
    found = re.match(rf"# (?:(shortened) copy of |(after) )?(?:.*?\b({COMMIT}))?", first)
    if not found or not any(found.groups()):
        return ""
    shortened, after, commit = found.groups()
    return ", " + " ".join(
        word for word in (shortened or (after and "rewritten"), commit and f"`{commit[:8]}`") if word
    )


def revision_of(checkout: Path | None) -> str:
    if checkout is None:
        return "none"
    command = ["git", "-C", str(checkout), "describe", "--tags", "--always"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return (
        done.stdout.strip()
        or "some files, at the commits and of the releases in the table;\n"
        "what is shortened or rewritten has no tests that need a GPU, or has the CPU in a GPU's place, which some\n"
        "of its tests then fail of, on both; most of `fsdp/`, `_shard/` and `checkpoint/e2e/`, and what of `tensor/`\n"
        "is rewritten, in one job of 2 or 4 ranks of Open MPI; what of `launcher/` is, has c10d in place of etcd"
    )


def others_rows(page: str, table: str, files: Sequence[str]) -> list[str]:
    """The rows that a page has in one of its tables for other files than these."""
    rows = page.partition(table)[2].partition("\n\n")[0].splitlines()
    return [row for each in rows for row in _apart(each) if row.split("`")[1] not in files]


#: Of a row that stands for several files: their directory (./ is that of all), and each of them with its numbers.
_TOGETHER = re.compile(r"\| `([^`]+/)`: (.+) \| (?:\d+ \| ){4}none \|")
_IN_IT = re.compile(r"`([^`]+)`(.*?) \((\d+), (\d+), (\d+), (\d+)\)(?:; |$)")
_ALONE = re.compile(r"\| `((?:[^`/]+/)?)([^`]+)`([^|]*) \| (\d+) \| (\d+) \| (\d+) \| (\d+) \| none \|")


def _apart(row: str) -> list[str]:
    found = _TOGETHER.fullmatch(row)
    if not found:
        return [row]
    place, files = found.groups()
    return [
        f"| `{place.removeprefix('./')}{name}`{origin} | {' | '.join(counts)} | none |"
        for name, origin, *counts in _IN_IT.findall(files)
    ]


def together(rows: Sequence[str]) -> list[str]:
    """With one row for the files of a directory of which nothing passes on gloo only."""
    same: dict[str, list[tuple[str, str, list[str]]]] = {}
    for row in rows:
        if found := _ALONE.fullmatch(row):
            place, name, origin, *counts = found.groups()
            same.setdefault(place or "./", []).append((name, origin, counts))
    merged = []
    for place, files in same.items():
        names = "; ".join(f"`{name}`{origin} ({', '.join(counts)})" for name, origin, counts in files)
        sums = [str(sum(int(counts[at]) for *_, counts in files)) for at in range(4)]
        merged.append(f"| `{place}`: {names} | {' | '.join(sums)} | none |")
    return sorted([*(row for row in rows if not _ALONE.fullmatch(row)), *merged])


def page(results: Sequence[Compared], checkout: Path | None, before: str = "") -> str:
    import torch
    from mpi4py import MPI

    library = " ".join([MPI.get_vendor()[0], ".".join(map(str, MPI.get_vendor()[1]))])
    text = INTRODUCTION.format(torch=torch.__version__.partition("+")[0], mpi=library, revision=revision_of(checkout))
    files = [each.file for each in results]
    lines = sorted(others_rows(before, FILES_TABLE, files) + [row(each) for each in results])
    different = others_rows(before, TESTS_TABLE, files)
    for each in results:
        alike: dict[tuple[str, str], list[str]] = {}
        for test, outcome in each.differences().items():
            words = reason_of(each.file, test) or outcome.words.replace("|", "\\|")
            alike.setdefault((outcome.result, words), []).append(test.rpartition("::")[2])
        different += [f"| `{each.file}` | {', '.join(names)} | {' | '.join(how)} |" for how, names in alike.items()]
    tables = [FILES_TABLE, *(f"{line}\n" for line in together(lines))]
    if different:
        tables += [TESTS_TABLE, *(f"{line}\n" for line in sorted(different))]
    return text + "".join(tables)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    given = os.environ.get(CHECKOUT)
    files = [f"{folder}test_{name}.py" for folder, names in FILES.items() for name in names.split()]
    parser.add_argument("checkout", type=Path, nargs="?", default=given and Path(given), help="of pytorch/pytorch")
    parser.add_argument("--only", nargs="+", default=[BODY, *files], metavar="FILE", help="these files")
    parser.add_argument("--keyword", help="these tests of each, as pytest's -k has it")
    parser.add_argument("--fresh", action="store_true", help="new processes, not forks of one that has imported torch")
    parser.add_argument("--seconds", type=float, default=3600, help="for each file on each backend")
    parser.add_argument("--page", default=str(PAGE), help="where the table goes; - for stdout")
    return parser.parse_args()


def main() -> int:
    given, results = arguments(), []
    with tempfile.TemporaryDirectory() as directory:
        place = Path(directory)
        body = place / BODY
        body.write_text(START_BODY)
        for file in given.only:
            path = body if file == BODY else (given.checkout or place) / "test" / "distributed" / file
            if not path.exists():
                print(f"{file}: not run: it is in a checkout of PyTorch, which {CHECKOUT} may name", flush=True)
                continue
            keyword = given.keyword or KEYWORDS.get(file, "")
            each = [run(path, place, ours, keyword, given) for ours in (False, True)]
            results.append(
                Compared(file, "" if file == BODY else origin_of(path, given.checkout or place), keyword, *each)
            )
            print(row(results[-1]), flush=True)
    if given.page == "-":
        print(page(results, given.checkout))
    else:  # before the sections of other scripts
        file = Path(given.page)
        before, heading, others = file.read_text().partition("\n## ") if file.exists() else ("", "", "")
        file.write_text(page(results, given.checkout, before) + heading + others)
    unexplained = [test for each in results for test in each.differences() if not reason_of(each.file, test)]
    for test in unexplained:
        print(f"no reason is known: {test}", flush=True)
    return 1 if unexplained or not results or not all(each.gloo for each in results) else 0


if __name__ == "__main__":
    sys.exit(main())
elif FORKING in os.environ and "MPIPLUS_REPLACE" in os.environ:  # in processes forked of one that has imported this
    import torch.distributed

    torch.distributed.ProcessGroupGloo = WorldInstead(torch.distributed.ProcessGroupGloo)
