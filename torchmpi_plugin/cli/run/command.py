"""``mpiplus run``: start a program on several ranks through the MPI's own launcher, and watch it."""

from __future__ import annotations

import functools
import importlib.util
import os
import shlex
import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import click

from ... import settings
from ...jobs.formats import FIELDS, check_format
from ...jobs.writing import say
from ...launchers.batch import allocated_ranks
from ...launchers.layout import lay_out, parse_nodes, read_hostfile
from ...launchers.variables import Launch
from ..started import is_shell_step, speaks, started_by
from .counts import NODES, PER_NODE, NodeRange
from .logs import SHOWN_LAYOUT, files_of, parse_ranks
from .of_torchrun import no_effect, torchrun_options

if TYPE_CHECKING:
    from ...jobs.attempts import Attempt
    from ...jobs.outcome import JobResult

_FIELDS = ", ".join(f"{{{name}}}" for name in FIELDS)
_POSITIVE = click.IntRange(min=1)
_SECONDS = click.FloatRange(min=0, min_open=True)
_LAST_WORDS_SECONDS = 1.0


class Numbers(NamedTuple):
    """How many ranks: all of them, or with ``nnodes`` those of each node."""

    nproc: int
    nnodes: int | None


@click.command(context_settings={"allow_interspersed_args": False})
@click.option(
    "-n", "-np", "--nproc", "nproc", type=_POSITIVE, help="Ranks: all of them, or with --nnodes those of each node."
)
@click.option(
    "--nproc-per-node", "--nproc_per_node", type=PER_NODE, help="Ranks on each node; auto, cpu: one per core."
)
@click.option(
    "--nnodes",
    type=NODES,
    metavar="N|MIN:MAX",
    help="Nodes (as many as --hosts or --hostfile name, else 1); with MIN:MAX as many of them as answer.",
)
@click.option("--hosts", metavar="HOST[:N],...", help="Where: h1,h2 or h1:4,h2:4.")
@click.option("--hostfile", type=click.Path(), help="A file with a node per line: h1, h1:4 or h1 slots=4.")
@click.option("--map-by", metavar="POLICY", help="--map-by of mpirun, -map-by of MPICH's mpiexec.")
@click.option("-m", "--module", "--module_mode", is_flag=True, help="PROGRAM is a Python module.")
@click.option(
    *("-c", "--command", "--command_mode", "--no-python", "--no_python"),
    "command",
    is_flag=True,
    help="PROGRAM is a command, not a Python script.",
)
@click.option("--stdout", metavar="FORMAT", help=f"Also write each rank's stdout to a file. Fields: {_FIELDS}.")
@click.option("--stderr", metavar="FORMAT", help="The same for stderr.")
@click.option("--log-dir", "--log_dir", metavar="DIR", help=f"The same for all, and error files: {SHOWN_LAYOUT}.")
@click.option(
    *("--local-ranks-filter", "--local_ranks_filter"),
    metavar="RANKS",
    callback=parse_ranks,
    help="Show only these of each node: 0,1.",
)
@click.option(
    "--max-restarts",
    "--max_restarts",
    metavar="N",
    type=click.IntRange(min=0),
    default=0,
    help="Start all ranks again when one fails, N times at most.",
)
@click.option(
    "--restart-on", metavar="END,...", help="After which ends: any, signal, exit, lost, timeout, a code (any)."
)
@click.option("--attempt-timeout", metavar="SECONDS", type=_SECONDS, help="End each attempt then.")
@click.option("--timeout", metavar="SECONDS", type=_SECONDS, help="End the job then.")
@click.option(
    "--grace",
    metavar="SECONDS",
    type=click.FloatRange(min=0),
    default=10.0,
    show_default=True,
    help="Between SIGTERM and SIGKILL when the job is ended.",
)
@click.option("--prefix/--no-prefix", default=True, help='"[rank 2]" in front of each line of rank 2 (default: yes).')
@click.option("--launcher", metavar="PROGRAM", help="mpirun, mpiexec or srun to use, if not the one that is found.")
@click.option("--mpi-args", metavar="ARGUMENTS", multiple=True, help='For mpirun, as in --mpi-args "--mca btl tcp".')
@click.option("--summary", is_flag=True, help="Say at the end of the world who has waited for whom.")
@click.option("-v", "--verbose", is_flag=True, help="Show the command line, and what mpirun says.")
@click.option("--node-rank", "--node_rank", type=int, hidden=True)
@click.option("--master-addr", "--master_addr", hidden=True)
@click.option("--master-port", "--master_port", type=int, hidden=True)
@click.option("--world-size", "--world_size", type=_POSITIVE, hidden=True)
@click.option("--standalone", is_flag=True, hidden=True)
@torchrun_options
@click.argument("program")
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def run(
    *,
    nproc: int | None,
    nproc_per_node: int | None,
    nnodes: int | NodeRange | None,
    hosts: str | None,
    hostfile: str | None,
    map_by: str | None,
    module: bool,
    command: bool,
    stdout: str | None,
    stderr: str | None,
    log_dir: str | None,
    local_ranks_filter: list[int] | None,
    max_restarts: int,
    restart_on: str | None,
    attempt_timeout: float | None,
    timeout: float | None,
    grace: float,
    prefix: bool,
    launcher: str | None,
    mpi_args: tuple[str, ...],
    summary: bool,
    verbose: bool,
    node_rank: int | None,
    master_addr: str | None,
    master_port: int | None,
    world_size: int | None,
    standalone: bool,
    program: str,
    arguments: tuple[str, ...],
    **_: object,
) -> None:
    """Run a program on several ranks: mpiplus run -n 4 train.py --lr 0.1

    Uses the mpirun or mpiexec that belongs to the MPI which mpi4py loads. Shows each rank's output with the rank in
    front, and says at the end which rank failed first, on which node, and with what. The exit code is that rank's.
    Under mpirun, srun or torchrun it starts nothing, and becomes the program itself.
    """
    argv = program_command(program, arguments, module, command)
    wanted_nodes, nnodes = nnodes, nnodes.most if isinstance(nnodes, NodeRange) else nnodes
    launch = in_place(wanted_ranks(nproc, nproc_per_node, nnodes), os.environ)
    if launch is not None:
        if speaks(os.environ):
            options: dict[str, object] = {
                "--stdout": stdout,
                "--stderr": stderr,
                "--timeout": timeout,
                "--hosts": hosts,
            }
            options |= {"--log-dir": log_dir, "--local-ranks-filter": local_ranks_filter}
            options |= {"--max-restarts": max_restarts or None, "--attempt-timeout": attempt_timeout}
            _warn([*ineffective(options), *other_number(launch, nproc, nproc_per_node, nnodes)])
        os.execvp(argv[0], argv)
    from .restarting import ends_of, nodes_to_choose_from, spare_nodes

    named = nodes_to_choose_from(wanted_nodes, bool(max_restarts), hosts, hostfile)
    nnodes = min(nnodes, len(named)) if nnodes and named and isinstance(wanted_nodes, NodeRange) else nnodes
    numbers = count_ranks(nproc, nproc_per_node, nnodes, hosts, hostfile)
    logs = files_of(log_dir, stdout, stderr)
    _check(numbers, hosts, hostfile, logs.stdout, logs.stderr)
    _warn(no_effect(click.get_current_context().params))
    ranks = numbers.nproc * (numbers.nnodes or 1)
    _warn(contradictions(ranks, node_rank, master_addr, world_size, standalone and bool(hosts or hostfile)))
    from ...jobs.attempts import Restarts, run_attempts
    from ...jobs.job import run_job
    from ...launchers.mpirun import LauncherError

    env = {"MASTER_ADDR": master_addr, "MASTER_PORT": master_port, settings.SUMMARY.name: "1" if summary else None}
    job: Callable[..., JobResult] = functools.partial(
        run_job,
        map_by=map_by,
        mpi_args=[word for text in mpi_args for word in shlex.split(text)],
        env={name: str(value) for name, value in env.items() if value is not None},
        grace=grace,
        launcher=launcher,
    )
    shown: dict[str, Any] = {**logs._asdict(), "shown_local_ranks": local_ranks_filter}
    shown |= {"verbose": verbose, "prefix": prefix}

    def start(attempt: Attempt) -> JobResult:
        return job(
            argv,
            nproc=numbers.nproc,
            nnodes=attempt.nnodes or numbers.nnodes,
            hosts=attempt.hosts or hosts,
            hostfile=None if attempt.hosts else hostfile,
            timeout=attempt.timeout,
            attempt=attempt.number,
            max_restarts=max_restarts,
            ended=attempt.ended,
            **shown,
        )

    def tell(text: str) -> None:
        say(sys.stderr, f"{text}\n", max(grace, _LAST_WORDS_SECONDS))

    restarts = Restarts(max_restarts, ends_of(restart_on), timeout, attempt_timeout)
    try:
        result = run_attempts(
            start, restarts, spare_nodes(named, numbers.nproc, numbers.nnodes, wanted_nodes, job), tell
        )
    except LauncherError as error:
        raise click.ClickException(str(error)) from None
    if result.message:
        tell(result.message)
    sys.exit(result.returncode)


