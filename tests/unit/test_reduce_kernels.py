"""The reduction kernels against plain torch and numpy arithmetic.

The kernels are compiled here, apart from the extension module, twice: as
setuptools would, and with -march=native, where the compiler may fuse a
multiplication with an addition and must be kept from it.  Every test runs
each instruction set this machine has.
"""

import importlib.util
import os
import re
import shlex
import subprocess
from functools import reduce
from pathlib import Path

import cffi
import numpy as np
import pytest
import torch

C_SRC = Path(__file__).resolve().parents[2] / "c_src"
CC = shlex.split(os.environ.get("CC", "gcc"))

BLOCK_BYTES = 8192  # of reduce.c
OPS = ["SUM", "PROD", "MIN", "MAX", "BAND", "BOR", "BXOR"]
INTEGERS = {f"{k}{8 * n}": np.dtype(f"{k.lower()}{n}") for n in (1, 2, 4, 8) for k in "UI"}
# Name: torch type, NaN code the kernels produce.
NARROW = {
    "F16": (torch.float16, 0x7E00),
    "BF16": (torch.bfloat16, 0x7FC0),
    "F8_E4M3FN": (torch.float8_e4m3fn, 0x7F),
    "F8_E4M3FNUZ": (torch.float8_e4m3fnuz, 0x80),
    "F8_E5M2": (torch.float8_e5m2, 0x7F),
    "F8_E5M2FNUZ": (torch.float8_e5m2fnuz, 0x80),
}
REAL_FLOATS = {"F32": torch.float32, "F64": torch.float64} | {n: t for n, (t, _) in NARROW.items()}
COMPLEX = {"CHALF": "F16", "CFLOAT": "F32", "CDOUBLE": "F64"}
DTYPES = ["BOOL", *INTEGERS, *REAL_FLOATS, *COMPLEX]
CASES = [
    (dtype, op)
    for dtype in DTYPES
    for op in OPS
    if (dtype in INTEGERS or dtype == "BOOL")
    or op in ("SUM", "PROD")
    or (op in ("MIN", "MAX") and dtype in REAL_FLOATS)
]


# ---- building and calling the kernels ----


