"""The layers of the package, from the ground up: where each module is, what it may import; the same for the C files.

``test_layout.py`` reads the code and compares; ``python tests/unit/layers.py`` draws them into docs/architecture.md.
"""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "torchmpi_plugin"
C_SRC = ROOT / "c_src"
PAGE = ROOT / "docs" / "architecture.md"
_NAME = PACKAGE.name

#: The modules that lie beside the layers: below all of them, and the entry, by which torch and users come in.
GROUND, ENTRY = "the ground", "the entry"
LOOSE = {
    GROUND: (
        *("names", "errors", "flavours", "forks", "operations", "options", "protocol", "seconds", "settings"),
        *("torch_internals", "torch_operators"),
    ),
    ENTRY: ("__init__", "_autoload"),
}

#: What each layer may import: a layer, one of the modules on the ground, or one module of a layer.
LAYERS: dict[str, tuple[str, ...]] = {
    GROUND: (),
    "node": ("settings",),
    "launchers": ("flavours", "names", "settings", "node"),
    "tensors": ("names", "operations", "settings", "torch_internals", "node"),
    "mpi": ("errors", "flavours", "forks", "names", "settings", "node", "launchers", "tensors"),
    "store": ("errors", "names", "protocol", "node", "launchers", "mpi"),
    "communicator": ("errors", "forks", "names", "protocol", "settings", "node", "mpi", "store"),
    "engine": ("names", "errors", "forks", "operations", "torch_internals", "tensors", "mpi"),
    "timeline": ("errors", "names", "operations", "settings", "tensors", "mpi", "engine"),
    "status": ("names", "seconds", "settings", "node", "engine", "timeline"),
    "diagnosis": (
        *("errors", "names", "operations", "settings", "torch_internals"),
        *("node", "tensors", "store", "engine", "timeline", "status"),
    ),
    "group": (
        *("errors", "forks", "names", "operations", "settings", "torch_internals"),
        *("node", "tensors", "mpi", "store", "communicator", "engine", "timeline", "diagnosis"),
    ),
    "api": (GROUND, "tensors", "mpi", "group"),
    "lifecycle": (
        *(GROUND, "node", "launchers", "tensors", "mpi", "store", "communicator", "engine"),
        *("timeline", "status", "diagnosis", "group", "api"),
    ),
    "jobs": ("names", "settings", "node", "launchers"),
    "dist": ("errors", "names", "node", "launchers"),
    "launch": ("errors", "names", "node", "launchers", "mpi", "jobs", "dist"),
    "integrations": ("names", "settings", "launchers", "api"),
    "cli": (
        *("flavours", "names", "operations", "options", "seconds", "settings"),
        *("node", "launchers", "mpi", "communicator", "timeline", "jobs"),
    ),
    ENTRY: ("errors", "forks", "names", "options", "settings", "torch_internals", "api"),
}

#: The folders of c_src, bottom first: a file may include and call what is in its own folder or in one before it.
#: ``shim.h``, which declares what Python calls, and ``ops.def``, the table of operations, lie beside them and may be
#: included from everywhere.
C_LAYERS = (
    *("arith", "mpi", "engine", "cuda", "message", "shm", "internode", "mpicoll", "p2p", "collectives", "group"),
    "python",
)
#: Only the layer python includes it.
PYTHON_HEADER = "Python.h"


# ---- Python ----


@functools.cache
def modules() -> dict[str, Path]:
    """All modules, by their names within the package; a layer itself is its ``__init__``."""
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(PACKAGE).with_suffix("").parts
        found[".".join(parts[:-1] if len(parts) > 1 and parts[-1] == "__init__" else parts)] = path
    return found


def layer_of(module: str) -> str | None:
    """Where a module is; None if it is nowhere."""
    first, _, rest = module.partition(".")
    if first in LAYERS and (rest or module in modules()):
        return first
    return next((layer for layer, names in LOOSE.items() if module in names), None)


def imports(module: str, text: str, known: frozenset[str]) -> Iterator[str]:
    """The modules of the package that ``module``, with this text, imports: also in functions and for types only."""
    path = modules().get(module)
    here = [_NAME, *(module.split(".") if module != "__init__" else [])]
    package = here if path is not None and path.name == "__init__.py" else here[:-1]
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            whole = ".".join([*base, *([node.module] if node.module else [])])
            names = [f"{whole}.{alias.name}" for alias in node.names]
        else:
            continue
        for name in names:
            inside = name.removeprefix(f"{_NAME}.")
            while inside != name and inside:  # a name in a module, else the module or layer itself
                if inside in known:
                    yield inside
                    break
                inside = inside.rpartition(".")[0]


