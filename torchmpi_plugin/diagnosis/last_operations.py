"""Records of the flight recorder, as a timeline reads them: for ``mpiplus status --timeline``."""

from __future__ import annotations

import json
import os
import socket
import time
from typing import Any

from .._bridge import Call
from ..engine import engine
from ..timeline.rows import ROW
from . import flight_recorder
from .frames import line_of


def as_text(rank: int, size: int, node: int) -> str:
    """The lines of ``timeline/rows.py``, then a line with the rows; of this rank of the world."""
    recorder = flight_recorder.current
    entries = [] if recorder is None else recorder.entries()
    about = {"rank": rank, "size": size, "node": node, "host": socket.gethostname(), "pid": os.getpid()}
    lines: list[dict[str, Any]] = [{**about, "first": 0, "epoch": time.time_ns() - time.monotonic_ns()}]
    groups: dict[Any, int] = {}
    kinds: dict[tuple[Any, ...], int] = {}
    rows = []
    lib, ffi = engine.start().lib, engine.start().ffi
    record: Any = ffi.new("mpp_record *")
    for entry in entries:
        if not lib.mpp_record_of(entry.number, record):
            continue
        if entry.subject not in groups:
            groups[entry.subject] = len(groups)
            lines.append(
                {"group": groups[entry.subject], "name": entry.subject.title, "ranks": list(entry.subject.ranks)}
            )
        key = groups[entry.subject], entry.operation, entry.outputs[0][1] if entry.outputs else None, *_place_of(entry)
        if key not in kinds:
            kinds[key] = len(kinds) + 1
            words = str(key[2] or "").removeprefix("torch.")
            of = {"of": key[0], "name": key[1], "dtype": words, "op": "", "file": key[3], "line": key[4]}
            lines.append({"kind": kinds[key], **of})
        told = {"kind": kinds[key]} | ({"sequence": entry.collective} if entry.peer is None else {})
        rows.append([told[name] if name in told else int(getattr(record[0], name)) for name in ROW.names or ()])
    return "\n".join(json.dumps(line) for line in [*lines, {"rows": rows}])


def _place_of(entry: Call) -> tuple[str, int]:
    if not entry.frames:
        return "", 0
    code, instruction = entry.frames[:2]
    return code.co_filename, line_of(code, instruction)
