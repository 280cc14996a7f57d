"""The command line and the environment that start the supervisors through mpirun, mpiexec or srun."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping, Sequence

from .. import settings
from ..flavours import MPICH, OPEN_MPI
from ..node import node
from ..node.processes import python_command
from .layout import Layout
from .mpirun import SLURM, Launcher, LauncherError
from .table import OF_SCRIPTS, PREFIXES

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