def is_allowed(importer: str, imported: str) -> bool:
    """Whether the list says so."""
    from_layer, to_layer = layer_of(importer), layer_of(imported)
    if from_layer == to_layer:
        return True
    allowed = LAYERS[from_layer or ENTRY]
    return to_layer in allowed or imported in allowed


def circle(edges: dict[str, set[str]]) -> list[str]:
    """Some circle of a graph, or nothing."""
    done: set[str] = set()

    def search(node: str, way: list[str]) -> list[str]:
        if node in way:
            return [*way[way.index(node) :], node]
        if node in done:
            return []
        found = next((found for other in sorted(edges.get(node, ())) if (found := search(other, [*way, node]))), [])
        done.add(node)
        return found

    return next((found for node in sorted(edges) if (found := search(node, []))), [])


# ---- C ----


def _without_comments(text: str) -> str:
    return re.sub(r"/\*.*?\*/|//[^\n]*", "", text, flags=re.DOTALL)


def c_files() -> dict[str, str]:
    """The text of each C file, by its path below c_src."""
    return {path.relative_to(C_SRC).as_posix(): path.read_text() for path in sorted(C_SRC.rglob("*.[ch]"))}


def c_is_allowed(user: str, used: str) -> bool:
    """Whether the order of layers lets one file include or call into another."""
    if used in ("shim.h", "ops.def"):
        return True
    if user == "shim.h":
        return used.startswith("arith/")
    return C_LAYERS.index(used.partition("/")[0]) <= C_LAYERS.index(user.partition("/")[0])


#: The beginning of a function, or of a variable with a value, that other files know.
_SHARED = re.compile(r"^(?!static|typedef|extern)[a-z][\w *]*?\b(mpp_\w+)(\([^;{]*\) \{|[^;(]* = )", re.M)


def c_uses(texts: dict[str, str]) -> dict[str, set[str]]:
    """Which files each of these C files includes or calls into; what is shared between files is called mpp_..."""
    codes = {name: _without_comments(text) for name, text in texts.items()}
    homes = {found[1]: name for name, code in codes.items() for found in _SHARED.finditer(code) if name.endswith(".c")}
    uses: dict[str, set[str]] = {}
    for name, code in codes.items():
        calls = re.findall(r"\bmpp_\w+\b(?=\s*[(.;,)])", code) if name.endswith(".c") else []  # headers declare
        uses[name] = {homes[word] for word in calls if word in homes} - {name}
        uses[name] |= set(re.findall(r'^#include "([^"]+)"', code, re.M))
    return uses


def c_units(uses: dict[str, set[str]]) -> dict[str, set[str]]:
    """The same of a .c file and the .h file of its name as one."""
    units: dict[str, set[str]] = {}
    for name, used in uses.items():
        unit = name.rpartition(".")[0]
        units.setdefault(unit, set()).update({other.rpartition(".")[0] for other in used} - {unit})
    return units


# ---- the picture ----

_BEGIN, _END = "<!-- drawn by tests/unit/layers.py -->", "<!-- end of the drawing -->"


def _reached(layer: str) -> set[str]:
    direct = {name.partition(".")[0] for name in LAYERS[layer]} & set(LAYERS)
    return direct.union(*(_reached(other) for other in direct)) if direct else set()


def _purpose(layer: str) -> str:
    path = PACKAGE / layer / "__init__.py"
    text = ast.get_docstring(ast.parse(path.read_text())) or ""
    return text.partition("\n")[0].rstrip(".").replace("``", "")


def picture() -> str:
    """The layers as Mermaid draws them: an arrow to each layer that is not reached by way of another one."""
    lines = [_BEGIN, "```mermaid", "flowchart TD"]
    inside = [layer for layer in LAYERS if layer not in LOOSE]
    lines += [f'    {layer}["<b>{layer}</b><br/>{_purpose(layer)}"]' for layer in reversed(inside)]
    for layer in reversed(inside):
        direct = {name.partition(".")[0] for name in LAYERS[layer]} & set(inside)
        beyond = set().union(*(_reached(other) for other in direct)) if direct else set()
        lines += [f"    {layer} --> {other}" for other in inside if other in direct - beyond]
    return "\n".join([*lines, "```", _END])


def drawn(page: str) -> str:
    """The page with the current picture."""
    before, _, rest = page.partition(_BEGIN)
    return before + picture() + rest.partition(_END)[2]


if __name__ == "__main__":
    PAGE.write_text(drawn(PAGE.read_text()))
