"""The operations of c10d: one row each, which every other table of operations is made from."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple


class Operation(NamedTuple):
    """A row.

    Attributes:
        name: in errors, and of what is recorded. Two methods of one name are one operation.
        method: c10d's, which torch's front end calls; it stands in ``ProcessGroupMPI``, with its other names.
        options: c10d's type of its last argument; empty: it has none.
        start: the function of c_src/shim.h that C starts it with, without "mpp_"; empty: it consists of others.
        roles: its tensors, written and read, or both in one; then "root" and "op", if it has them. "*": the parts of
            all ranks in one tensor; "/": the same in parts of given sizes; "[]": a tensor for each rank, or several;
            "[root]": one for each rank, from the root alone; "@": a message, with a peer or from anyone.
        forms: its parameters, in all ways to call it; the first is the one that the method written here takes.
            Each is "name: kind", with the kinds of ``group/forms.py``.
        newer: the method's name since torch 2.13, by which torch's dispatcher calls it of a backend.
        operator: c10d's, in torch's dispatcher, if that is not the method with "_" behind; None: there is none.
        equal_counts: its tensor has as many elements on one rank as on any other.
        recorded: its name in torch's flight recorder, if that is not ``name``.
        bus: by what nccl-tests multiply its data to compare it with a link, given the number of ranks.
    """

    name: str
    method: str
    options: str
    start: str
    roles: str
    forms: tuple[str, ...]
    newer: str = ""
    operator: str | None = ""
    equal_counts: bool = False
    recorded: str = ""
    bus: Callable[[int], float] | None = None

    @property
    def reduces(self) -> bool:
        """True if it computes, by an operation that is an argument."""
        return "op" in self.roles.split()


_GATHER = "output: tensor, input: tensor, opts"
_SCATTER = "outputTensor: tensor, inputTensor: tensor, opts"
_COALESCED = "outputs: list, inputs: list, opts"
_SPLITS = "output: tensor, input: tensor, output_split_sizes: ints, input_split_sizes: ints"
_TO_LISTS = "output_tensors: lists, input_tensors: list, opts"
_TO_LIST = "output_tensors: list, input_tensor: tensor"
_FROM_LISTS = "output_tensors: list, input_tensors: lists, opts"
_LISTS = "output_tensors: list, input_tensors: list"
_OWN = ("tensors: list, opts",)


def _of_others(ranks: int) -> float:
    return (ranks - 1) / ranks


ROWS = (
    Operation(
        *("all_reduce", "allreduce", "AllreduceOptions", "allreduce", "inout op"),
        ("tensors: list, opts", "tensors: list, op, timeout", "tensor: tensor, op, timeout"),
        equal_counts=True,
        bus=lambda ranks: 2 * _of_others(ranks),
    ),
    Operation(
        *("all_reduce_coalesced", "allreduce_coalesced", "AllreduceCoalescedOptions", "", "inout[] op"),
        ("tensors: list, opts",),
    ),
    Operation("barrier", "barrier", "BarrierOptions", "barrier", "", ("opts", "timeout"), operator="barrier"),
    Operation(
        *("broadcast", "broadcast", "BroadcastOptions", "broadcast", "inout root"),
        ("tensors: list, opts", "tensor: tensor, root, timeout"),
        equal_counts=True,
        bus=lambda _: 1.0,
    ),
    Operation(
        *("reduce", "reduce", "ReduceOptions", "reduce_to", "inout root op"),
        ("tensors: list, opts", "tensor: tensor, root, op, timeout"),
        equal_counts=True,
    ),
    Operation(
        *("all_gather", "allgather", "AllgatherOptions", "allgather", "out[]+in"), (_TO_LISTS, f"{_TO_LIST}, timeout")
    ),
    Operation(
        *("all_gather_coalesced", "allgather_coalesced", "AllgatherOptions", "", "out[]+in[]"),
        ("output_lists: lists, input_list: list, opts",),
    ),
    Operation(
        *("all_gather_into_tensor", "_allgather_base", "AllgatherOptions", "allgather", "out*+in"),
        *((_GATHER,), "all_gather_single"),
        equal_counts=True,
        recorded="_all_gather_base",
        bus=_of_others,
    ),
    Operation(
        *("all_gather_into_tensor_coalesced", "allgather_into_tensor_coalesced", "AllgatherOptions", "", "out[]+in[]"),
        *((_COALESCED,), "all_gather_single_coalesced"),
    ),
    Operation(
        *("reduce_scatter", "reduce_scatter", "ReduceScatterOptions", "reduce_scatter", "out+in[] op"),
        (_FROM_LISTS, "output: tensor, input: list, op, timeout"),
    ),
    Operation(
        *("reduce_scatter_tensor", "_reduce_scatter_base", "ReduceScatterOptions", "reduce_scatter", "out+in* op"),
        *((_SCATTER,), "reduce_scatter_single"),
        equal_counts=True,
        recorded="_reduce_scatter_base",
        bus=_of_others,
    ),
    Operation(
        *("reduce_scatter_tensor_coalesced", "reduce_scatter_tensor_coalesced", "ReduceScatterOptions"),
        *("", "out[]+in[] op"),
        *((_COALESCED,), "reduce_scatter_single_coalesced"),
    ),
    Operation(
        *("gather", "gather", "GatherOptions", "exchange", "out[root]+in root"),
        (_TO_LISTS, f"{_TO_LIST}, root, timeout"),
    ),
    Operation(
        *("gather_single", "gather_single", "GatherOptions", "exchange", "out*[root]+in root"),
        (_GATHER,),
        operator="gather_into_tensor_",
        recorded="gather",
    ),
    Operation(
        *("scatter", "scatter", "ScatterOptions", "exchange", "out+in[root] root"),
        (_FROM_LISTS, "output_tensor: tensor, input_tensors: list, root, timeout"),
    ),
    Operation(
        *("all_to_all", "alltoall", "AllToAllOptions", "exchange", "out[]+in[]"),
        (f"{_LISTS}, opts", f"{_LISTS}, timeout"),
    ),
    Operation(
        *("all_to_all_single", "alltoall_base", "AllToAllOptions", "exchange", "out/+in/"),
        (f"{_SPLITS}, opts", f"{_SPLITS}, timeout"),
        newer="all_to_all_single",
        bus=_of_others,
    ),
    Operation("send", "send", "", "send", "in@peer", ("tensors: list, dstRank: int, tag",), operator="send"),
    Operation("recv", "recv", "", "recv", "out@peer", ("tensors: list, srcRank: int, tag",)),
    Operation("recv", "recv_anysource", "", "recv", "out@any", ("arg0: list, arg1: tag",), operator="recv_any_source_"),
)
#: Functions of mpiplus's own, which c10d has no method for.
OWN = (
    Operation(*("scan", "scan", "AllreduceOptions", "scan", "inout op", _OWN), operator=None, equal_counts=True),
    Operation(*("exscan", "exscan", "AllreduceOptions", "exscan", "inout op", _OWN), operator=None, equal_counts=True),
)
#: By name; of two methods the first.
BY_NAME = {row.name: row for row in (*reversed(ROWS), *OWN)}
