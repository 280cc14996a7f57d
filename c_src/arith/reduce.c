/* Drives the kernels of reduce_kernels.h: block by block through buffers that stay in the first-level cache. */

/* Ahead of every function, helpers included: gcc refuses to inline across
 * different settings.  A fused multiply-add rounds once where a multiply and
 * an add round twice, so builds for machines with and without it would give
 * different bits; gcc fuses by default.  Its loops with a float operation in
 * one arm of ?: only vectorise if that may be computed in vain, raising flags
 * nobody reads: no-trapping-math.  O3 is for builds told -O2. */
#if defined(__clang__)
#pragma STDC FP_CONTRACT OFF
#elif defined(__GNUC__)
#pragma GCC optimize("O3", "fp-contract=off", "no-trapping-math")
#endif

#include "arith/reduce.h"

#include <float.h>
#include <stdatomic.h>
#include <string.h>

#include "arith/narrow_float.h"

#ifdef __FAST_MATH__
#error "-ffast-math drops NaN tests and reorders sums; build reduce.c without it"
#endif
/* 16 is 0 where the CPU computes _Float16 too, which is not used here. */
#if FLT_EVAL_METHOD != 0 && FLT_EVAL_METHOD != 16
#error "excess precision would make results depend on the compiler; on i386 use -msse2 -mfpmath=sse"
#endif

/* x86 gets builds beyond the compiler's default target, chosen at run time. */
#if defined(__x86_64__) || defined(__i386__)
#define MPP_X86 1
#include <cpuid.h>
#include <immintrin.h>
#endif

/* No iteration depends on another one even where out is one of the inputs.
 * Without this the compilers' overlap check sends in-place calls down a scalar
 * path. */
#if defined(__clang__)
/* It warns of every loop so marked that it leaves alone, e.g. for a sanitizer. */
#pragma clang diagnostic ignored "-Wpass-failed"
#define MPP_INDEPENDENT _Pragma("clang loop vectorize(assume_safety)")
#else
#define MPP_INDEPENDENT _Pragma("GCC ivdep")
#endif

#define MPP_CAT_(a, b) a##_##b
#define MPP_CAT(a, b) MPP_CAT_(a, b)
#define MPP_STRING_(a) #a
#define MPP_STRING(a) MPP_STRING_(a)

#define MPP_UNSIGNED_TYPES(X) X(u8) X(u16) X(u32) X(u64)
#define MPP_INTEGER_TYPES(X)                                                                                           \
    X(u8, u64) X(u16, u64) X(u32, u64) X(u64, u64) X(i8, i64) X(i16, i64) X(i32, i64) X(i64, i64)
#define MPP_FLOAT_TYPES(X) X(f32) X(f64)
#define MPP_NARROW_FLOATS(X) X(bf16, u16) X(e4m3fn, u8) X(e4m3fnuz, u8) X(e5m2, u8) X(e5m2fnuz, u8)
#define MPP_FLOAT_OPS(X) X(sum) X(prod) X(min) X(max)

/* any_T: a T at any address, holding whatever the caller declared it as. */
#define ANY(t, type)                                                                                                   \
    typedef type t;                                                                                                    \
    typedef type any_##t __attribute__((aligned(1), may_alias));
ANY(u8, uint8_t)
ANY(u16, uint16_t)
ANY(u32, uint32_t)
ANY(u64, uint64_t)
ANY(i8, int8_t)
ANY(i16, int16_t)
ANY(i32, int32_t)
ANY(i64, int64_t)
ANY(f32, float)
ANY(f64, double)
#undef ANY

/* MIN and MAX give NaN if either side is, like torch.minimum, and the first
 * of two equal values.  | rather than ||: no branch. */
#define FLOAT_OPS(t)                                                                                                   \
    MPP_INLINE t mpp_sum_##t(t a, t b) { return a + b; }                                                               \
    MPP_INLINE t mpp_prod_##t(t a, t b) { return a * b; }                                                              \
    MPP_INLINE t mpp_min_##t(t a, t b) { return ((b < a) | (b != b)) ? b : a; }                                        \
    MPP_INLINE t mpp_max_##t(t a, t b) { return ((b > a) | (b != b)) ? b : a; }
