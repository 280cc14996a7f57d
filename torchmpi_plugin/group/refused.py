"""The words for what is wrong with a call that C refuses, and nothing else. No operation begins here."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from ..operations import Operation
from ..tensors import arguments
from ..tensors.arguments import ArgumentError, check_alike, check_count, check_numel, check_numel_pair, single
from . import several
from .group import ProcessGroupMPI as Group
from .starting import reduction

Tensors = Sequence[torch.Tensor]


def explain(
    group: Group,
    row: Operation,
    given: tuple[Any, ...],
    tensors_of: Callable[[Group, tuple[Any, ...]], tuple[Tensors, Tensors]],
) -> Exception:
    """Return what is wrong with a method's arguments; ``tensors_of`` finds those that are written, and read.

    Raises:
        ValueError, TypeError: what it is, where there are words for it.
    """
    name, roles = row.name, row.roles.split()
    if "@" in row.roles:
        if "@peer" in row.roles:
            arguments.check_peer(given[1], group.size(), name)
        arguments.check_tag(given[-1], group.communicator.largest_tag, name)
    elif roles and roles[0] == "inout":
        if "root" in roles:
            several.one_of(given[0], given[-1].rootTensor, name)
        if row.reduces:
            reduction(group, single(given[0], name).dtype, given[-1].reduceOp, name)
    elif roles:
        outs, ins = tensors_of(group, given)
        if outs and ins:
            _compare(group, row, outs, ins, given)
        if row.reduces:
            reduction(group, outs[0].dtype, given[-1].reduceOp, name)
    return ArgumentError(f"{name}: these arguments do not go together")


def _compare(group: Group, row: Operation, outs: Tensors, ins: Tensors, given: tuple[Any, ...]) -> None:
    out, _, in_ = row.roles.split()[0].partition("+")
    if out == "out/":
        _compare_rows(group, row.name, outs[0], ins[0], given)
    elif out == in_.replace("in", "out"):
        _compare_lists(group, row.name, outs, ins)
    elif "*" in out or "[" in out:
        _compare_with_own(group, row, outs, ins[0], out, "output")
    else:
        _compare_with_own(group, row, ins, outs[0], in_, "input")


def _compare_rows(group: Group, name: str, output: torch.Tensor, source: torch.Tensor, given: tuple[Any, ...]) -> None:
    check_alike(output, source, name)
    ins = arguments.split_sizes(given[3], source, group.size(), "input", name)
    outs = arguments.split_sizes(given[2], output, group.size(), "output", name)
    check_numel_pair(ins[group.rank()], outs[group.rank()], name)


def _compare_lists(group: Group, name: str, outs: Tensors, ins: Tensors) -> None:
    check_count(len(outs), group.size(), "the output list", name)
    check_count(len(ins), group.size(), "the input list", name)
    for tensor in (*outs, *ins):
        check_alike(tensor, ins[0], name)
    check_numel_pair(ins[group.rank()].numel(), outs[group.rank()].numel(), name)


def _compare_with_own(group: Group, row: Operation, whole: Tensors, own: torch.Tensor, role: str, what: str) -> None:
    """All ranks' parts, a tensor for each or one after the other, with this rank's."""
    name, size = row.name, group.size()
    of_root = "root's " if "root" in role else ""
    if "*" not in role:
        check_count(len(whole), size, f"the {of_root}{what} list", name)
    for tensor in whole:
        check_alike(tensor, own, name)
        if role.endswith("[root]") and "*" not in role:
            check_numel(tensor, own.numel(), f"each {what}", name)
    if "*" in role:
        check_numel(whole[0], own.numel() * size, f"the {of_root}{what}", name)
    elif what == "output":
        check_numel(whole[group.rank()], own.numel(), "this rank's output", name)
    else:
        check_numel(own, whole[group.rank()].numel(), "the output", name)