def program_command(program: str, arguments: Sequence[str], module: bool, command: bool) -> list[str]:
    """The command line of a rank. Its Python is the one that ``PYTHON_EXEC`` names, as under torchrun, else this one.

    Raises:
        click.UsageError: there is no such script, module, command or Python.
    """
    python = os.environ.get("PYTHON_EXEC") or sys.executable
    if not command and shutil.which(python) is None:
        raise click.UsageError(f"there is no program {python!r}, which PYTHON_EXEC names as the ranks' Python")
    if module and command:
        raise click.UsageError("-m and -c exclude each other: PROGRAM is a module or a command")
    if module:
        if not _module_exists(program.partition(".")[0]):
            raise click.UsageError(f"there is no module {program!r}, neither installed nor in {os.getcwd()}")
        return [python, "-m", program, *arguments]
    if command:
        words = [program, *arguments]
        if not arguments and shutil.which(program) is None:
            words = shlex.split(program)  # -c "program argument"
        if not words or shutil.which(words[0]) is None:
            raise click.UsageError(
                f"there is no command {program!r} on the PATH; -c runs a command, for Python code: "
                f"-c python -c {shlex.quote(program)}"
            )
        return words
    if not Path(program).is_file():
        what = "is a directory, not a script" if Path(program).is_dir() else "does not exist"
        raise click.UsageError(
            f"the script {program!r} {what} (from {os.getcwd()}). For a module use -m, for a command -c."
        )
    return [python, program, *arguments]


