"""torch's dtypes and reduce operations, as the shim and MPI know them: one table."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed import ReduceOp

from . import torch_internals

# Position = enum mpp_dtype of c_src/reduce.h. The MPI type is given where MPI is handed that type to reduce;
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
            raise ValueError(f"the factor of PREMUL_SUM must have one element, not {factor.numel()}")
        return float(factor.item())
    return float(factor)


# Kinds of call in a signature, as c_src/shm.h numbers them.
_KINDS = ("", "barrier", "broadcast", "all_reduce", "reduce", "all_gather", "reduce_scatter")


def describe_signature(signature: int) -> str:
    """What another rank called, from the signature that ``mpp_sign`` in c_src/shm.c made of it."""
    signature &= (1 << 64) - 1
    kind, size = _KINDS[signature & 15], signature >> 24
    if kind == "barrier":
        return kind
    root = f" with root {signature >> 14 & 1023}" if kind in ("broadcast", "reduce") else ""
    if kind in ("broadcast", "all_gather"):
        return f"{kind} of {size} bytes{root}"
    scaled = ", scaled" if signature >> 13 & 1 else ""
    dtype, op = _TABLE[signature >> 4 & 31][0], MPI_OPERATIONS[signature >> 9 & 15]
    return f"{kind} ({op}{scaled}) of {size} bytes of {dtype}{root}"
