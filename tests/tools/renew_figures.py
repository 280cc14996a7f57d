"""Measure the tables of figures in docs/ again; write each with the commit that it is of, and draw the picture.

    python tests/tools/renew_figures.py                          # on an idle machine with a core for each rank: minutes
    python tests/tools/renew_figures.py --nodes node1,node2      # the tables between two nodes as well
    python tests/tools/renew_figures.py --only all-calls,training    # some of FIGURES
    python tests/tools/renew_figures.py --only all-training --measured training.json   # of a run that was made before

A table stands between <!-- figures: NAME --> and <!-- /figures -->. The last block of commands before it measures it,
and is what runs here; tables with the same command are of one run. docs/api-modes.md has its own script, which runs
here too. Not renewed: figures within sentences, and tables without such marks.
"""

from __future__ import annotations

import argparse
import json
import re
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import draw_figures

from torchmpi_plugin.cli.bench import results

ROOT = Path(__file__).parents[2]
NODES = "node1,node2"  # as they stand in the commands
_BETWEEN = ("raw", "raw nonblocking", "mpiplus", "gloo", "front end")


def table(titles: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table in Markdown."""
    head, *lines = (f"| {' | '.join(cells)} |" for cells in (titles, *rows))
    return "\n".join((head, "|" + "---|" * len(titles), *lines))


def calls(found: dict[str, Any]) -> str:
    """Single calls of raw MPI, mpiplus and gloo."""
    titles = ("operation", "dtype", "size", "raw MPI, us", "mpiplus, us", "gloo, us", "mpiplus / raw", "gloo / mpiplus")
    rows = []
    for row in found["operations"]:
        size = results.format_size(row["bytes"]) if row["bytes"] else "-"
        times = [results.format_us(row["us"].get(name)) for name in ("raw", "mpiplus", "gloo")]
        ratios = [row["ratio"].get(pair) for pair in ("mpiplus/raw", "gloo/mpiplus")]
        compared = ["-" if ratio is None else f"{ratio:.2f}" for ratio in ratios]
        rows.append([row["operation"], row["dtype"] or "-", size, *times, *compared])
    return table(titles, rows)


def between(found: dict[str, Any]) -> str:
    """One operation in float32, each size with all contestants."""
    rows = []
    for row in found["operations"]:
        if row["dtype"] == "float32":
            times = [results.format_us(row["us"].get(name)) for name in _BETWEEN]
            rows.append([results.format_size(row["bytes"]), *times, f"{row['bus_gb_per_s']['mpiplus']:.2f}"])
    return table(("size", *_BETWEEN, "mpiplus, GB/s"), rows)


def every_way(found: dict[str, Any], dtypes: Sequence[str] = ("float32", "bfloat16")) -> str:
    """All ways to train, with what each backend's step takes of the step that does not communicate."""
    titles = ("way", "model", "dtype", "alone, ms", "mpiplus, ms (of alone)", "gloo, ms (of alone)", "mpiplus / gloo")
    rows = []
    for row in (row for row in found["training"] if row["dtype"] in dtypes):
        sides = [row["backends"][name] for name in ("mpiplus", "gloo")]
        steps = [f"{1e3 * side['step_seconds']:.1f} ({side['step_over_alone']:.2f})" for side in sides]
        alone, ratio = f"{1e3 * sides[0]['alone_seconds']:.1f}", f"{row['ratio']['mpiplus/gloo']:.2f}"
        rows.append([f"`{row['way']}`", row["model"], row["dtype"], alone, *steps, ratio])
    return table(titles, rows)


class Figure(NamedTuple):
    """A table: its page, and what makes it of the JSON that its command writes."""

    page: Path
    of: Callable[[dict[str, Any]], str]


PERFORMANCE, FACES = (ROOT / "docs" / name for name in ("performance.md", "api-modes.md"))
FIGURES = {
    "all-calls": Figure(PERFORMANCE, calls),
    "all-training": Figure(PERFORMANCE, every_way),
    "all-training-nodes": Figure(PERFORMANCE, lambda found: every_way(found, ("float32",))),
    "all-training-wire": Figure(PERFORMANCE, lambda found: every_way(found, ("float32",))),
    "between-nodes": Figure(PERFORMANCE, between),
}


def find(name: str) -> re.Match[str]:
    """A table's command (1), and what stands between its marks (2)."""
    fence = r"```sh\n((?:(?!```).)*)```(?:(?!```).)*"
    found = re.search(rf"{fence}<!-- figures: {name} -->\n(.*?)<!-- /figures -->", FIGURES[name].page.read_text(), re.S)
    assert found is not None, f"{FIGURES[name].page.name} has no command with a table {name}"
    return found


def commit() -> str:
    """The checkout's; with "-dirty" where it has been changed since."""
    command = ("git", "-C", ROOT, "describe", "--always", "--dirty", "--exclude", "*")
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def measure(command: str) -> dict[str, Any]:
    """What ``mpiplus bench`` writes as JSON."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "figures.json")
        subprocess.run(["bash", "-exc", f"{command} --json {shlex.quote(str(file))}"], check=True, cwd=ROOT / "docs")
        return dict(json.loads(file.read_text()))


def note(facts: dict[str, Any], of: str) -> str:
    """What stands below a table."""
    where = f"{facts['ranks']} ranks, {facts['nodes']} node(s) of {facts['cores']} cores ({facts['processor']})"
    return f"Commit {of}, {facts['date'][:10]}. Medians of one run: {where},\n{facts['MPI']}, torch {facts['torch']}."


def main() -> None:
    """Measure, and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", default="", help="two nodes, with a comma")
    parser.add_argument("--only", default=",".join((*FIGURES, "api-modes")), help="names, with commas")
    parser.add_argument("--measured", type=Path, help="the JSON of a run of this commit, in place of a new one")
    options, of, found = parser.parse_args(), commit(), {}
    if not Path(results.__file__).is_relative_to(ROOT):
        sys.exit(f"the package is that of {results.__file__}, not this checkout's: pip install -e .")
    for name in options.only.split(","):
        if name == "api-modes":  # writes its table by itself, where torch has what it measures
            subprocess.run([sys.executable, ROOT / "tests" / "tools" / "measure_api_modes.py"], check=True)
            FACES.write_text(FACES.read_text().replace("\nMedians of one run, torch", f"\nCommit {of}; medians, torch"))
            continue
        command = find(name)[1].partition("  #")[0].strip()
        if options.measured:
            found[command] = json.loads(options.measured.read_text())
        elif NODES in command and not options.nodes:
            print(f"{name}: left as it is, without --nodes")
            continue
        if command not in found:
            found[command] = measure(command.replace(NODES, options.nodes))
        new = f"{FIGURES[name].of(found[command])}\n\n{note(found[command]['facts'], of)}\n"
        page, place = FIGURES[name].page, find(name)
        page.write_text(place.string[: place.start(2)] + new + place.string[place.end(2) :])
    draw_figures.PICTURE.write_text(draw_figures.picture(PERFORMANCE.read_text()))


if __name__ == "__main__":
    main()
