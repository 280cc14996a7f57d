"""torch's dtypes and reduce operations, as the shim and MPI know them: one table."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed import ReduceOp

from .. import _bridge
from ..operations import BY_NAME
from .arguments import ArgumentError

# C's numbers: c_src/arith/dtypes.h.
DTYPES: dict[torch.dtype, int] = {getattr(torch, name): code for code, name in enumerate(_bridge.DTYPES)}
MPI_DATATYPES: dict[int, str] = {code: name for code, name in enumerate(_bridge.MPI_DATATYPES) if name}
MPI_OPERATIONS: dict[int, str] = dict(enumerate(_bridge.REDUCTIONS))

_Kind: Any = ReduceOp.RedOpType  # the stubs do not list its members

AVG, PREMUL_SUM, SUM = _Kind.AVG, _Kind.PREMUL_SUM, _Kind.SUM
OPERATIONS: dict[Any, int] = {
    getattr(_Kind, "PRODUCT" if name == "PROD" else name): code for code, name in MPI_OPERATIONS.items()
}
OPERATIONS |= dict.fromkeys((AVG, PREMUL_SUM), OPERATIONS[SUM])


def kind_of(op: Any) -> Any:
    """The ``RedOpType`` of a ``ReduceOp``, which torch passes in either form."""
    return op if type(op) is _Kind else op.op


def premul_factor(op: Any) -> float:
    """The factor of a PREMUL_SUM: a number, or a tensor of one element. A ValueError: it has several."""
    factor = op.__getstate__()[1]
    if isinstance(factor, torch.Tensor):
        if factor.numel() != 1:
            raise ArgumentError(f"the factor of PREMUL_SUM must have one element, not {factor.numel()}")
        return float(factor.item())
    return float(factor)


def describe_call(call: Any) -> str:
    """Describe what a rank called, from its ``mpp_call``."""
    kind = _bridge.CALLS[call.kind]
    if kind == "barrier":
        return kind
    if kind == "exchange":
        return "gather, scatter or all_to_all"
    how = ""
    if BY_NAME[kind].reduces:
        name = "PREMUL_SUM" if call.has_premul else "AVG" if call.divisor > 1 else MPI_OPERATIONS[call.op]
        how = f" ({name})"
    dtype = f" of {_bridge.DTYPES[call.dtype]}" if how else ""
    root = f" with root {call.root}" if call.root >= 0 else ""
    if call.place:
        root += " on a CUDA device"
    if not call.has_lengths:
        return f"{kind}{how} of {call.bytes} bytes{dtype}{root}"
    return f"{kind}{how} of blocks of up to {call.bytes} bytes{dtype}{root}, its own of {call.own}"


def describe_disagreement(rank: int, mine: Any, theirs: Any, expected: int) -> str:
    """Describe how rank ``rank``'s call ``theirs`` differs from ``mine``, both an ``mpp_call``.

    Args:
        expected: bytes that this rank's list has for that rank, -1 where there is no list.
    """
    kind, own_kind = _bridge.CALLS[theirs.kind], _bridge.CALLS[mine.kind]
    if kind == "nothing":
        return f"rank {rank} had no memory for its call and makes none"
    if kind == own_kind == "exchange" and theirs.has_lengths:
        if theirs.root < 0:
            return "some rank sends another not as many bytes as that one expects"
        return f"rank {rank} sends {theirs.bytes} bytes to rank {theirs.root}, which expects {theirs.own}"
    text = f"rank {rank} calls {describe_call(theirs)}"
    if kind != own_kind or expected < 0:
        return text
    if theirs.own != expected:
        return f"{text}, for which the list of this rank has {expected}"
    how = ("dtype", "op", "has_premul", "divisor")
    alike = all(getattr(theirs, name) == getattr(mine, name) for name in how)
    return f"{text}, and has other lengths in its list than this rank" if alike else text
