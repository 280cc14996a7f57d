"""What reductions give, by plain torch and numpy: to compare the kernels' results with, and those of groups."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import numpy as np
import torch


def reduced(tensors: Sequence[torch.Tensor], op: str, premul: float | None = None, divisor: int = 1) -> torch.Tensor:
    """Of one tensor for each rank, in the order of the ranks; each may be multiplied first, and the result divided.

    Floats are accumulated in float32 (float64 for itself), as a balanced tree over the ranks, and rounded once.
    """
    dtype = tensors[0].dtype
    if dtype == torch.bool:
        return _reduced_bools(tensors, op)
    if not (dtype.is_floating_point or dtype.is_complex):
        return _reduced_integers(tensors, op, premul, divisor)
    parts = [torch.view_as_real(tensor) if dtype.is_complex else tensor for tensor in tensors]
    wide = torch.float64 if parts[0].dtype == torch.float64 else torch.float32
    values = [part.to(wide) for part in parts]
    if premul is not None:
        values = [value * torch.tensor(premul, dtype=wide) for value in values]
    times = _complex_product if dtype.is_complex else torch.mul
    combine = {"PROD": times, "MIN": torch.minimum, "MAX": torch.maximum}.get(op, torch.add)
    total = _tree(combine, values)
    if divisor != 1:
        total = total / torch.tensor(divisor, dtype=wide)
    total = total.to(parts[0].dtype)
    return torch.view_as_complex(total) if dtype.is_complex else total


def _tree(combine: Callable[..., torch.Tensor], values: Sequence[torch.Tensor]) -> torch.Tensor:
    """The first half is as large a power of two as leaves something for the second."""
    if len(values) == 1:
        return values[0]
    half = 1 << (len(values) - 1).bit_length() - 1
    return combine(_tree(combine, values[:half]), _tree(combine, values[half:]))


def _complex_product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    (ar, ai), (br, bi) = a.unbind(-1), b.unbind(-1)
    return torch.stack([ar * br - ai * bi, ar * bi + ai * br], dim=-1)


def _reduced_bools(tensors: Sequence[torch.Tensor], op: str) -> torch.Tensor:
    both = dict.fromkeys(("PROD", "MIN", "BAND"), torch.logical_and)
    return functools.reduce({**both, "BXOR": torch.logical_xor}.get(op, torch.logical_or), tensors)


def _reduced_integers(tensors: Sequence[torch.Tensor], op: str, premul: float | None, divisor: int) -> torch.Tensor:
    """Wraps as C's unsigned arithmetic does; a quotient is truncated toward zero."""
    arrays = [tensor.reshape(-1).numpy() for tensor in tensors]
    kind = arrays[0].dtype
    if premul is not None:
        factor = np.array(int(premul) % (1 << 64), np.uint64).astype(kind)
        arrays = [array * factor for array in arrays]
    combine = {"PROD": np.multiply, "MIN": np.minimum, "MAX": np.maximum,
               "BAND": np.bitwise_and, "BOR": np.bitwise_or, "BXOR": np.bitwise_xor}.get(op, np.add)  # fmt: skip
    total = functools.reduce(combine, arrays)
    if divisor != 1:
        wide = total.astype(np.int64 if kind.kind == "i" else np.uint64)
        quotient = wide // wide.dtype.type(divisor)
        quotient += ((wide < 0) & (quotient * wide.dtype.type(divisor) != wide)).astype(wide.dtype)
        total = quotient.astype(kind)
    return torch.from_numpy(np.array(total)).reshape(tensors[0].shape)
