"""What the scripts have in common that run programs of other projects on mpiplus and on gloo."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

PAGE = Path(__file__).parents[2] / "docs" / "pytorch-tests.md"


def outcome(program: Sequence[str], variables: Mapping[str, str], ranks: int, seconds: float) -> tuple[bool, str]:
    """Whether all ranks have passed, and otherwise the first error. They are started by Open MPI's mpirun."""
    launch = [str(Path(sys.executable).with_name("mpirun")), "--allow-run-as-root", "--oversubscribe", "-n", str(ranks)]
    exported = [part for name in variables for part in ("-x", name)]
    environment = os.environ | {"OMP_NUM_THREADS": "1"} | variables
    try:
        done = subprocess.run(
            [*launch, *exported, sys.executable, *program],
            env=environment,
            capture_output=True,
            text=True,
            timeout=seconds,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return False, f"not through in {seconds:.0f} s"
    lines = re.findall(r"^(?:\[rank\d+\]: )?(\w+Error: .*)", done.stderr, re.MULTILINE)
    if done.returncode == 0:
        return True, ""
    return False, [*lines, f"exit code {done.returncode}"][0][:200]


def write_section(place: str, heading: str, text: str) -> None:
    """In place of what the page has under the heading, else at its end; - is stdout."""
    if place == "-":
        print(text)
        return
    page = Path(place)
    before, found, after = page.read_text().partition(f"{heading}\n")
    _, next_one, others = after.partition("\n## ") if found else ("", "", "")
    page.write_text(f"{before.rstrip()}\n\n{text}{next_one}{others}")
