"""The mpirun or mpiexec that belongs to the MPI that mpi4py would load, and its command line with the supervisors."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from .. import settings
from ..flavours import FLAVOURS, MPICH, OPEN_MPI, Library
from ..node import node
from ..node.processes import python_command
from .layout import Layout
from .table import OF_SCRIPTS, PREFIXES

_PROBE_SECONDS = 60.0
_VERSION_SECONDS = 20.0
SLURM = "Slurm"
# The library is opened, not initialised: MPI_Init may start daemons, print, or end the process.
_PROBE = "from torchmpi_plugin.mpi.library import main; main()"


class LauncherError(RuntimeError):
    """No launcher, or no MPI; the message says what was found and what to do."""


@dataclass(frozen=True)
class Launcher:
    """A program that starts ranks."""

    path: str  # the program
    family: str  # whose options it takes: "Open MPI", "MPICH" or "Slurm"
    version: str  # the line of its --version that says so
    library: Library  # the MPI library it belongs to
    #: launchers that were found and do not fit, with the reasons
    rejected: Mapping[str, str] = field(default_factory=dict)


def probe_library() -> Library:
    """Ask a process of its own which MPI library mpi4py loads; a LauncherError if it is none, and what to do."""
    try:
        answer = subprocess.run(
            python_command(_PROBE), check=False, capture_output=True, text=True, timeout=_PROBE_SECONDS
        )
    except subprocess.TimeoutExpired:
        raise LauncherError(
            f"loading the MPI library takes longer than {_PROBE_SECONDS:g} s. Try: {sys.executable} -m mpi4py "
            f"--mpi-lib-version"
        ) from None
    for line in answer.stdout.splitlines():
        if line.startswith("MPI-LIBRARY "):
            return Library(**json.loads(line.partition(" ")[2]))
    errors = [line for line in answer.stderr.splitlines() if line.strip()]
    for line in errors:
        if line.startswith("MPI-ERROR "):
            raise LauncherError(line.partition(" ")[2])
    raise LauncherError(
        f"loading the MPI library ends in: {errors[-1] if errors else f'exit code {answer.returncode}'}"
    )


def identify(text: str) -> tuple[str, str] | None:
    """Return whose launcher says this of itself on ``--version``, and in which line."""
    marks = [(mark, flavour.name) for flavour in FLAVOURS for mark in flavour.marks]
    for mark, family in (*marks, ("slurm", SLURM)):
        for line in text.splitlines():
            if mark in line.lower():
                number = next((word for word in text.split() if word[0].isdigit() and "." in word), "")
                name = "Hydra" if "hydra" in line.lower() else line.strip()
                return family, name if number in name else f"{name} {number}"
    return None


def _ask(program: str) -> tuple[str, str] | None:
    try:
        answer = subprocess.run(
            [program, "--version"], check=False, capture_output=True, text=True, timeout=_VERSION_SECONDS
        )
    except (OSError, subprocess.TimeoutExpired, UnicodeDecodeError):
        return None
    return identify(answer.stdout + answer.stderr)


def _misfit(found: tuple[str, str] | None, library: Library) -> str:
    """Return why a launcher does not fit the library; empty if it does."""
    if found is None:
        return "does not say whose it is"
    family, line = found
    if family != library.flavour.name:
        return f"belongs to {family} ({line})"
    numbers = [word for word in line.replace(",", " ").split() if word[0].isdigit()]
    if library.flavour.is_strict and numbers and numbers[-1].split(".")[0] != library.version.split(".")[0]:
        return f"is of another version ({line})"
    return ""


def _candidates(library: Library) -> Iterator[str]:
    """Programs that may be the launcher: those beside the library first, then those on the PATH."""
    names = library.flavour.programs
    if library.path:
        for file in dict.fromkeys((library.path, os.path.realpath(library.path))):
            for parent in list(Path(file).parents)[:6]:
                yield from (str(parent / "bin" / name) for name in names)
    for name in names:
        for directory in os.get_exec_path():
            yield os.path.join(directory, name)


def find_launcher(chosen: str | None = None, library: Library | None = None) -> Launcher:
    """The launcher that belongs to the MPI library which mpi4py loads.

    Args:
        chosen: the user's: a program, or "srun"; None: the one beside the library, else the first on the PATH
            that fits, else srun in a Slurm allocation.
        library: what :func:`probe_library` says, where that is known.

    Raises:
        LauncherError: none fits; the message says what was found.
    """
    library = library or probe_library()
    if chosen is not None:
        return _chosen(chosen, library)
    rejected: dict[str, str] = {}
    seen = set()
    for program in _candidates(library):
        if program in seen or not os.access(program, os.X_OK) or os.path.isdir(program):
            continue
        seen.add(program)
        found = _ask(program)
        reason = _misfit(found, library)
        if found is not None and not reason:
            return Launcher(program, *found, library, rejected)
        rejected[program] = reason
    if "SLURM_JOB_ID" in os.environ and shutil.which("srun"):
        return _chosen("srun", library)
    raise LauncherError(_none_fits(library, rejected))


def _chosen(chosen: str, library: Library) -> Launcher:
    program = shutil.which(chosen)
    if program is None:
        raise LauncherError(f"there is no launcher {chosen!r} on the PATH")
    found = _ask(program)
    if found is None:
        raise LauncherError(f"{program} does not say on --version whose launcher it is; use mpirun, mpiexec or srun")
    reason = "" if found[0] == SLURM else _misfit(found, library)
    if reason:
        raise LauncherError(
            f"{program} {reason}, but mpi4py loads {library.name} ({library.path}): the ranks would not find each "
            f"other. Leave --launcher out, or {library.cure}."
        )
    return Launcher(program, *found, library)


def _none_fits(library: Library, rejected: Mapping[str, str]) -> str:
    found = "; ".join(f"{program} {reason}" for program, reason in rejected.items())
    return (
        f"no mpirun or mpiexec belongs to the MPI that mpi4py loads, {library.name} ({library.path}). "
        f"Found: {found or 'none on the PATH'}. Put that MPI's bin directory on the PATH (load its module), name its "
        f"launcher with --launcher, or {library.cure}."
    )


# ---- the command line and the environment that start the supervisors ----

_SUPERVISE = "from torchmpi_plugin.jobs.guard import main; main()"
# What Open MPI must hand on to other nodes for the supervisor to start. It gets the rest from the launcher.
_NEEDED = ("PATH", "LD_LIBRARY_PATH", "PYTHONPATH", "PYTHONHOME", "MPI4PY_MPIABI", "MPI4PY_LIBMPI", settings.JOB)
# These say something of the process or node they were set for, not of what the user wants.
_LOCAL_PREFIXES = (*PREFIXES, "SSH_", "XDG_", "DBUS_")
_LOCAL = {"HOSTNAME", "PWD", "OLDPWD", "SHLVL", "_", "DISPLAY", "TMPDIR", settings.JOB}
# Of an srun step in which mpirun is to start others: it would take itself for the step's rank.
_STEP = {"PMI_RANK", "PMI_SIZE", "PMI_FD", "PMI_PORT", "PMI_ID", "PMI_JOBID", "PMI_SPAWNED"}
_STEP_PREFIXES = ("PMIX_RANK", "PMIX_NAMESPACE", "PMIX_SERVER_")
_TORCH = {*OF_SCRIPTS[1:5], *OF_SCRIPTS.node_rank}


def inherited(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that ranks on other nodes take over from the launcher's environment."""
    return _without(environment, _LOCAL | _TORCH, _LOCAL_PREFIXES)


