"""A run of ``mpiplus bench`` as tables for people."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby

from rich import box
from rich.console import Console
from rich.table import Table

from ...names import counted
from .results import OVERLAP_SIZE, OVERLAP_SLEEP, Report, Row, backends_of, comparisons, format_size, format_us

_WIDTH, _WIDEST = 132, 1000
#: Of the cores, wanted by others before the benchmark: more, and it measures them.
_BUSY = 0.5


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
    figures = [row.bus_gb_per_s(backends_of(contestants)[0]), *row.ratios(contestants).values()]
    return [
        *(row.operation, row.dtype or "-", format_size(row.size) if row.size else "-"),
        *(format_us(row.us.get(name)) for name in contestants),
        *("-" if figure is None else f"{figure:.2f}" for figure in figures),
    ]


def print_table(
    console: Console, titles: Iterable[str], texts: int, sections: Iterable[Iterable[Sequence[str]]]
) -> None:
    """Print rows as wide as they have to be: with many contestants that is wider than text.

    Args:
        texts: so many of the first columns are texts, the others numbers.
        sections: of the rows, which have a cell for each title.
    """
    table = Table(box=box.SIMPLE_HEAD)
    for index, title in enumerate(titles):
        table.add_column(title, justify="left" if index < texts else "right", no_wrap=True)
    for rows in sections:
        for cells in rows:
            table.add_row(*cells)
        table.add_section()
    found = console.measure(table, options=console.options.update_width(_WIDEST))
    console.width = max(_WIDTH, found.maximum)
    console.print(table)


def print_facts(rank: int, facts: Mapping[str, str | int], command: str) -> Console:
    """Print what the numbers depend on, one fact on a line; return the console, which prints on rank 0 only.

    It is for plain text: some launchers give each rank a terminal of 80 columns, whatever the user's output goes to.
    """
    console = Console(quiet=rank != 0, width=_WIDTH, force_terminal=False, highlight=False)
    if facts["ranks"] == 1:
        console.print(f"One process alone; to measure communication: mpirun -n 2 {command}")
    table = Table(box=None, show_header=False)
    for name, fact in facts.items():
        table.add_row(name, str(fact))
    console.print("mpiplus bench", table)
    load, cores = os.getloadavg()[0], len(os.sched_getaffinity(0))
    if load > _BUSY * cores:
        console.print(
            f"The machine is loaded ({load:.1f} processes want its {counted(cores, 'core')}): these times say little. "
            f"Measure when the others have ended."
        )
    return console


def print_report(console: Console, report: Report) -> None:
    """Print the tables and the notes, but not the facts: they stand above, see :func:`print_facts`."""
    for limit in report.limits().values():
        console.print(f"\n{limit.in_words()}")
    console.print("\nmicroseconds per call on the slowest rank, median of the turns; GB/s: bus bandwidth")
    alike = groupby(report.rows, key=lambda row: (row.operation, row.dtype))
    sections = ((table_cells(row, report.contestants) for row in rows) for _, rows in alike)
    print_table(console, table_header(report.contestants), 2, sections)
    for note in report.notes():
        console.print(note, style="dim")
    if not report.overlaps:
        return
    console.print(
        f"\nasync overlap: all_reduce of {format_size(OVERLAP_SIZE)}, then time.sleep({OVERLAP_SLEEP}), then wait()"
    )
    rows = [
        (found.contestant, format_us(found.sync_us), format_us(found.wait_us), f"{found.percent:.1f} %")
        for found in report.overlaps
    ]
    print_table(console, ("", "synchronous us", "wait() us", "left to wait()"), 1, [rows])
