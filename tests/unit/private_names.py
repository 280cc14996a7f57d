"""Where tests use the package's private names: what they reach for there breaks with any change of its inside.

``python tests/unit/private_names.py`` lists the uses. Names that torch's interface has too are not the package's own.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist

ROOT = Path(__file__).parents[2]
#: The one file that reaches inside for the others.
SUPPORT = ROOT / "tests" / "inside.py"
#: Words that libraries give a meaning: of named tuples, of click's and gettext's.
OTHERS = {"_replace", "_asdict", "_fields", "_make", "_"}
TORCHS = (dist, dist.distributed_c10d, dist.ProcessGroup, dist.Backend, dist.Work, torch.Tensor)
#: Of backends in later versions of torch than the oldest.
LATER = {"_add_ephemeral_timeout", "_dump_fr_trace", "_set_default_timeout"}


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__") and name not in OTHERS | LATER


def defined(tree: ast.AST) -> Iterator[str]:
    """Functions, classes, variables and attributes that a file makes."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.attr


def of_the_package() -> set[str]:
    files = [*(ROOT / "torchmpi_plugin").rglob("*.py")]
    names = {name for file in files for name in defined(ast.parse(file.read_text()))} | {file.stem for file in files}
    return {name for name in names if is_private(name) and not any(hasattr(torchs, name) for torchs in TORCHS)}


def used(text: str, names: set[str]) -> Iterator[tuple[int, str]]:
    """Lines and names: as an attribute, in an import, or as a word that ``setattr`` and its like take."""
    tree = ast.parse(text)
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and node.attr in names:
            if not (isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")):
                yield node.lineno, node.attr
        elif isinstance(node, ast.ImportFrom):
            yield from ((node.lineno, alias.name) for alias in node.names if alias.name in names)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value in names:
            yield node.lineno, node.value


def uses() -> list[str]:
    names, found = of_the_package(), []
    for file in sorted((ROOT / "tests").rglob("*.py")):
        if file != SUPPORT and not file.is_relative_to(ROOT / "tests" / "tools"):
            where = file.relative_to(ROOT).as_posix()
            found += [f"{where}:{line}: {name}" for line, name in sorted(used(file.read_text(), names))]
    return found


if __name__ == "__main__":
    sys.stdout.writelines(f"{use}\n" for use in uses())
