"""The end of a Work is one transition: whatever two threads do to it, stopped at each line in turn, its future is set
once, and everybody hears of the same outcome."""

from __future__ import annotations

import itertools
import sys
import threading
from collections.abc import Callable
from datetime import timedelta
from types import FrameType, SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from patience import wait_until

from torchmpi_plugin.engine import engine
from torchmpi_plugin.engine import work as work_module
from torchmpi_plugin.engine.futures import Future
from torchmpi_plugin.engine.work import CoalescedWork, PendingWork
from torchmpi_plugin.errors import DistBackendError, RankFailedError

HANDLE = 7
#: How long a thread that waits for the other one's lock is waited for. One that does not is done much sooner.
BLOCKED = 0.05
#: More than any action here has.
MOST_LINES = 200


class Group:
    """What a Work asks of its group. Its time is always up, and what it does about that can be seen."""

    label = "group 'test'"
    second_halves: set[Any] = set()  # noqa: RUF012

    def __init__(self) -> None:
        self.diagnosis = SimpleNamespace(
            lock=threading.Lock(), timed_out=lambda call: DistBackendError("timed out"), look=lambda call: None
        )
        self.told: list[Exception] = []

    def failed(self, error: Exception, timed_out: bool = False) -> None:
        self.told.append(error)

    def failure_of(self, call: Any) -> Exception:
        return DistBackendError("failed in C")

    def why_aborted(self) -> str:
        return "was aborted"

    def gave_up(self, call: Any) -> None:
        pass


class Case:
    """A pending Work, and what can happen to it."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.group = Group()
        self.work = PendingWork()
        times = {"begun": 0, "limit": 0.0, "extension": 0.0}
        call: Any = SimpleNamespace(operation="all_reduce", outputs=(), peer=None, tag=0, sequence=1, **times)
        self.work.handle, self.work.group, self.work.call = HANDLE, self.group, call
        self.work._tensors, self.work._lock = [torch.ones(2, dtype=dtype)], threading.RLock()
        self.futures: list[Any] = []

    def get_future(self) -> None:
        self.futures.append(self.work.get_future())

    def deadline(self) -> None:
        self.work.check_deadline()

    def abort(self) -> None:
        self.work.abandon_aborted()

    def succeed(self) -> None:
        if self.work.complete(HANDLE, engine.DONE) == engine.RESOLVE:
            self.work.resolve()

    def fail(self) -> None:
        if self.work.complete(HANDLE, engine.FAILED) == engine.RESOLVE:
            self.work.resolve()

    def outcome(self) -> str:
        """Everybody's, which must be one; of a Work that is over."""
        error = self.work.exception()
        said = {"" if error is None else str(error)}
        for future in [*self.futures, self.work.get_future()]:
            wait_until(future.done, 10, "nobody has set the future", 0.001)  # what C++ reads a thread of torch's sets
            try:
                future.wait()
                said.add("")
            except RuntimeError as raised:
                words = [text for text in ("timed out", "failed in C", "was aborted") if text in str(raised)]
                assert words, raised
                said.add(str(error) if error is not None and words[0] in str(error) else str(raised))
        assert len(said) == 1, said
        return said.pop()


@pytest.fixture(autouse=True)
def engine_without_mpi(monkeypatch: pytest.MonkeyPatch) -> None:
    lib = SimpleNamespace(mpp_state_of=lambda handle: engine.PENDING, mpp_wake_on_completion=lambda handle: None)
    made = SimpleNamespace(lib=lib, poll=lambda work: work.finished, only_thread=None)
    monkeypatch.setattr(engine, "start", lambda: made)
    monkeypatch.setattr(engine, "running", lambda: None)


