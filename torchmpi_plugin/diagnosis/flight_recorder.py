"""The last operations of this process, for a post-mortem: what torch's flight recorder keeps, in its form.

torch's own recorder sees what goes through torch's dispatcher, which an operation of mpiplus does not (see
docs/api-modes.md); and a backend in Python cannot tell it when an operation is complete. So mpiplus keeps a ring of its
own, and writes it as torch does: under the same variables, to the same files, for the same tools
(``python -m torch.distributed.flight_recorder.fr_trace``). An entry is the record that C writes of a call anyway.
"""

from __future__ import annotations

import json
import os
import pickle
import threading
import time
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from .. import operations, torch_internals
from .._bridge import Call
from ..engine import engine
from ..names import describe_ranks, log
from ..status import files
from ..timeline.rows import ROW, Kinds
from .frames import line_of

#: The version of torch's format that this writes.
_FORMAT = "2.10"
_DEFAULT_ENTRIES = 2000


class Subject(NamedTuple):
    """The group of an operation."""

    name: str
    description: str
    ranks: Sequence[int]

    @property
    def title(self) -> str:
        """The group's description, or its name where it has none, which torch calls "undefined"."""
        return self.name if self.description in ("", "undefined") else self.description

    @property
    def label(self) -> str:
        """The group's name in messages, which count ranks within the group."""
        named = f"group {self.name!r}" + (f" ({self.title})" if self.title != self.name else "")
        if list(self.ranks) == list(range(len(self.ranks))):
            return named
        return f"{named} (its {describe_ranks(range(len(self.ranks)))}: the world's {describe_ranks(self.ranks)})"


def _state(entry: Call) -> str:
    """As the analyzer calls it: what has failed was never seen to finish."""
    work = None if entry.work is None else entry.work()
    return "completed" if work is None or (work.finished and work._error is None) else "scheduled"


class Recorder:
    """One per world; keeps so many operations."""

    def __init__(self, entries: int, rank: int) -> None:
        self._ring: deque[Call] = deque(maxlen=entries)
        #: Keeps one more.
        self.append = self._ring.append
        self._rank = rank
        self._dumping, self._dumped = threading.Lock(), False
        engine.start().lib.mpp_keep_records(entries)

    def entries(self) -> list[Call]:
        """Return what is kept, the oldest first."""
        return list(self._ring)

    # ---- the trace ----

    def dump(self, collectives: bool = True, frames: bool = True, only_active: bool = False) -> dict[str, Any]:
        """The trace; without the operations, their frames or what is complete, if these are not wanted."""
        entries = self.entries()
        groups = list(dict.fromkeys(entry.subject for entry in entries))
        rows = [
            self._row(number, groups.index(entry.subject), entry, frames)
            for number, entry in enumerate(entries if collectives else [])
            if not only_active or _state(entry) != "completed"
        ]
        return {
            "version": _FORMAT,
            "pg_config": {
                group.name: {"name": group.name, "desc": group.description, "ranks": str(list(group.ranks))}
                for group in groups
            },
            "pg_status": self._status(entries),
            "comm_lib_version": "mpiplus",
            "entries": rows,
        }

    @staticmethod
    def _status(entries: list[Call]) -> dict[str, dict[str, int]]:
        status: dict[str, dict[str, int]] = {}
        for entry in entries:
            of_group = status.setdefault(entry.subject.name, {"last_completed_collective": -1})
            of_group["last_enqueued_collective"] = of_group["last_started_collective"] = entry.collective
            if entry.peer is None and _state(entry) == "completed":
                of_group["last_completed_collective"] = entry.collective
        return status

    def _row(self, number: int, group: int, entry: Call, frames: bool) -> dict[str, Any]:
        state, subject, calls = _state(entry), entry.subject, entry.frames or []
        created, started, completed = _times_of(entry.number)
        row = {
            "record_id": number,
            "pg_id": group,
            "process_group": (subject.name, subject.description),
            "collective_seq_id": entry.collective,
            "p2p_seq_id": entry.message,
            "op_id": entry.collective + entry.message,
            "profiling_name": f"mpiplus:{self._name(entry, subject.ranks.index(self._rank))}",
            "time_created_ns": created,
            **_columns("input", () if entry.operation == "recv" else entry.inputs),
            **_columns("output", () if entry.operation == "send" else entry.outputs),
            "state": state,
            "time_discovered_started_ns": started,
            "time_discovered_completed_ns": completed if state == "completed" else None,
            "retired": state == "completed",
            "timeout_ms": 0,
            "is_p2p": entry.peer is not None,
        }
        if frames:
            row["frames"] = [
                {"filename": code.co_filename, "line": line_of(code, at), "name": code.co_name}
                for code, at in zip(calls[::2], calls[1::2], strict=True)
            ]
        return row

    @staticmethod
    def _name(entry: Call, rank: int) -> str:
        if entry.peer is None:
            row = operations.BY_NAME.get(entry.operation)
            return (row and row.recorded) or entry.operation
        arrow = "->" if entry.operation == "send" else "<-"
        return f"{entry.operation} {rank}{arrow}{entry.peer if entry.peer >= 0 else '?'}"

    def write(self) -> str:
        """Write the trace to this rank's file, whose name it returns."""
        path = Path(f"{_file_prefix()}{self._rank}")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(pickle.dumps(self.dump()))
        return str(path)

    def write_after_failure(self) -> None:
        """:meth:`write`, once in the life of the process: later failures would cover what led to the first."""
        with self._dumping:
            if self._dumped or not _writes_after_failure():
                return
            self._dumped = True
            try:
                log.warning(
                    "mpiplus: the flight recorder's trace is in %s (read it with torch's flight_recorder.fr_trace)",
                    self.write(),
                )
            except Exception as error:
                log.warning("mpiplus: the flight recorder's trace cannot be written: %s", error)


