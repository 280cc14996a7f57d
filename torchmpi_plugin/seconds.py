"""Seconds on a command line."""

from __future__ import annotations

import math
from typing import Any

import click

#: What a call of the system that counts milliseconds in 31 bits can wait for.
LONGEST = 2.0e6


class Seconds(click.FloatRange):
    """A time that comes to an end: `float` takes NaN and infinity as well, of which the system's calls know nothing."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        seconds = super().convert(value, param, ctx)
        if not math.isfinite(seconds):
            self.fail(f"{value!r} is not a number of seconds", param, ctx)
        return seconds
