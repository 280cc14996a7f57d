"""The MPI library that mpi4py would load, and the mpirun or mpiexec that belongs to it."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from ..flavours import FLAVOURS, Library
from ..node.processes import python_command

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
    """Ask a process of its own which MPI library mpi4py loads.

    Raises:
        LauncherError: none, and what to do.
    """
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
            f"other. Leave --launcher out, or make mpi4py load the other MPI (MPI4PY_LIBMPI names its file)."
        )
    return Launcher(program, *found, library)


def _none_fits(library: Library, rejected: Mapping[str, str]) -> str:
    found = "; ".join(f"{program} {reason}" for program, reason in rejected.items())
    return (
        f"no mpirun or mpiexec belongs to the MPI that mpi4py loads, {library.name} ({library.path}). "
        f"Found: {found or 'none on the PATH'}. Put that MPI's bin directory on the PATH (load its module), name its "
        f"launcher with --launcher, or make mpi4py load the launcher's MPI (MPI4PY_LIBMPI=libmpi.so.40, "
        f"libmpi.so.12, on Debian libmpich.so.12, or a full path)."
    )
