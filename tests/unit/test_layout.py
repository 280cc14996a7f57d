"""The code is where ``layers.py`` says, and imports and calls go one way, without circles."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import layers
import private_names
import pytest

MODULES = layers.modules()
KNOWN = frozenset(MODULES)
TEXTS = {name: path.read_text() for name, path in MODULES.items()}
C_TEXTS = layers.c_files()


EDGES = {name: set(layers.imports(name, text, KNOWN)) for name, text in TEXTS.items()}
C_USES = layers.c_uses(C_TEXTS)


def test_every_module_is_in_a_layer() -> None:
    assert [name for name in MODULES if layers.layer_of(name) is None] == []
    assert set(layers.LAYERS) == set(map(layers.layer_of, MODULES))


def test_imports_go_down() -> None:
    order = list(layers.LAYERS)
    for layer, allowed in layers.LAYERS.items():
        above = [name for name in allowed if (home := name.partition(".")[0]) in order[order.index(layer) :] and home]
        assert not above, f"{layer} may import {above}, which come later in the list"
    upwards = [(name, other) for name, used in EDGES.items() for other in used if not layers.is_allowed(name, other)]
    assert upwards == []
    assert not layers.is_allowed("node.node", "group.world") and not layers.is_allowed("jobs.job", "mpi.runtime")
    assert layers.circle(EDGES) == []


def test_what_is_allowed_is_used() -> None:
    """So that the picture shows what there is."""
    for layer, allowed in layers.LAYERS.items():
        imported = {other for name, used in EDGES.items() if layers.layer_of(name) == layer for other in used}
        unused = [name for name in allowed if name not in imported and name not in map(layers.layer_of, imported)]
        assert not unused, f"{layer} imports nothing of {unused}"


def test_c_files() -> None:
    """Each in a layer and under a name of its own; calls go down, without circles; one layer knows Python."""
    assert {name.rpartition("/")[0] for name in C_TEXTS if name != "shim.h"} == set(layers.C_LAYERS)
    assert len({name.rpartition("/")[2] for name in C_TEXTS}) == len(C_TEXTS)
    assert [(a, b) for a, used in C_USES.items() for b in sorted(used) if not layers.c_is_allowed(a, b)] == []
    found = {"engine/operation.c", "engine/polling.c", "shm/channel.c", "p2p/windows.c"}
    assert C_USES["group/group.c"] >= found  # it does find calls
    assert layers.circle(layers.c_units(C_USES)) == []
    included = set().union(*C_USES.values())
    assert [name for name in C_TEXTS if name.endswith(".h") and name not in included] == []
    assert {name.partition("/")[0] for name, text in C_TEXTS.items() if layers.PYTHON_HEADER in text} == {"python"}


def test_the_architecture_page_has_the_layers() -> None:
    page = layers.PAGE.read_text()
    assert page == layers.drawn(page), "python tests/unit/layers.py draws it"
    rows = [line.split("|")[1].strip() for line in page.splitlines() if line.startswith("| ")]
    begin = rows.index(layers.C_LAYERS[0])
    assert rows[begin : begin + len(layers.C_LAYERS)] == [*layers.C_LAYERS]


def test_no_file_is_too_long(limit: int = 450) -> None:
    lengths = {name: len(text.splitlines()) for name, text in {**TEXTS, **C_TEXTS}.items()}
    assert {name: length for name, length in lengths.items() if length > limit} == {}


#: CI works on a copy without what git knows.
CHECKOUT = Path(os.environ.get("MPIPLUS_TEST_CHECKOUT", layers.ROOT))
BUDGET = Path(__file__).with_name("budget.txt")
TREES = {
    "product": ("torchmpi_plugin", "c_src"),
    "tests": ("tests", ":!tests/tools"),
    "tools": ("tests/tools",),
    "docs": ("docs/*.md",),
}


def lines_of(*paths: str) -> int:
    """Lines of the files that git knows, or is about to."""
    safe = ("-c", "safe.directory=*", "-C", str(CHECKOUT))  # it may be another user's
    command = ["git", *safe, "ls-files", "-z", "--cached", "--others", "--exclude-standard", "--"]
    names = subprocess.run([*command, *paths], check=True, capture_output=True, timeout=60).stdout.decode()
    files = (CHECKOUT / name for name in names.split("\0") if name)
    return sum(file.read_bytes().count(b"\n") for file in files if file.is_file())


def budget_of(what: str) -> int:
    rows = (line.split() for line in BUDGET.read_text().splitlines())
    return next(int(row[1]) for row in rows if row[:1] == [what])


@pytest.mark.skipif(not (CHECKOUT / ".git").exists(), reason="not in a checkout")
@pytest.mark.parametrize("tree", TREES)
def test_no_tree_outgrows_its_budget(tree: str) -> None:
    allowed, lines = budget_of(tree), lines_of(*TREES[tree])
    assert lines <= allowed, (
        f"{tree} has {lines} lines, and its budget is {allowed}: make room by what can go, or raise the budget in "
        f"{BUDGET.name} and say there, in a line, what the lines are for"
    )
    assert lines > 0


def test_tests_use_few_private_names() -> None:
    names = {"_inside"}
    kinds = "thing._inside", "from torchmpi_plugin import _inside", 'monkeypatch.setattr(thing, "_inside", 1)'
    assert all(list(private_names.used(text, names)) == [(1, "_inside")] for text in kinds)
    assert not list(private_names.used("self._inside = thing.other", names))
    uses = private_names.uses()
    assert 0 < len(uses) <= budget_of("private-names"), f"reach for what is public, or through {private_names.SUPPORT}"
