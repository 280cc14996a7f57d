/* The reduction loops.  reduce.c includes this file once per instruction set,
 * each time with
 *   MPP_ISA        suffix of every name defined here, and the build's name
 *   MPP_ISA_BYTES  vector size for the explicit fp16 loops; 0: none
 *   MPP_TARGET     attribute of every function
 * so there is deliberately no include guard.  A macro that is the same text each
 * time stays defined; the end undefines the others.
 *
 * Everything is plain loops left to the vectoriser except fp16 on x86, whose
 * conversion instructions gcc 12 does not find by itself.  All kernels accept
 * any alignment, and an output that is exactly one of the inputs.
 */
#define K(name) MPP_CAT(name, MPP_ISA)

/* Names for the reading and writing end of a loop over n elements. */
#define MAP1(name, out_t, in_t, expr)                                                                                  \
    static MPP_TARGET void K(name)(void *out, const void *in, size_t n) {                                              \
        any_##out_t *o = out;                                                                                          \
        const any_##in_t *p = in;                                                                                      \
        MPP_INDEPENDENT                                                                                                \
        for (size_t i = 0; i < n; i++) {                                                                               \
            const in_t x = p[i];                                                                                       \
            o[i] = (expr);                                                                                             \
        }                                                                                                              \
    }

#define MAP2(name, t, expr)                                                                                            \
    static MPP_TARGET void K(name)(void *out, const void *in_a, const void *in_b, size_t n) {                          \
        any_##t *o = out;                                                                                              \
        const any_##t *pa = in_a, *pb = in_b;                                                                          \
        MPP_INDEPENDENT                                                                                                \
        for (size_t i = 0; i < n; i++) {                                                                               \
            const t a = pa[i], b = pb[i];                                                                              \
            o[i] = (expr);                                                                                             \
        }                                                                                                              \
    }

/* With a number `k` made of one that is the same for all elements. */
#define MAP_WITH(name, t, given_t, k_t, k_of_given, expr)                                                              \
    static MPP_TARGET void K(name)(void *out, const void *in, size_t n, given_t given) {                               \
        const k_t k = k_of_given;                                                                                      \
        any_##t *o = out;                                                                                              \
        const any_##t *p = in;                                                                                         \
        MPP_INDEPENDENT                                                                                                \
        for (size_t i = 0; i < n; i++) {                                                                               \
            const t x = p[i];                                                                                          \
            o[i] = (t)(expr);                                                                                          \
        }                                                                                                              \
    }

/* ---- integers ----
 * SUM and PROD wrap: u8 and u16 are promoted to int, whose product could
 * overflow, hence 1u; signed types run the unsigned kernels, same bits. */
