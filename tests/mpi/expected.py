"""The results of reductions, computed with plain torch and numpy, and how to compare with them."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Sequence

import numpy as np
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
    dtype = tensors[0].dtype
    if dtype.is_complex and op_name == "PRODUCT":  # the one that is not that of the parts
        return functools.reduce(torch.mul, [tensor.to(torch.complex128) for tensor in tensors]).to(dtype)
    if dtype.is_complex:
        parts = [torch.view_as_real(tensor) for tensor in tensors]
        return torch.view_as_complex(reduced(parts, op_name))
    if dtype == torch.bool:
        return _reduced_bools(tensors, op_name)
    if dtype.is_floating_point:
        return _reduced_floats(tensors, op_name)
    return _reduced_integers(tensors, op_name)


def _reduced_bools(tensors: Sequence[torch.Tensor], op_name: str) -> torch.Tensor:
    trues = torch.stack([tensor.to(torch.uint8) for tensor in tensors]).sum(0)
    if op_name in ("SUM", "MAX", "BOR"):
        return trues > 0
    if op_name in ("PRODUCT", "MIN", "BAND"):
        return trues == len(tensors)
    return trues % 2 == 1


def _reduced_floats(tensors: Sequence[torch.Tensor], op_name: str) -> torch.Tensor:
    """Accumulates in float32 (float64 for itself), as a balanced tree over the ranks, and rounds once."""
    dtype = tensors[0].dtype
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    values = [tensor.to(wide) for tensor in tensors]
    if op_name == "PREMUL_SUM":
        values = [value * PREMUL_FACTOR for value in values]
    combine = {"PRODUCT": torch.mul, "MIN": torch.minimum, "MAX": torch.maximum}.get(op_name, torch.add)
    result = _tree(combine, values)
    return (result / len(tensors) if op_name == "AVG" else result).to(dtype)


def _tree(combine: Callable[..., torch.Tensor], values: Sequence[torch.Tensor]) -> torch.Tensor:
    """The first half is as large a power of two as leaves something for the second."""
    if len(values) == 1:
        return values[0]
    half = 1 << (len(values) - 1).bit_length() - 1
    return combine(_tree(combine, values[:half]), _tree(combine, values[half:]))


def _reduced_integers(tensors: Sequence[torch.Tensor], op_name: str) -> torch.Tensor:
    """Wraps as C's unsigned arithmetic does; a mean is truncated toward zero."""
    arrays = [tensor.reshape(-1).numpy() for tensor in tensors]
    if op_name == "PREMUL_SUM":
        arrays = [array * array.dtype.type(PREMUL_FACTOR) for array in arrays]
    combine = {
        "PRODUCT": np.multiply,
        "MIN": np.minimum,
        "MAX": np.maximum,
        "BAND": np.bitwise_and,
        "BOR": np.bitwise_or,
        "BXOR": np.bitwise_xor,
    }.get(op_name, np.add)
    result = functools.reduce(combine, arrays)
    if op_name == "AVG":
        total = result.astype(np.int64)
        result = (np.sign(total) * (abs(total) // len(arrays))).astype(result.dtype)
    return torch.from_numpy(np.array(result)).reshape(tensors[0].shape)


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