def _without(environment: Mapping[str, str], names: set[str], prefixes: tuple[str, ...]) -> dict[str, str]:
    return {name: it for name, it in environment.items() if name not in names and not name.startswith(prefixes)}


def launch_environment(launcher: Launcher, layout: Layout, environment: Mapping[str, str]) -> dict[str, str]:
    """The launcher's own environment: this one, without another job's ranks, and with what spares its MPI time."""
    result = _without(environment, _TORCH | _STEP, _STEP_PREFIXES)
    flavour = launcher.library.flavour
    crowded = most_on_a_node(layout) > len(node.cores())
    return {**(flavour.quick if layout.one_node else {}), **(flavour.crowded if crowded else {}), **result}


def most_on_a_node(layout: Layout) -> int:
    """The most ranks that a node gets, where that is known; 0: it is not."""
    if layout.nodes:
        return max(ranks for _, ranks in layout.nodes)
    if layout.per_node:
        return layout.per_node
    return layout.ranks if layout.one_node else 0


def tells_of_deaths(mpi_args: Sequence[str]) -> bool:
    """Return whether MPI tells ranks of the end of another: Open MPI's ULFM does, MPICH's launcher does not."""
    return "-with-ft ulfm" in " ".join(mpi_args).replace("=", " ")


def asks_for_recovery(mpi_args: Sequence[str]) -> bool:
    """Return whether the user wants the others to go on after the death of a rank (ULFM), and no end of the job."""
    text = " ".join(mpi_args).replace("=", " ")
    return any(option in text for option in ("-with-ft ulfm", "-enable-recovery", "-disable-auto-cleanup"))