class Kernels:
    def __init__(self, module):
        self.ffi, self.lib = module.ffi, module.lib
        self.isas = [n for n in ("baseline", "avx2", "avx512") if self.lib.mpp_kernel_select(n.encode())]
        self.lib.mpp_kernel_select(self.ffi.NULL)

    def reduction(self, dtype, op="SUM", premul=None, divisor=1):
        value = self.ffi.new("mpp_reduction *")
        value.dtype, value.op = getattr(self.lib, f"MPP_{dtype}"), getattr(self.lib, f"MPP_{op}")
        value.has_premul, value.premul, value.divisor = premul is not None, premul or 0.0, divisor
        return value

    def pointer(self, array, offset=0):
        return self.ffi.cast("char *", array.ctypes.data + offset)

    def size(self, dtype):
        return self.lib.mpp_dtype_size(getattr(self.lib, f"MPP_{dtype}"))

    def reduce(self, reduction, size, sources, in_place=None):
        """Bytes in, bytes out, every buffer at an odd address of its own."""
        buffers = [np.concatenate([np.zeros(k + 1, np.uint8), s]) for k, s in enumerate(sources)]
        guard = 0xA5
        out = np.full(len(sources[0]) + 7, guard, np.uint8)
        pointers = [self.pointer(b, k + 1) for k, b in enumerate(buffers)]
        dst = self.pointer(out, 3) if in_place is None else pointers[in_place]
        src = self.ffi.new("void *[]", pointers)
        self.lib.mpp_reduce(reduction, dst, src, len(pointers), len(sources[0]) // size)
        if in_place is not None:
            return buffers[in_place][in_place + 1 :]
        assert (out[:3] == guard).all() and (out[-4:] == guard).all()
        return out[3:-4]


def load_kernels(folder, name, flags):
    ffi = cffi.FFI()
    header = (C_SRC / "reduce.h").read_text()
    ffi.cdef(re.sub(r"(?m)^#.*$", "", header))
    ffi.set_source(name, '#include "reduce.h"', sources=[str(C_SRC / "reduce.c")],
                   include_dirs=[str(C_SRC)], extra_compile_args=flags)  # fmt: skip
    spec = importlib.util.spec_from_file_location(name, ffi.compile(tmpdir=str(folder)))
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return Kernels(module)


@pytest.fixture(scope="session")
def kernels(tmp_path_factory):
    return load_kernels(tmp_path_factory.mktemp("reduce"), "_reduce_plain", ["-O3", "-std=c11"])


@pytest.fixture(scope="session")
def native_kernels(tmp_path_factory):
    flags = ["-O3", "-std=gnu11", "-march=native"]
    return load_kernels(tmp_path_factory.mktemp("native"), "_reduce_native", flags)


@pytest.fixture(autouse=True)
def best_isa_afterwards(request):
    yield
    for name in {"kernels", "native_kernels"} & set(request.fixturenames):
        k = request.getfixturevalue(name)
        k.lib.mpp_kernel_select(k.ffi.NULL)


def each_isa(kernels):
    for isa in kernels.isas:
        assert kernels.lib.mpp_kernel_select(isa.encode())
        assert kernels.ffi.string(kernels.lib.mpp_kernel_isa()).decode() == isa
        yield isa


# ---- the reference ----


def as_torch(raw, dtype):
    return torch.from_numpy(raw.copy()).view(dtype)


def as_bytes(tensor):
    return tensor.contiguous().view(torch.uint8).numpy()


def integer_reference(sources, op, premul, divisor):
    kind = sources[0].dtype
    with np.errstate(over="ignore"):
        if premul is not None:
            factor = np.array(int(premul) % (1 << 64), np.uint64).astype(kind)
            sources = [s * factor for s in sources]
        function = {"SUM": np.add, "PROD": np.multiply, "MIN": np.minimum, "MAX": np.maximum,
                    "BAND": np.bitwise_and, "BOR": np.bitwise_or, "BXOR": np.bitwise_xor}[op]  # fmt: skip
        total = reduce(function, sources)
    if divisor == 1:
        return total
    wide = total.astype(np.int64 if kind.kind == "i" else np.uint64)
    quotient = wide // wide.dtype.type(divisor)
    quotient += ((wide < 0) & (quotient * wide.dtype.type(divisor) != wide)).astype(wide.dtype)
    return quotient.astype(kind)


def bool_reference(sources, op):
    function = {"SUM": np.logical_or, "MAX": np.logical_or, "BOR": np.logical_or,
                "PROD": np.logical_and, "MIN": np.logical_and, "BAND": np.logical_and,
                "BXOR": np.logical_xor}[op]  # fmt: skip
    return reduce(function, sources).astype(np.uint8) if len(sources) > 1 else sources[0]


def complex_product(a, b):
    (ar, ai), (br, bi) = a.view(-1, 2).T, b.view(-1, 2).T
    return torch.stack([ar * br - ai * bi, ar * bi + ai * br], dim=1).flatten()


def float_reference(sources, torch_type, op, premul, divisor, is_complex):
    compute = torch.float64 if torch_type is torch.float64 else torch.float32
    wide = [s.to(compute) for s in sources]
    if premul is not None:
        wide = [w * torch.tensor(premul, dtype=compute) for w in wide]
    function = {"SUM": torch.add, "PROD": complex_product if is_complex else torch.mul,
                "MIN": torch.minimum, "MAX": torch.maximum}[op]  # fmt: skip
    total = reduce(function, wide)
    if divisor != 1:
        total = total / torch.tensor(divisor, dtype=compute)
    return total.to(torch_type)


def expected(sources, dtype, op, premul, divisor):
    if sources[0].size == 0:  # which torch cannot view as another type
        return sources[0]
    if dtype == "BOOL":
        return bool_reference(sources, op)
    if dtype in INTEGERS:
        values = [s.view(INTEGERS[dtype]) for s in sources]
        return integer_reference(values, op, premul, divisor).view(np.uint8)
    torch_type = REAL_FLOATS[COMPLEX.get(dtype, dtype)]
    values = [as_torch(s, torch_type) for s in sources]
    return as_bytes(float_reference(values, torch_type, op, premul, divisor, dtype in COMPLEX))


def check_equal(actual, wanted, dtype, op, context):
    """Equal bits, except which NaN, and which zero MIN and MAX picked."""
    torch_type = REAL_FLOATS.get(COMPLEX.get(dtype, dtype))
    if torch_type is None or actual.size == 0:
        np.testing.assert_array_equal(actual, wanted, err_msg=str(context))
        return
    size = torch_type.itemsize
    bits = [x.copy().view(f"u{size}") for x in (actual, wanted)]
    values = [as_torch(x, torch_type).to(torch.float64).numpy() for x in (actual, wanted)]
    same = (bits[0] == bits[1]) | (np.isnan(values[0]) & np.isnan(values[1]))
    if op in ("MIN", "MAX"):
        same |= (values[0] == 0) & (values[1] == 0)
    wrong = np.flatnonzero(~same)
    assert wrong.size == 0, (context, wrong[:5], values[0][wrong[:5]], values[1][wrong[:5]])


def random_bytes(rng, dtype, count, size):
    """Half ordinary numbers, half arbitrary bits: NaN, inf, subnormal, huge."""
    if dtype == "BOOL":
        return rng.integers(0, 2, count, dtype=np.uint8)
    raw = rng.integers(0, 256, count * size, dtype=np.uint8)
    torch_type = REAL_FLOATS.get(COMPLEX.get(dtype, dtype))
    if torch_type is None or count == 0:
        return raw
    ordinary = torch.from_numpy(rng.standard_normal(raw.size // torch_type.itemsize)).to(torch_type)
    where = rng.integers(0, 2, count, dtype=bool).repeat(size)
    return np.where(where, raw, as_bytes(ordinary))


def check_reductions(kernels, dtype, op, all_counts):
    rng = np.random.default_rng(DTYPES.index(dtype) * 10 + OPS.index(op))
    size, block = kernels.size(dtype), BLOCK_BYTES // kernels.size("F32" if dtype in NARROW else dtype)
    counts = [0, 1, 7, 1000, block - 1, block, block + 1] if all_counts else [1003]
    scalings = [(None, 1)] if dtype == "BOOL" else [(None, 1), (-2.5, 1), (None, 3), (0.3, 300)]
    for nsrc in (1, 2, 3, 5):
        for count in counts:
            sources = [random_bytes(rng, dtype, count, size) for _ in range(nsrc)]
            for premul, divisor in scalings:
                wanted = expected(sources, dtype, op, premul, divisor)
                reduction = kernels.reduction(dtype, op, premul, divisor)
                for isa in each_isa(kernels):
                    places = [None, *range(nsrc)] if count == counts[-1] else [None, nsrc - 1]
                    for place in places:
                        context = (isa, dtype, op, nsrc, count, premul, divisor, place)
                        actual = kernels.reduce(reduction, size, sources, place)
                        check_equal(actual, wanted, dtype, op, context)


# ---- tests ----


@pytest.mark.parametrize("dtype,op", CASES)
def test_reduce(kernels, dtype, op):
    check_reductions(kernels, dtype, op, all_counts=True)


@pytest.mark.parametrize("op", ["SUM", "PROD"])
@pytest.mark.parametrize("dtype", [*REAL_FLOATS, *COMPLEX])
def test_nothing_is_fused_where_the_compiler_could(native_kernels, dtype, op):
    check_reductions(native_kernels, dtype, op, all_counts=False)


@pytest.mark.parametrize("dtype,op", CASES)
def test_reducing_the_wide_type_gives_the_same(kernels, dtype, op):
    lib, rng = kernels.lib, np.random.default_rng(1)
    count, size = 3000, kernels.size(dtype)
    code = lib.mpp_wide_dtype(getattr(lib, f"MPP_{dtype}"))
    wide = next(d for d in DTYPES if getattr(lib, f"MPP_{d}") == code)
    wide_op = {"SUM": "MAX", "PROD": "MIN"}.get(op, op) if dtype == "BOOL" else op
    premul, divisor = (None, 1) if dtype == "BOOL" else (1.75, 3)
    reduction = kernels.reduction(dtype, op, premul, divisor)
    sources = [random_bytes(rng, dtype, count, size) for _ in range(3)]
    for isa in each_isa(kernels):
        widened = [np.empty(count * kernels.size(wide), np.uint8) for _ in sources]
        for w, s in zip(widened, sources, strict=True):
            lib.mpp_widen(reduction, kernels.pointer(w), kernels.pointer(s), count)
        total = kernels.reduce(kernels.reduction(wide, wide_op), kernels.size(wide), widened)
        total, actual = total.copy(), np.empty(count * size, np.uint8)
        lib.mpp_narrow(reduction, kernels.pointer(actual), kernels.pointer(total), count)
        check_equal(actual, expected(sources, dtype, op, premul, divisor), dtype, op, isa)


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


def test_types_and_supported_pairs(kernels):
    lib = kernels.lib
    assert {d: kernels.size(d) for d in ("BOOL", "BF16", "CHALF", "CDOUBLE", "F8_E5M2")} == {
        "BOOL": 1, "BF16": 2, "CHALF": 4, "CDOUBLE": 16, "F8_E5M2": 1}  # fmt: skip
    assert len(DTYPES) == lib.MPP_DTYPE_COUNT and len(OPS) == lib.MPP_REDOP_COUNT
    supported = [(d, o) for d in DTYPES for o in OPS
                 if lib.mpp_reduction_supported(getattr(lib, f"MPP_{d}"), getattr(lib, f"MPP_{o}"))]  # fmt: skip
    assert supported == CASES
    assert not lib.mpp_reduction_supported(-1, 0) and not lib.mpp_reduction_supported(0, len(OPS))
    assert lib.mpp_dtype_size(len(DTYPES)) == 0
    assert not lib.mpp_kernel_select(b"no such set")


SELF_CHECK = r"""
#include <stdlib.h>
#include <string.h>
#include "reduce.h"

/* Buffers end where the heap block ends and start at odd addresses. */
static void try_one(const mpp_reduction *r, int nsrc, size_t n)
{
    size_t bytes = n * mpp_dtype_size(r->dtype), wide_bytes = n * mpp_dtype_size(mpp_wide_dtype(r->dtype));
    char *block[6], *wide = malloc(wide_bytes + 1);
    const void *src[6];
    for (int i = 0; i < 6; i++) {
        block[i] = malloc(bytes + 1);
        for (size_t j = 0; j <= bytes; j++)
            block[i][j] = (char)(r->dtype == MPP_BOOL ? rand() & 1 : rand() >> 7);
        src[i] = block[i] + 1;
    }
    mpp_reduce(r, block[5] + 1, src, nsrc, n);
    mpp_reduce(r, block[nsrc - 1] + 1, src, nsrc, n);
    mpp_widen(r, wide + 1, src[0], n);
    mpp_narrow(r, block[5] + 1, wide + 1, n);
    for (int i = 0; i < 6; i++)
        free(block[i]);
    free(wide);
}

int main(void)
{
    static const char *const isas[] = {"baseline", "avx2", "avx512"};
    static const size_t counts[] = {0, 1, 7, 100, 2049};
    for (int isa = 0; isa < 3; isa++)
        for (int i = 0; i < MPP_DTYPE_COUNT * MPP_REDOP_COUNT * 20 && mpp_kernel_select(isas[isa]); i++) {
            int scaled = i % 4, dtype = i / 20 % MPP_DTYPE_COUNT, op = i / 20 / MPP_DTYPE_COUNT;
            mpp_reduction r = {dtype, op, scaled & 1, 0, scaled == 1 ? -1e30 : -2.5, scaled & 2 ? 300 : 1};
            if (mpp_reduction_supported(dtype, op))
                for (int nsrc = 1; nsrc <= 4; nsrc++)
                    try_one(&r, nsrc, counts[i / 4 % 5]);
        }
    return 0;
}
"""


def compile_with(flags, *sources):
    command = [*CC, "-std=c11", "-Wall", "-Wextra", "-Werror", f"-I{C_SRC}", *flags, *map(str, sources)]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("level", ["-O0", "-O3"])
def test_sanitizers_stay_silent(tmp_path, level):
    main, program = tmp_path / "check.c", tmp_path / "check"
    main.write_text(SELF_CHECK)
    sanitize = ["-g", "-fsanitize=address,undefined,float-cast-overflow", "-fno-sanitize-recover=all"]
    compile_with([level, *sanitize, "-o", str(program)], C_SRC / "reduce.c", main)
    done = subprocess.run([program], check=False, capture_output=True, text=True)
    assert done.returncode == 0 and not done.stderr, done.stderr


def test_compiles_without_warnings(tmp_path):
    compile_with(["-O3", "-c", "-o", str(tmp_path / "reduce.o")], C_SRC / "reduce.c")
