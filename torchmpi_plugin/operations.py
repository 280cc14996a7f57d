"""The operations of c10d: one row each, which every other table of operations is made from."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple


class Operation(NamedTuple):
    """A row.

    Attributes:
        name: in errors, and of what is recorded. Two methods of one name are one operation.
        method: c10d's, which torch's front end calls, and of which this one is written in Python.
        options: c10d's type of its last argument; empty: it has none.
        forms: its parameters, in all ways to call it; the first is the one that the method written here takes.
            Each is "name: kind", with the kinds of ``group/forms.py``.
        newer: the method's name since torch 2.13, by which torch's dispatcher calls it of a backend.
        aliases: other names of it that torch has had.
        operator: c10d's, in torch's dispatcher; empty: there is none.
        start: the function of c_src/shim.h that C starts it with, without "mpp_"; empty: it begins in Python.
        roles: its tensors as C reads them: what is written and what is read, or both in one. "*": the parts of all
            ranks in one tensor; "/": the same in parts of given sizes; "[]": a tensor for each rank; "[root]": the
            same, from the root alone; "@": a message, with a peer or from anyone.
        root: one of the ranks is an argument.
        reduces: it computes, by an operation that is an argument.
        equal_counts: its tensor has as many elements on one rank as on any other.
        recorded: its name in torch's flight recorder, if that is not ``name``.
        bus: by what nccl-tests multiply its data to compare it with a link, given the number of ranks.
    """

    name: str
    method: str
    options: str
    forms: tuple[str, ...]
    newer: str = ""
    aliases: tuple[str, ...] = ()
    operator: str = ""
    start: str = ""
    roles: str = ""
    root: bool = False
    reduces: bool = False
    equal_counts: bool = False
    recorded: str = ""
    bus: Callable[[int], float] | None = None


_GATHER = "output: tensor, input: tensor, opts"
_SCATTER = "outputTensor: tensor, inputTensor: tensor, opts"
_COALESCED = "outputs: list, inputs: list, opts"
_SPLITS = "output: tensor, input: tensor, output_split_sizes: ints, input_split_sizes: ints"


def _of_others(ranks: int) -> float:
    return (ranks - 1) / ranks


ROWS = (
    Operation(
        *("all_reduce", "allreduce", "AllreduceOptions"),
        ("tensors: list, opts", "tensors: list, op, timeout", "tensor: tensor, op, timeout"),
        operator="allreduce_",
        start="allreduce",
        roles="inout",
        reduces=True,
        equal_counts=True,
        bus=lambda ranks: 2 * _of_others(ranks),
    ),
    Operation(
        *("all_reduce_coalesced", "allreduce_coalesced", "AllreduceCoalescedOptions"),
        ("tensors: list, opts",),
        operator="allreduce_coalesced_",
        reduces=True,
    ),
    Operation("barrier", "barrier", "BarrierOptions", ("opts", "timeout"), operator="barrier", start="barrier"),
    Operation(
        *("broadcast", "broadcast", "BroadcastOptions"),
        ("tensors: list, opts", "tensor: tensor, root, timeout"),
        operator="broadcast_",
        start="broadcast",
        roles="inout",
        root=True,
        equal_counts=True,
        bus=lambda _: 1.0,
    ),
    Operation(
        *("reduce", "reduce", "ReduceOptions"),
        ("tensors: list, opts", "tensor: tensor, root, op, timeout"),
        operator="reduce_",
        start="reduce_to",
        roles="inout",
        root=True,
        reduces=True,
        equal_counts=True,
    ),
    Operation(
        *("all_gather", "allgather", "AllgatherOptions"),
        (
            "output_tensors: lists, input_tensors: list, opts",
            "output_tensors: list, input_tensor: tensor, timeout",
        ),
        operator="allgather_",
        start="allgather_list",
        roles="out[]+in",
    ),
    Operation(
        *("all_gather_coalesced", "allgather_coalesced", "AllgatherOptions"),
        ("output_lists: lists, input_list: list, opts",),
        operator="allgather_coalesced_",
    ),
    Operation(
        *("all_gather_into_tensor", "_allgather_base", "AllgatherOptions"),
        (_GATHER,),
        newer="all_gather_single",
        aliases=("allgather_into_tensor",),
        operator="_allgather_base_",
        start="allgather",
        roles="out*+in",
        equal_counts=True,
        recorded="_all_gather_base",
        bus=_of_others,
    ),
    Operation(
        *("all_gather_into_tensor_coalesced", "all_gather_single_coalesced", "AllgatherOptions"),
        (_COALESCED,),
        aliases=("allgather_into_tensor_coalesced",),
        operator="allgather_into_tensor_coalesced_",
    ),
    Operation(
        *("reduce_scatter", "reduce_scatter", "ReduceScatterOptions"),
        ("output_tensors: list, input_tensors: lists, opts", "output: tensor, input: list, op, timeout"),
        operator="reduce_scatter_",
        start="reduce_scatter",
        roles="out+in[]",
        reduces=True,
    ),
    Operation(
        *("reduce_scatter_tensor", "_reduce_scatter_base", "ReduceScatterOptions"),
        (_SCATTER,),
        newer="reduce_scatter_single",
        aliases=("reduce_scatter_tensor",),
        operator="_reduce_scatter_base_",
        start="reduce_scatter",
        roles="out+in*",
        reduces=True,
        equal_counts=True,
        recorded="_reduce_scatter_base",
        bus=_of_others,
    ),
    Operation(
        *("reduce_scatter_tensor_coalesced", "reduce_scatter_single_coalesced", "ReduceScatterOptions"),
        (_COALESCED,),
        aliases=("reduce_scatter_tensor_coalesced",),
        operator="reduce_scatter_tensor_coalesced_",
        reduces=True,
    ),
    Operation(
        *("gather", "gather", "GatherOptions"),
        (
            "output_tensors: lists, input_tensors: list, opts",
            "output_tensors: list, input_tensor: tensor, root, timeout",
        ),
        operator="gather_",
        start="exchange",
        roles="out[root]+in",
        root=True,
    ),
    Operation(
        *("gather_single", "gather_single", "GatherOptions"),
        (_GATHER,),
        aliases=("gather_into_tensor",),
        root=True,
        recorded="gather",
    ),
    Operation(
        *("scatter", "scatter", "ScatterOptions"),
        (
            "output_tensors: list, input_tensors: lists, opts",
            "output_tensor: tensor, input_tensors: list, root, timeout",
        ),
        operator="scatter_",
        start="exchange",
        roles="out+in[root]",
        root=True,
    ),
    Operation(
        *("all_to_all", "alltoall", "AllToAllOptions"),
        (
            "output_tensors: list, input_tensors: list, opts",
            "output_tensors: list, input_tensors: list, timeout",
        ),
        operator="alltoall_",
        start="exchange",
        roles="out[]+in[]",
    ),
    Operation(
        *("all_to_all_single", "alltoall_base", "AllToAllOptions"),
        (f"{_SPLITS}, opts", f"{_SPLITS}, timeout"),
        newer="all_to_all_single",
        operator="alltoall_base_",
        start="exchange",
        roles="out/+in/",
        bus=_of_others,
    ),
    Operation(
        "send", "send", "", ("tensors: list, dstRank: int, tag",), operator="send", start="send", roles="in@peer"
    ),
    Operation(
        "recv", "recv", "", ("tensors: list, srcRank: int, tag",), operator="recv_", start="recv", roles="out@peer"
    ),
    Operation(
        *("recv", "recv_anysource", ""),
        ("arg0: list, arg1: tag",),
        operator="recv_any_source_",
        start="recv",
        roles="out@any",
    ),
)
#: By name; of two methods the first.
BY_NAME = {row.name: row for row in reversed(ROWS)}
