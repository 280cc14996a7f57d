"""The code blocks of the documentation, and what the comments before them say.

A block is what stands between two fences. Comments directly before it, which no reader of the page sees, say how it is
tested:

    <!-- not run: needs Slurm -->   it is read, not run; for the reason given
    <!-- ci: example -->            a stage of .ci/run runs it as it stands
    <!-- needs: torch 2.15 -->      it runs on this torch or a newer one
    <!-- before: CODE -->           run before it, in its language; may have several lines
    <!-- ranks: 4 -->               Python: a new program from here on, on so many ranks; 1 is without a launcher
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

from packaging.version import Version

ROOT = Path(__file__).parents[2]
PAGES = (ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md")))
LANGUAGES = {"python", "sh", "text", "yaml", "dockerfile", "mermaid"}
RANKS = 2  # of a program in Python, unless the page says otherwise
_BLOCK = re.compile(r"((?:^<!--(?:(?!-->).)*-->\n)*)^```([^\n]*)\n(.*?)^```$", re.M | re.S)
_COMMENT = re.compile(r"<!-- *(not run|ci|needs|before|ranks):(.*?)-->", re.S)


@dataclass(frozen=True)
class Block:
    """One block; its first line of code is ``line`` of the page."""

    page: Path
    line: int
    language: str
    text: str
    comments: dict[str, str]

    @property
    def place(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"

    @property
    def runs(self) -> bool:
        return not self.reason

    @property
    def reason(self) -> str:
        """Why it does not run here; empty: it does."""
        if "ci" in self.comments:
            return "run by .ci/run"
        needed = self.comments.get("needs", "torch 0").removeprefix("torch ")
        if Version(version("torch")) < Version(needed):
            return f"needs torch {needed}"
        return self.comments.get("not run", "")


def blocks_of(page: Path) -> Iterator[Block]:
    text = page.read_text()
    for found in _BLOCK.finditer(text):
        line = text.count("\n", 0, found.start(3)) + 1
        comments = {name: content.strip() for name, content in _COMMENT.findall(found.group(1))}
        yield Block(page, line, found.group(2), found.group(3), comments)


def all_blocks(*languages: str) -> list[Block]:
    return [block for page in PAGES for block in blocks_of(page) if block.language in languages]


def programs(ranks: int) -> Iterator[list[Block]]:
    """The pages' programs in Python on so many ranks: each is some blocks of one page, one after the other."""
    for page in PAGES:
        found: list[tuple[int, list[Block]]] = [(RANKS, [])]
        for block in blocks_of(page):
            if block.language != "python" or not block.runs:
                continue
            if "ranks" in block.comments:
                found.append((int(block.comments["ranks"]), []))
            found[-1][1].append(block)
        yield from (blocks for wanted, blocks in found if wanted == ranks and blocks)


def rank_numbers() -> list[int]:
    """On how many ranks there are programs."""
    return sorted({RANKS, *(int(b.comments["ranks"]) for b in all_blocks("python") if "ranks" in b.comments)})
