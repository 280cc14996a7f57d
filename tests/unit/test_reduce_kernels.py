"""The reduction kernels against plain torch and numpy arithmetic, for each instruction set this machine has."""

import subprocess

import numpy as np
import pytest
from reduce_kernels import (
    ARITH,
    BLOCK_BYTES,
    C_SRC,
    CASES,
    CC,
    COMPLEX,
    DTYPES,
    NARROW,
    OPS,
    REAL_FLOATS,
    check_equal,
    each_isa,
    expected,
    random_bytes,
)


def check_reductions(kernels, dtype, op, all_counts):
    rng = np.random.default_rng(DTYPES.index(dtype) * 10 + OPS.index(op))
    size, block = kernels.size(dtype), BLOCK_BYTES // kernels.size("F32" if dtype in NARROW else dtype)
    counts = [0, 1, 7, 1000, block - 1, block, block + 1] if all_counts else [1003]
    scalings = [(None, 1)] if dtype == "BOOL" else [(None, 1), (-2.5, 1), (None, 3), (0.3, 300)]
    for nsrc in (1, 2, 3, 4, 5, 11) if all_counts else (1, 2, 3, 7):
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


@pytest.mark.parametrize("dtype,op", CASES)
def test_reduce(kernels, dtype, op):
    check_reductions(kernels, dtype, op, all_counts=True)


@pytest.mark.parametrize("op", ["SUM", "PROD"])
@pytest.mark.parametrize("dtype", [*REAL_FLOATS, *COMPLEX])
def test_nothing_is_fused_where_the_compiler_could(native_kernels, dtype, op):
    check_reductions(native_kernels, dtype, op, all_counts=False)


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
#include "arith/mpi_representation.h"

/* Buffers end where the heap block ends and start at odd addresses. */
static void try_one(const mpp_reduction *r, int nsrc, size_t n)
{
    size_t bytes = n * mpp_dtype_size(r->dtype), converted_bytes = n * mpp_dtype_size(mpp_mpi_dtype(r));
    char *block[6], *converted = malloc(converted_bytes ? converted_bytes : 1);
    const void *src[6];
    for (int i = 0; i < 6; i++) {
        block[i] = malloc(bytes + 1);
        for (size_t j = 0; j <= bytes; j++)
            block[i][j] = (char)(r->dtype == MPP_BOOL ? rand() & 1 : rand() >> 7);
        src[i] = block[i] + 1;
    }
    mpp_reduce(r, block[5] + 1, src, nsrc, n);
    mpp_reduce(r, block[nsrc - 1] + 1, src, nsrc, n);
    mpp_to_mpi(r, converted, src[0], n);
    mpp_from_mpi(r, block[5] + 1, converted, n);
    for (int i = 0; i < 6; i++)
        free(block[i]);
    free(converted);
}

int main(void)
{
    static const char *const isas[] = {"baseline", "avx2", "avx512"};
    static const size_t counts[] = {0, 1, 7, 100, 2049};
    for (int isa = 0; isa < 3; isa++)
        for (int i = 0; i < MPP_DTYPE_COUNT * MPP_REDOP_COUNT * 20 && mpp_kernel_select(isas[isa]); i++) {
            int scaled = i % 4, dtype = i / 20 % MPP_DTYPE_COUNT, op = i / 20 / MPP_DTYPE_COUNT;
            mpp_reduction r = {dtype, op, scaled & 1, scaled == 1 ? -1e30 : -2.5, scaled & 2 ? 300 : 1, NULL};
            if (mpp_reduction_supported(dtype, op))
                for (int nsrc = 1; nsrc <= 4; nsrc++)
                    try_one(&r, nsrc, counts[i / 4 % 5]);
        }
    return 0;
}
"""


def test_sanitizers_stay_silent(tmp_path):
    main, program = tmp_path / "check.c", tmp_path / "check"
    main.write_text(SELF_CHECK)
    command = [*CC, "-std=c11", "-O1", "-g", f"-I{C_SRC}", "-fno-sanitize-recover=all"]
    command += ["-fsanitize=address,undefined,float-cast-overflow"]
    kernels = tmp_path / "reduce.o"  # apart, as a compiler's cache knows it
    subprocess.run([*command, "-c", "-o", kernels, ARITH / "reduce.c"], check=True)
    subprocess.run([*command, "-o", program, kernels, ARITH / "mpi_representation.c", main], check=True)
    done = subprocess.run([program], check=False, capture_output=True, text=True)
    assert done.returncode == 0 and not done.stderr, done.stderr
