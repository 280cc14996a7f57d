"""``mpiplus bench``: raw MPI, mpiplus and gloo side by side, in one run under mpirun."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ...mpi import library as mpi_library
from ...node import node
from .results import NONBLOCKING, RAW, parse_size

if TYPE_CHECKING:
    from .files import Files

_FULL_SIZES = "8,1K,64K,1M,16M"
_QUICK_SIZES = "8,64K,4M"
_PLOTS = (".png", ".svg", ".pdf")
_TUNING_FILE = "mpiplus-tuning.json"
_CONTESTANTS = ("backends", "raw", "nonblocking", "front_end")
_OF_OPERATIONS = ("ops", "sizes", "raw", "nonblocking", "tuning_file", "front_end")
_FILE = click.Path(dir_okay=False, path_type=Path)
#: On any core, until whoever has started it is gone.
_LOOP = """
import contextlib, os
with contextlib.suppress(OSError):
    os.sched_setaffinity(0, range(os.cpu_count()))
parent = os.getppid()
while os.getppid() == parent:
    sum(range(1000000))
"""


def parse_names(_: click.Context | None, __: click.Parameter | None, value: str | None) -> list[str]:
    return [name.strip() for name in (value or "").split(",") if name.strip()]


def parse_operations(ctx: click.Context | None, param: click.Parameter | None, value: str) -> list[str]:
    """Split a list of operations, MPI's names too (all_gather), and refuse those that the table does not have."""
    with _saying_what_is_wrong():
        mpi_library.load()  # which importing the table needs
    from .operations import OPERATIONS

    names = parse_names(ctx, param, value)
    found = [next((full for full in OPERATIONS if f"{full}_".startswith(f"{name}_")), None) for name in names]
    unknown = [name for name, full in zip(names, found, strict=True) if full is None]
    if unknown:
        raise click.BadParameter(f"no operation {', '.join(unknown)}; there are {', '.join(OPERATIONS)}")
    return [full for full in found if full is not None]


def parse_backends(ctx: click.Context | None, param: click.Parameter | None, value: str) -> list[str]:
    """Split a list of backends, and refuse names that torch does not know."""
    import torch.distributed as dist

    names = parse_names(ctx, param, value)
    unknown = [name for name in names if not dist.is_backend_available(name)]
    if unknown or not names:
        raise click.BadParameter(f"this torch has no backend {', '.join(unknown)}" if unknown else "name at least one")
    return names


def parse_sizes(_: click.Context | None, __: click.Parameter | None, value: str | None) -> list[int] | None:
    """Turn a list of sizes like ``8,64K`` into bytes."""
    try:
        sizes = None if value is None else [parse_size(text) for text in value.split(",")]
    except ValueError as error:
        raise click.BadParameter(str(error)) from None
    if sizes and max(sizes) > os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"):
        raise click.BadParameter(f"{max(sizes):,} bytes are more than this node's memory")
    return sizes


def parse_plot(_: click.Context | None, __: click.Parameter | None, value: Path | None) -> Path | None:
    if value is not None and value.suffix not in _PLOTS:
        raise click.BadParameter(f"the name must end in {', '.join(_PLOTS)}: {value}")
    return value


@contextmanager
def _saying_what_is_wrong() -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        raise click.ClickException(str(error)) from None


@click.command()
@click.option("--quick", is_flag=True, help="Fewer sizes and shorter turns: about 25 s.")
@click.option("--json", "json_file", type=_FILE, help="Write the numbers there too.")
@click.option(
    "--plot", "plot_file", type=_FILE, callback=parse_plot, help="Draw them there: .png, .svg, .pdf. Needs matplotlib."
)
@click.option(
    *("--tune", "tuning_file"),
    type=_FILE,
    metavar="[FILE]",
    is_flag=False,
    flag_value=_TUNING_FILE,
    help="Instead, measure MPI's collectives between nodes against mpiplus's, one phase against two on a node, or with "
    f"--device cuda what a path has two ways for, and write there which to take, for MPIPLUS_TUNING ({_TUNING_FILE}).",
)
@click.option(
    "--device",
    type=click.Choice(["cpu", "cuda"]),
    default="cpu",
    help="Where tensors are, but for raw MPI's (cpu). cuda: mpiplus on each path of CUDA tensors, gloo and nccl.",
)
@click.option("--ops", metavar="NAME,...", default="", callback=parse_operations, help="Operations (all).")
@click.option("--sizes", metavar="SIZE,...", callback=parse_sizes, help=f"Sizes of the data ({_FULL_SIZES}).")
@click.option(
    "--backends", metavar="NAME,...", default="mpiplus,gloo", callback=parse_backends, help="Backends (mpiplus,gloo)."
)
@click.option("--raw/--no-raw", default=True, help="Measure plain MPI calls through mpi4py as well.")
@click.option("--nonblocking/--no-nonblocking", default=True, help="And MPI's nonblocking calls.")
@click.option("--front-end/--no-front-end", default=True, help="And torch's own part, on a group that does nothing.")
@click.option(
    "--repeats",
    metavar="N",
    type=click.IntRange(min=1),
    help="Turns of each contestant (11; quick: 5; --train: 21, 7).",
)
@click.option(
    *("--train", "ways"),
    metavar="[WAY,...]",
    callback=parse_names,
    is_flag=False,
    flag_value="all",
    help="Instead, train small networks: see above. In all ways, or these: ddp, ddp25, at-once, no-sync, fsdp2, zero, "
    "pipeline, tensor, sleep. Some five minutes; --quick: less than two.",
)
@click.option(
    "--busy",
    metavar="N",
    type=click.IntRange(min=0),
    default=0,
    help="Beside N processes a node that only compute (0).",
)
@click.option("--samples", type=click.IntRange(min=2), hidden=True, help="--train: of a rank in a step.")
@click.pass_context
def bench(context: click.Context, /, *, busy: int, backends: list[str], **given: Any) -> None:
    """Compare raw MPI, mpiplus and gloo: mpirun -n 2 mpiplus bench

    Every rank runs the same operations on all of them in turns, in one job, so that whatever else the machine does hits
    all alike. A time is that of one call, on the slowest rank, and the median over the turns. The size is that of the
    whole of the data: what all_gather_into_tensor gives, what reduce_scatter_tensor takes. ping_pong is there and back.
    GB/s are the bus bandwidth of nccl-tests, to be compared with the plain messages that are measured first.

    With --train a CNN and a transformer are trained in several ways, on each backend in turns: with
    DistributedDataParallel, FSDP2, ZeRO, a pipeline, and others; --train ddp,fsdp2 chooses. Losses must agree. "alone"
    is a step that does all but communicate, and a barrier waits for slower ranks: what a step takes longer, it waits
    for data, or for the core that communication takes. "hidden" is the part of the all_reduce of all of DDP's buckets,
    timed with nothing else to do, that a step does not get longer by, cut off at 0 and 1. A rank has one thread, or
    OMP_NUM_THREADS. More ranks than cores: mpirun --oversubscribe -n 4.
    """
    from .files import Files

    device, tuning = given["device"], given["tuning_file"] is not None
    files = Files(given["json_file"], given["plot_file"], given["tuning_file"], device)
    if device == "cuda" and not _is_given(context, "backends"):
        from torch.distributed import is_nccl_available  # slow to import

        backends += ["nccl"] * is_nccl_available()
    if given["ways"]:
        _refuse(context, _OF_OPERATIONS, "--train, which measures whole steps")
        with _beside(busy):
            from .training.training import run

            run(given, backends, files)
        return
    if tuning:
        _refuse(context, _CONTESTANTS, "--tune, which compares ways of mpiplus")
    with _beside(busy):
        _run(_settings_of(given, [] if tuning else backends, bool(busy)), files)