MPP_FLOAT_TYPES(FLOAT_OPS)
#undef FLOAT_OPS

typedef void map_fn(void *out, const void *in, size_t n);
typedef void combine_fn(void *out, const void *a, const void *b, size_t n);
typedef void scale_fn(void *out, const void *in, size_t n, double premul);
typedef void divide_fn(void *out, const void *in, size_t n, int64_t divisor);

/* Indexed by type; complex types run as twice as many real ones.  combine,
 * complex_prod, scale and divide exist for the computing types, widen and
 * narrow for the others; pair, narrow(widen(a) op widen(b)), and onto,
 * a op widen(b), for some of those. */
struct kernels {
    const char *isa;
    combine_fn *combine[MPP_DTYPE_COUNT][MPP_REDOP_COUNT];
    combine_fn *pair[MPP_DTYPE_COUNT][MPP_REDOP_COUNT];
    combine_fn *onto[MPP_DTYPE_COUNT][MPP_REDOP_COUNT];
    combine_fn *complex_prod[MPP_DTYPE_COUNT];
    scale_fn *scale[MPP_DTYPE_COUNT];
    divide_fn *divide[MPP_DTYPE_COUNT];
    map_fn *widen[MPP_DTYPE_COUNT], *narrow[MPP_DTYPE_COUNT];
};

/* The factor as an integer, modulo 2^64; NaN and what fits nowhere give 0 (the plain cast would be undefined). */
static uint64_t mpp_integer_factor(double premul) {
    if (premul > -0x1p63 && premul < 0x1p63) return (uint64_t)(int64_t)premul;
    return premul >= 0x1p63 && premul < 0x1p64 ? (uint64_t)premul : 0;
}

/* The target is an attribute of each kernel; its helpers are inlined there, and compiled for it. */
#define MPP_ISA baseline
#define MPP_ISA_BYTES 0
#define MPP_TARGET
#include "arith/reduce_kernels.h"

#ifdef MPP_X86
#define MPP_ISA avx2
#define MPP_ISA_BYTES 32
#define MPP_TARGET __attribute__((target("avx2,f16c")))
#include "arith/reduce_kernels.h"
#define MPP_ISA avx512
#define MPP_ISA_BYTES 64
#define MPP_TARGET __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl")))
#include "arith/reduce_kernels.h"
#endif

/* ---- choosing a build ---- */

#ifdef MPP_X86
/* __builtin_cpu_supports would bring in the compiler's runtime library, and with clang's comes a memcpy that takes the
 * place of the C library's.  xcr0 says which registers the OS saves: 0x06 those of AVX, 0xe0 what AVX-512 adds. */
static int runs(unsigned features, unsigned registers) {
    const unsigned leaf_1 = bit_OSXSAVE | bit_AVX | bit_F16C;
    unsigned a, b, c, d, xcr0, upper;
    if (!__get_cpuid(1, &a, &b, &c, &d) || (c & leaf_1) != leaf_1) return 0;
    __asm__("xgetbv" : "=a"(xcr0), "=d"(upper) : "c"(0));
    if ((xcr0 & registers) != registers || !__get_cpuid_count(7, 0, &a, &b, &c, &d)) return 0;
    return (b & features) == features;
}
#endif

static _Atomic(const struct kernels *) selected;

int mpp_kernel_select(const char *isa) {
    const struct kernels *candidates[3];
    int n = 0;
#ifdef MPP_X86
    const unsigned avx512 = bit_AVX512F | bit_AVX512BW | bit_AVX512DQ | bit_AVX512VL;
    if (runs(bit_AVX2 | avx512, 0xe6)) candidates[n++] = &kernels_avx512;
    if (runs(bit_AVX2, 0x06)) candidates[n++] = &kernels_avx2;
#endif
    candidates[n++] = &kernels_baseline;
    for (int i = 0; i < n; i++) {
        if (!isa || strcmp(isa, candidates[i]->isa) == 0) {
            atomic_store_explicit(&selected, candidates[i], memory_order_relaxed);
            return 1;
        }
    }
    return 0;
}

/* Threads racing here for the first time all store the same pointer. */
static const struct kernels *kernels(void) {
    const struct kernels *k = atomic_load_explicit(&selected, memory_order_relaxed);
    if (!k) {
        mpp_kernel_select(NULL);
        k = atomic_load_explicit(&selected, memory_order_relaxed);
    }
    return k;
}

