#include "arith/mpi_representation.h"

enum form { FORM_WIDE, FORM_LONG, FORM_ORDERED };

static enum form form_of(const mpp_reduction *r) {
    const mpp_element *element = &mpp_elements[r->dtype];
    if (r->op == MPP_SUM || r->op == MPP_PROD) return element->is_short ? FORM_LONG : FORM_WIDE;
    return (r->op == MPP_MIN || r->op == MPP_MAX) && element->is_float ? FORM_ORDERED : FORM_WIDE;
}

int mpp_mpi_dtype(const mpp_reduction *r) {
    switch (form_of(r)) {
    case FORM_LONG: return MPP_U32; /* signed ones too: modulo 2^16 it is all the same */
    case FORM_ORDERED: return r->dtype == MPP_F64 ? MPP_I64 : MPP_I32;
    default: return mpp_wide_dtype(r->dtype);
    }
}

/* A torch bool travels as a byte that is 0 or 1. MPI has no logical operation on bytes that every library
 * implements, but on 0 and 1 the maximum is "or" and the minimum is "and". */
int mpp_mpi_op(const mpp_reduction *r) {
    if (r->dtype == MPP_BOOL && (r->op == MPP_SUM || r->op == MPP_BOR)) return MPP_MAX;
    if (r->dtype == MPP_BOOL && (r->op == MPP_PROD || r->op == MPP_BAND)) return MPP_MIN;
    return r->op;
}

/* IEEE floats read as sign and magnitude; with the magnitude of negative ones inverted they are integers in
 * the floats' order, -0 before +0. A NaN becomes the integer that wins, which reads back as a NaN. */
#define ORDERED(bits, least, most)                                                                                     \
    static void order_##bits(void *values, size_t n, int nan_is_least) {                                               \
        const int##bits##_t nan = nan_is_least ? least : most, infinity = bits == 64 ? INFINITY_64 : INFINITY_32;      \
        int##bits##_t *v = values;                                                                                     \
        for (size_t i = 0; i < n; i++) {                                                                               \
            int##bits##_t x = v[i], magnitude = x & most;                                                              \
            v[i] = magnitude > infinity ? nan : x < 0 ? x ^ most : x;                                                  \
        }                                                                                                              \
    }                                                                                                                  \
    static void unorder_##bits(void *values, size_t n) {                                                               \
        int##bits##_t *v = values;                                                                                     \
        for (size_t i = 0; i < n; i++) v[i] = v[i] < 0 ? v[i] ^ most : v[i];                                           \
    }
#define INFINITY_32 0x7f800000
#define INFINITY_64 0x7ff0000000000000
ORDERED(32, INT32_MIN, INT32_MAX)
ORDERED(64, INT64_MIN, INT64_MAX)
#undef ORDERED

typedef uint16_t any_u16 __attribute__((aligned(1), may_alias));

static void lengthen(uint32_t *out, const void *in, size_t n, size_t size) {
    for (size_t i = 0; i < n; i++) out[i] = size == 1 ? ((const uint8_t *)in)[i] : ((const any_u16 *)in)[i];
}

static void shorten(void *values, size_t n, size_t size) { /* where they are */
    for (size_t i = 0; i < n; i++) {
        uint32_t value = ((const uint32_t *)values)[i];
        if (size == 1) ((uint8_t *)values)[i] = (uint8_t)value;
        else ((any_u16 *)values)[i] = (uint16_t)value;
    }
}

void mpp_to_mpi(const mpp_reduction *r, void *out, const void *src, size_t count) {
    enum form form = form_of(r);
    mpp_reduction how = *r;
    if (form == FORM_LONG) { /* and so with a factor: modulo 2^16 it does not matter where it is multiplied */
        lengthen(out, src, count, mpp_dtype_size(r->dtype));
        how.dtype = MPP_U32;
        src = out;
    }
    mpp_widen(&how, out, src, count);
    if (form != FORM_ORDERED) return;
    if (r->dtype == MPP_F64) order_64(out, count, r->op == MPP_MIN);
    else order_32(out, count, r->op == MPP_MIN);
}

void mpp_from_mpi(const mpp_reduction *r, void *dst, void *values, size_t count) {
    enum form form = form_of(r);
    if (form == FORM_LONG) shorten(values, count, mpp_dtype_size(r->dtype));
    if (form == FORM_ORDERED && r->dtype == MPP_F64) unorder_64(values, count);
    else if (form == FORM_ORDERED) unorder_32(values, count);
    mpp_narrow(r, dst, values, count);
}
