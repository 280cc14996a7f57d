"""The begin and the end of a world's recording: clocks are compared, and the files of other nodes come to rank 0's."""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import time
import zlib
from pathlib import Path
from typing import Any

from ..errors import attempt
from . import clocks, recording
from .clocks import key

log = logging.getLogger("torchmpi_plugin")

#: How long rank 0 waits for the other nodes, to compare clocks and to get their files.
_CLOCK_SECONDS, _FILE_SECONDS = 5.0, 20.0
#: A store takes no more than 8 MiB at a time.
_PIECE = 4 << 20


def begin(world: Any) -> None:
    """A world begins: see :func:`recording.start`."""
    communicator = world.communicator
    digest = hashlib.sha256(communicator.secret.encode()).hexdigest()[:8]
    job = f"{os.environ.get('MASTER_PORT', '0')}-{digest}"
    recording.start(world.rank(), world.size(), communicator.place.node_rank, job)
    _compare_clocks(world, "begin")


def end(world: Any) -> None:
    """It ends, and with it the recording; what fails here costs the timeline a part."""
    recorded = recording.current
    if recorded is None:
        return
    _compare_clocks(world, "end")
    recorded.close()
    recording.current = None
    if world.communicator.node_count > 1:
        attempt("the timeline lacks other nodes", lambda: _collect(world, recorded.text), None)


def _compare_clocks(world: Any, when: str) -> None:
    recorded, communicator = recording.current, world.communicator
    if recorded is not None:
        attempt(
            "the timeline's clocks were not compared",
            lambda: clocks.measure(world.get_group_store(), communicator, when, _CLOCK_SECONDS, recorded.say),
            None,
        )


def _collect(world: Any, text: Path) -> None:
    """Through the store, where rank 0's files are not seen from here; else they are in its directory as it is."""
    store, communicator = world.get_group_store(), world.communicator
    away = [r for r in range(world.size()) if communicator.node_of(r) != communicator.node_of(0)]
    if world.rank() in away:
        is_shared = text.with_name(f"{text.name.split('.')[0]}.0.json").exists()
        files = () if is_shared else (text, text.with_suffix(".calls"))
        _send(store, world.rank(), b"\0".join(path.read_bytes() for path in files))
        if not is_shared and clocks.appears(
            store, key("files", world.rank(), "taken"), time.monotonic() + _FILE_SECONDS
        ):
            for path in files:
                path.unlink()
            with contextlib.suppress(OSError):  # not empty
                text.parent.rmdir()
    if world.rank() != 0:
        return
    until = time.monotonic() + _FILE_SECONDS
    while away and time.monotonic() < until:
        for rank in [rank for rank in away if store.check([key("files", rank)])]:
            away.remove(rank)
            lines, _, rows = _receive(store, rank).partition(b"\0")
            if lines:
                path = text.with_name(f"{text.name.split('.')[0]}.{rank}.json")
                path.write_bytes(lines)
                path.with_suffix(".calls").write_bytes(rows)
                store.set(key("files", rank, "taken"), "")
        time.sleep(0.02)
    if away:
        log.warning("mpiplus: the timeline lacks the calls of %d rank(s) on other nodes: %s", len(away), away[:16])


def _send(store: Any, rank: int, files: bytes) -> None:
    packed = zlib.compress(files, 1)
    pieces = [packed[at : at + _PIECE] for at in range(0, len(packed), _PIECE)]
    for number, piece in enumerate(pieces):
        store.set(key("files", rank, number), piece)
    store.set(key("files", rank), str(len(pieces)))


def _receive(store: Any, rank: int) -> bytes:
    pieces = range(int(store.get(key("files", rank))))
    return zlib.decompress(b"".join(store.get(key("files", rank, number)) for number in pieces))
