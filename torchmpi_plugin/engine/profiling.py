"""Events for torch's profiler: for each operation those that other backends' have, by which trace tools go.

"mpiplus:all_reduce" begins with the call, and ends when the operation is complete, which for an asynchronous one is on
another thread, or with the profiler: torch frees its events then, and an end that came later would be written to other
memory. "c10d::allreduce_" is the call alone, as of torch's own operator, with sizes and dtypes: those of the
tensors, and in the words that NCCL's "record_param_comms" has for them. An event of that name itself needs what only
C++ can set, and the profiler crashes without.

An operation that goes on while its thread does other things has a track of its own in a trace: the profiler has its
event on the thread that has begun it, and viewers drop events of a thread that overlap partly. There is no way to say
another thread, so the file is changed where torch has just written it.
"""

from __future__ import annotations

import bisect
import contextlib
import functools
import json
import threading
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch

from .. import operations, torch_internals
from ..errors import attempt
from ..names import BACKEND
from .work import Work

T = TypeVar("T")

#: Whether this thread is being profiled.
wanted: Callable[[], bool] = torch_internals.find("torch.autograd:_profiler_enabled")
#: Of the kind that torch's own operators have: its name, tensors whose shapes and dtypes it shows, and what else.
_OperatorEvent: Callable[..., Any] = torch_internals.find("torch._C._profiler:_RecordFunctionFast")


#: By thread, those of the operation that it is about to start: until that is complete, and of the call.
events: dict[int, tuple[Any, Any]] = {}
#: Threads in a call that has an event for all its operations.
_in_several: set[int] = set()
#: What ends the events of operations under way. The lock is held until an event has ended; reentrant, as what is
#: destroyed meanwhile may complete another operation.
_open: set[Callable[[], None]] = set()
_lock = threading.RLock()


def _end_one(ending: Callable[[], None]) -> None:
    with _lock:
        if ending in _open:
            _open.remove(ending)
            ending()


#: What torch's own backends call an operation in their events, where it is not our name.
_IN_CPP = {"all_gather_into_tensor": "all_gather", "all_to_all_single": "all_to_all"}
_STOP = "torch.autograd.profiler:_disable_profiler"
_stop: Callable[[], Any] = torch_internals.find(_STOP)


def _end_all_and_stop() -> Any:
    """Return what torch's profilers call to stop."""
    with _lock:
        while _open:
            _open.pop()()
    return _stop()


torch_internals.put(_STOP, _end_all_and_stop)


def begin(
    backend: str,
    operation: str,
    root: int,
    inputs: Sequence[torch.Tensor],
    outputs: Sequence[torch.Tensor],
    group: dict[str, Any],
) -> None:
    """An operation begins on this thread.

    Args:
        backend: its name in the program; another one than ours with MPIPLUS_REPLACE.
        root: or the other rank; -1: none, or any.
        group: what is to be said of its group.
    """
    end(None)  # of one that raised before it came to its end
    _titles.add(f"{backend}:")
    row = operations.BY_NAME.get(operation)
    name = (row and row.operator) or f"{row.method if row else operation}_"
    tensors = [*inputs, *(tensor for tensor in outputs if all(tensor is not other for other in inputs))]
    said = {
        "Collective name": name.removesuffix("_"),
        "In msg nelems": sum(tensor.numel() for tensor in inputs),
        "Out msg nelems": sum(tensor.numel() for tensor in outputs),
        "dtype": tensors[0].type().rpartition(".")[2].removesuffix("Tensor") if tensors else "",
        **group,
    }
    of_call = _OperatorEvent(f"c10d::{name}", tensors, said)
    of_operation: Any
    if backend == BACKEND:
        of_operation = torch.profiler.record_function(f"{backend}:{operation}")
    elif threading.get_ident() in _in_several:
        of_operation = contextlib.nullcontext()
    else:  # as that one's is, with shapes
        title = "recvAnySource" if operation == "recv" and root < 0 else _IN_CPP.get(operation, operation)
        of_operation = _OperatorEvent(f"{backend}:{title}", inputs, {})
    both = events[threading.get_ident()] = of_operation, of_call
    for event in both:
        event.__enter__()


def of_several(backend: str, operation: str, inputs: Sequence[torch.Tensor], call: Callable[[], T]) -> T:
    """Make a call that consists of several operations: in another backend's name it has one event, and they none."""
    if backend == BACKEND or not wanted():
        return call()
    thread = threading.get_ident()
    _in_several.add(thread)
    try:
        with _OperatorEvent(f"{backend}:{operation}", inputs, {}):
            return call()
    finally:
        _in_several.discard(thread)