def _times_of(call: int) -> tuple[int, int | None, int | None]:
    """Return when this rank came, when the last one had, and when the call was complete: in ns since the epoch."""
    lib, ffi = engine.start().lib, engine.start().ffi
    record: Any = ffi.new("mpp_record *")
    lib.mpp_record_of(call, record)
    offset = time.time_ns() - time.monotonic_ns()
    begun, last, complete = (record[0].begun, record[0].last_came, record[0].complete)
    return begun + offset, max(begun, last) + offset if last else None, complete + offset if complete else None


def _columns(side: str, shapes: Sequence[tuple[Sequence[int], torch.dtype]]) -> dict[str, Any]:
    return {
        f"{side}_sizes": [list(shape) for shape, _ in shapes],
        f"{side}_dtypes": [_name_of(dtype) for _, dtype in shapes],
    }


def _name_of(dtype: torch.dtype) -> str:
    """As c10 calls it: Float, Long, BFloat16."""
    return torch.empty(0, dtype=dtype, device="meta").type().rpartition(".")[2].removesuffix("Tensor")


# ---- torch's variables ----


def _first_set(*names: str) -> str:
    return next((value for name in names if (value := os.environ.get(name))), "")


def _writes_after_failure() -> bool:
    """torch does so from 2.15 on; before, for those who ask."""
    default = "1" if torch_internals.has_python_backends() else "0"
    word = _first_set("TORCH_FR_DUMP_ON_TIMEOUT", "TORCH_NCCL_DUMP_ON_TIMEOUT") or default
    return word.lower() in ("1", "y", "yes", "t", "true", "on")


def _file_prefix() -> str:
    if named := _first_set("TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE"):
        return named
    try:
        cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    except RuntimeError:  # in a container: neither HOME, nor a line for this user in /etc/passwd
        cache = files.make_directory()
    return str(cache / "torch" / "comm_lib_trace_rank_")


#: Of this process; None where the user has switched it off, or before the first world.
current: Recorder | None = None


def entries_wanted() -> int:
    """Return how many the user wants to be kept; a ValueError if that is no number."""
    word = _first_set("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE") or str(_DEFAULT_ENTRIES)
    try:
        return int(word)
    except ValueError:
        raise ValueError(f"TORCH_FR_BUFFER_SIZE must be a number of operations, not {word!r}") from None


def start(rank: int) -> None:
    """Called with every new world: keep recording, or begin to."""
    global current  # noqa: PLW0603
    entries = entries_wanted()
    if entries <= 0:
        current = None
        return
    current = Recorder(entries, rank)
    torch_internals.answer_recorder_calls("mpiplus", _dump_current)


def _dump_current(collectives: bool, frames: bool, only_active: bool) -> dict[str, Any]:
    recorder = current if current is not None else Recorder(1, 0)
    return recorder.dump(collectives, frames, only_active)


def last_operations(rank: int, size: int, node: int) -> str:
    """The text of ``timeline/rows.py``, then a line with the rows; of this rank of the world."""
    lines: list[dict[str, Any]] = []
    kinds, rows = Kinds(lines.append, rank, size, node, first=0), []
    lib, ffi = engine.start().lib, engine.start().ffi
    record: Any = ffi.new("mpp_record *")
    for entry in current.entries() if current is not None else ():
        if not lib.mpp_record_of(entry.number, record):
            continue
        code, at = (entry.frames or [None, 0])[:2]
        place = (code.co_filename, line_of(code, at)) if code else ("", 0)
        kind = kinds.number(entry.subject, entry.operation, entry.outputs[0][1] if entry.outputs else None, "", *place)
        told = {"kind": kind} | ({"sequence": entry.collective} if entry.peer is None else {})
        rows.append([told[name] if name in told else int(getattr(record[0], name)) for name in ROW.names or ()])
    return "\n".join(json.dumps(line) for line in [*lines, {"rows": rows}])