#define UNSIGNED(t)                                                                                                    \
    MAP2(sum_##t, t, (t)(a + b))                                                                                       \
    MAP2(prod_##t, t, (t)(1u * a * b))                                                                                 \
    MAP2(band_##t, t, (t)(a & b))                                                                                      \
    MAP2(bor_##t, t, (t)(a | b))                                                                                       \
    MAP2(bxor_##t, t, (t)(a ^ b))                                                                                      \
    MAP_WITH(scale_##t, t, double, t, (t)mpp_integer_factor(given), 1u * x * k)
MPP_UNSIGNED_TYPES(UNSIGNED)
#undef UNSIGNED

/* In 64 bits, because the divisor need not fit the type. */
#define INTEGER(t, wide)                                                                                               \
    MAP2(min_##t, t, b < a ? b : a)                                                                                    \
    MAP2(max_##t, t, b > a ? b : a)                                                                                    \
    MAP_WITH(divide_##t, t, int64_t, wide, (wide)given, (wide)x / k)
MPP_INTEGER_TYPES(INTEGER)
#undef INTEGER

/* ---- float32 and float64 ---- */
#define FLOATING(t)                                                                                                    \
    MAP2(sum_##t, t, mpp_sum_##t(a, b))                                                                                \
    MAP2(prod_##t, t, mpp_prod_##t(a, b))                                                                              \
    MAP2(min_##t, t, mpp_min_##t(a, b))                                                                                \
    MAP2(max_##t, t, mpp_max_##t(a, b))                                                                                \
    MAP_WITH(scale_##t, t, double, t, (t)given, (x * k))                                                               \
    MAP_WITH(divide_##t, t, int64_t, t, (t)given, x / k)
MPP_FLOAT_TYPES(FLOATING)
#undef FLOATING

/* n counts real numbers, two per complex one.  Not vectorised by gcc: where
 * the target has FMA, gcc 12 makes vfmaddsub of this loop in spite of
 * fp-contract=off, and the rounding of the products is lost. */
#ifndef __clang__
#pragma GCC push_options
#pragma GCC optimize("no-tree-vectorize", "no-tree-slp-vectorize")
#endif
#define COMPLEX_PROD(t)                                                                                                \
    static MPP_TARGET void K(complex_prod_##t)(void *out, const void *in_a, const void *in_b, size_t n) {              \
        any_##t *o = out;                                                                                              \
        const any_##t *pa = in_a, *pb = in_b;                                                                          \
        for (size_t i = 0; i < n; i += 2) {                                                                            \
            const t ar = pa[i], ai = pa[i + 1], br = pb[i], bi = pb[i + 1];                                            \
            o[i] = ar * br - ai * bi;                                                                                  \
            o[i + 1] = ar * bi + ai * br;                                                                              \
        }                                                                                                              \
    }
MPP_FLOAT_TYPES(COMPLEX_PROD)
#undef COMPLEX_PROD
#ifndef __clang__
#pragma GCC pop_options
#endif

/* ---- bool: a byte; any nonzero counts as true ---- */
MAP1(widen_bool, u8, u8, x != 0)
MAP2(or_bool, u8, (a | b) != 0)
MAP2(and_bool, u8, (a != 0) & (b != 0))
MAP2(xor_bool, u8, (a != 0) ^ (b != 0))

/* ---- 8 bit floats and bfloat16 ---- */
#define NARROW_FLOAT(name, t)                                                                                          \
    MAP1(widen_##name, f32, t, mpp_##name##_to_f32(x))                                                                 \
    MAP1(narrow_##name, t, f32, mpp_f32_to_##name(x))
MPP_NARROW_FLOATS(NARROW_FLOAT)
#undef NARROW_FLOAT

/* Two bfloat16 per 32 bit word: each half is a float32 after a mask or a
 * shift, so nothing has to be moved between vector lanes.  Byte order does not
 * matter: the result goes back where its operands came from. */
#define BF16_PAIRS(op)                                                                                                 \
    static MPP_TARGET void K(op##_bf16)(void *out, const void *in_a, const void *in_b, size_t n) {                     \
        any_u32 *o = out;                                                                                              \
        const any_u32 *pa = in_a, *pb = in_b;                                                                          \
        MPP_INDEPENDENT                                                                                                \
        for (size_t i = 0; i < n / 2; i++) {                                                                           \
            const u32 a = pa[i], b = pb[i], upper = 0xffff0000;                                                        \
            float high = mpp_##op##_f32(mpp_f32(a & upper), mpp_f32(b & upper));                                       \
            float low = mpp_##op##_f32(mpp_f32(a << 16), mpp_f32(b << 16));                                            \
            o[i] = (mpp_bf16_round(high) & upper) | mpp_bf16_round(low) >> 16;                                         \
        }                                                                                                              \
        if (n % 2) {                                                                                                   \
            float a = mpp_bf16_to_f32(((const any_u16 *)in_a)[n - 1]);                                                 \
            float b = mpp_bf16_to_f32(((const any_u16 *)in_b)[n - 1]);                                                 \
            ((any_u16 *)out)[n - 1] = mpp_f32_to_bf16(mpp_##op##_f32(a, b));                                           \
        }                                                                                                              \
    }
MPP_FLOAT_OPS(BF16_PAIRS)
#undef BF16_PAIRS

/* ---- fp16 ----
 * V_LOAD and V_STORE convert V_COUNT values from and to fp16, any alignment;
 * a stored NaN becomes the canonical one, as in mpp_f32_to_f16.  min_ps(b, a)
 * is b < a ? b : a, to which the NaN rule of mpp_min_f32 is added. */
#define V_ROUND (_MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)
#if MPP_ISA_BYTES == 64
#define V_COUNT 16
#define V __m512
#define V_(name) _mm512_##name##_ps
#define V_LOAD(p) _mm512_cvtph_ps(_mm256_loadu_si256((const void *)(p)))
#define V_STORE_ROUNDED(p, v) _mm256_storeu_si256((void *)(p), _mm512_cvtps_ph(v, V_ROUND))
#define V_IF_NAN(v, yes, no) _mm512_mask_blend_ps(_mm512_cmp_ps_mask(v, v, _CMP_UNORD_Q), (no), (yes))
#elif MPP_ISA_BYTES == 32
#define V_COUNT 8
#define V __m256
#define V_(name) _mm256_##name##_ps
#define V_LOAD(p) _mm256_cvtph_ps(_mm_loadu_si128((const void *)(p)))
#define V_STORE_ROUNDED(p, v) _mm_storeu_si128((void *)(p), _mm256_cvtps_ph(v, V_ROUND))
#define V_IF_NAN(v, yes, no) _mm256_blendv_ps((no), (yes), _mm256_cmp_ps(v, v, _CMP_UNORD_Q))
#endif
#define V_LOAD_F32(p) V_(loadu)((const void *)(p))
#define V_STORE_F32(p, v) V_(storeu)((void *)(p), (v))
#define V_STORE(p, v) V_STORE_ROUNDED(p, V_IF_NAN(v, V_(set1)(mpp_f32(0x7fc00000)), v))
#define V_sum(a, b) V_(add)(a, b)
#define V_prod(a, b) V_(mul)(a, b)
#define V_min(a, b) V_IF_NAN(b, b, V_(min)(b, a))
#define V_max(a, b) V_IF_NAN(b, b, V_(max)(b, a))

#ifdef V_COUNT
/* Counted ahead: where i + V_COUNT is compared, clang computes it beside i, a third of the loop. */
#define V_LOOP(i, n, statement)                                                                                        \
    for (const size_t whole = n - n % V_COUNT; i < whole; i += V_COUNT) {                                              \
        statement;                                                                                                     \
    }
#else
#define V_LOOP(i, n, statement)
#endif

/* `vectors` moves V_COUNT numbers from i on, `one` number i. */
#define F16_LOOP(vectors, one)                                                                                         \
    size_t i = 0;                                                                                                      \
    V_LOOP(i, n, vectors)                                                                                              \
    MPP_INDEPENDENT                                                                                                    \
    for (; i < n; i++) one;

static MPP_TARGET void K(widen_f16)(void *out, const void *in, size_t n) {
    any_f32 *o = out;
    const any_u16 *p = in;
    F16_LOOP(V_STORE_F32(o + i, V_LOAD(p + i)), o[i] = mpp_f16_to_f32(p[i]))
}

static MPP_TARGET void K(narrow_f16)(void *out, const void *in, size_t n) {
    any_u16 *o = out;
    const any_f32 *p = in;
    F16_LOOP(V v = V_LOAD_F32(p + i); V_STORE(o + i, v), o[i] = mpp_f32_to_f16(p[i]))
}

#define F16_PAIR(op)                                                                                                   \
    static MPP_TARGET void K(op##_f16)(void *out, const void *in_a, const void *in_b, size_t n) {                      \
        any_u16 *o = out;                                                                                              \
        const any_u16 *pa = in_a, *pb = in_b;                                                                          \
        F16_LOOP(V a = V_LOAD(pa + i); V b = V_LOAD(pb + i); V v = V_##op(a, b);                                       \
                 V_STORE(o + i, v),                                                                                    \
                 o[i] = mpp_f32_to_f16(mpp_##op##_f32(mpp_f16_to_f32(pa[i]), mpp_f16_to_f32(pb[i]))))                  \
    }
MPP_FLOAT_OPS(F16_PAIR)
#undef F16_PAIR

/* One more source onto a float32 sum, sparing the widened source a trip through
 * the cache. */
#define ACCUMULATE(op)                                                                                                 \
    static MPP_TARGET void K(op##_onto_bf16)(void *out, const void *in_a, const void *in_b, size_t n) {                \
        any_f32 *o = out;                                                                                              \
        const any_f32 *pa = in_a;                                                                                      \
        const any_u16 *pb = in_b;                                                                                      \
        MPP_INDEPENDENT                                                                                                \
        for (size_t i = 0; i < n; i++) o[i] = mpp_##op##_f32(pa[i], mpp_bf16_to_f32(pb[i]));                           \
    }                                                                                                                  \
    static MPP_TARGET void K(op##_onto_f16)(void *out, const void *in_a, const void *in_b, size_t n) {                 \
        any_f32 *o = out;                                                                                              \
        const any_f32 *pa = in_a;                                                                                      \
        const any_u16 *pb = in_b;                                                                                      \
        F16_LOOP(V a = V_LOAD_F32(pa + i); V b = V_LOAD(pb + i); V v = V_##op(a, b);                                   \
                 V_STORE_F32(o + i, v), o[i] = mpp_##op##_f32(pa[i], mpp_f16_to_f32(pb[i])))                           \
    }
MPP_FLOAT_OPS(ACCUMULATE)
#undef ACCUMULATE

/* ---- the table ---- */
#define UNSIGNED_ROW(t)                                                                                                \
    [MPP_SUM] = K(sum_##t), [MPP_PROD] = K(prod_##t), [MPP_BAND] = K(band_##t), [MPP_BOR] = K(bor_##t),                \
    [MPP_BXOR] = K(bxor_##t)
#define ORDER_ROW(t) [MPP_MIN] = K(min_##t), [MPP_MAX] = K(max_##t)
#define INTEGER_ROWS(U, u, I, i)                                                                                       \
    .combine[U] = {UNSIGNED_ROW(u), ORDER_ROW(u)}, .scale[U] = K(scale_##u), .divide[U] = K(divide_##u),               \
    .combine[I] = {UNSIGNED_ROW(u), ORDER_ROW(i)}, .scale[I] = K(scale_##u), .divide[I] = K(divide_##i)
#define FLOAT_ROW(t) {[MPP_SUM] = K(sum_##t), [MPP_PROD] = K(prod_##t), ORDER_ROW(t)}
#define FLOAT_ROWS(F, t)                                                                                               \
    .combine[F] = FLOAT_ROW(t), .complex_prod[F] = K(complex_prod_##t), .scale[F] = K(scale_##t),                      \
    .divide[F] = K(divide_##t)
#define CONVERT_ROWS(N, t) .widen[N] = K(widen_##t), .narrow[N] = K(narrow_##t)

static const struct kernels K(kernels) = {
    .isa = MPP_STRING(MPP_ISA),
    INTEGER_ROWS(MPP_U8, u8, MPP_I8, i8),
    INTEGER_ROWS(MPP_U16, u16, MPP_I16, i16),
    INTEGER_ROWS(MPP_U32, u32, MPP_I32, i32),
    INTEGER_ROWS(MPP_U64, u64, MPP_I64, i64),
    FLOAT_ROWS(MPP_F32, f32),
    FLOAT_ROWS(MPP_F64, f64),
    .widen[MPP_BOOL] = K(widen_bool),
    .narrow[MPP_BOOL] = K(widen_bool),
    CONVERT_ROWS(MPP_F16, f16),
    CONVERT_ROWS(MPP_BF16, bf16),
    CONVERT_ROWS(MPP_F8_E4M3FN, e4m3fn),
    CONVERT_ROWS(MPP_F8_E4M3FNUZ, e4m3fnuz),
    CONVERT_ROWS(MPP_F8_E5M2, e5m2),
    CONVERT_ROWS(MPP_F8_E5M2FNUZ, e5m2fnuz),
    .pair[MPP_F16] = FLOAT_ROW(f16),
    .pair[MPP_BF16] = FLOAT_ROW(bf16),
    .onto[MPP_F16] = FLOAT_ROW(onto_f16),
    .onto[MPP_BF16] = FLOAT_ROW(onto_bf16),
    .pair[MPP_BOOL] = {[MPP_BOR] = K(or_bool), [MPP_BAND] = K(and_bool), [MPP_BXOR] = K(xor_bool)},
};

#undef V_COUNT
#undef V
#undef V_
#undef V_LOAD
#undef V_STORE_ROUNDED
#undef V_IF_NAN
#undef V_LOOP
#undef MPP_ISA
#undef MPP_ISA_BYTES
#undef MPP_TARGET