def end(work: Work | None) -> None:
    """The operation that began on this thread has become ``work``."""
    of_operation, of_call = events.pop(threading.get_ident(), (None, None))
    if of_operation is None:
        return
    of_call.__exit__(None, None, None)
    if work is None or work.finished:
        of_operation.__exit__(None, None, None)
    else:
        ending = torch_internals.ending(of_operation)
        _open.add(ending)
        work.later_future().add_done_callback(lambda _: _end_one(ending))


# ---- tracks ----

_PARSE = "torch.autograd.profiler:profile._parse_kineto_results"
#: How the names of our events begin.
_titles: set[str] = set()
#: Of a track: no number of a thread.
_FIRST_TRACK = 2_000_000_000
#: A longer trace stays as it is: Python takes ten times its bytes to change it.
_MOST_BYTES = 256 << 20

Event = dict[str, Any]


def _writing(write: Callable[..., Any]) -> Callable[..., Any]:
    """The profiler's method that writes a file, with such tracks."""

    @functools.wraps(write)
    def export_chrome_trace(self: Any, path: Any, *more: Any, **named: Any) -> Any:
        result = write(self, path, *more, **named)
        attempt("the profiler's trace stays as it is", lambda: _rewrite(Path(path)), None)
        return result

    return export_chrome_trace


def _rewrite(path: Path) -> None:
    text = path.read_text("utf-8") if path.stat().st_size <= _MOST_BYTES else ""
    if any(f'"{title}' in text for title in _titles):
        trace = json.loads(text)
        _complete(trace["traceEvents"])
        path.write_text(json.dumps(trace), "utf-8")


def _complete(events: list[Event]) -> None:
    """Put our events that overlap others partly on tracks of their own; in all of ours say what is said of the call."""
    threads = defaultdict(list)
    for event in events:
        if event.get("ph") == "X":
            threads[event["pid"], event["tid"]].append(event)
    moved = [event for thread in threads.values() for event in _overlapping(thread)]
    ends: list[float] = []
    for event in sorted(moved, key=lambda event: float(event["ts"])):
        lane = next((lane for lane, end in enumerate(ends) if end <= event["ts"]), len(ends))
        if lane == len(ends):
            ends.append(0)
            track = {"ph": "M", "pid": event["pid"], "tid": _FIRST_TRACK + lane}
            events.append({**track, "name": "thread_name", "args": {"name": f"mpiplus, asynchronous {lane + 1}"}})
            events.append({**track, "name": "thread_sort_index", "args": {"sort_index": _FIRST_TRACK + lane}})
        ends[lane] = _end(event)
        event["tid"] = _FIRST_TRACK + lane


def _end(event: Event) -> float:
    return float(event["ts"] + event.get("dur", 0))


def _overlapping(thread: list[Event]) -> list[Event]:
    """Say in ours on a thread what is said of the call; return those that overlap others partly."""
    thread.sort(key=lambda event: (event["ts"], -event.get("dur", 0)))
    begins, found = [event["ts"] for event in thread], []
    open_ends: list[float] = []
    for at, event in enumerate(thread):
        begin, end = event["ts"], _end(event)
        while open_ends and open_ends[-1] <= begin:
            open_ends.pop()
        if event["name"].startswith(tuple(_titles)):
            inside = thread[at + 1 : bisect.bisect_left(begins, end)]
            call = next((other for other in inside if other["name"].startswith("c10d::")), None)
            if call is not None:
                event["args"] = {**call.get("args", {}), **event.get("args", {})}
            if any(end > other for other in open_ends) or any(_end(other) > end for other in inside):
                found.append(event)
                continue
        open_ends.append(end)
    return found


def _flagging(parse: Callable[..., Any]) -> Callable[..., Any]:
    """The profiler's method that makes its list of events: another backend's are all asynchronous, by C++ alone."""

    @functools.wraps(parse)
    def parse_results(*given: Any, **named: Any) -> Any:
        found = parse(*given, **named)
        others = tuple(_titles - {f"{BACKEND}:"})
        for event in found:
            event.is_async = event.is_async or (bool(others) and event.name.startswith(others))
        return found

    return parse_results


torch_internals.put(_PARSE, _flagging(torch_internals.find(_PARSE)))
_profile = torch.autograd.profiler.profile
_profile.export_chrome_trace = _writing(_profile.export_chrome_trace)  # type: ignore[method-assign]
