/* What the reductions and conversions give, as one number for each case: compiled by two compilers, or run on two
 * processors, it must print the same. Inputs are the same everywhere; which NaN a wide float holds does not count.
 *
 * Usage: arithmetic [INSTRUCTION_SET]
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "arith/mpi_representation.h"

enum { COUNT = 2500, SOURCES = 4, CODES = 1 << 16, PATTERNS = 1 << 18 };

static uint64_t dice = 1;

static uint32_t next(void) {
    dice = dice * 6364136223846793005u + 1442695040888963407u;
    return (uint32_t)(dice >> 33);
}

static size_t size_of_real(int dtype) {
    int is_complex = dtype == MPP_CHALF || dtype == MPP_CFLOAT || dtype == MPP_CDOUBLE;
    return mpp_dtype_size(dtype) / (is_complex ? 2 : 1);
}

/* Every bit pattern; every other number of a size near 1, or sums would hardly ever round. */
static void fill(unsigned char *at, int dtype, size_t bytes) {
    size_t size = size_of_real(dtype);
    for (size_t i = 0; i < bytes; i++) {
        unsigned byte = next() & 0xff;
        if (dtype == MPP_BOOL) byte &= 1;
        else if (size > 1 && i % (2 * size) == size - 1) byte = (byte & 0x80) | (byte & 1 ? 0x3f : 0x40);
        at[i] = (unsigned char)byte;
    }
}

static int is_nan(const unsigned char *at, size_t size) {
    float single;
    double twice;
    if (size == sizeof single) return memcpy(&single, at, size), single != single;
    return memcpy(&twice, at, size), twice != twice;
}

/* FNV-1a; `real` is the size of a wide float, else 0. */
static uint64_t digest(const unsigned char *at, size_t bytes, size_t real) {
    uint64_t hash = 0xcbf29ce484222325u;
    for (size_t i = 0; i < bytes; i++) {
        int skip = real && is_nan(at + i / real * real, real);
        hash = (hash ^ (skip ? 0x4e : at[i])) * 0x100000001b3u;
    }
    return hash;
}

static size_t wide_float(int dtype) {
    switch (dtype) {
    case MPP_F32:
    case MPP_CFLOAT: return sizeof(float);
    case MPP_F64:
    case MPP_CDOUBLE: return sizeof(double);
    default: return 0;
    }
}

static void reductions(int dtype, int op) {
    static unsigned char block[SOURCES][COUNT * 16 + 1], out[COUNT * 16 + 1], converted[COUNT * 16];
    size_t bytes = COUNT * mpp_dtype_size(dtype);
    const void *sources[SOURCES];
    for (int i = 0; i < SOURCES; i++) {
        sources[i] = block[i] + 1; /* an odd address */
        fill(block[i] + 1, dtype, bytes);
    }
    for (int scaled = 0; scaled < (dtype == MPP_BOOL ? 1 : 4); scaled++)
        for (int n = 1; n <= SOURCES; n++) {
            mpp_reduction r = {dtype, op, scaled & 1, -2.5, scaled & 2 ? 300 : 1, NULL};
            mpp_reduce(&r, out + 1, sources, n, COUNT);
            printf("%d %d %d %d %016llx", dtype, op, scaled, n,
                   (unsigned long long)digest(out + 1, bytes, wide_float(dtype)));
            mpp_to_mpi(&r, converted, sources[n - 1], COUNT);
            mpp_from_mpi(&r, out + 1, converted, COUNT);
            printf(" %016llx\n", (unsigned long long)digest(out + 1, bytes, wide_float(dtype)));
        }
}

/* A narrow float type: what each of its codes means, and what float32 becomes in it. */
static void conversions(int dtype) {
    static const float near[] = {0x1p-24f, 0x1p-16f, 0x1p-9f, 0x1p-7f, 240, 448, 65504, 57344};
    static uint32_t wide[PATTERNS];
    static uint16_t narrow[PATTERNS];
    const mpp_reduction r = {dtype, MPP_SUM, 0, 0, 1, NULL};
    size_t size = mpp_dtype_size(dtype), codes = size == 1 ? 256 : CODES;
    for (size_t i = 0; i < codes; i++) {
        if (size == 1) ((uint8_t *)narrow)[i] = (uint8_t)i;
        else narrow[i] = (uint16_t)i;
    }
    mpp_widen(&r, wide, narrow, codes);
    printf("%d widened %016llx", dtype, (unsigned long long)digest((unsigned char *)wide, codes * 4, sizeof(float)));
    for (size_t i = 0; i < PATTERNS; i++) {
        wide[i] = next() << 1 ^ next();
        if (i % 2) memcpy(&wide[i], &near[i / 2 % 8], sizeof wide[i]);
        if (i % 2) wide[i] ^= next() & 0x80ffffff;
    }
    mpp_narrow(&r, narrow, wide, PATTERNS);
    printf(" narrowed %016llx\n", (unsigned long long)digest((unsigned char *)narrow, PATTERNS * size, 0));
}

int main(int argc, char **argv) {
    if (!mpp_kernel_select(argc > 1 ? argv[1] : NULL)) return 2;
    for (int dtype = 0; dtype < MPP_DTYPE_COUNT; dtype++) {
        for (int op = 0; op < MPP_REDOP_COUNT; op++)
            if (mpp_reduction_supported(dtype, op)) reductions(dtype, op);
        if (mpp_wide_dtype(dtype) == MPP_F32 && dtype != MPP_F32) conversions(dtype);
    }
    return 0;
}
