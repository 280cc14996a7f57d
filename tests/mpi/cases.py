"""One case of the operation table: a group, a dtype, a shape and a layout, and tensors for them."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from groups import Group

DTYPES = [
    getattr(torch, name)
    for name in (
        *("bool", "uint8", "uint16", "uint32", "uint64", "int8", "int16", "int32", "int64"),
        *("float16", "bfloat16", "float32", "float64", "complex32", "complex64", "complex128"),
        *("float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz"),
        "float8_e8m0fnu",
    )
]
SHAPES: list[tuple[int, ...]] = [(), (0,), (1,), (5,), (3, 4), (1000,), (70001,)]
LAYOUTS = ("contiguous", "strided", "transposed", "offset", "channels_last")
FILL = 0x01  # what a buffer holds before an operation: a valid byte of every dtype

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Case:
    """What one run of one operation is about, on this rank of the group."""

    group: Group
    dtype: torch.dtype = torch.float32
    shape: Shape = (5,)
    layout: str = "contiguous"
    mode: str = "sync"
    op_name: str = "SUM"

    def __str__(self) -> str:
        dtype = str(self.dtype).removeprefix("torch.")
        return f"{self.group} {dtype} {self.shape} {self.layout} {self.mode} {self.op_name}"

    @property
    def rank(self) -> int:
        return self.group.rank

    @property
    def size(self) -> int:
        return self.group.size

    @property
    def process_group(self) -> Any:
        return self.group.process_group

    @property
    def is_async(self) -> bool:
        return self.mode != "sync"

    @property
    def op(self) -> Any:
        if self.op_name == "PREMUL_SUM":
            return dist._make_nccl_premul_sum(2.0)
        return getattr(dist.ReduceOp, self.op_name)

    @property
    def root(self) -> int:
        """The group rank of rooted operations: one that every rank finds, and not always zero."""
        return (torch.Size(self.shape).numel() + self.dtype.itemsize) % self.size

    @property
    def global_root(self) -> int:
        return self.group.ranks[self.root]

    def with_(self, **changes: Any) -> Case:
        return replace(self, **changes)

    def data(self, rank: int, slot: int = 0, shape: Shape | None = None) -> torch.Tensor:
        """Any bytes at all: what `rank` puts into `slot`, where it is only moved. Do not change."""
        shape = self.shape if shape is None else shape
        return movement_data(self.dtype, tuple(shape), rank, slot)

    def number(self, rank: int, slot: int = 0, shape: Shape | None = None) -> torch.Tensor:
        """Numbers fit for this case's reduction, from `rank` for `slot`. Do not change."""
        shape = self.shape if shape is None else shape
        return reduction_data(self.dtype, tuple(shape), rank, slot, self.op_name)

    def place(self, tensor: torch.Tensor) -> torch.Tensor:
        """A copy in this case's layout."""
        return place(tensor, self.layout)

    def empty(self, shape: Sequence[int] | None = None) -> torch.Tensor:
        """A buffer for a result, in this case's layout, holding something else."""
        shape = self.shape if shape is None else tuple(shape)
        return empty(self.dtype, tuple(shape), self.layout)


@functools.lru_cache(maxsize=4096)
def movement_data(dtype: torch.dtype, shape: Shape, rank: int, slot: int) -> torch.Tensor:
    numel = torch.Size(shape).numel()
    generator = torch.Generator().manual_seed(7919 * rank + 104729 * slot + numel)
    top = 2 if dtype == torch.bool else 256
    raw = torch.randint(0, top, (numel * dtype.itemsize,), dtype=torch.uint8, generator=generator)
    return raw.view(dtype).reshape(shape)


@functools.lru_cache(maxsize=4096)
def reduction_data(dtype: torch.dtype, shape: Shape, rank: int, slot: int, op_name: str) -> torch.Tensor:
    """Numbers of either sign whose reduction over a few ranks stays in range.

    Integers take all their bits where the operation wraps or compares, and few where it divides.
    """
    if dtype.is_complex:
        parts = reduction_data(real_part(dtype), (*shape, 2), rank, slot, op_name)
        return torch.view_as_complex(parts.clone())
    small = op_name in ("AVG", "PREMUL_SUM")
    if dtype == torch.bool or not (dtype.is_floating_point or small):
        return movement_data(dtype, shape, rank, slot)
    generator = torch.Generator().manual_seed(31 * rank + 1009 * slot)
    if dtype.is_floating_point:
        numbers = torch.randn(shape, dtype=torch.float64, generator=generator)
        if op_name == "PRODUCT":  # near one, so that five factors stay in the narrowest type
            numbers = 1 + numbers.clamp(-2, 2) / 4
        return numbers.to(torch.float32).to(dtype) if dtype.itemsize < 4 else numbers.to(dtype)
    low = 0 if dtype in UNSIGNED else -12
    return torch.randint(low, 13, shape, dtype=torch.int64, generator=generator).to(dtype)


UNSIGNED = (torch.uint8, torch.uint16, torch.uint32, torch.uint64)


def real_part(dtype: torch.dtype) -> torch.dtype:
    parts = {torch.complex32: torch.float16, torch.complex64: torch.float32, torch.complex128: torch.float64}
    return parts[dtype]


def raw_bytes(numel: int, dtype: torch.dtype) -> torch.Tensor:
    filled = torch.full((numel * dtype.itemsize,), FILL, dtype=torch.uint8)
    return filled.view(dtype)


def empty(dtype: torch.dtype, shape: Shape, layout: str) -> torch.Tensor:
    """A view of `shape` in a buffer of FILL bytes, laid out as `layout` names it."""
    numel = torch.Size(shape).numel()
    if layout == "strided":
        return raw_bytes(numel * 2, dtype).reshape(*shape, 2)[..., 1]
    if layout == "offset":
        return raw_bytes(numel + 5, dtype)[3 : 3 + numel].view(shape)
    if layout == "transposed" and len(shape) > 1:
        return raw_bytes(numel, dtype).view(shape[::-1]).permute(*range(len(shape))[::-1])
    if layout == "channels_last" and len(shape) == 4:
        n, c, h, w = shape
        return raw_bytes(numel, dtype).view(n, h, w, c).permute(0, 3, 1, 2)
    return raw_bytes(numel, dtype).view(shape)


def place(tensor: torch.Tensor, layout: str) -> torch.Tensor:
    return empty(tensor.dtype, tuple(tensor.shape), layout).copy_(tensor)


def gaps_untouched(view: torch.Tensor) -> bool:
    """Whether the bytes between a view's elements are as `empty` left them.

    Overwrites the view, so compare its contents first.
    """
    base = view._base
    if base is None:
        return True
    view.copy_(raw_bytes(view.numel(), view.dtype).view(view.shape))
    return bool((base.view(torch.uint8) == FILL).all())
