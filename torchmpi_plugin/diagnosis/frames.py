"""Where the user's program is: its own frames, without those of torch and of mpiplus."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from types import CodeType, FrameType

import torch

#: Beginnings of the names of files.
NOT_THE_USERS = tuple(f"{directory}{os.sep}" for directory in (Path(__file__).parents[1], Path(torch.__file__).parent))


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
