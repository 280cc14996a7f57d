"""Numbers of ranks and nodes as torchrun takes them."""

from __future__ import annotations

from typing import Any, NamedTuple

import click

from ...node import node


class _PerNode(click.IntRange):
    """A number, or ``auto`` or ``cpu``: one rank for each core that this process may use."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if value in ("auto", "cpu"):
            return len(node.cores())
        if value in ("gpu", "xpu"):
            self.fail(f"{value!r} does not go with tensors on the CPU; give a number, auto or cpu", param, ctx)
        return super().convert(value, param, ctx)


class NodeRange(NamedTuple):
    """Bounds of a job's number of nodes."""

    least: int
    most: int


class _Nodes(click.IntRange):
    """A number, or torchrun's ``min:max``."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        least: Any
        most: Any
        least, colon, most = str(value).partition(":")
        if colon and least != most:
            numbers = NodeRange(super().convert(least, param, ctx), super().convert(most, param, ctx))
            if numbers.least > numbers.most:
                self.fail(f"{value!r} is no range: the lower number comes first", param, ctx)
            return numbers
        return super().convert(least if colon else value, param, ctx)


#: More than any machine has: a job of more is a mistake, for which lists of ranks would fill the memory.
MOST = 10_000_000
PER_NODE, NODES = _PerNode(1, MOST), _Nodes(1, MOST)
