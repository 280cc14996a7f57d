"""What is computed in another type, or handed to MPI in another form, and the way back."""

import numpy as np
import pytest
import torch
from reduce_kernels import (
    CASES,
    DTYPES,
    INTEGERS,
    NARROW,
    OPS,
    as_bytes,
    as_torch,
    check_equal,
    each_isa,
    expected,
    random_bytes,
)


@pytest.mark.parametrize("dtype,op", CASES)
def test_reducing_the_form_on_the_wire_gives_the_same(kernels, dtype, op):
    """Also in another order, to the bit: MPI may combine the ranks' parts in a different order on each."""
    lib, rng = kernels.lib, np.random.default_rng(1)
    count, size = 5000, kernels.size(dtype)
    premul, divisor = (None, 1) if dtype == "BOOL" else (1.75, 3)
    reduction = kernels.reduction(dtype, op, premul, divisor)
    dtype_of_mpi, mpi_op = mpi_dtype(kernels, reduction), OPS[lib.mpp_mpi_op(reduction)]
    sources = [random_bytes(rng, dtype, count, size) for _ in range(3)]
    for isa in each_isa(kernels):
        sent = [np.empty(count * kernels.size(dtype_of_mpi), np.uint8) for _ in sources]
        for w, s in zip(sent, sources, strict=True):
            lib.mpp_to_mpi(reduction, kernels.pointer(w), kernels.pointer(s), count)
        total = kernels.reduce(kernels.reduction(dtype_of_mpi, mpi_op), kernels.size(dtype_of_mpi), sent)
        actual = from_mpi(kernels, reduction, total, count, size)
        check_equal(actual, expected(sources, dtype, op, premul, divisor), dtype, op, isa)
        if op in ("SUM", "PROD") and dtype_of_mpi not in INTEGERS:
            continue  # sums of floats depend on the order
        reversed_total = kernels.reduce(kernels.reduction(dtype_of_mpi, mpi_op), kernels.size(dtype_of_mpi), sent[::-1])
        assert (from_mpi(kernels, reduction, reversed_total, count, size) == actual).all()


def test_what_libraries_do_wrong_does_not_reach_them(kernels):
    """Open MPI saturates short integers; MPI libraries compare floats with < alone."""
    for dtype in DTYPES:
        for op in ("SUM", "PROD", "MIN", "MAX"):
            if (dtype, op) not in CASES:
                continue
            dtype_of_mpi = mpi_dtype(kernels, kernels.reduction(dtype, op))
            if op in ("MIN", "MAX"):
                assert dtype_of_mpi in INTEGERS
            elif dtype != "BOOL":
                assert kernels.size(dtype_of_mpi) >= 4


def mpi_dtype(kernels, reduction):
    code = kernels.lib.mpp_mpi_dtype(reduction)
    return next(name for name in DTYPES if getattr(kernels.lib, f"MPP_{name}") == code)


def from_mpi(kernels, reduction, values, count, size):
    values, out = values.copy(), np.empty(count * size, np.uint8)
    kernels.lib.mpp_from_mpi(reduction, kernels.pointer(out), kernels.pointer(values), count)
    return out


def every_code(torch_type):
    return np.arange(256**torch_type.itemsize).astype(f"u{torch_type.itemsize}")


def telling_float32():
    """Every upper half with the lower halves around which roundings turn."""
    low = np.array([0, 1, 0x0FFF, 0x1000, 0x1001, 0x3000, 0x7FFF, 0x8000, 0x8001, 0xFFFF], np.uint32)
    grid = (np.arange(1 << 16, dtype=np.uint32)[:, None] << 16 | low).ravel()
    return np.concatenate([grid, np.random.default_rng(2).integers(0, 1 << 32, 1 << 20, dtype=np.uint32)])


def widen(kernels, dtype, codes):
    out = np.empty(codes.size, np.uint32)
    kernels.lib.mpp_widen(kernels.reduction(dtype), kernels.pointer(out), kernels.pointer(codes), codes.size)
    return out


def narrow(kernels, dtype, bits, code_type):
    out = np.empty(bits.size, code_type)
    kernels.lib.mpp_narrow(kernels.reduction(dtype), kernels.pointer(out), kernels.pointer(bits), bits.size)
    return out


@pytest.mark.parametrize("dtype", NARROW)
def test_widening_every_value(kernels, dtype):
    codes = every_code(NARROW[dtype][0])
    wanted = as_torch(codes.view(np.uint8), NARROW[dtype][0]).to(torch.float32).numpy()
    for isa in each_isa(kernels):
        actual = widen(kernels, dtype, codes)
        same = (actual == wanted.view(np.uint32)) | (np.isnan(actual.view(np.float32)) & np.isnan(wanted))
        assert same.all(), (isa, codes[~same])


@pytest.mark.parametrize("dtype", NARROW)
def test_narrowing_to_every_value(kernels, dtype):
    torch_type, nan = NARROW[dtype]
    bits = telling_float32()
    is_nan = np.isnan(bits.view(np.float32))
    wanted = as_torch(bits.view(np.uint8), torch.float32).to(torch_type)
    assert wanted.to(torch.float32).isnan().numpy()[is_nan].all()
    code_type = every_code(torch_type).dtype
    codes = np.where(is_nan, nan, as_bytes(wanted).view(code_type)).astype(code_type)
    for isa in each_isa(kernels):
        actual = narrow(kernels, dtype, bits, code_type)
        wrong = np.flatnonzero(actual != codes)
        assert wrong.size == 0, (isa, [(hex(bits[i]), hex(actual[i]), hex(codes[i])) for i in wrong[:5]])


@pytest.mark.parametrize("dtype", NARROW)
def test_flushing_denormals_does_not_reach_the_conversions(kernels, dtype):
    codes = every_code(NARROW[dtype][0])
    for isa in each_isa(kernels):
        plain_wide = widen(kernels, dtype, codes)
        plain = narrow(kernels, dtype, plain_wide, codes.dtype)
        flushing = torch.set_flush_denormal(True)
        try:
            wide = widen(kernels, dtype, codes)
            back = narrow(kernels, dtype, plain_wide, codes.dtype)
        finally:
            torch.set_flush_denormal(False)
        if not flushing:
            pytest.skip("this CPU cannot flush denormals")
        assert (wide == plain_wide).all() and (back == plain).all(), isa


def test_any_nonzero_byte_is_true(kernels):
    values = np.arange(256, dtype=np.uint8)
    for isa in each_isa(kernels):
        for convert in (kernels.lib.mpp_widen, kernels.lib.mpp_narrow):
            out = np.empty_like(values)
            convert(kernels.reduction("BOOL"), kernels.pointer(out), kernels.pointer(values), 256)
            assert (out == (values != 0)).all(), isa