class Stopping:
    """Runs an action on a thread, and stops at its line number ``line`` in work.py."""

    def __init__(self, action: Callable[[], None], line: int) -> None:
        self.reached, self.go_on = threading.Event(), threading.Event()
        self.errors: list[BaseException] = []
        self._left = line
        self._thread = threading.Thread(target=self._run, args=(action,))
        self._thread.start()

    def _run(self, action: Callable[[], None]) -> None:
        sys.settrace(self._trace)
        try:
            action()
        except BaseException as error:
            self.errors.append(error)
        finally:
            sys.settrace(None)
            self.reached.set()

    def _trace(self, frame: FrameType, event: str, argument: Any) -> Any:
        if frame.f_code.co_filename != work_module.__file__:
            return None
        if event == "line":
            self._left -= 1
            if self._left == 0:
                self.reached.set()
                self.go_on.wait(10)
        return self._trace

    def finish(self) -> list[BaseException]:
        self.go_on.set()
        self._thread.join(10)
        assert not self._thread.is_alive()
        return self.errors

    @property
    def was_stopped(self) -> bool:
        return self._left <= 0


ACTIONS = ("get_future", "deadline", "abort", "succeed", "fail")


@pytest.mark.parametrize(("first", "second"), itertools.product(ACTIONS, ACTIONS))
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_stopped_at_each_line(first: str, second: str, dtype: torch.dtype) -> None:
    """float16 has the kind of future that C++ reads."""
    for asked_before, line in itertools.product((False, True), range(1, MOST_LINES)):
        case = Case(dtype)
        if asked_before:
            case.get_future()
        stopping = Stopping(getattr(case, first), line)
        assert stopping.reached.wait(10)
        other = Stopping(getattr(case, second), MOST_LINES)
        other.reached.wait(BLOCKED)
        errors = stopping.finish() + other.finish()
        assert not errors, (line, errors)
        if not case.work.finished:
            assert (first, second) == ("get_future", "get_future")
            case.succeed()
        case.outcome()
        if not stopping.was_stopped:
            break
    else:
        pytest.fail(f"{first} has more than {MOST_LINES} lines")


@pytest.mark.parametrize("when", ["abort hook", "flight record"])
def test_a_future_asked_for_while_a_failure_is_told(when: str) -> None:
    """By a hook of the user's, or by another thread while a file is being written: the deadline's thread goes on."""
    case = Case(torch.float32)
    if when == "abort hook":
        case.group.failed = lambda error, timed_out=False: case.get_future()
    else:
        asker = threading.Thread(target=case.get_future)
        case.group.failed = lambda error, timed_out=False: (asker.start(), asker.join(10))
    case.deadline()
    assert "timed out" in case.outcome()


def test_a_future_is_resolved_where_telling_fails() -> None:
    case = Case(torch.float32)
    case.get_future()
    case.group.failed = Mock(side_effect=KeyboardInterrupt)
    with pytest.raises(KeyboardInterrupt):
        case.deadline()
    assert "timed out" in case.outcome()


def test_a_work_may_outlive_the_modules_at_pythons_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(work_module, "engine", None)
    Case(torch.float32).work.__del__()


def test_the_time_for_several_operations_is_for_all_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    now, given = [0.0], []
    monkeypatch.setattr(work_module, "time", SimpleNamespace(monotonic=lambda: now[0]))

    class Late:
        def wait(self, timeout: timedelta) -> None:
            given.append(timeout.total_seconds())
            now[0] += given[-1]
            raise DistBackendError("late")

    late: Any = [Late(), Late(), Late()]
    with pytest.raises(DistBackendError, match="late"):
        CoalescedWork(late, []).wait(timedelta(seconds=5))
    assert given[0] == 5.0 and sum(given[1:]) < 1


@pytest.mark.parametrize("has_devices", [False, True])
def test_whoever_waits_in_python(has_devices: bool) -> None:
    future = Future()
    future.has_devices = has_devices
    future.fail(RankFailedError("rank 1 has ended", ranks=[1]))
    assert future.done()
    with pytest.raises(RankFailedError, match="rank 1 has ended"):
        future.wait()
    with pytest.raises(RankFailedError):
        future.value()
