"""Writes docs/frameworks/table.md from a run of tests/frameworks, in the environment that ran it.

    python -m pytest tests/frameworks --junitxml=results.xml
    python tests/tools/generate_frameworks.py results.xml        # a second argument: another file, or - for stdout

It fails where a test did; the table then says which. A table of tests that were all left out is left out too.
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
from test_features import FEATURES  # noqa: E402
from test_own_scripts import ACCELERATES_OWN  # noqa: E402

INTRODUCTION = """# What was tried

Which version of which framework was run on mpiplus, and with what outcome. `tests/tools/generate_frameworks.py` writes
this page from a run of `tests/frameworks`: torch {torch}, {mpi}, two ranks on one node without a GPU,
each script under mpirun on mpiplus and under torchrun on gloo. "as on gloo": the same losses.
"""
EXAMPLES = """
| framework | version | script | outcome |
|---|---|---|---|
"""
OWN = """
The scripts with which Accelerate tests itself, which are in its wheel, on the CPU. "as on gloo": they come to their end
on both. The others want a GPU.

"""
MORE = """
More than one plain run (`tests/frameworks/test_features.py`): the same numbers as on gloo. `fsdp` shards nothing on a
CPU: Accelerate does that on accelerators only, and without one the Trainer goes on with DDP. Ray Train's workers have
no launcher of MPI's: with MPICH they are as on gloo, and Open MPI says that it cannot ([Ray Train](ray.md)).

| framework | version | what | outcome |
|---|---|---|---|
"""
BY_NAME = """
The [names in their lists](index.md#by-name), with the integrations and without (`tests/frameworks/test_by_name.py`):

"""


def found_in(results: Path) -> dict[str, str]:
    """What became of each test, by its name with its parameters."""
    found = {}
    for case in ElementTree.parse(results).iter("testcase"):
        bad = next((child for child in case if child.tag in ("failure", "error", "skipped")), None)
        found[case.get("name", "")] = "passed" if bad is None else bad.tag
    return found


def compared(results: dict[str, str], test: str) -> str:
    outcome = results.get(test, "not run")
    return "as on gloo" if outcome == "passed" else outcome


def command(script: str) -> str:
    name, *arguments = script.split()
    return " ".join([f"docs/examples/frameworks/{name}.py", *arguments])


def more_row(framework: str, what: str, outcome: str) -> str:
    return f"| {framework} | {version(framework)} | {what} | {outcome} |"


def page(results: dict[str, str]) -> str:
    rows = [
        f"| {SCRIPTS[name]} | {version(SCRIPTS[name])} | `{command(name)}` | "
        f"{compared(results, f'test_as_on_gloo[{name}]')} |"
        for name in SCRIPTS
    ]
    own = [f"- `{name}.py`: {compared(results, f'test_accelerates_own[{name}]')}" for name in ACCELERATES_OWN]
    more = [more_row(*name.split(": "), compared(results, f"test_feature_as_on_gloo[{name}]")) for name in FEATURES]
    more.append(more_row("ray", "Ray Train", results.get("test_ray_train", "not run")))
    others = "test_as_on_gloo|test_every|test_accelerates|test_feature|test_ray"
    names = [(name, outcome) for name, outcome in results.items() if not re.match(others, name)]
    from mpi4py import MPI

    library = " ".join([MPI.get_vendor()[0], ".".join(map(str, MPI.get_vendor()[1]))])
    text = INTRODUCTION.format(torch=version("torch").partition("+")[0], mpi=library)
    kinds = sorted({outcome for _, outcome in names})
    tests = [f"- {kind}: {sum(outcome == kind for _, outcome in names)} tests" for kind in kinds]
    tables = [(EXAMPLES, rows), (OWN, own), (MORE, more), (BY_NAME, tests)]
    left_out = ("| not run |", ": not run")
    run = [(head, lines) for head, lines in tables if not all(line.endswith(left_out) for line in lines)]
    return text + "".join(head + "\n".join(lines) + "\n" for head, lines in run)


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
