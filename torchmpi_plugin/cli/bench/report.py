"""A run of ``mpiplus bench`` as tables for people and as one JSON object for programs."""

from __future__ import annotations

import os
import platform
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from importlib.metadata import version
from itertools import groupby
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from .results import OVERLAP_SIZE, OVERLAP_SLEEP, Bus, Link, Overlap, Row, backends_of, comparisons, format_size

_WIDTH, _WIDEST = 132, 1000
#: Of the cores, wanted by others before the benchmark: more, and it measures them.
_BUSY = 0.5


def machine_facts(ranks: int, nodes: int, library: str) -> dict[str, str | int]:
    """Return what the numbers depend on, by name."""
    return {
        "date": datetime.now().astimezone().isoformat(sep=" ", timespec="seconds"),
        "host": platform.node(),
        "processor": _processor(),
        "cores": os.cpu_count() or 0,
        "cores of rank 0": len(os.sched_getaffinity(0)),
        "load average": f"{os.getloadavg()[0]:.1f}",
        "ranks": ranks,
        "nodes": nodes,
        "MPI": library,
        "mpi4py": version("mpi4py"),
        "torch": version("torch"),
        "torchmpi-plugin": version("torchmpi-plugin"),
        "Python": platform.python_version(),
    }


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def format_us(us: float | None) -> str:
    """Return microseconds to about three digits; a dash for None."""
    if us is None:
        return "-"
    digits = 2 if abs(us) < 10 else 1 if abs(us) < 100 else 0
    return f"{us:,.{digits}f}"


def table_header(contestants: Sequence[str]) -> list[str]:
    """Return the column titles of the table of operations; a line break where a title has two lines."""
    return [
        *("operation", "dtype", "size"),
        *(name.replace(" ", "\n") for name in contestants),
        f"{backends_of(contestants)[0]}\nGB/s",
        *(f"{above}/\n{below}" for above, below in comparisons(contestants)),
    ]


def table_cells(row: Row, contestants: Sequence[str]) -> list[str]:
    """Return one row of the table of operations, a cell for each title of :func:`table_header`."""
    ratios = [row.ratio(above, below) for above, below in comparisons(contestants)]
    bus = row.bus_gb_per_s(backends_of(contestants)[0])
    return [
        *(row.operation, row.dtype or "-", format_size(row.size) if row.size else "-"),
        *(format_us(row.us.get(name)) for name in contestants),
        "-" if bus is None else f"{bus:.2f}",
        *("-" if ratio is None else f"{ratio:.2f}" for ratio in ratios),
    ]


def open_console(rank: int) -> Console:
    """Return a console for plain text that prints on rank 0 only.

    Some launchers give each rank a terminal of 80 columns of its own, whatever the user's output really goes to.
    """
    return Console(quiet=rank != 0, width=_WIDTH, force_terminal=False, highlight=False)


def new_table(titles: Iterable[str], texts: int) -> Table:
    """Make a table of which the first columns, so many, are texts, and the others numbers."""
    table = Table(box=box.SIMPLE_HEAD)
    for index, title in enumerate(titles):
        table.add_column(title, justify="left" if index < texts else "right", no_wrap=True)
    return table


def print_table(console: Console, table: Table) -> None:
    """Print it as wide as it has to be: with many contestants that is wider than text."""
    found = console.measure(table, options=console.options.update_width(_WIDEST))
    console.width = max(_WIDTH, found.maximum)
    console.print(table)


def print_facts(console: Console, facts: Mapping[str, str | int]) -> None:
    """Print what the numbers depend on, one fact on a line."""
    table = Table(box=None, show_header=False)
    for name, fact in facts.items():
        table.add_row(name, str(fact))
    console.print("mpiplus bench", table)
    load, cores = os.getloadavg()[0], len(os.sched_getaffinity(0))
    if load > _BUSY * cores:
        console.print(
            f"The machine is loaded ({load:.1f} processes want its {cores} cores): these times say little. "
            f"Measure when the others have ended."
        )


