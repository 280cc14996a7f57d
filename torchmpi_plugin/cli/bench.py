"""``mpiplus bench``: raw MPI, mpiplus and gloo side by side, in one run under mpirun."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import click

from ..mpi import library as mpi_library
from .sizes import parse_size

_FULL_SIZES = "8,1K,64K,1M,16M"
_QUICK_SIZES = "8,64K,4M"


@dataclass(frozen=True)
class Settings:
    """How to measure.

    Attributes:
        backends: what torch.distributed runs on, the one of interest first.
        raw: whether to measure plain MPI calls too.
        operations: names from the table of operations.
        sizes: bytes.
        repeats: the turns of each contestant.
        block_seconds: about how long one turn lasts, in seconds.
    """

    backends: Sequence[str]
    raw: bool
    operations: Sequence[str]
    sizes: Sequence[int]
    repeats: int
    block_seconds: float


def parse_names(_: click.Context | None, __: click.Parameter | None, value: str) -> list[str]:
    """Split a list at its commas."""
    return [name.strip() for name in value.split(",") if name.strip()]


def parse_operations(ctx: click.Context | None, param: click.Parameter | None, value: str) -> list[str]:
    """Split a list of operations, all if it is empty, and refuse names that the table does not have."""
    with _saying_what_is_wrong():
        mpi_library.load()  # which importing the table needs
    from .operations import OPERATIONS

    names = parse_names(ctx, param, value)
    unknown = [name for name in names if name not in OPERATIONS]
    if unknown:
        raise click.BadParameter(f"no operation {', '.join(unknown)}; there are {', '.join(OPERATIONS)}")
    return names or list(OPERATIONS)


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
        return None if value is None else [parse_size(text) for text in value.split(",")]
    except ValueError as error:
        raise click.BadParameter(str(error)) from None


@contextmanager
def _saying_what_is_wrong() -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        raise click.ClickException(str(error)) from None


@click.command()
@click.option("--quick", is_flag=True, help="Fewer sizes and shorter turns: about 20 s.")
@click.option(
    "--json", "json_file", type=click.Path(dir_okay=False, path_type=Path), help="Write the numbers there too."
)
@click.option("--ops", metavar="NAME,...", default="", callback=parse_operations, help="Operations (all).")
@click.option("--sizes", metavar="SIZE,...", callback=parse_sizes, help=f"Sizes of the data ({_FULL_SIZES}).")
@click.option(
    "--backends", metavar="NAME,...", default="mpiplus,gloo", callback=parse_backends, help="Backends (mpiplus,gloo)."
)
@click.option("--raw/--no-raw", default=True, help="Measure plain MPI calls through mpi4py as well.")
@click.option(
    "--repeats",
    metavar="N",
    type=click.IntRange(min=1),
    help="Turns of each contestant (11; quick: 5; --train: 21, 7).",
)
@click.option("--train", is_flag=True, help="Train small networks instead: see above. About 80 s; --quick: 25 s.")
def bench(
    *,
    quick: bool,
    json_file: Path | None,
    ops: list[str],
    sizes: list[int] | None,
    backends: list[str],
    raw: bool,
    repeats: int | None,
    train: bool,
) -> None:
    """Compare raw MPI, mpiplus and gloo: mpirun -n 2 mpiplus bench

    Every rank runs the same operations on all of them in turns, in one job, so that whatever else the machine does hits
    all alike. A time is that of one call, on the slowest rank, and the median over the turns. The size is that of the
    whole of the data: what all_gather_into_tensor gives, what reduce_scatter_tensor takes. ping_pong is there and back.

    With --train a CNN and a transformer are trained with DistributedDataParallel, in float32 and bfloat16, on each
    backend in turns; their losses must agree. "waiting" is the part of a step by which it is longer than a step alone,
    in which DDP does all but communicate, and a barrier waits for slower ranks: for data, or for the core that
    communication takes. "overlap" is the part of the all_reduce of all buckets, timed with nothing else to do, that a
    step does not get longer by. Both are cut off at 0 and 1.
    """
    if train:
        _train(backends, quick, repeats, json_file)
        return
    settings = Settings(
        backends=backends,
        raw=raw,
        operations=ops,
        sizes=sizes or parse_sizes(None, None, _QUICK_SIZES if quick else _FULL_SIZES) or [],
        repeats=repeats or (5 if quick else 11),
        block_seconds=0.01 if quick else 0.02,
    )
    _run(settings, json_file)


def _train(backends: Sequence[str], quick: bool, repeats: int | None, json_file: Path | None) -> None:
    with _saying_what_is_wrong():
        mpi_library.load()
    from ..mpi import runtime
    from . import training

    training.refuse_what_is_not_for_training(click.get_current_context())
    with _saying_what_is_wrong():
        runtime.mpi()
    training.run(backends, quick, repeats, json_file)


def _run(settings: Settings, json_file: Path | None) -> None:
    from ..mpi import runtime
    from .operations import OPERATIONS, plan
    from .overlap import measure_overlap
    from .report import Report, open_console, print_facts
    from .session import open_session

    with _saying_what_is_wrong():
        runtime.mpi()
    with open_session(settings.backends, settings.raw) as session:
        console = open_console(session.rank)
        if alone := session.size == 1:
            console.print("One process alone; to measure communication: mpirun -n 2 mpiplus bench")
        print_facts(console, facts := session.facts())
        cases = plan([OPERATIONS[name] for name in settings.operations], settings.sizes, session.size)
        rows = [session.measure_case(case, settings.repeats, settings.block_seconds) for case in cases]
        overlaps = [] if alone else measure_overlap(session, min(settings.repeats, 5), settings.block_seconds)
    report = Report(facts, asdict(settings), session.contestants, rows, overlaps)
    report.print(console)
    if json_file and session.rank == 0:
        json_file.write_text(json.dumps(report.to_json(), indent=2) + "\n")
