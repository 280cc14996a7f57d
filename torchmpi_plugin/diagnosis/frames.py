"""Frames of the user's program, without those of torch and of mpiplus."""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Iterator
from pathlib import Path
from types import CodeType, FrameType, TracebackType

import torch

from ..errors import DistBackendError
from ..tensors.arguments import ArgumentError, ArgumentTypeError

#: Beginnings of the names of files. threading's frames are those of a wait, of the user's or of ours.
NOT_THE_USERS = (
    *(f"{directory}{os.sep}" for directory in (Path(__file__).parents[1], Path(torch.__file__).parent)),
    threading.__file__,
)


def line_of(code: CodeType, instruction: int) -> int:
    """The line of an instruction (``f_lasti``) of a function."""
    lines = (line for begin, end, line in code.co_lines() if begin <= instruction < end and line is not None)
    return next(lines, code.co_firstlineno)


def of_user(frame: FrameType | None) -> Iterator[FrameType]:
    """``frame`` and those that called it, the innermost first, as far as they are the user's."""
    while frame is not None:
        if not frame.f_code.co_filename.startswith(NOT_THE_USERS):
            yield frame
        frame = frame.f_back


def of_uncaught(value: BaseException) -> TracebackType | None:
    """The traceback to show; of an error that mpiplus means its own frames and torch's, the last ones, say nothing."""
    if isinstance(value, DistBackendError | ArgumentError | ArgumentTypeError) or _is_refusal(value):
        return without_the_last(value.__traceback__)
    return value.__traceback__


def _is_refusal(value: BaseException) -> bool:
    """Return whether mpiplus has raised it, in words that begin with an operation; its own mistakes do not."""
    innermost = _entries(value.__traceback__)[-1].tb_frame.f_code.co_filename if value.__traceback__ else ""
    return innermost.startswith(NOT_THE_USERS[0]) and bool(re.match(r"\w+(\([^)]*\)| of group .*)?: ", str(value)))


def _entries(traceback: TracebackType | None) -> list[TracebackType]:
    entries = []
    while traceback is not None:
        entries.append(traceback)
        traceback = traceback.tb_next
    return entries


def without_the_last(traceback: TracebackType | None) -> TracebackType | None:
    """``traceback`` down to the user's last frame; all of it where there is none."""
    entries = _entries(traceback)
    traceback = None
    users = [at for at, it in enumerate(entries) if not it.tb_frame.f_code.co_filename.startswith(NOT_THE_USERS)]
    for it in reversed(entries[: users[-1] + 1] if users else entries):
        traceback = TracebackType(traceback, it.tb_frame, it.tb_lasti, it.tb_lineno)
    return traceback
