"""torch's dtypes and reduce operations, as the shim and MPI know them: one table."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed import ReduceOp

from .. import torch_internals
from .arguments import ArgumentError

# Position = enum mpp_dtype of c_src/arith/reduce.h. The MPI type is given where MPI is handed that type to reduce;
# the others are converted to one of these first (mpp_wide_dtype). Data that only moves travels as bytes.
_TABLE: tuple[tuple[str, str | None], ...] = (
    ("bool", None),
    ("uint8", "UINT8_T"),
    ("int8", "INT8_T"),
    ("uint16", "UINT16_T"),
    ("int16", "INT16_T"),
    ("uint32", "UINT32_T"),
    ("int32", "INT32_T"),
    ("uint64", "UINT64_T"),
    ("int64", "INT64_T"),
    ("float16", None),
    ("bfloat16", None),
    ("float32", "FLOAT"),
    ("float64", "DOUBLE"),
    ("complex32", None),
    ("complex64", "C_FLOAT_COMPLEX"),
    ("complex128", "C_DOUBLE_COMPLEX"),
    ("float8_e4m3fn", None),
    ("float8_e4m3fnuz", None),
    ("float8_e5m2", None),
    ("float8_e5m2fnuz", None),
)
DTYPES: dict[torch.dtype, int] = {getattr(torch, name): code for code, (name, _) in enumerate(_TABLE)}
MPI_DATATYPES: dict[int, str] = {code: name for code, (_, name) in enumerate(_TABLE) if name}

# Position = enum mpp_redop.
MPI_OPERATIONS: dict[int, str] = dict(enumerate(("SUM", "PROD", "MIN", "MAX", "BAND", "BOR", "BXOR")))

_Kind: Any = ReduceOp.RedOpType  # the stubs do not list its members

AVG, PREMUL_SUM, SUM = _Kind.AVG, _Kind.PREMUL_SUM, _Kind.SUM
OPERATIONS: dict[Any, int] = {
    _Kind.SUM: 0,
    _Kind.AVG: 0,
    _Kind.PREMUL_SUM: 0,
    _Kind.PRODUCT: 1,
    _Kind.MIN: 2,
    _Kind.MAX: 3,
    _Kind.BAND: 4,
    _Kind.BOR: 5,
    _Kind.BXOR: 6,
}


def kind_of(op: Any) -> Any:
    """The ``RedOpType`` of a ``ReduceOp``, which torch passes in either form."""
    return op if type(op) is _Kind else op.op


def premul_factor(op: Any) -> float:
    """The factor of a PREMUL_SUM: a number, or a tensor of one element.

    Raises:
        ValueError: a tensor of several elements.
    """
    factor = torch_internals.premul_factor(op)
    if isinstance(factor, torch.Tensor):
        if factor.numel() != 1:
            raise ArgumentError(f"the factor of PREMUL_SUM must have one element, not {factor.numel()}")
        return float(factor.item())
    return float(factor)


# Position = enum mpp_call_kind of c_src/shim.h.
_CALLS = ("", "barrier", "broadcast", "all_reduce", "reduce", "all_gather", "reduce_scatter", "an exchange")
_EXCHANGE = len(_CALLS) - 1


def describe_call(call: Any) -> str:
    """What a rank called, from its ``mpp_call``."""
    kind = _CALLS[call.kind]
    if kind == "barrier":
        return kind
    if call.kind == _EXCHANGE:
        return "gather, scatter or all_to_all"
    how = ""
    if kind in ("all_reduce", "reduce", "reduce_scatter"):
        name = "PREMUL_SUM" if call.has_premul else "AVG" if call.divisor > 1 else MPI_OPERATIONS[call.op]
        how = f" ({name})"
    dtype = f" of {_TABLE[call.dtype][0]}" if how else ""
    root = f" with root {call.root}" if call.root >= 0 else ""
    if not call.has_lengths:
        return f"{kind}{how} of {call.bytes} bytes{dtype}{root}"
    return f"{kind}{how} of blocks of up to {call.bytes} bytes{dtype}, its own of {call.own}"


def describe_disagreement(rank: int, mine: Any, theirs: Any, expected: int) -> str:
    """How rank ``rank``'s call ``theirs`` differs from ``mine``, both an ``mpp_call``.

    Args:
        expected: bytes that this rank's list has for that rank, -1 where there is no list.
    """
    if theirs.kind == 0:
        return f"rank {rank} had no memory for its call and makes none"
    if theirs.kind == mine.kind == _EXCHANGE:
        if theirs.root < 0:
            return "some rank sends another not as many bytes as that one expects"
        return f"rank {rank} sends {theirs.bytes} bytes to rank {theirs.root}, which expects {theirs.own}"
    text = f"rank {rank} calls {describe_call(theirs)}"
    if theirs.kind != mine.kind or expected < 0:
        return text
    if theirs.own != expected:
        return f"{text}, for which the list of this rank has {expected}"
    how = ("dtype", "op", "has_premul", "divisor")
    alike = all(getattr(theirs, name) == getattr(mine, name) for name in how)
    return f"{text}, and has other lengths in its list than this rank" if alike else text
