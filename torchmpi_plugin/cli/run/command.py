"""``mpiplus run``: start a program on several ranks through the MPI's own launcher, and watch it."""

from __future__ import annotations

import importlib.util
import os
import shlex
import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

import click

from ... import settings
from ...jobs.formats import FIELDS
from ...jobs.output import say
from ...launchers.layout import allocated_ranks, named_nodes
from ...launchers.variables import Launch, is_shell_step, speaks, started_by
from ...names import counted
from ...seconds import Seconds
from ...timeline.command import directory_of, draw, file_option
from . import options

if TYPE_CHECKING:
    from ...jobs.spec import JobSpec

_FIELDS = ", ".join(f"{{{name}}}" for name in FIELDS)
_POSITIVE = click.IntRange(1, options.MOST)
_SECONDS = Seconds(min=0, min_open=True)
_LAST_WORDS_SECONDS = 1.0
_NEED_A_LAUNCHER = (
    *("stdout", "stderr", "timeout", "hosts", "log_dir"),
    *("local_ranks_filter", "max_restarts", "attempt_timeout", "timeline"),
)


class Numbers(NamedTuple):
    """Numbers of ranks: of all of them, or with ``nnodes`` of those on each node."""

    nproc: int
    nnodes: int | None


@click.command(context_settings={"allow_interspersed_args": False, "token_normalize_func": options.with_hyphens})
@click.option(
    "-n", "-np", "--nproc", "nproc", type=_POSITIVE, help="Ranks: all of them, or with --nnodes those of each node."
)
@click.option("--nproc-per-node", type=options.PER_NODE, help="Ranks on each node; auto, cpu: one per core.")
@click.option(
    "--nnodes",
    type=options.NODES,
    metavar="N|MIN:MAX",
    help="Nodes (as many as --hosts or --hostfile name, else 1); with MIN:MAX as many of them as answer.",
)
@click.option("--hosts", metavar="HOST[:N],...", help="Where: h1,h2 or h1:4,h2:4.")
@click.option("--hostfile", type=click.Path(), help="A file with a node per line: h1, h1:4 or h1 slots=4.")
@click.option("--map-by", metavar="POLICY", help="--map-by of mpirun, -map-by of MPICH's mpiexec.")
@click.option("-m", "--module", "--module-mode", is_flag=True, help="PROGRAM is a Python module.")
@click.option(
    *("-c", "--command", "--command-mode", "--no-python"),
    "command",
    is_flag=True,
    help="PROGRAM is a command, not a Python script.",
)
@click.option("--stdout", metavar="FORMAT", help=f"Also write each rank's stdout to a file. Fields: {_FIELDS}.")
@click.option("--stderr", metavar="FORMAT", help="The same for stderr.")
@click.option("--log-dir", metavar="DIR", help=f"The same for all, and error files: {options.LAYOUT}.")
@click.option(
    "--local-ranks-filter", metavar="RANKS", callback=options.parse_ranks, help="Show only these of each node: 0,1."
)
@click.option(
    "--max-restarts",
    metavar="N",
    type=click.IntRange(min=0),
    default=0,
    help="Start all ranks again when one fails, N times at most.",
)
@click.option(
    "--restart-on",
    metavar="END,...",
    default="any",
    callback=options.parse_ends,
    help="After which ends: any, signal, exit, lost, timeout, a code (any).",
)
@click.option("--attempt-timeout", metavar="SECONDS", type=_SECONDS, help="End each attempt then.")
@click.option("--timeout", metavar="SECONDS", type=_SECONDS, help="End the job then.")
@click.option(
    "--grace",
    metavar="SECONDS",
    type=Seconds(min=0),
    default=10.0,
    show_default=True,
    help="Between SIGTERM and SIGKILL when the job is ended.",
)
@click.option("--prefix/--no-prefix", default=True, help='"[rank 2]" in front of each line of rank 2 (default: yes).')
@click.option("--launcher", metavar="PROGRAM", help="mpirun, mpiexec or srun to use, if not the one that is found.")
@click.option("--mpi-args", metavar="ARGUMENTS", multiple=True, help='For mpirun, as in --mpi-args "--mca btl tcp".')
@click.option("--summary", is_flag=True, help="Say at the end of the world who has waited for whom.")
@file_option(help="Write there who called what when: .json, .json.gz for Perfetto, or an .html page.")
@click.option("-v", "--verbose", is_flag=True, help="Show the command line, and what mpirun says.")
@click.option("--node-rank", type=int, hidden=True)
@click.option("--master-addr", hidden=True)
@click.option("--master-port", type=int, hidden=True)
@click.option("--world-size", type=_POSITIVE, hidden=True)
@click.option("--standalone", is_flag=True, hidden=True)
@options.torchrun_options
@click.argument("program")
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def run(*, program: str, arguments: tuple[str, ...], **given: Any) -> None:
    """Run a program on several ranks: mpiplus run -n 4 train.py --lr 0.1

    Uses the mpirun or mpiexec that belongs to the MPI which mpi4py loads. Shows each rank's output with the rank in
    front, and says at the end which rank failed first, on which node, and with what. The exit code is that rank's.
    Under mpirun, srun or torchrun it starts nothing, and becomes the program itself.
    """
    argv = program_command(program, arguments, given["module"], given["command"])
    wanted = given["nnodes"]
    counts = (given["nproc"], given["nproc_per_node"], wanted.most if isinstance(wanted, options.NodeRange) else wanted)
    launch = in_place(wanted_ranks(*counts), os.environ)
    if launch is not None:
        if speaks(os.environ):
            _warn([*ineffective(given), *other_number(launch, *counts)])
        os.execvp(argv[0], argv)
    _start(argv, counts, given)


