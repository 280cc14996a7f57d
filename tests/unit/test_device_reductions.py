"""What torch's kernels make of the blocks of all ranks, against the same reference as mpiplus's own arithmetic."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from reduce_kernels import (
    CASES,
    DTYPES,
    INTEGERS,
    OPS,
    REAL_FLOATS,
    as_bytes,
    as_torch,
    check_equal,
    expected,
    random_bytes,
)

from torchmpi_plugin.group import device_reductions


def torch_dtype(name: str) -> torch.dtype:
    if name in INTEGERS:
        return getattr(torch, INTEGERS[name].name)
    parts = {"CHALF": torch.complex32, "CFLOAT": torch.complex64, "CDOUBLE": torch.complex128}
    return torch.bool if name == "BOOL" else (REAL_FLOATS | parts)[name]


def suits(dtype: str, op: str, has_premul: int = 0) -> bool:
    tensor = SimpleNamespace(is_cpu=False, dtype=torch_dtype(dtype))
    how = SimpleNamespace(op=OPS.index(op), has_premul=has_premul)
    return device_reductions.suits(tensor, 65, how, 64)


@pytest.mark.parametrize("dtype,op", [case for case in CASES if suits(*case)])
def test_combine(dtype: str, op: str) -> None:
    rng = np.random.default_rng(DTYPES.index(dtype) * 10 + OPS.index(op))
    kind = torch_dtype(dtype)
    for ranks in (1, 2, 3, 5):
        sources = [random_bytes(rng, dtype, 1003, kind.itemsize) for _ in range(ranks)]
        for divisor in (1,) if dtype == "BOOL" else (1, 3):
            wanted = expected(sources, dtype, op, None, divisor)
            how = SimpleNamespace(op=OPS.index(op), divisor=divisor)
            for place in (None, 0, ranks - 1):
                blocks = [as_torch(source, kind) for source in sources]
                target = torch.empty_like(blocks[0]) if place is None else blocks[place]
                with np.errstate(all="ignore"):
                    device_reductions.combine(blocks, target, how)
                check_equal(as_bytes(target), wanted, dtype, op, (ranks, divisor, place))


def test_what_is_staged() -> None:
    """Types and operations that torch has no kernels for on a GPU, and what is short."""
    for dtype in ("F8_E4M3FN", "U16", "U32", "U64", "CHALF"):
        assert not suits(dtype, "SUM")
    assert not suits("CFLOAT", "PROD")
    assert not suits("F32", "SUM", has_premul=1)
    assert all(suits(dtype, "SUM") for dtype in ("BOOL", "U8", "I64", "BF16", "F16", "F64", "CFLOAT", "CDOUBLE"))
    how = SimpleNamespace(op=0, has_premul=0)
    on_device = SimpleNamespace(is_cpu=False, dtype=torch.float32)
    assert not device_reductions.suits(on_device, 64, how, 64)
    assert not device_reductions.suits(on_device, 1 << 40, how, None)
    assert not device_reductions.suits(torch.zeros(2), 65, how, 64)