def _settings_of(given: Mapping[str, Any], backends: Sequence[str], busy: bool) -> dict[str, Any]:
    """Return how to measure; ``raw`` has what of plain MPI, no ``operations`` are all, ``block_seconds`` a turn's."""
    tunes, quick = given["tuning_file"] is not None, given["quick"]
    return {
        "backends": backends,
        "raw": [RAW, *([NONBLOCKING] if given["nonblocking"] else [])] if given["raw"] and not tunes else [],
        "front_end": given["front_end"] and not tunes,
        "operations": given["ops"],
        "sizes": given["sizes"] or parse_sizes(None, None, _QUICK_SIZES if quick else _FULL_SIZES) or [],
        "repeats": given["repeats"] or (5 if quick else 11),
        # Among others that compute a turn has to last for many rounds of the scheduler, of some 4 ms for each of them.
        "block_seconds": 0.3 if busy else 0.01 if quick else 0.02,
        "device": given["device"],
    }


@contextmanager
def _beside(count: int) -> Iterator[None]:
    """Within, ``count`` processes compute on each node, as data loaders and neighbours do. For all ranks."""
    from ...mpi import runtime

    with _saying_what_is_wrong():
        mpi = runtime.mpi()
    if not count:
        yield
        return
    world = mpi.COMM_WORLD
    nodes = world.allgather(node.identity())
    is_first = nodes.index(nodes[world.rank]) == world.rank
    if world.rank == 0:
        click.echo(f"Processes that compute beside the ranks of each node: {count}")
    loops = [subprocess.Popen([sys.executable, "-c", _LOOP]) for _ in range(count if is_first else 0)]
    try:
        yield
    finally:
        for loop in loops:
            loop.kill()
            loop.wait()


def _is_given(context: click.Context, option: str) -> bool:
    return context.get_parameter_source(option) is click.core.ParameterSource.COMMANDLINE


def _refuse(context: click.Context, names: Sequence[str], beside: str) -> None:
    for option in context.command.params:
        if option.name in names and _is_given(context, option.name or ""):
            raise click.UsageError(f"{option.opts[0]} does not go with {beside}", context)


def _run(settings: dict[str, Any], files: Files) -> None:
    from . import tune
    from .limit import measure_bus, measure_link, measure_overlap
    from .operations import OPERATIONS, plan
    from .report import print_facts, print_report
    from .results import Report
    from .session import new_groups, open_session

    repeats, device = settings["repeats"], settings["device"]
    turns = (repeats, settings["block_seconds"])
    make_groups = tune.new_groups if files.tuning else partial(new_groups, settings["backends"], settings["front_end"])
    with open_session(settings["raw"], make_groups, files.why_not, device) as session:
        tuned = {row.operation for row in tune.table(session.nodes, device).values()} if files.tuning else OPERATIONS
        names = settings["operations"] or [name for name in OPERATIONS if name in tuned]
        if not {*tuned} & {*names}:
            raise click.ClickException(f"--tune compares {', '.join(sorted(tuned))}, of which --ops names none")
        console = print_facts(session.rank, facts := session.facts(), "mpiplus bench")
        link, bus = measure_link(session, *turns), measure_bus(session, *turns)
        cases = plan([OPERATIONS[name] for name in names], settings["sizes"], session.size)
        rows = [session.measure_case(case, *turns) for case in cases]
        skips_overlap = session.size == 1 or files.tuning is not None
        overlaps = [] if skips_overlap else measure_overlap(session, min(repeats, 5), settings["block_seconds"])
    report = Report(facts, {**settings, "operations": names}, session.contestants, rows, overlaps, link, bus)
    print_report(console, report)
    if session.rank == 0:
        files.write(report, session.nodes, console)
