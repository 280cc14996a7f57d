"""The MPI installations of this machine that can run the tests, each verified by a probe run."""

from __future__ import annotations

import functools
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import fork_server
from patience import patient

PROBE_RANKS = 2
PROBE_SECONDS = 60.0
PROBE = """
import json, sys
from mpi4py import MPI
vendor, version = MPI.get_vendor()
with open("/proc/self/maps") as maps:
    libraries = sorted({line.split()[-1] for line in maps if "/libmpi" in line})
report = dict(vendor=vendor, version=".".join(map(str, version)),
              size=MPI.COMM_WORLD.size, libraries=libraries)
sys.stdout.write("MPI-PROBE " + json.dumps(report) + "\\n")
"""

#: What has been found, for the processes that share the tests.
FOUND = "MPIPLUS_TEST_INSTALLATIONS"


@dataclass(frozen=True)
class Installation:
    """A launcher together with the MPI library that mpi4py loads under it."""

    mpiexec: str
    vendor: str
    version: str
    library: str
    environment: Mapping[str, str] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return f"{self.vendor.replace(' ', '')}-{self.version}"

    @property
    def has_ulfm(self) -> bool:
        return self.vendor == "Open MPI" and not self.version.startswith("4.")

    def command(self, ranks: int, arguments: Sequence[str]) -> list[str]:
        """The command line that runs `python arguments` on `ranks` ranks."""
        return launch_command(self.mpiexec, self.vendor, ranks, arguments, fork_server.python())

    def full_environment(self) -> dict[str, str]:
        """This process's environment, without a launcher's traces, with what the library needs."""
        return launch_environment(self.environment)


@dataclass(frozen=True)
class Rejected:
    """A launcher that was found and cannot run the tests, and why."""

    mpiexec: str
    reason: str
    named_after_its_mpi: bool = False


def launch_command(
    mpiexec: str, vendor: str, ranks: int, arguments: Sequence[str], python: str = sys.executable
) -> list[str]:
    flags: list[str] = []
    if vendor == "Open MPI":  # it refuses root, and more ranks than cores, unless told
        flags.append("--oversubscribe")
        if os.geteuid() == 0:
            flags.append("--allow-run-as-root")
    return [mpiexec, *flags, "-n", str(ranks), python, *arguments]


#: The libraries' own checks of arguments and of what is left at MPI_Finalize, as far as a build has them.
OWN_CHECKS = {
    "OMPI_MCA_mpi_param_check": "1",
    "OMPI_MCA_mpi_show_handle_leaks": "1",
    "OMPI_MCA_mpi_show_mpi_alloc_mem_leaks": "10",
    "MPIR_CVAR_ERROR_CHECKING": "1",
    "MPIR_CVAR_ABORT_ON_LEAKED_HANDLES": "1",
}
#: What they say when they have found something.
LEAK = re.compile(
    r"still allocated in MPI_Finalize|not freed via MPI_FREE_MEM|has pending \d+ ref|was not returned to mpool"
)


def launch_environment(extra: Mapping[str, str]) -> dict[str, str]:
    launcher_traces = ("OMPI_COMM_", "PMI_", "PMIX_", "PRTE_LAUNCHED", "MPI_LOCAL")
    rendezvous = {"RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"}
    kept = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(launcher_traces) and name not in rendezvous
    }
    # The search for network devices costs Open MPI a second per start; one node needs none.
    kept.setdefault("OMPI_MCA_btl", "^ofi")
    kept["OMP_NUM_THREADS"] = "1"
    return {**kept, **OWN_CHECKS, **extra}


def is_open_mpi(mpiexec: str) -> bool:
    """Whether a launcher is Open MPI's, by its own word."""
    command = [mpiexec, "--version"]
    try:
        answer = subprocess.run(command, check=False, capture_output=True, text=True, timeout=PROBE_SECONDS)
    except (OSError, subprocess.TimeoutExpired):
        return False
    words = (answer.stdout + answer.stderr).lower()
    return "open mpi" in words or "openrte" in words or "prrte" in words


def run_limited(
    command: Sequence[str], environment: Mapping[str, str], seconds: float, **options
) -> tuple[int | None, str]:
    """Run a command; (its exit code, or None past the time limit, patience included; its output).

    A launcher past its limit is asked to end (it then ends its ranks), and killed if it does not.
    """
    process = subprocess.Popen(
        command,
        env=dict(environment),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,
        **options,
    )
    try:
        output, _ = process.communicate(timeout=patient(seconds))
        return process.returncode, output
    except subprocess.TimeoutExpired:
        process.terminate()
    try:
        output, _ = process.communicate(timeout=10)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        output, _ = process.communicate()
    return None, output


