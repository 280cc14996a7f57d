"""The format of a rank's two files of its calls. Imports neither torch nor MPI.

``JOB.RANK.calls`` is a ring of records of fixed length, ``mpp_record`` of c_src/shim.h, which C writes to.
``JOB.RANK.json`` has a JSON object a line: first of all the rank; then, as they come, groups, kinds of calls, and
measurements of a node's clock.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import time
import zlib
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

#: As ``mpp_record`` of c_src/shim.h.
ROW = np.dtype(
    [
        ("number", "u8"),
        *((name, "i8") for name in ("begun", "last_came", "complete", "asked")),
        *((name, "u8") for name in ("sequence", "bytes")),
        *((name, "i4") for name in ("kind", "last", "peer", "tag")),
    ]
)
#: How many calls are kept: a power of two. 4.5 MiB.
PLACES = 1 << 16
#: The kind of what is no call: the program's optimizer has made a step.
STEP = 1 << 30
#: So many kinds of calls have numbers; further ones, of a program that makes groups without end, are not recorded.
_MOST_KINDS = 100_000


class Kinds:
    """Writes a rank's text: a line about the rank, and one for each new group and kind of calls, which get numbers.

    Args:
        say: takes a line.
        rank, size, node: the rank's number and its node's, and of how many.
        first: the number of the first call that is recorded.
    """

    def __init__(self, say: Callable[[dict[str, Any]], object], rank: int, size: int, node: int, first: int) -> None:
        self._say = say
        self._kinds: dict[tuple[Any, ...], int] = {}
        self._groups: dict[int, tuple[int, Any]] = {}
        about = {"rank": rank, "size": size, "node": node, "host": socket.gethostname(), "pid": os.getpid()}
        say({**about, "first": first, "epoch": time.time_ns() - time.monotonic_ns()})

    def number(self, subject: Any, name: str, dtype: Any, op: str, file: str, line: int) -> int:
        """The number of a kind of calls; 0: it has none."""
        key = id(subject), name, dtype, op, file, line
        if (known := self._kinds.get(key)) is not None or len(self._kinds) >= _MOST_KINDS:
            return known or 0
        if id(subject) not in self._groups:
            # The subject too, so that no other one comes to its address.
            self._groups[id(subject)] = len(self._groups), subject
            self._say({"group": len(self._groups) - 1, "name": subject.title, "ranks": list(subject.ranks)})
        words, of = str(dtype or "").removeprefix("torch."), self._groups[id(subject)][0]
        number = self._kinds[key] = len(self._kinds) + 1
        self._say({"kind": number, "of": of, "name": name, "dtype": words, "op": op, "file": file, "line": line})
        return number


@dataclass
class Recorded:
    """The records of one rank."""

    about: dict[str, Any]  # its rank and process, and the epoch: what to add to its clock for ns since 1970
    rows: np.ndarray[Any, Any]
    steps: np.ndarray[Any, Any]
    dropped: int  # the number of its calls that are not in the ring any more
    groups: dict[int, dict[str, Any]] = field(default_factory=dict)
    kinds: dict[int, dict[str, Any]] = field(default_factory=dict)
    clocks: list[dict[str, Any]] = field(default_factory=list)  # node, at, offset and error, in ns of rank 0's clock
    reached: dict[str, Any] = field(default_factory=dict)  # messages, ns by bytes; with: the other rank


def parse(lines: str, rows: np.ndarray[Any, Any]) -> Recorded:
    """From the text and the ring. A line that was cut off is left out, as is a call that had only begun.

    Raises:
        ValueError: the text has no line about the rank.
    """
    objects: list[dict[str, Any]] = []
    for line in lines.splitlines():
        with contextlib.suppress(ValueError):
            objects.append(json.loads(line))
    if not objects or "rank" not in objects[0]:
        raise ValueError("these are no calls of a rank")
    first = objects[0].get("first", 1)
    rows = rows[(rows["kind"] > 0) & (rows["number"] >= first)]
    rows = rows[np.argsort(rows["number"])]
    dropped, is_step = int(rows["number"][0]) - first if len(rows) else 0, rows["kind"] == STEP
    found = Recorded(objects[0], rows[~is_step], rows[is_step], dropped)
    for each in objects[1:]:
        if "group" in each:
            found.groups[each["group"]] = each
        elif "kind" in each:
            found.kinds[each["kind"]] = each
        elif "clock" in each:
            found.clocks.append(each)
        elif "messages" in each:
            found.reached = each
    return found


def answered(text: str) -> Recorded:
    """Parse the answer of a running rank (``flight_recorder.last_operations``); a ValueError if it was cut off."""
    lines, _, last = text.strip().rpartition("\n")
    return parse(lines, np.array([tuple(row) for row in json.loads(last)["rows"]], ROW))


def pack(text: Path) -> bytes:
    """Both files of the rank whose text file this is."""
    return zlib.compress(b"\0".join(path.read_bytes() for path in (text, text.with_suffix(".calls"))), 1)


def unpack(packed: bytes, text: Path) -> None:
    lines, _, ring = zlib.decompress(packed).partition(b"\0")
    text.write_bytes(lines)
    text.with_suffix(".calls").write_bytes(ring)


def remove(text: Path) -> None:
    """Remove both, and the directory if nothing else is in it."""
    for path in (text, text.with_suffix(".calls")):
        path.unlink()
    with contextlib.suppress(OSError):
        text.parent.rmdir()


def jobs_in(directory: Path) -> dict[str, list[Path]]:
    """The text files of the ranks by job, the latest job last."""
    jobs: dict[str, list[Path]] = {}
    for path in sorted(directory.glob("*.*.json"), key=lambda path: path.stat().st_mtime):
        if path.with_suffix(".calls").exists():
            job = path.name.split(".")[0]
            jobs[job] = [*jobs.pop(job, []), path]
    return jobs


def read(path: Path) -> Recorded:
    """The rank whose text file this is; an OSError or a ValueError: it cannot be read."""
    ring = path.with_suffix(".calls").read_bytes()
    return parse(path.read_text(), np.frombuffer(ring[: len(ring) // ROW.itemsize * ROW.itemsize], ROW))
