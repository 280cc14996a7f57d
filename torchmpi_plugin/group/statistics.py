"""Figures of a group's operations, as C counts them; and at the world's end who has waited for whom."""

from __future__ import annotations

import contextlib
import json
import socket
import sys
import time
import weakref
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .. import _bridge, forks, settings
from ..diagnosis import monitor
from ..engine import engine
from ..errors import attempt
from ..names import counted, describe_ranks
from ..timeline import recording
from .group import Group

_NS = 1e-9
#: How long rank 0 waits for the figures of ranks that have not left yet. They leave at about the same time.
_ANSWER_SECONDS = 5.0
_KEY = "mpiplus/summary/{}"


def of(group: Group) -> dict[str, Any]:
    """The figures of an open group: see :func:`torchmpi_plugin.statistics`."""
    ranks = [group.global_rank(rank) for rank in range(group.size())]
    return {"rank": group.rank(), "size": group.size(), **_figures(group.communicator.handle, ranks)}


def _figures(handle: int, ranks: Sequence[int]) -> dict[str, Any]:
    lib, ffi, kinds = engine.start().lib, engine.start().ffi, len(_bridge.CALLS)
    figures: Any = ffi.new("uint64_t[]", 3 * kinds + 2)
    late: Any = ffi.new("int64_t[]", len(ranks))
    lib.mpp_group_statistics(handle, figures, late)
    columns = ("calls", "bytes", "hand_overs")
    called = {
        name: {column: int(figures[3 * kind + at]) for at, column in enumerate(columns)}
        for kind, name in enumerate(_bridge.CALLS)
    }
    return {
        "operations": {name: found for name, found in called.items() if found["calls"]},
        "seconds_in_calls": _NS * figures[3 * kinds],
        "seconds_waiting": _NS * figures[3 * kinds + 1],
        "seconds_waited_for": {rank: _NS * late[at] for at, rank in enumerate(ranks) if late[at]},
    }


def count(group: Group, name: str) -> None:
    """Count a group's operations from now on, until it ends or nobody holds it any more."""
    handle, ranks = group.communicator.handle, [group.global_rank(rank) for rank in range(group.size())]
    engine.start().lib.mpp_group_describe(handle, json.dumps({"name": name, "ranks": ranks})[1:-1].encode())
    _counted[handle] = ranks
    weakref.finalize(group, _forget, group.communicator, ranks).atexit = False


def _forget(communicator: Any, ranks: list[int]) -> None:
    """Nobody holds its group any more, which has lost its attributes by now; the communicator keeps the handle."""
    if _counted.get(communicator.handle) is ranks:
        _count_no_more(communicator.handle)


# ---- at the end ----

_began = time.monotonic()
#: Of groups that are open: by C's handle their ranks in the world.
_counted: dict[int, list[int]] = {}
_seconds: Counter[str] = Counter()
_waited_for: Counter[int] = Counter()


def begin() -> None:
    """A new world begins."""
    global _began  # noqa: PLW0603
    _began = time.monotonic()
    _seconds.clear()
    _waited_for.clear()


def end(group: Any) -> None:
    """A group is about to end, for the second time perhaps; nothing here may keep it alive."""
    if not group.closed:
        attempt("the summary lacks a group's figures", lambda: _collect(group), None)
    monitor.stop(group)


def _collect(group: Group) -> None:
    """Remember its figures, and with the world, and those of all groups that are left, report those of all ranks."""
    is_world, wanted = monitor.answers_for(group), settings.SUMMARY.value()
    for handle in list(_counted) if is_world else [group.communicator.handle]:
        _count_no_more(handle)
    if is_world:
        recording.end(group)
    if wanted and is_world:
        _report(group, wanted)


def _count_no_more(handle: int) -> None:
    """Remember a group's figures, once."""
    ranks = _counted.pop(handle, None)
    if ranks is None or forks.forked:
        return
    engine.start().lib.mpp_group_hide(handle)
    found = _figures(handle, ranks)
    _seconds["in_calls"] += found["seconds_in_calls"]
    _seconds["waiting"] += found["seconds_waiting"]
    _waited_for.update(found["seconds_waited_for"])


