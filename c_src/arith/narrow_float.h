/* Conversions between float32 and the 8 and 16 bit floats, one value at a time
 * and free of branches, so that a loop over them vectorises.
 *
 * They agree bit for bit with torch's own conversions (torch >= 2.13, whose
 * float8_e4m3fn saturates; earlier ones gave NaN) except that every NaN
 * becomes one canonical NaN: the sign and payload of a NaN made by arithmetic
 * depend on the CPU and on operand order, which compilers are free to swap.
 *
 * No step needs a float32 subnormal, so torch.set_flush_denormal(True), which
 * makes the CPU read and write those as zero, cannot change what a narrow
 * subnormal converts to.
 */
#pragma once

#include <stdint.h>
#include <string.h>

/* Forced inline: a real call inside a kernel loop would stop vectorisation. */
#define MPP_INLINE static inline __attribute__((always_inline))

#define MPP_F32_INF 0x7f800000

MPP_INLINE float mpp_f32(uint32_t bits) {
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

MPP_INLINE uint32_t mpp_f32_bits(float value) {
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return bits;
}

/* ---- bfloat16: the upper half of a float32 ---- */

MPP_INLINE float mpp_bf16_to_f32(uint16_t h) { return mpp_f32((uint32_t)h << 16); }

/* Leaves the bfloat16 in the upper half; what the lower half holds is noise. */
MPP_INLINE uint32_t mpp_bf16_round(float value) {
    uint32_t bits = mpp_f32_bits(value);
    uint32_t rounded = bits + 0x7fff + (bits >> 16 & 1);
    return value != value ? 0x7fc00000 : rounded;
}

MPP_INLINE uint16_t mpp_f32_to_bf16(float value) { return (uint16_t)(mpp_bf16_round(value) >> 16); }

/* ---- formats with their own exponent width ----
 * "magnitude" is the encoding without its sign bit.  Comparisons are on signed
 * ints because SSE2 has no unsigned ones; no magnitude reaches the sign bit. */

/* The float32 bits of a magnitude, as if the format had no inf and no NaN. */
MPP_INLINE uint32_t mpp_magnitude_widen(uint32_t magnitude, int mantissa_bits, int bias) {
    uint32_t in_place = magnitude << (23 - mantissa_bits);
    uint32_t least_normal = (uint32_t)(128 - bias) << 23;
    uint32_t normal = in_place + ((uint32_t)(127 - bias) << 23);
    /* Subnormal m: (least_normal with mantissa m) - least_normal, exact. */
    float subnormal = mpp_f32(least_normal | in_place) - mpp_f32(least_normal);
    return (int32_t)magnitude < 1 << mantissa_bits ? mpp_f32_bits(subnormal) : normal;
}

/* The magnitude nearest to |value|, its exponent running past the format's
 * largest where the value does; inf and NaN give something larger still. */
MPP_INLINE int32_t mpp_magnitude_narrow(uint32_t abs_bits, int mantissa_bits, int bias) {
    int drop = 23 - mantissa_bits;
    uint32_t half = (1u << (drop - 1)) - 1 + (abs_bits >> drop & 1);
    uint32_t normal = (abs_bits + half - ((uint32_t)(127 - bias) << 23)) >> drop;
    /* Adding a power of two whose last bit weighs as much as the format's
     * smallest subnormal lets the CPU do the rounding. */
    uint32_t magic = (uint32_t)(151 - bias - mantissa_bits) << 23;
    uint32_t subnormal = mpp_f32_bits(mpp_f32(abs_bits) + mpp_f32(magic)) - magic;
    int is_subnormal = (int32_t)abs_bits < (128 - bias) << 23;
    return (int32_t)(is_subnormal ? subnormal : normal);
}

/* Formats laid out like IEEE ones: all-ones exponent for inf and NaN. */
MPP_INLINE float mpp_ieee_widen(uint32_t h, int width, int mantissa_bits, int bias) {
    uint32_t magnitude = h & ((1u << (width - 1)) - 1);
    uint32_t sign = h >> (width - 1) << 31;
    uint32_t inf = ((1u << (width - 1)) - 1) >> mantissa_bits << mantissa_bits;
    uint32_t bits = mpp_magnitude_widen(magnitude, mantissa_bits, bias);
    uint32_t special = MPP_F32_INF | magnitude << (23 - mantissa_bits);
    special |= magnitude == inf ? 0 : 0x400000; /* quiet, as vcvtph2ps does */
    return mpp_f32(sign | ((int32_t)magnitude < (int32_t)inf ? bits : special));
}

MPP_INLINE uint32_t mpp_ieee_narrow(float value, int width, int mantissa_bits, int bias, uint32_t nan) {
    uint32_t bits = mpp_f32_bits(value), abs_bits = bits & 0x7fffffff;
    uint32_t sign = bits >> 31 << (width - 1);
    int32_t inf = (int32_t)(((1u << (width - 1)) - 1) >> mantissa_bits << mantissa_bits);
    int32_t magnitude = mpp_magnitude_narrow(abs_bits, mantissa_bits, bias);
    uint32_t finite = (uint32_t)(magnitude < inf ? magnitude : inf) | sign;
    return (int32_t)abs_bits > MPP_F32_INF ? nan : finite;
}

/* fp16, in hardware where every machine of the architecture has it. */
MPP_INLINE float mpp_f16_to_f32(uint16_t h) {
#if defined(__aarch64__) && defined(__ARM_FP16_FORMAT_IEEE)
    __fp16 value;
    memcpy(&value, &h, sizeof value);
    return value;
#else
    return mpp_ieee_widen(h, 16, 10, 15);
#endif
}

MPP_INLINE uint16_t mpp_f32_to_f16(float value) {
#if defined(__aarch64__) && defined(__ARM_FP16_FORMAT_IEEE)
    __fp16 rounded = (__fp16)value;
    uint16_t bits;
    memcpy(&bits, &rounded, sizeof bits);
    return value != value ? 0x7e00 : bits;
#else
    return (uint16_t)mpp_ieee_narrow(value, 16, 10, 15, 0x7e00);
#endif
}

MPP_INLINE float mpp_e5m2_to_f32(uint8_t h) { return mpp_ieee_widen(h, 8, 2, 15); }

MPP_INLINE uint8_t mpp_f32_to_e5m2(float value) { return (uint8_t)mpp_ieee_narrow(value, 8, 2, 15, 0x7f); }

/* float8_e4m3fn: no inf, and one NaN per sign.  Too large saturates, inf too. */
MPP_INLINE float mpp_e4m3fn_to_f32(uint8_t h) {
    uint32_t magnitude = h & 0x7f, sign = (uint32_t)h >> 7 << 31;
    uint32_t bits = mpp_magnitude_widen(magnitude, 3, 7);
    return mpp_f32(sign | (magnitude == 0x7f ? 0x7fc00000 : bits));
}

MPP_INLINE uint8_t mpp_f32_to_e4m3fn(float value) {
    uint32_t bits = mpp_f32_bits(value), abs_bits = bits & 0x7fffffff;
    int32_t magnitude = mpp_magnitude_narrow(abs_bits, 3, 7);
    uint32_t finite = (uint32_t)(magnitude < 0x7e ? magnitude : 0x7e) | bits >> 31 << 7;
    return (uint8_t)((int32_t)abs_bits > MPP_F32_INF ? 0x7f : finite);
}

/* The "fnuz" formats: no inf and no negative zero, whose code 0x80 is the only
 * NaN.  Too large gives NaN, inf too. */
MPP_INLINE float mpp_fnuz_widen(uint32_t h, int mantissa_bits, int bias) {
    uint32_t bits = h >> 7 << 31 | mpp_magnitude_widen(h & 0x7f, mantissa_bits, bias);
    return mpp_f32(h == 0x80 ? 0x7fc00000 : bits);
}

MPP_INLINE uint8_t mpp_fnuz_narrow(float value, int mantissa_bits, int bias) {
    uint32_t bits = mpp_f32_bits(value), abs_bits = bits & 0x7fffffff;
    int32_t magnitude = mpp_magnitude_narrow(abs_bits, mantissa_bits, bias);
    uint32_t finite = magnitude == 0 ? 0 : (uint32_t)magnitude | bits >> 31 << 7;
    return (uint8_t)(magnitude > 0x7f ? 0x80 : finite);
}

MPP_INLINE float mpp_e4m3fnuz_to_f32(uint8_t h) { return mpp_fnuz_widen(h, 3, 8); }
MPP_INLINE float mpp_e5m2fnuz_to_f32(uint8_t h) { return mpp_fnuz_widen(h, 2, 16); }
MPP_INLINE uint8_t mpp_f32_to_e4m3fnuz(float value) { return mpp_fnuz_narrow(value, 3, 8); }
MPP_INLINE uint8_t mpp_f32_to_e5m2fnuz(float value) { return mpp_fnuz_narrow(value, 2, 16); }
