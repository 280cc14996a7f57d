"""MPIPLUS_TIMELINE: this rank records its calls in files. C writes the times, this gives numbers to kinds of calls.

At the begin and at the end of a world clocks are compared, and at the end the files of other nodes come to rank 0's.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import mmap
import os
import time
import weakref
from pathlib import Path
from types import CodeType
from typing import Any

from torch.optim.optimizer import register_optimizer_step_post_hook

from .. import _bridge, operations, settings
from ..engine import engine
from ..errors import attempt
from ..names import describe_ranks, log
from ..tensors.dtypes import OPERATIONS
from . import rows
from .clocks import appears, key, measure
from .rows import PLACES, ROW, STEP, Kinds

#: As in c_src/python/timeline.c: from there on the sum is divided by the number of ranks, or the number is torch's.
_AVERAGES, _OF_PYTHON = 64, 128
#: How long rank 0 waits for the other nodes, to compare clocks and to get their files.
_CLOCK_SECONDS, _FILE_SECONDS = 5.0, 20.0
#: A store takes no more than 8 MiB at a time.
_PIECE = 4 << 20


class Recording:
    """Of one world.

    Args:
        text: the file for what is no call; the ring of calls lies beside it.
        rank, size, node: of this rank: see ``rows.Kinds``.
    """

    def __init__(self, text: Path, rank: int, size: int, node: int) -> None:
        self.text = text
        text.parent.mkdir(parents=True, exist_ok=True)
        self._lines = text.open("w", buffering=1)
        self._kinds = Kinds(self.say, rank, size, node, self._keep_in(text.with_suffix(".calls")))
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
        self._lines.write(f"{json.dumps(line)}\n")

    def _kind_of(self, code: CodeType | None, line: int, subject: Any, name: str, dtype: Any, op: int) -> int:
        """The number of a kind of calls; 0: it has none. Called by C where it meets one that it does not remember."""
        row, reduction = operations.BY_NAME.get(name), ""
        if row and row.reduces:
            names = dict(enumerate(_bridge.REDUCTIONS))
            names |= {_OF_PYTHON + int(kind): kind.name for kind in OPERATIONS}
            reduction = "AVG" if _AVERAGES <= op < _OF_PYTHON - 1 else names.get(op, "")
        return self._kinds.number(subject, name, dtype, reduction, code.co_filename if code else "", line)

    def close(self) -> None:
        """Nothing more is recorded; what was is in the files."""
        _bridge.set_timeline(None)
        self._hook.remove()
        self._lines.close()


#: Memory that C may write to for ever.
_mapped: list[mmap.mmap] = []
#: Of the current world.
current: Recording | None = None


def begin(world: Any) -> None:
    """A world begins: record it if the user wants that; where it cannot be, say so in the log."""
    global current  # noqa: PLW0603
    if current is not None:
        current.close()
    current, wanted = None, settings.TIMELINE.value()
    if not wanted:
        return
    rank, communicator = world.rank(), world.communicator
    digest = hashlib.sha256(communicator.secret.encode()).hexdigest()[:8]
    text = Path(wanted, f"{os.environ.get('MASTER_PORT', '0')}-{digest}.{rank}.json")
    try:
        current = Recording(text, rank, world.size(), communicator.place.node_rank)
    except (OSError, MemoryError) as error:
        log.warning("mpiplus: there will be no timeline of rank %d: %s", rank, error)
        with contextlib.suppress(OSError):  # files that say nothing would be taken for damaged ones, and the job's too
            rows.remove(text)
        return
    _compare_clocks(world, "begin", current)


def end(world: Any) -> None:
    """It ends, and with it the recording; what fails here costs the timeline a part."""
    global current  # noqa: PLW0603
    recorded = current
    if recorded is None:
        return
    _compare_clocks(world, "end", recorded)
    recorded.close()
    current = None
    if world.communicator.node_count > 1:
        attempt("the timeline lacks other nodes", lambda: _collect(world, recorded.text), None)


def _compare_clocks(world: Any, when: str, recorded: Recording) -> None:
    store, communicator = world.get_group_store(), world.communicator
    attempt(
        "the timeline's clocks were not compared",
        lambda: measure(store, communicator, when, _CLOCK_SECONDS, recorded.say),
        None,
    )


def _collect(world: Any, text: Path) -> None:
    """Through the store, where rank 0's files are not seen from here; else they are in its directory as it is."""
    store, communicator = world.get_group_store(), world.communicator
    away = [r for r in range(world.size()) if communicator.node_of(r) != communicator.node_of(0)]
    if world.rank() in away:
        is_shared = text.with_name(f"{text.name.split('.')[0]}.0.json").exists()
        packed = b"" if is_shared else rows.pack(text)
        pieces = [packed[at : at + _PIECE] for at in range(0, len(packed), _PIECE)]
        for number, piece in enumerate(pieces):
            store.set(key("files", world.rank(), number), piece)
        store.set(key("files", world.rank()), str(len(pieces)))
        if pieces and appears(store, key("files", world.rank(), "taken"), time.monotonic() + _FILE_SECONDS):
            rows.remove(text)
    if world.rank() != 0:
        return
    until = time.monotonic() + _FILE_SECONDS
    while away and time.monotonic() < until:
        for rank in [rank for rank in away if store.check([key("files", rank)])]:
            away.remove(rank)
            pieces = [store.get(key("files", rank, n)) for n in range(int(store.get(key("files", rank))))]
            if pieces:
                rows.unpack(b"".join(pieces), text.with_name(f"{text.name.split('.')[0]}.{rank}.json"))
                store.set(key("files", rank, "taken"), "")
        time.sleep(0.02)
    if away:
        log.warning("mpiplus: the timeline lacks the calls of other nodes' %s", describe_ranks(away))