def probe(mpiexec: str, environment: Mapping[str, str]) -> Installation | Rejected:
    """Start two ranks and ask mpi4py what it runs on.

    Args:
        mpiexec: the launcher.
        environment: variables that name the launcher's library to mpi4py; none: mpi4py's own choice.
    """
    guess = "Open MPI" if is_open_mpi(mpiexec) else ""
    command = launch_command(mpiexec, guess, PROBE_RANKS, ["-c", PROBE])
    try:
        code, output = run_limited(command, launch_environment(environment), PROBE_SECONDS)
    except OSError as error:
        return Rejected(mpiexec, str(error), bool(environment))
    answers = [json.loads(line.partition("MPI-PROBE ")[2]) for line in output.splitlines() if "MPI-PROBE " in line]
    if code != 0 or len(answers) != PROBE_RANKS:
        ending = "no answer in time" if code is None else f"exit code {code}"
        return Rejected(mpiexec, f"{ending}: {output.strip()[-500:]}", bool(environment))
    first = answers[0]
    if any(answer["size"] != PROBE_RANKS for answer in answers):
        return Rejected(
            mpiexec,
            f"{PROBE_RANKS} ranks became {PROBE_RANKS} worlds of {first['size']}: mpi4py loads "
            f"{first['vendor']} {first['version']}, which is not this launcher's library",
            bool(environment),
        )
    library = os.path.realpath(first["libraries"][0]) if first["libraries"] else "unknown"
    return Installation(mpiexec, first["vendor"], first["version"], library, dict(environment))


def candidates() -> Iterator[tuple[str, dict[str, str]]]:
    """Launchers with the variables that make mpi4py load their library, likeliest first."""
    for name in ("mpiexec", "mpirun"):
        beside = Path(sys.executable).parent / name
        if beside.exists():
            yield str(beside), {}
    for name in ("mpiexec", "mpirun"):
        if found := shutil.which(name):
            yield found, {}
    system = {  # Debian's names, and where Debian keeps the libraries
        "mpiexec.openmpi": ("openmpi", "libmpi.so.40"),
        "mpiexec.mpich": ("mpich", "libmpich.so.12"),
        "mpiexec.hydra": ("mpich", "libmpich.so.12"),
    }
    for name, (abi, library) in system.items():
        if found := shutil.which(name):
            yield found, {"MPI4PY_MPIABI": abi, "MPI4PY_LIBMPI": library}


def foreign_launcher(installation: Installation) -> str | None:
    """A launcher of the other family: the one that CI names, else the first on the ``PATH``."""
    names = ("mpiexec", "mpiexec.mpich", "mpiexec.openmpi")
    found = [os.environ.get("MPIPLUS_TEST_OTHER_MPIEXEC"), *map(shutil.which, names)]
    ours = installation.vendor == "Open MPI"
    return next((mpiexec for mpiexec in found if mpiexec and is_open_mpi(mpiexec) != ours), None)


@functools.cache
def find_installations() -> tuple[tuple[Installation, ...], tuple[Rejected, ...]]:
    """Every MPI here that runs the tests, once each, and every launcher that cannot. Child processes inherit it."""
    if FOUND not in os.environ:
        found, rejected = _look_for_installations()
        os.environ[FOUND] = json.dumps([[asdict(one) for one in found], [asdict(one) for one in rejected]])
    installations, refused = json.loads(os.environ[FOUND])
    return tuple(Installation(**one) for one in installations), tuple(Rejected(**one) for one in refused)


def _look_for_installations() -> tuple[tuple[Installation, ...], tuple[Rejected, ...]]:
    installations: dict[tuple[str, str, str], Installation] = {}
    rejected: list[Rejected] = []
    tried: set[tuple[str, tuple[tuple[str, str], ...]]] = set()
    for mpiexec, environment in candidates():
        key = (os.path.realpath(mpiexec), tuple(environment.items()))
        if key in tried:
            continue
        tried.add(key)
        answer = probe(mpiexec, environment)
        if isinstance(answer, Rejected):
            rejected.append(answer)
        else:
            identity = (answer.vendor, answer.version, answer.library)
            installations.setdefault(identity, answer)
    return tuple(installations.values()), tuple(rejected)
