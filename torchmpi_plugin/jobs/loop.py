"""Additions to asyncio for the launcher and the supervisors."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Coroutine, Iterator, Mapping
from typing import Any, TypeVar

_Result = TypeVar("_Result")


def run(main: Coroutine[object, object, _Result]) -> _Result:
    """As asyncio.run, but inside a running loop too, as a notebook's cells are, and whatever loops the user has chosen.

    That would also leave the thread without a loop of its own, which the user's code may ask for later.
    """
    with _outside(), contextlib.closing(asyncio.SelectorEventLoop()) as loop:
        try:
            return loop.run_until_complete(main)
        finally:
            loop.run_until_complete(_clear())


async def _clear() -> None:
    """Leave nothing open."""
    left = asyncio.all_tasks() - {asyncio.current_task()}
    for task in left:
        task.cancel()
    await asyncio.gather(*left, return_exceptions=True)
    await asyncio.sleep(0)  # connections that were closed


@contextlib.contextmanager
def _outside() -> Iterator[None]:
    """The running loop, if any, waits like any function that calls one that takes long."""
    loop = asyncio._get_running_loop()
    task = asyncio.current_task(loop) if loop else None
    if loop and task:
        asyncio.tasks._leave_task(loop, task)
    asyncio._set_running_loop(None)
    try:
        yield
    finally:
        asyncio._set_running_loop(loop)
        if loop and task:
            asyncio.tasks._enter_task(loop, task)


def raise_into(over: asyncio.Future[Any]) -> None:
    """Raise what one of the loop's calls raises where ``over`` is awaited; asyncio alone would log it."""

    def failed(_: asyncio.AbstractEventLoop, context: Mapping[str, Any]) -> None:
        if not over.done():
            over.set_exception(context.get("exception") or RuntimeError(context["message"]))

    over.get_loop().set_exception_handler(failed)


class Alarm:
    """Calls a function at the earliest of the moments it was set to."""

    def __init__(self, act: Callable[[], None]) -> None:
        self._act = act
        self._handle: asyncio.TimerHandle | None = None

    def set(self, seconds: float) -> None:
        """Act in so many seconds, unless that is to be earlier."""
        loop = asyncio.get_running_loop()
        when = loop.time() + seconds
        if self._handle is None or when < self._handle.when():
            self.cancel()
            self._handle = loop.call_at(when, self._ring)

    def cancel(self) -> None:
        """Do not act, until it is set again."""
        if self._handle is not None:
            self._handle.cancel()
            self._handle = None

    def _ring(self) -> None:
        self._handle = None
        self._act()
