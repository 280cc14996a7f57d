"""The results of reductions by the names that torch.distributed has for them, and how to compare with them."""

from __future__ import annotations

import os
from collections.abc import Sequence

import reductions
import torch

FLOAT_OPS = ("SUM", "PRODUCT", "MIN", "MAX", "AVG", "PREMUL_SUM")
BIT_OPS = ("BAND", "BOR", "BXOR")
REDUCE_OPS = (*FLOAT_OPS, *BIT_OPS)
PREFIX_OPS = tuple(name for name in REDUCE_OPS if name != "AVG")
PREMUL_FACTOR = 2
#: Ranks dealt out over the nodes have another tree (docs/architecture/internode.md), so the wide result may differ.
HOSTS = os.environ.get("MPIPLUS_TEST_HOST_OF", "").split(",")


def makes_sense(dtype: torch.dtype, op_name: str) -> bool:
    """Whether an operation is defined on a dtype."""
    if dtype == torch.bool:
        return op_name not in ("AVG", "PREMUL_SUM")
    if dtype.is_complex:  # torch's front end sends the parts, and refuses the rest
        return op_name in ("SUM", "AVG", "PREMUL_SUM")
    if dtype == torch.float8_e8m0fnu:  # a scale: powers of two, with neither sign nor zero
        return False
    return op_name in FLOAT_OPS or not dtype.is_floating_point


def reduced(tensors: Sequence[torch.Tensor], op_name: str) -> torch.Tensor:
    """The reduction of one tensor per rank, in group rank order."""
    if op_name == "AVG":
        return reductions.reduced(tensors, "SUM", divisor=len(tensors))
    if op_name == "PREMUL_SUM":
        return reductions.reduced(tensors, "SUM", PREMUL_FACTOR)
    return reductions.reduced(tensors, "PROD" if op_name == "PRODUCT" else op_name)


def same_bytes(actual: torch.Tensor, expected: torch.Tensor) -> bool:
    return bool(torch.equal(as_bytes(actual), as_bytes(expected)))


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    # contiguous() would return a one-element tensor as it is, with a stride that view() refuses.
    packed = torch.empty(tensor.shape, dtype=tensor.dtype).copy_(tensor)
    return packed.reshape(-1).view(torch.uint8)


def same_numbers(actual: torch.Tensor, expected: torch.Tensor, op_name: str) -> bool:
    """Equality of results: to the bit where at most one rounding decides, within a few where order may.

    NaN equals NaN whatever its payload, and zero equals zero whatever its sign.
    """
    dtype = actual.dtype
    if dtype.is_complex:
        return same_numbers(torch.view_as_real(actual), torch.view_as_real(expected), op_name)
    if not dtype.is_floating_point:
        return same_bytes(actual, expected)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    narrow = 0.0 if sorted(HOSTS) == HOSTS else torch.finfo(dtype).eps  # the next number, where it is close to half way
    tolerance = 0.0 if op_name in ("MIN", "MAX") else {torch.float64: 1e-14, torch.float32: 2e-6}.get(dtype, narrow)
    actual, expected = actual.to(wide), expected.to(wide)
    return torch.allclose(actual, expected, rtol=tolerance, atol=min(tolerance, 2e-6), equal_nan=True)


def difference(actual: torch.Tensor, expected: torch.Tensor, op_name: str = "") -> str | None:
    """What is wrong with the result of a reduction, or of what is only moved, in a line; None where nothing is."""
    if actual.dtype != expected.dtype or actual.shape != expected.shape:
        return f"is {actual.dtype} {tuple(actual.shape)}, not {expected.dtype} {tuple(expected.shape)}"
    if same_numbers(actual, expected, op_name) if op_name else same_bytes(actual, expected):
        return None
    got, want = (as_bytes(tensor).view(-1, actual.dtype.itemsize) for tensor in (actual, expected))
    wrong = (got != want).any(1).nonzero().reshape(-1)
    first = int(wrong[0])
    return (
        f"{len(wrong)} of {len(got)} elements differ, the first at {first}: bytes "
        f"{got[first].tolist()} instead of {want[first].tolist()}"
    )
