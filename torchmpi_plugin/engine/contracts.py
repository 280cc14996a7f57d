"""Contracts between the engine, a Work and its group, which do not know each other's classes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol


class Owner(Protocol):
    """The group of an operation, as its Work and the engine need it: ``ProcessGroupMPI`` says what each does."""

    second_halves: set[Callable[[int], int]]
    #: Finds out why an operation takes so long.
    diagnosis: Any

    @property
    def label(self) -> str: ...
    def failure_of(self, call: Any) -> Exception: ...
    def gave_up(self, call: Any) -> None: ...
    def failed(self, error: Exception, timed_out: bool = False) -> None: ...


class Pending(Protocol):
    """A Work, as the engine and whoever reports on it need it: ``PendingWork`` says what each does."""

    handle: int
    caller: int
    finished: bool
    abandoned: bool
    call: Any

    @property
    def group(self) -> Owner: ...
    def elapsed(self) -> float: ...
    def complete(self, handle: int, state: int) -> int: ...
    def resolve(self) -> None: ...
    def check_deadline(self) -> None: ...
    def abandon_aborted(self) -> None: ...
