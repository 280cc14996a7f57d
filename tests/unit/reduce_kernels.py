"""The reduction kernels, compiled apart from the extension module, and what to compare them with."""

import os
import re
import shlex
import subprocess
from pathlib import Path
from typing import Any

import cffi
import numpy as np
import torch
from plain_python import module_of
from reductions import reduced

C_SRC = Path(__file__).resolve().parents[2] / "c_src"
ARITH = C_SRC / "arith"
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
TORCH = {"BOOL": torch.bool, **{name: getattr(torch, kind.name) for name, kind in INTEGERS.items()}, **REAL_FLOATS,
         "CHALF": torch.complex32, "CFLOAT": torch.complex64, "CDOUBLE": torch.complex128}  # fmt: skip
CASES = [
    (dtype, op)
    for dtype in DTYPES
    for op in OPS
    if (dtype in INTEGERS or dtype == "BOOL")
    or op in ("SUM", "PROD")
    or (op in ("MIN", "MAX") and dtype in REAL_FLOATS)
]


class Reductions:
    """What has the C code, and passes reductions to it."""

    ffi: Any
    lib: Any

    def reduction(self, dtype, op="SUM", premul=None, divisor=1):
        value = self.ffi.new("mpp_reduction *")
        value.dtype, value.op = getattr(self.lib, f"MPP_{dtype}"), getattr(self.lib, f"MPP_{op}")
        value.has_premul, value.premul, value.divisor = premul is not None, premul or 0.0, divisor
        return value


class Kernels(Reductions):
    def __init__(self, module):
        self.ffi, self.lib = module.ffi, module.lib
        self.isas = [n for n in ("baseline", "avx2", "avx512") if self.lib.mpp_kernel_select(n.encode())]
        self.lib.mpp_kernel_select(self.ffi.NULL)

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
    header = "".join((ARITH / name).read_text() for name in ("reduce.h", "mpi_representation.h"))
    header = re.sub(r"(?m)^#include <.*$", "", header)
    command = [*CC, "-E", "-P", f"-I{C_SRC}", "-xc", "-"]
    ffi.cdef(subprocess.run(command, input=header, capture_output=True, text=True, check=True).stdout)
    sources = [str(ARITH / source) for source in ("reduce.c", "mpi_representation.c")]
    ffi.set_source(name, '#include "arith/mpi_representation.h"', sources=sources, include_dirs=[str(C_SRC)],
                   extra_compile_args=flags)  # fmt: skip
    return Kernels(module_of(ffi.compile(tmpdir=str(folder)), name))


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


def expected(sources, dtype, op, premul, divisor):
    if sources[0].size == 0:  # which torch cannot view as another type
        return sources[0]
    return as_bytes(reduced([as_torch(source, TORCH[dtype]) for source in sources], op, premul, divisor))


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