def _start(argv: list[str], counts: tuple[int | None, int | None, int | None], given: dict[str, Any]) -> NoReturn:
    """Run the job, with the options that were given, to its end."""
    from ...jobs.job import Attempts
    from ...launchers.mpirun import LauncherError
    from .nodes import fetch, nodes_to_choose_from, spare_nodes

    wanted, where = given["nnodes"], (given["hosts"], given["hostfile"])
    named = nodes_to_choose_from(wanted, bool(given["max_restarts"]), *where)
    if named and isinstance(wanted, options.NodeRange):
        counts = (*counts[:2], min(wanted.most, len(named)))
    numbers = count_ranks(*counts, *where)
    spec = spec_of(argv, numbers, given)
    _warn(options.no_effect(given))
    _warn(contradictions(spec.layout.ranks, given))

    def tell(text: str) -> None:
        say(sys.stderr, f"{text}\n", max(spec.grace, _LAST_WORDS_SECONDS))

    try:
        nodes = spare_nodes(named, numbers, wanted, spec)
        result = Attempts(spec, nodes, tell, given["restart_on"], given["attempt_timeout"]).run()
    except LauncherError as error:
        raise click.ClickException(str(error)) from None
    if result.message:
        tell(result.message)
    if given["timeline"]:
        fetch(spec, directory_of(given["timeline"]))
        draw(given["timeline"])
    sys.exit(result.returncode)


def spec_of(argv: list[str], numbers: Numbers, given: Mapping[str, Any]) -> JobSpec:
    """Describe the job by its options; a UsageError where they contradict each other."""
    from ...jobs.spec import JobSpec

    env = {name.upper(): given[name] for name in ("master_addr", "master_port")}
    env[settings.SUMMARY.name] = "1" if given["summary"] else None
    env[settings.TIMELINE.name] = str(directory_of(given["timeline"])) if given["timeline"] else None
    same = ("hosts", "hostfile", "map_by", "grace", "launcher", "verbose", "prefix", "max_restarts", "timeout")
    spec = JobSpec(
        argv,
        **numbers._asdict(),
        **{name: given[name] for name in same},
        mpi_args=[word for text in given["mpi_args"] for word in _words(text)],
        env={name: str(value) for name, value in env.items() if value is not None},
        shown_local_ranks=given["local_ranks_filter"],
        **options.files_of(given["log_dir"], given["stdout"], given["stderr"]),
    )
    try:
        _ = spec.layout
    except ValueError as error:
        raise click.UsageError(str(error)) from None
    return spec


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
            words = _words(program)  # -c "program argument"
        if not words or shutil.which(words[0]) is None:
            raise click.UsageError(
                f"there is no command {program!r} on the PATH; -c runs a command, for Python code: "
                f"-c python -c {shlex.quote(program)}"
            )
        return words
    if program in ("python", "python3") and not Path(program).exists():
        return [python, *arguments]  # as it stands behind mpirun
    if not Path(program).is_file():
        what = "is a directory, not a script" if Path(program).is_dir() else "does not exist"
        raise click.UsageError(
            f"the script {program!r} {what} (from {os.getcwd()}). For a module use -m, for a command -c."
        )
    return [python, program, *arguments]


