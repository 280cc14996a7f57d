"""MPIPLUS_TIMELINE: this rank records its calls in files. C writes the times, this gives numbers to kinds of calls."""

from __future__ import annotations

import json
import logging
import mmap
import os
import socket
import time
import weakref
from pathlib import Path
from types import CodeType
from typing import Any

from torch.optim.optimizer import register_optimizer_step_post_hook

from .. import _bridge, operations, settings
from ..engine import engine
from ..tensors.dtypes import OPERATIONS
from .rows import PLACES, ROW, STEP

log = logging.getLogger("torchmpi_plugin")

#: So many kinds of calls have numbers; further ones, of a program that makes groups without end, are not recorded.
_MOST_KINDS = 100_000
#: As in c_src/python/timeline.c: from there on the sum is divided by the number of ranks, or the number is torch's.
_AVERAGES, _OF_PYTHON = 64, 128


class Recording:
    """Of one world.

    Args:
        directory: where the files go.
        job: a name that no other job has.
        about: of this rank: see ``rows.Recorded``.
    """

    def __init__(self, directory: Path, job: str, about: dict[str, Any]) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self.text = directory / f"{job}.{about['rank']}.json"
        self._lines = self.text.open("w", buffering=1)
        self._kinds: dict[tuple[Any, ...], int] = {}
        self._groups: dict[Any, int] = {}
        self._subjects: list[Any] = []
        first = self._keep_in(self.text.with_suffix(".calls"))
        self.say({**about, "first": first, "epoch": time.time_ns() - time.monotonic_ns()})
        self._steps, self._optimizer = 0, lambda: None
        self._hook = register_optimizer_step_post_hook(self._note_step)
        _bridge.set_timeline(self._kind_of)

    @staticmethod
    def _keep_in(path: Path) -> int:
        """Let C write to a file, from the call of the number that this returns on.

        The file's blocks are taken now: a disk that is full later on would be a signal. And its pages, each of which
        costs 5 us and more when it is first written to, by a call.
        """
        lib, ffi = engine.start().lib, engine.start().ffi
        with path.open("w+b") as file:
            os.posix_fallocate(file.fileno(), 0, PLACES * ROW.itemsize)
            memory = mmap.mmap(file.fileno(), PLACES * ROW.itemsize)
        memory[:: mmap.PAGESIZE] = bytes(len(range(0, len(memory), mmap.PAGESIZE)))
        _mapped.append(memory)
        first = int(lib.mpp_keep_records_at(int(ffi.cast("uintptr_t", ffi.from_buffer(memory))), PLACES))
        if not first:
            raise MemoryError("no memory")
        return first

    def _note_step(self, optimizer: Any, *_: Any) -> None:
        """Of several optimizers the first one to make a step counts; no lock, as two threads' steps are no steps."""
        if self._optimizer() is None:
            self._optimizer = weakref.ref(optimizer)
        if self._optimizer() is optimizer:
            self._steps += 1
            lib = engine.start().lib
            lib.mpp_call_begins(time.monotonic_ns())
            lib.mpp_call_is(STEP, self._steps, 1)
            lib.mpp_call_returns(1)

    def say(self, line: dict[str, Any]) -> None:
        """One more line of text."""
        self._lines.write(f"{json.dumps(line)}\n")

    def _kind_of(self, code: CodeType | None, line: int, subject: Any, name: str, dtype: Any, op: int) -> int:
        """The number of a kind of calls; 0: it has none. Called by C where it meets one that it does not remember."""
        key = code, line, id(subject), name, dtype, op
        if (known := self._kinds.get(key)) is not None or len(self._kinds) >= _MOST_KINDS:
            return known or 0
        if (group := self._groups.get(id(subject))) is None:
            group = self._groups[id(subject)] = len(self._groups)
            self._subjects.append(subject)  # so that no other one comes to its address
            self.say({"group": group, "name": subject.title, "ranks": list(subject.ranks)})
        row = operations.BY_NAME.get(name)
        self.say(
            {
                "kind": len(self._kinds) + 1,
                "of": group,
                "name": name,
                "dtype": str(dtype or "").removeprefix("torch."),
                "op": self._reduction(op) if row and row.reduces else "",
                "file": code.co_filename if code else "",
                "line": line,
            }
        )
        return self._kinds.setdefault(key, len(self._kinds) + 1)

    @staticmethod
    def _reduction(op: int) -> str:
        names = {code: name for code, name in enumerate(_bridge.REDUCTIONS)}
        names |= {_OF_PYTHON + int(kind): kind.name for kind in OPERATIONS}
        return "AVG" if _AVERAGES <= op < _OF_PYTHON - 1 else names.get(op, "")

    def close(self) -> None:
        """Nothing more is recorded; what was is in the files."""
        _bridge.set_timeline(None)
        self._hook.remove()
        self._lines.close()


#: Memory that C may write to for ever.
_mapped: list[mmap.mmap] = []
#: Of the current world.
current: Recording | None = None


def start(rank: int, size: int, node: int, job: str) -> None:
    """A world begins: record it if the user wants that; where it cannot be, say so in the log.

    Args:
        job: a name that no other job has.
    """
    global current  # noqa: PLW0603
    if current is not None:
        current.close()
    current = None
    wanted = settings.TIMELINE.value()
    if not wanted:
        return
    about = {"rank": rank, "size": size, "node": node, "host": socket.gethostname(), "pid": os.getpid()}
    try:
        current = Recording(Path(wanted), job, about)
    except (OSError, MemoryError) as error:
        log.warning("mpiplus: there will be no timeline of rank %d: %s", rank, error)