const char *mpp_kernel_isa(void) { return kernels()->isa; }

/* ---- what is known about a type ---- */

#define ROW(code, torch, mpi, size, wide, real, is_float, is_short)                                                    \
    [MPP_##code] = {size, MPP_##wide, MPP_##real, is_float, is_short},
const mpp_element mpp_elements[MPP_DTYPE_COUNT] = {MPP_DTYPES(ROW)};
#undef ROW

size_t mpp_dtype_size(int dtype) { return dtype >= 0 && dtype < MPP_DTYPE_COUNT ? mpp_elements[dtype].size : 0; }

int mpp_wide_dtype(int dtype) { return mpp_elements[dtype].wide; }

int mpp_reduction_supported(int dtype, int op) {
    if (dtype < 0 || dtype >= MPP_DTYPE_COUNT || op < 0 || op >= MPP_REDOP_COUNT) return 0;
    if (op == MPP_SUM || op == MPP_PROD || !mpp_elements[dtype].is_float) return 1;
    return (op == MPP_MIN || op == MPP_MAX) && mpp_elements[dtype].real == dtype;
}

/* ---- running a reduction ---- */

#define BLOCK_BYTES 8192

/* A reduction resolved to kernels.  "Numbers" are the reals a buffer is made of: twice the elements if complex. */
struct plan {
    combine_fn *combine;
    combine_fn *pair, *onto; /* may be NULL */
    scale_fn *scale;         /* NULL: no premul */
    divide_fn *divide;       /* NULL: no divisor */
    map_fn *widen, *narrow;  /* NULL: computes in the storage type */
    double premul;
    const double *factors; /* NULL: premul for all sources */
    int64_t divisor;
    size_t size, wide_size, out_size; /* of one number */
    size_t count;                     /* numbers in the whole buffer */
    size_t block;                     /* numbers per block, even */
};

/* Logic on 0 and 1, where a sum could wrap to 0. */
static int op_of(const mpp_reduction *r) {
    if (r->dtype != MPP_BOOL || r->op > MPP_MAX) return r->op;
    return r->op == MPP_SUM || r->op == MPP_MAX ? MPP_BOR : MPP_BAND;
}

static struct plan make_plan(const mpp_reduction *r, size_t count) {
    const struct kernels *k = kernels();
    int real = mpp_elements[r->dtype].real, wide = mpp_elements[real].wide, op = op_of(r);
    int is_complex = real != r->dtype;
    struct plan p = {
        .combine = k->combine[wide][op],
        .pair = wide == real ? k->combine[wide][op] : k->pair[real][op],
        .onto = r->has_premul ? NULL : k->onto[real][op],
        .scale = r->has_premul ? k->scale[wide] : NULL,
        .divide = r->divisor != 1 ? k->divide[wide] : NULL,
        .widen = k->widen[real],
        .narrow = k->narrow[real],
        .premul = r->premul,
        .factors = r->factors,
        .divisor = r->divisor,
        .size = mpp_elements[real].size,
        .wide_size = mpp_elements[wide].size,
        .out_size = mpp_elements[real].size,
        .count = is_complex ? 2 * count : count,
        .block = BLOCK_BYTES / mpp_elements[wide].size,
    };
    if (is_complex && op == MPP_PROD) {
        p.combine = k->complex_prod[wide];
        p.pair = wide == real ? p.combine : NULL;
        p.onto = NULL;
    }
    return p;
}

/* n numbers of source i in the computing type, premultiplied: in buffer, or where they are if nothing is to be done. */
static const void *load(const struct plan *p, void *buffer, const void *src, int i, size_t n) {
    const void *values = src;
    if (p->widen) {
        p->widen(buffer, values, n);
        values = buffer;
    }
    if (p->scale) {
        p->scale(buffer, values, n, p->factors ? p->factors[i] : p->premul);
        values = buffer;
    }
    return values;
}

static void store(const struct plan *p, void *dst, void *buffer, const void *values, size_t n) {
    if (p->divide) {
        void *quotient = p->narrow ? buffer : dst;
        p->divide(quotient, values, n, p->divisor);
        values = quotient;
    }
    if (p->narrow) p->narrow(dst, values, n);
    else if (values != dst) memcpy(dst, values, n * p->out_size);
}

/* Combines as a balanced tree does: of n sources the first 2^k with the rest, 2^k the largest power of two below n, and
 * both parts in the same way. An aligned block of 2^k sources is then a subtree, wherever it is added up, and the
 * rounding error grows with log n. Partial results wait on a stack, as the digits of a binary number do: every source
 * adds one, and two parts of equal size become one.
 *
 * dst is written only after the last source was read, by the very pass that reads it, so dst may be any of them. */
enum { MOST_PARTS = 20 }; /* for half a million sources */

static void reduce_block(const struct plan *p, char *dst, const void *const *src, int nsrc, size_t start, size_t n,
                         char (*buffers)[BLOCK_BYTES]) {
    const void *parts[MOST_PARTS];
    int waiting = 0;
    size_t at = start * p->size;
    char *to = dst + start * p->out_size;
    for (int i = 0; i < nsrc; i++) {
        const char *more = (const char *)src[i] + at;
        const void *values = NULL; /* of this source, widened, unless it is added as it is */
        int pairs = i == nsrc - 1 ? waiting : __builtin_ctz(~(unsigned)i);
        if (!pairs || !p->onto) values = load(p, buffers[waiting], more, i, n);
        for (; pairs; pairs--) {
            int ends_here = i == nsrc - 1 && pairs == 1 && !p->divide && !p->narrow;
            const void *left = parts[--waiting];
            void *out = ends_here ? to : buffers[waiting];
            if (values) p->combine(out, left, values, n);
            else p->onto(out, left, more, n);
            values = out;
        }
        parts[waiting++] = values;
    }
    store(p, to, buffers[0], parts[0], n);
}

static size_t block_at(const struct plan *p, size_t start) {
    return p->count - start < p->block ? p->count - start : p->block;
}

static void reduce_blocks(const struct plan *p, void *dst, const void *const *src, int nsrc) {
    _Alignas(64) char buffers[MOST_PARTS][BLOCK_BYTES];
    for (size_t start = 0; start < p->count; start += p->block)
        reduce_block(p, dst, src, nsrc, start, block_at(p, start), buffers);
}

void mpp_reduce(const mpp_reduction *r, void *dst, const void *const *src, int nsrc, size_t count) {
    if (count == 0) return;
    struct plan p = make_plan(r, count);
    int plain = !p.scale && !p.divide;
    if (plain && nsrc == 1) {
        if (dst != src[0]) memcpy(dst, src[0], p.count * p.size);
    } else if (plain && nsrc == 2 && p.pair) {
        p.pair(dst, src[0], src[1], p.count);
    } else {
        reduce_blocks(&p, dst, src, nsrc);
    }
}

void mpp_reduce_wide(const mpp_reduction *r, void *wide, const void *const *src, int nsrc, size_t count) {
    struct plan p = make_plan(r, count);
    p.divide = NULL;
    p.narrow = NULL;
    p.out_size = p.wide_size;
    reduce_blocks(&p, wide, src, nsrc);
}

mpp_reduction mpp_of_wide(const mpp_reduction *r) {
    return (mpp_reduction){.dtype = mpp_elements[r->dtype].wide, .op = op_of(r), .divisor = 1};
}

void mpp_widen(const mpp_reduction *r, void *wide, const void *src, size_t count) {
    struct plan p = make_plan(r, count);
    for (size_t start = 0; start < p.count; start += p.block) {
        size_t n = block_at(&p, start);
        void *out = (char *)wide + start * p.wide_size;
        const void *values = load(&p, out, (const char *)src + start * p.size, 0, n);
        if (values != out) memcpy(out, values, n * p.size);
    }
}

void mpp_narrow(const mpp_reduction *r, void *dst, const void *wide, size_t count) {
    _Alignas(64) char buffer[BLOCK_BYTES];
    struct plan p = make_plan(r, count);
    for (size_t start = 0; start < p.count; start += p.block) {
        const char *values = (const char *)wide + start * p.wide_size;
        store(&p, (char *)dst + start * p.size, buffer, values, block_at(&p, start));
    }
}