def _words(text: str) -> list[str]:
    try:
        return shlex.split(text)
    except ValueError as error:
        raise click.UsageError(f"{text!r} is no command line: {error}") from None


def _module_exists(top: str) -> bool:
    """Return whether ``python -m`` would find a module or package, which also looks in the working directory."""
    sys.path.insert(0, os.getcwd())
    try:
        return importlib.util.find_spec(top) is not None
    except (ImportError, ValueError):
        return False
    finally:
        del sys.path[0]


def wanted_ranks(nproc: int | None, per_node: int | None, nnodes: int | None) -> int | None:
    """Return the number of ranks that the options name; None where they leave it open."""
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
    """Return an advice to a user whose launcher has started more ranks, or fewer, than the options name."""
    wanted = wanted_ranks(nproc, per_node, nnodes)
    if wanted is None or wanted == launch.size:
        return []
    if per_node and nnodes is None and launch.size % per_node == 0:
        return []  # it may be so many on each of several nodes
    given = "-n" if nproc else "--nproc-per-node"
    option = f"{given} {nproc or per_node}" + (f" --nnodes {nnodes}" if nnodes else "")
    return [
        f"{option} asks for {counted(wanted, 'rank')}, but this process is already one of {launch.size} that "
        f"{launch.launcher} has started ({launch.variable}={launch.size}), and those it will be. Say the number "
        f"there, or leave out one of the two launchers"
    ]


def ineffective(given: Mapping[str, Any]) -> list[str]:
    """Return an advice to a user whose options would need a launcher of our own."""
    names = [f"--{options.with_hyphens(name)}" for name in _NEED_A_LAUNCHER if given.get(name)]
    if not names:
        return []
    verb = "has" if len(names) == 1 else "have"
    return [f"already under a launcher, so the program runs in place and {', '.join(names)} {verb} no effect"]


def count_ranks(
    nproc: int | None, per_node: int | None, nnodes: int | None, hosts: str | None, hostfile: str | None
) -> Numbers:
    """The number of ranks that the options ask for; a UsageError where they do not say, or contradict each other."""
    if nproc is not None and per_node is not None:
        raise click.UsageError("-n and --nproc-per-node exclude each other")
    if per_node is not None:
        try:
            return Numbers(per_node, nnodes or len(named_nodes(hosts, hostfile)) or 1)
        except ValueError as error:
            raise click.UsageError(str(error)) from None
    if nproc is not None:
        return Numbers(nproc, nnodes)
    allocated = allocated_ranks(os.environ)
    if allocated is None or nnodes is not None:
        raise click.UsageError("how many ranks? Say it with -n, as in: mpiplus run -n 4 train.py")
    return Numbers(allocated, None)


def _warn(lines: Sequence[str]) -> None:
    for line in lines:
        click.echo(f"mpiplus run: {line}", err=True)


def contradictions(ranks: int, given: Mapping[str, Any]) -> list[str]:
    """Return warnings to a user of torchrun or Composer whose options mean something else, or nothing, with MPI."""
    lines = []
    if given["node_rank"] is not None:
        lines.append(
            "--node-rank has no effect: one call starts the ranks of all nodes; name them with --hosts, and do not "
            "start it on each node"
        )
    world_size, master_addr = given["world_size"], given["master_addr"]
    if world_size not in (None, ranks):
        lines.append(f"--world-size {world_size} is ignored: -n and --nnodes make {ranks} ranks")
    if given["standalone"] and (given["hosts"] or given["hostfile"]):
        lines.append("--standalone has no effect: the ranks run on the nodes that are named")
    if master_addr is not None:
        lines.append(f"--master-addr {master_addr} is passed on as MASTER_ADDR, where rank 0 must run; MPI needs none")
    return lines
