"""Where tests use the package's private names: what they reach for there breaks with any change of its inside.

``python tests/unit/private_names.py`` lists the uses. Names that torch's interface has too are not the package's own.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist

ROOT = Path(__file__).parents[2]
#: The one file that reaches inside for the others.
SUPPORT = ROOT / "tests" / "inside.py"
#: Words that libraries give a meaning: of named tuples, of click's and gettext's; of later versions of torch.
_WORDS = "_replace _asdict _fields _make _ _add_ephemeral_timeout _set_default_timeout"
OTHERS = {*re.findall(r"\w+", _WORDS), "_dump_fr_trace", "_dump_fr_trace_json"}
TORCHS = (dist, dist.distributed_c10d, dist.ProcessGroup, dist.Backend, dist.Work, torch.Tensor)
#: Functions, classes, variables and attributes that a file makes.
_MADE = re.compile(r"(?m)\b(?:def|class) (_\w+)|^ *(?:\w+\.)?(_[a-zA-Z]\w*)(?:, \w+)*(?::[^=\n]+)? = ")
#: As an attribute, in an import, or as a word that ``setattr`` and its like take.
_USED = re.compile(r"(?<!\bself)(?<!\bcls)\.(_[a-zA-Z]\w*)|import (?:\w+, )*(_[a-zA-Z]\w*)|[\"'](_[a-zA-Z]\w*)[\"']")


def of_the_package() -> set[str]:
    files = [*(ROOT / "torchmpi_plugin").rglob("*.py")]
    names = {name for file in files for found in _MADE.findall(file.read_text()) for name in found}
    names |= {file.stem for file in files} - {"_autoload"}  # which torch calls
    private = {name for name in names if re.match("_[a-zA-Z]", name) and name not in OTHERS}
    return {name for name in private if not any(hasattr(torchs, name) for torchs in TORCHS)}


def used(text: str, names: set[str]) -> Iterator[tuple[int, str]]:
    """Lines and names."""
    for number, line in enumerate(text.splitlines(), 1):
        for found in _USED.findall(line):
            yield from ((number, name) for name in found if name in names)


def uses() -> list[str]:
    names, found = of_the_package(), []
    for file in sorted((ROOT / "tests").rglob("*.py")):
        if file != SUPPORT and not file.is_relative_to(ROOT / "tests" / "tools"):
            where = file.relative_to(ROOT).as_posix()
            found += [f"{where}:{line}: {name}" for line, name in sorted(used(file.read_text(), names))]
    return found


if __name__ == "__main__":
    sys.stdout.writelines(f"{use}\n" for use in uses())