def _report(world: Group, wanted: str) -> None:
    """This rank's figures go to rank 0 through the store, and rank 0 prints all."""
    own = {
        "host": socket.gethostname(),
        "seconds": time.monotonic() - _began,
        "in_calls": _seconds["in_calls"],
        "waiting": _seconds["waiting"],
        "waited_for": dict(_waited_for),
    }
    store = world.get_group_store()
    with contextlib.suppress(RuntimeError):  # the store has gone, with rank 0
        if world.rank() != 0:
            store.set(_KEY.format(world.rank()), json.dumps(own))
            return
        ranks = {0: own, **_of_others(store, world.size())}
        print(table(ranks, world.size()), file=sys.stderr, flush=True)
        if wanted != "1":
            text = json.dumps({str(rank): ranks[rank] for rank in sorted(ranks)}, indent=1)
            attempt(f"the summary is not in {wanted}", lambda: Path(wanted).write_text(text), 0)


def _of_others(store: Any, size: int) -> dict[int, dict[str, Any]]:
    found: dict[int, dict[str, Any]] = {}
    until = time.monotonic() + _ANSWER_SECONDS
    while len(found) < size - 1 and time.monotonic() < until:
        for rank in range(1, size):
            if rank not in found and store.check([_KEY.format(rank)]):
                found[rank] = json.loads(store.get(_KEY.format(rank)))
        time.sleep(0.02)
    return found


def table(ranks: dict[int, dict[str, Any]], size: int) -> str:
    """The ranks' shares of time in communication, and who was waited for longest."""
    waited_for: Counter[int] = Counter()
    for figures in ranks.values():
        waited_for.update({int(rank): seconds for rank, seconds in figures["waited_for"].items()})
    lines = [
        f"mpiplus: time in communication, {counted(size, 'rank')}, {ranks[0]['seconds']:.1f} s",
        f"{'rank':>6} {'in calls':>9} {'waiting':>8} {'others waited for it':>21}  node",
    ]
    for rank in sorted(ranks):
        of_rank = ranks[rank]
        shares = [of_rank[name] / max(of_rank["seconds"], _NS) for name in ("in_calls", "waiting")]
        late = f"{waited_for[rank]:.1f} s"
        lines.append(f"{rank:>6} {shares[0]:>9.1%} {shares[1]:>8.1%} {late:>21}  {of_rank['host']}")
    if missing := sorted(set(range(size)) - set(ranks)):
        lines.append(f"mpiplus: no figures of {describe_ranks(missing)}")
    if waited_for:
        rank, seconds = waited_for.most_common(1)[0]
        lines.append(f"mpiplus: rank {rank} was waited for longest: {seconds:.1f} s of other ranks' time in all")
    return "\n".join(lines)


# ---- for Prometheus ----


def as_text(name: str, found: dict[str, Any]) -> str:
    """Figures of a group in Prometheus' text format."""
    escaped = name.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
    labels = f'group="{escaped}",rank="{found["rank"]}"'
    lines: list[str] = []
    for figure in ("calls", "bytes", "hand_overs"):
        lines.append(f"# TYPE mpiplus_{figure}_total counter")
        for operation, one in found["operations"].items():
            lines.append(f'mpiplus_{figure}_total{{{labels},operation="{operation}"}} {one[figure]}')
    for figure in ("seconds_in_calls", "seconds_waiting"):
        lines.append(f"# TYPE mpiplus_{figure}_total counter")
        lines.append(f"mpiplus_{figure}_total{{{labels}}} {found[figure]:.6f}")
    lines.append("# TYPE mpiplus_seconds_waited_for_total counter")
    for late, seconds in found["seconds_waited_for"].items():
        lines.append(f'mpiplus_seconds_waited_for_total{{{labels},late_rank="{late}"}} {seconds:.6f}')
    return "\n".join(lines) + "\n"
