"""Writes docs/frameworks/table.md from a run of tests/frameworks, in the environment that ran it.

    python -m pytest tests/frameworks --junitxml=results.xml
    python docs/tools/generate_frameworks.py results.xml        # a second argument: another file, or - for stdout

It fails where a test did; the table then says which.
"""

from __future__ import annotations

import re
import sys
from importlib.metadata import version
from pathlib import Path
from xml.etree import ElementTree

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "frameworks" / "table.md"
sys.path += [str(ROOT / "tests" / "frameworks"), str(ROOT / "tests")]
from test_examples import SCRIPTS  # noqa: E402

INTRODUCTION = """# What was tried

`docs/tools/generate_frameworks.py` writes this page from a run of `tests/frameworks`: torch {torch}, {mpi}, two
ranks on one node without a GPU, each script under mpirun on mpiplus and under torchrun on gloo. "as on gloo": the same
losses.

| framework | version | script | outcome |
|---|---|---|---|
"""
BY_NAME = """
The [names in their lists](index.md#by-name), with the integrations and without:

| test | outcome |
|---|---|
"""


def found_in(results: Path) -> dict[str, str]:
    """What became of each test, by its name with its parameters."""
    found = {}
    for case in ElementTree.parse(results).iter("testcase"):
        bad = next((child for child in case if child.tag in ("failure", "error", "skipped")), None)
        found[case.get("name", "")] = "passed" if bad is None else bad.tag
    return found


def page(results: dict[str, str]) -> str:
    examples = {name: results.get(f"test_as_on_gloo[{name}]", "not run") for name in SCRIPTS}
    rows = [
        f"| {SCRIPTS[name]} | {version(SCRIPTS[name])} | `docs/examples/frameworks/{name}.py` | "
        f"{'as on gloo' if outcome == 'passed' else outcome} |"
        for name, outcome in examples.items()
    ]
    names = [(name, outcome) for name, outcome in results.items() if not re.match("test_as_on_gloo|test_every", name)]
    from mpi4py import MPI

    library = " ".join([MPI.get_vendor()[0], ".".join(map(str, MPI.get_vendor()[1]))])
    text = INTRODUCTION.format(torch=version("torch").partition("+")[0], mpi=library)
    tests = [f"| `{name}` | {outcome} |" for name, outcome in names]
    return text + "\n".join(rows) + "\n" + BY_NAME + "\n".join(tests) + "\n"


def main() -> None:
    results = found_in(Path(sys.argv[1]))
    text = page(results)
    if sys.argv[2:] == ["-"]:
        print(text)
    else:
        (Path(sys.argv[2]) if sys.argv[2:] else PAGE).write_text(text)
    sys.exit(not results or any(outcome != "passed" for outcome in results.values()))


if __name__ == "__main__":
    main()
