/* Element-wise reduction of torch buffers: the arithmetic MPI libraries lack
 * (bfloat16, fp16, fp8, premultiplied and averaged sums) and the conversions
 * to and from a type every MPI can reduce.
 *
 * Buffers may start at any byte address.  Results are the same bits whichever
 * instruction set is used and however a buffer is cut into calls, because
 * ranks on different machines must agree on them.  One exception: *which* NaN
 * a float32, float64 or complex64/128 result holds is not fixed (the CPU picks
 * one operand's payload).  The narrow floats always give one canonical NaN.
 *
 * Rounding is to nearest even; the caller must not have changed the thread's
 * floating-point rounding mode.
 */
#ifndef MPIPLUS_REDUCE_H
#define MPIPLUS_REDUCE_H

#include <stddef.h>
#include <stdint.h>

#include "arith/dtypes.h"

#define MPP_NUMBER_OF(code, ...) MPP_##code,
enum mpp_dtype { MPP_DTYPES(MPP_NUMBER_OF) MPP_DTYPE_COUNT };
enum mpp_redop { MPP_REDOPS(MPP_NUMBER_OF) MPP_REDOP_COUNT };

typedef struct mpp_reduction {
    int32_t dtype;         /* enum mpp_dtype */
    int32_t op;            /* enum mpp_redop */
    int32_t has_premul;    /* multiply each source by premul first */
    double premul;         /* cast to the computing type before use */
    int64_t divisor;       /* >= 1; 1: none.  Integers truncate toward zero */
    const double *factors; /* one for each source in place of premul; NULL: premul for all */
} mpp_reduction;

/* A row of dtypes.h. */
typedef struct {
    uint8_t size, wide, real, is_float, is_short;
} mpp_element;
extern const mpp_element mpp_elements[];

/* Bytes per element; 0 for an unknown dtype. */
size_t mpp_dtype_size(int dtype);

/* Complex has no order and floats no bits: SUM and PROD only for complex,
 * bitwise only for integers and bool. */
int mpp_reduction_supported(int dtype, int op);

/* dst[i] = narrow((premul*src[0][i] op premul*src[1][i] op ...) / divisor),
 * evaluated as a balanced tree over the sources in order (reduce.c), narrow
 * floats in float32 with one rounding at the end.  dst may be exactly one of the sources and must not otherwise overlap
 * any.  nsrc >= 1; the pair (dtype, op) must be supported. */
void mpp_reduce(const mpp_reduction *r, void *dst, const void *const *src, int nsrc, size_t count);

/* The same without the end: neither divided nor rounded, in the computing type.  wide must not overlap any source. */
void mpp_reduce_wide(const mpp_reduction *r, void *wide, const void *const *src, int nsrc, size_t count);

/* The reduction that combines such results. */
mpp_reduction mpp_of_wide(const mpp_reduction *r);

/* The type in which elements are computed.  BOOL gives U8 holding 0 or 1: there
 * SUM means MAX and PROD means MIN, since 256 ones would sum to 0. */
int mpp_wide_dtype(int dtype);

/* Converts to the wide type and applies premul. */
void mpp_widen(const mpp_reduction *r, void *wide, const void *src, size_t count);

/* Applies divisor, rounds once and converts back; for bool, nonzero gives 1. */
void mpp_narrow(const mpp_reduction *r, void *dst, const void *wide, size_t count);

/* Name of the instruction set in use: "baseline", "avx2" or "avx512". */
const char *mpp_kernel_isa(void);

/* For tests and benchmarks: use the named build from now on (NULL: the best
 * one).  Returns 0 and changes nothing if this machine cannot run it. */
int mpp_kernel_select(const char *isa);

#endif
