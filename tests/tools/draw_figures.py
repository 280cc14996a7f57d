"""Draw docs/all-reduce.svg from the table of all calls in docs/performance.md; renew_figures.py does so at its end.

It has a background of its own, so that it can be read in a light page and in a dark one.
"""

from __future__ import annotations

import math
import re
from pathlib import Path

DOCS = Path(__file__).parents[2] / "docs"
PICTURE, PAGE = DOCS / "all-reduce.svg", DOCS / "performance.md"
WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 720, 300, 64, 96, 40, 44
CONTESTANTS = (("gloo", "#c2410c", 2), ("raw MPI", "#64748b", 0), ("mpiplus", "#1d4ed8", 1))  # and their columns
TICKS = {1: "1 us", 10: "10 us", 100: "100 us", 1000: "1 ms", 10000: "10 ms"}


def rows_of(page: str) -> list[tuple[str, list[float]]]:
    """The sizes of all_reduce in float32, each with the times of raw MPI, mpiplus and gloo in us."""
    table = re.search(r"<!-- figures: all-calls -->\n(.*?)<!-- /figures -->", page, re.S)
    assert table is not None
    found = re.findall(r"^\| all_reduce \| float32 \| ([^|]+) \| (.*?) \|$", table[1], re.M)
    return [(size, [float(cell.replace(",", "")) for cell in cells.split(" | ")[:3]]) for size, cells in found]


def picture(page: str) -> str:
    """The drawing, both axes logarithmic."""
    rows = rows_of(page)

    def x(place: float) -> float:
        return LEFT + place * (WIDTH - LEFT - RIGHT) / (len(rows) - 1)

    def y(us: float) -> float:
        return HEIGHT - BOTTOM - (math.log10(us) + 0.3) * (HEIGHT - TOP - BOTTOM) / 4.6

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif" '
        'font-size="13" fill="#334155">',
        "<title>Time of an all_reduce over its size: gloo, raw MPI, mpiplus</title>",
        f'<rect width="{WIDTH}" height="{HEIGHT}" rx="8" fill="#f8fafc"/>',
        f'<text x="{LEFT}" y="24" font-weight="bold">all_reduce of float32, 2 ranks on one node: time of a call</text>',
    ]
    for us, label in TICKS.items():
        parts.append(f'<path d="M{LEFT} {y(us):.1f}H{WIDTH - RIGHT}" stroke="#cbd5e1"/>')
        parts.append(f'<text x="{LEFT - 8}" y="{y(us) + 4:.1f}" text-anchor="end">{label}</text>')
    for place, (size, _) in enumerate(rows):
        parts.append(f'<text x="{x(place):.1f}" y="{HEIGHT - 16}" text-anchor="middle">{size}</text>')
    for name, colour, column in CONTESTANTS:
        points = [(x(place), y(times[column])) for place, (_, times) in enumerate(rows)]
        line = " ".join(f"{across:.1f},{down:.1f}" for across, down in points)
        parts.append(f'<polyline points="{line}" fill="none" stroke="{colour}" stroke-width="2.5"/>')
        parts += [f'<circle cx="{across:.1f}" cy="{down:.1f}" r="3.5" fill="{colour}"/>' for across, down in points]
        across, down = points[-1]
        parts.append(f'<text x="{across + 10:.1f}" y="{down + 4:.1f}" fill="{colour}" font-weight="bold">{name}</text>')
    return "\n".join([*parts, "</svg>"]) + "\n"


if __name__ == "__main__":
    PICTURE.write_text(picture(PAGE.read_text()))
    print(f"wrote {PICTURE.name}")