def launch_command(
    launcher: Launcher, layout: Layout, map_by: str | None = None, mpi_args: Sequence[str] = ()
) -> list[str]:
    """The command line that starts a supervisor per rank."""
    build = {OPEN_MPI.name: _open_mpi, MPICH.name: _mpich, SLURM: _srun}[launcher.family]
    return [launcher.path, *build(launcher, layout, map_by, mpi_args), *mpi_args, *python_command(_SUPERVISE)]


def _open_mpi(_: Launcher, layout: Layout, map_by: str | None, mpi_args: Sequence[str]) -> list[str]:
    options = ["--allow-run-as-root"] if os.geteuid() == 0 else []
    options += ["-n", str(layout.ranks)]
    if layout.nodes:
        options += ["--host", ",".join(f"{name}:{ranks}" for name, ranks in layout.nodes)]
    elif layout.here and layout.ranks > len(node.cores()):
        options += ["--oversubscribe"]
    if map_by:
        options += ["--map-by", map_by]
    elif layout.per_node and (layout.node_count or 1) > 1 and not layout.nodes:
        options += ["--map-by", f"ppr:{layout.per_node}:node"]
    if not map_by and not any("bind-to" in word for word in mpi_args):
        # The default binds two ranks to a core each, and with them all of torch's threads.
        options += ["--bind-to", "none"]
    if not layout.here:
        for name in _NEEDED:
            if name == settings.JOB or name in os.environ:
                options += ["-x", name]
    return options


def _mpich(_: Launcher, layout: Layout, map_by: str | None, __: Sequence[str]) -> list[str]:
    options = ["-n", str(layout.ranks)]
    counts = {ranks for _, ranks in layout.nodes}
    if len(counts) == 1:  # the form that all relatives of MPICH know
        options += ["-hosts", ",".join(name for name, _ in layout.nodes), "-ppn", str(counts.pop())]
    elif counts:
        options += ["-hosts", ",".join(f"{name}:{ranks}" for name, ranks in layout.nodes)]
    elif layout.per_node:
        options += ["-ppn", str(layout.per_node)]
    if map_by:
        options += ["-map-by", map_by]
    return options


def _srun(launcher: Launcher, layout: Layout, map_by: str | None, mpi_args: Sequence[str]) -> list[str]:
    if map_by:
        raise LauncherError("srun has no --map-by; pass its --distribution with --mpi-args")
    options = ["--kill-on-bad-exit=1", f"--ntasks={layout.ranks}"]
    if layout.per_node:
        options += [f"--nodes={layout.node_count}", f"--ntasks-per-node={layout.per_node}"]
    if layout.nodes:
        options += [f"--nodelist={','.join(name for name, _ in layout.nodes)}"]
    if not any(word.startswith("--mpi") for word in mpi_args):
        options.append(f"--mpi={_srun_mpi(launcher)}")
    return options


def _srun_mpi(launcher: Launcher) -> str:
    """The plug-in of this Slurm that the MPI library understands."""
    try:
        answer = subprocess.run([launcher.path, "--mpi=list"], check=False, capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        answer = None
    there = (answer.stdout + answer.stderr).replace(",", " ").split() if answer else []
    wanted = launcher.library.flavour.srun
    if "CRAY" in launcher.library.text.upper():
        wanted = ("cray_shasta", *wanted)
    for name in wanted:
        if name in there:
            return name
    types = [word for word in there if word.startswith(("pm", "cray", "none", "open"))]
    raise LauncherError(
        f"this Slurm has no --mpi={wanted[0]}, which {launcher.library.name} needs (srun --mpi=list says: "
        f"{' '.join(types) or 'nothing'}). Use mpirun or mpiexec, or ask your site for the plug-in."
    )
