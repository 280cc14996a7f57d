"""The code is where ``layers.py`` says, and imports and calls go one way, without circles."""

from __future__ import annotations

import ast
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


def edges_of(texts: dict[str, str]) -> dict[str, set[str]]:
    return {name: set(layers.imports(name, text, KNOWN)) for name, text in texts.items()}


def against_the_order(edges: dict[str, set[str]]) -> list[str]:
    return [
        f"{importer} imports {imported}"
        for importer, all_of_them in edges.items()
        for imported in sorted(all_of_them)
        if not layers.is_allowed(importer, imported)
    ]


def c_against_the_order(uses: dict[str, set[str]]) -> list[str]:
    return [f"{a} uses {b}" for a, used in uses.items() for b in sorted(used) if not layers.c_is_allowed(a, b)]


def test_every_module_is_in_a_layer() -> None:
    assert [name for name in MODULES if layers.layer_of(name) is None] == []
    empty = [layer for layer in layers.LAYERS if not any(layers.layer_of(name) == layer for name in MODULES)]
    assert not empty


def test_no_layer_imports_what_is_above_it() -> None:
    order = list(layers.LAYERS)
    for layer, allowed in layers.LAYERS.items():
        above = [name for name in allowed if (home := name.partition(".")[0]) in order[order.index(layer) :] and home]
        assert not above, f"{layer} may import {above}, which come later in the list"


def test_imports_go_down() -> None:
    assert against_the_order(edges_of(TEXTS)) == []


def test_what_is_allowed_is_used() -> None:
    """So that the picture shows what there is."""
    edges = edges_of(TEXTS)
    for layer, allowed in layers.LAYERS.items():
        imported = {other for name, used in edges.items() if layers.layer_of(name) == layer for other in used}
        unused = [name for name in allowed if name not in imported and name not in map(layers.layer_of, imported)]
        assert not unused, f"{layer} imports nothing of {unused}"


def test_no_circle() -> None:
    assert layers.circle(edges_of(TEXTS)) == []


WRONG = {
    "against the order": ("node.node", "from ..group import world"),
    "in a function": ("engine.engine", "def f():\n    from ..lifecycle import shutdown"),
    "for types": ("engine.work", "if TYPE_CHECKING:\n    from ..group.group import Group"),
    "by its whole name": ("mpi.runtime", "import torchmpi_plugin.engine.engine"),
    "another module than allowed": ("jobs.job", "from ..mpi import runtime"),
}


@pytest.mark.parametrize("how", WRONG)
def test_a_wrong_import_is_found(how: str) -> None:
    module, line = WRONG[how]
    found = against_the_order(edges_of({**TEXTS, module: f"{TEXTS[module]}\n{line}\n"}))
    assert len(found) == 1, found
    assert found[0].startswith(f"{module} imports ")


def test_a_circle_within_a_layer_is_found() -> None:
    text = TEXTS["group.group"] + "\nfrom .process_group import ProcessGroupMPI\n"
    found = layers.circle(edges_of({**TEXTS, "group.group": text}))
    assert {"group.group", "group.process_group"} <= set(found)


def test_a_module_in_no_layer_is_found() -> None:
    assert layers.layer_of("utils") is None
    assert layers.layer_of("helpers.things") is None


def test_each_layer_says_what_it_is_for() -> None:
    for layer in layers.LAYERS:
        if layer not in layers.LOOSE:
            words = ast.get_docstring(ast.parse(TEXTS[layer])) or ""
            assert "Start " in words, f"{layer}/__init__.py does not say where to start reading"
            assert "Uses " in words, f"{layer}/__init__.py does not say whom it uses"


# ---- C ----


def test_every_c_file_is_in_a_layer() -> None:
    assert {name.rpartition("/")[0] for name in C_TEXTS if name != "shim.h"} == set(layers.C_LAYERS)
    names = [name.rpartition("/")[2] for name in C_TEXTS]
    assert len(set(names)) == len(names)


def test_c_calls_go_down() -> None:
    uses = layers.c_uses(C_TEXTS)
    assert c_against_the_order(uses) == []
    found = {"engine/operation.c", "engine/polling.c", "shm/channel.c", "p2p/windows.c"}
    assert uses["group/group.c"] >= found  # it does find calls


def test_no_circle_in_c() -> None:
    assert layers.circle(layers.c_units(layers.c_uses(C_TEXTS))) == []


def test_every_header_is_included() -> None:
    included = set().union(*layers.c_uses(C_TEXTS).values())
    assert [name for name in C_TEXTS if name.endswith(".h") and name not in included] == []


def test_one_layer_knows_python() -> None:
    assert {name.partition("/")[0] for name, text in C_TEXTS.items() if layers.PYTHON_HEADER in text} == {"python"}


@pytest.mark.parametrize(
    ("file", "code", "wanted"),
    [
        ("engine/polling.c", '#include "cuda/staging.h"\n', "engine/polling.c uses cuda/staging.h"),
        ("engine/polling.c", "void f(void) { mpp_windows_end(NULL); }\n", "engine/polling.c uses p2p/windows.c"),
        ("shm/protocol.c", '#include "internode/internode.h"\n', "shm/protocol.c uses internode/internode.h"),
        ("shm/protocol.c", "void f(void) { mpp_exchange(0); }\n", "shm/protocol.c uses collectives/exchange.c"),
    ],
)
def test_a_wrong_call_is_found(file: str, code: str, wanted: str) -> None:
    assert c_against_the_order(layers.c_uses({**C_TEXTS, file: C_TEXTS[file] + code})) == [wanted]


@pytest.mark.parametrize(
    ("file", "code", "circle"),
    [
        ("engine/operation.c", "void f(void) { mpp_begin(NULL); }\n", {"engine/polling", "engine/operation"}),
        ("engine/engine.h", '#include "engine/bell.h"\n', {"engine/engine", "engine/bell"}),  # bell.c includes engine.h
    ],
)
def test_a_circle_within_a_layer_of_c_is_found(file: str, code: str, circle: set[str]) -> None:
    uses = layers.c_uses({**C_TEXTS, file: C_TEXTS[file] + code})
    assert circle <= set(layers.circle(layers.c_units(uses)))


# ---- the page ----


def test_the_architecture_page_has_the_picture() -> None:
    page = layers.PAGE.read_text()
    assert page == layers.drawn(page), "python tests/unit/layers.py draws it"


def test_the_architecture_page_has_the_layers_of_c() -> None:
    rows = [line.split("|")[1].strip() for line in layers.PAGE.read_text().splitlines() if line.startswith("| ")]
    begin = rows.index(next(iter(layers.C_LAYERS)))
    assert rows[begin : begin + len(layers.C_LAYERS)] == list(layers.C_LAYERS)


def test_no_file_is_too_long(limit: int = 450) -> None:
    lengths = {name: len(text.splitlines()) for name, text in {**TEXTS, **C_TEXTS}.items()}
    assert {name: length for name, length in lengths.items() if length > limit} == {}


# ---- the budget ----

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