def _module_exists(top: str) -> bool:
    """Whether ``python -m`` would find a module or package, which also looks in the working directory."""
    sys.path.insert(0, os.getcwd())
    try:
        return importlib.util.find_spec(top) is not None
    except (ImportError, ValueError):
        return False
    finally:
        del sys.path[0]


def wanted_ranks(nproc: int | None, per_node: int | None, nnodes: int | None) -> int | None:
    """How many ranks the options name; None where they leave it open."""
    number = nproc or per_node
    return number * (nnodes or 1) if number else None


def in_place(wanted: int | None, environment: Mapping[str, str]) -> Launch | None:
    """The launcher that has already started this process as a rank, if one has."""
    launch = started_by(environment)
    if launch is None or launch.size > 1 or "TORCHELASTIC_RUN_ID" in environment:
        return launch
    if launch.variable == "WORLD_SIZE":
        return launch if wanted == 1 else None  # not a launcher but variables that something has left behind
    if is_shell_step(launch, environment) and (wanted or 1) > 1:
        return None
    return launch


def other_number(launch: Launch, nproc: int | None, per_node: int | None, nnodes: int | None) -> list[str]:
    """What to tell a user whose launcher has started more ranks, or fewer, than the options name."""
    wanted = wanted_ranks(nproc, per_node, nnodes)
    if wanted is None or wanted == launch.size:
        return []
    if per_node and nnodes is None and launch.size % per_node == 0:
        return []  # it may be so many on each of several nodes
    given = "-n" if nproc else "--nproc-per-node"
    option = f"{given} {nproc or per_node}" + (f" --nnodes {nnodes}" if nnodes else "")
    return [
        f"{option} asks for {wanted} rank(s), but this process is already one of {launch.size} that "
        f"{launch.launcher} has started ({launch.variable}={launch.size}), and those it will be. Say the number "
        f"there, or leave out one of the two launchers"
    ]


def ineffective(options: Mapping[str, object]) -> list[str]:
    """What to tell a user whose options would need a launcher of our own."""
    given = [name for name, value in options.items() if value is not None]
    if not given:
        return []
    verb = "has" if len(given) == 1 else "have"
    return [f"already under a launcher, so the program runs in place and {', '.join(given)} {verb} no effect"]


def count_ranks(
    nproc: int | None, per_node: int | None, nnodes: int | None, hosts: str | None, hostfile: str | None
) -> Numbers:
    """How many ranks the options ask for.

    Raises:
        click.UsageError: they do not say, or contradict each other.
    """
    if nproc is not None and per_node is not None:
        raise click.UsageError("-n and --nproc-per-node exclude each other")
    if per_node is not None:
        try:
            named = parse_nodes(hosts) if hosts else read_hostfile(hostfile) if hostfile else []
        except ValueError as error:
            raise click.UsageError(str(error)) from None
        return Numbers(per_node, nnodes or len(named) or 1)
    if nproc is not None:
        return Numbers(nproc, nnodes)
    allocated = allocated_ranks(os.environ)
    if allocated is None or nnodes is not None:
        raise click.UsageError("how many ranks? Say it with -n, as in: mpiplus run -n 4 train.py")
    return Numbers(allocated, None)


def _check(numbers: Numbers, hosts: str | None, hostfile: str | None, stdout: str | None, stderr: str | None) -> None:
    try:
        layout = lay_out(numbers.nproc, numbers.nnodes, hosts, hostfile)
        for format_ in (stdout, stderr):
            if format_:
                check_format(format_, layout.ranks)
    except ValueError as error:
        raise click.UsageError(str(error)) from None


def _warn(lines: Sequence[str]) -> None:
    for line in lines:
        click.echo(f"mpiplus run: {line}", err=True)


def contradictions(
    ranks: int, node_rank: int | None, master_addr: str | None, world_size: int | None, standalone_with_hosts: bool
) -> list[str]:
    """What to tell a user of torchrun or Composer whose options mean something else, or nothing, with MPI."""
    lines = []
    if node_rank is not None:
        lines.append(
            "--node-rank has no effect: one call starts the ranks of all nodes; name them with --hosts, and do not "
            "start it on each node"
        )
    if world_size is not None and world_size != ranks:
        lines.append(f"--world-size {world_size} is ignored: -n and --nnodes make {ranks} ranks")
    if standalone_with_hosts:
        lines.append("--standalone has no effect: the ranks run on the nodes that are named")
    if master_addr is not None:
        lines.append(f"--master-addr {master_addr} is passed on as MASTER_ADDR, where rank 0 must run; MPI needs none")
    return lines