@dataclass(frozen=True)
class Report:
    """One run of ``mpiplus bench``."""

    facts: Mapping[str, str | int]  # what the numbers depend on, by name
    settings: Mapping[str, Any]  # how it was measured, by name
    contestants: Sequence[str]  # raw MPI if it was measured, then the groups
    rows: Sequence[Row]  # the times of the operations
    overlaps: Sequence[Overlap]  # the asynchronous operations; none on one rank
    link: Link | None = None  # plain messages between two nodes, or two ranks; None on one rank
    bus: Bus | None = None  # copies to each rank's device and back; None without devices

    def limits(self) -> dict[str, Link | Bus]:
        """Return what has been measured of those, by name."""
        found: dict[str, Link | Bus | None] = {"plain messages": self.link, "bus": self.bus}
        return {name: limit for name, limit in found.items() if limit}

    def notes(self) -> list[str]:
        """Return a line for each operation and dtype that a contestant refused."""
        lines = [
            f"{name} has no {row.operation} of {row.dtype or 'nothing'}: {reason}"
            for row in self.rows
            for name, reason in row.refusals.items()
        ]
        return list(dict.fromkeys(lines))

    def to_json(self) -> dict[str, Any]:
        """Return everything that is printed, and every single turn, as plain data."""
        return {
            "facts": dict(self.facts),
            "settings": dict(self.settings),
            "contestants": list(self.contestants),
            "operations": [row.to_json(self.contestants) for row in self.rows],
            "point_to_point": self.link and self.link.to_json(),
            "bus": self.bus and self.bus.to_json(),
            "overlap": [overlap.to_json() for overlap in self.overlaps],
            "notes": self.notes(),
        }

    def print(self, console: Console) -> None:
        """Print the tables and the notes, but not the facts: they stand above, see :func:`print_facts`."""
        for limit in self.limits().values():
            console.print(f"\n{in_words(limit)}")
        console.print("\nmicroseconds per call on the slowest rank, median of the turns; GB/s: bus bandwidth")
        print_table(console, _operations_table(self.rows, self.contestants))
        for note in self.notes():
            console.print(note, style="dim")
        if not self.overlaps:
            return
        console.print(
            f"\nasync overlap: all_reduce of {format_size(OVERLAP_SIZE)}, then time.sleep({OVERLAP_SLEEP}), then wait()"
        )
        console.print(_overlap_table(self.overlaps))


def in_words(limit: Link | Bus) -> str:
    """Return what was measured between two ranks, or on the bus, as one line."""
    if isinstance(limit, Bus):
        rates = [limit.size / us / 1000 for us in (limit.to_device_us, limit.from_device_us)]
        where, one_way = "the bus, all ranks at once", "{:.2f} GB/s to the device, {:.2f} from it, ".format(*rates)
    else:
        ranks = " and ".join(f"rank {rank} on {node}" for rank, node in zip(limit.ranks, limit.hosts, strict=True))
        where, one_way = f"plain messages of MPI, {ranks}", ""
    return (
        f"{where}: {format_us(limit.latency_us)} us for 8 B; {one_way}{limit.gb_per_s:.2f} GB/s each way "
        f"at once ({format_size(limit.size)})"
    )


def _operations_table(rows: Sequence[Row], contestants: Sequence[str]) -> Table:
    table = new_table(table_header(contestants), texts=2)
    for _, alike in groupby(rows, key=lambda row: (row.operation, row.dtype)):
        for row in alike:
            table.add_row(*table_cells(row, contestants))
        table.add_section()
    return table


def _overlap_table(overlaps: Sequence[Overlap]) -> Table:
    table = new_table(("", "synchronous us", "wait() us", "left to wait()"), texts=1)
    for found in overlaps:
        table.add_row(found.contestant, format_us(found.sync_us), format_us(found.wait_us), f"{found.percent:.1f} %")
    return table
