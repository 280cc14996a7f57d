"""Contracts between the engine, a Work and its group, which do not know each other's classes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol


class Judge(Protocol):
    """Finds out why an operation takes so long."""

    @property
    def lock(self) -> Any:
        """One thread at a time asks."""

    def look(self, call: Any) -> Exception | None:
        """The error of an operation that waits for somebody who has gone."""

    def timed_out(self, call: Any) -> Exception:
        """The error of an operation whose time is up."""


class Owner(Protocol):
    """The group of an operation, as its Work and the engine need it."""

    second_halves: set[Callable[[], int]]

    @property
    def label(self) -> str:
        """The group's name in messages."""

    @property
    def group_name(self) -> str:
        """torch's name for it."""

    @property
    def sequence(self) -> int:
        """The number of collectives that were begun."""

    @property
    def diagnosis(self) -> Judge:
        """Finds out why an operation takes so long."""

    def failure_of(self, call: Any) -> Exception:
        """The error of an operation that C or MPI gave up."""

    def gave_up(self, call: Any) -> None:
        """An operation has failed here."""

    def failed(self, error: Exception, timed_out: bool = False) -> None:
        """The user is about to hear of a failure."""


class Pending(Protocol):
    """A Work, as the engine and whoever reports on it need it."""

    handle: int
    caller: int
    finished: bool
    abandoned: bool

    @property
    def group(self) -> Owner:
        """The group whose operation it is."""

    @property
    def name(self) -> str:
        """The operation's."""

    def elapsed(self) -> float:
        """Seconds since the call."""

    def complete(self, handle: int, state: int) -> int:
        """C is done with ``handle``; what is left to do."""

    def resolve(self) -> None:
        """Set the future."""

    def check_deadline(self) -> None:
        """Give up when the operation's time is up."""

    def abandon_aborted(self) -> None:
        """The group was aborted."""


class Begun(Protocol):
    """Any Work, complete or not."""

    finished: bool

    def get_future(self) -> Any:
        """Resolves when it is complete."""
