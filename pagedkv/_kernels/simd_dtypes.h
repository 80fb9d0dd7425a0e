/* What a value of K or V may be stored as, for one instruction set: how it is read and written, and the kernels
 * that read it. No guard: included once per instruction set.
 *
 *     f32     float
 *     f16     IEEE 754 binary16
 *     bf16    the upper half of a float
 *     i8      an integer in [-127, 127], times a float that its head has in this row
 */

/* --- one vector ------------------------------------------------------------------------------------- */

SIMD_INLINE V(vec) V(load_f32)(const simd_f32 *p) { return V(load)(p); }
SIMD_INLINE V(vec) V(load_part_f32)(const simd_f32 *p, ptrdiff_t n) { return V(load_part)(p, n); }

/* 0 < n < LANES: the first n, zeros after. */
#define PARTS(name)                                                                                           \
    SIMD_INLINE V(vec) V(load_part_##name)(const simd_##name *p, ptrdiff_t n) {                               \
        simd_##name x[LANES] = {0};                                                                           \
        memcpy(x, p, (size_t)n * sizeof x[0]);                                                                \
        return V(load_##name)(x);                                                                             \
    }
PARTS(f16)
PARTS(bf16)
PARTS(i8)
#undef PARTS

/* --- to floats and back ----------------------------------------------------------------------------- */

#define WIDEN(name, times)                                                                                    \
    static void V(widen_##name)(float *dst, const void *src, float scale, ptrdiff_t n) {                      \
        const simd_##name *p = (const simd_##name *)src;                                                      \
        const V(vec) factor = V(set1)(scale);                                                                 \
        ptrdiff_t d = 0;                                                                                      \
        for (; d + LANES <= n; d += LANES)                                                                    \
            V(store)(dst + d, times(V(load_##name)(p + d), factor));                                          \
        if (d < n)                                                                                            \
            V(store_part)(dst + d, times(V(load_part_##name)(p + d, n - d), factor), n - d);                  \
    }
#define ALONE(x, factor) ((void)(factor), (x))
WIDEN(f16, ALONE)
WIDEN(bf16, ALONE)
WIDEN(i8, V(mul))
#undef WIDEN
#undef ALONE

static void V(widen_f32)(float *dst, const void *src, float scale, ptrdiff_t n) {
    (void)scale;
    memcpy(dst, src, (size_t)n * sizeof(float));
}

static void V(narrow_f32)(void *dst, float *scale, const float *src, ptrdiff_t n) {
    (void)scale;
    memcpy(dst, src, (size_t)n * sizeof(float));
}

static void V(narrow_f16)(void *dst, float *scale, const float *src, ptrdiff_t n) {
    uint16_t *p = (uint16_t *)dst, last[LANES];
    ptrdiff_t d = 0;
    (void)scale;
    for (; d + LANES <= n; d += LANES)
        V(store_f16)(p + d, V(load)(src + d));
    if (d < n) {
        V(store_f16)(last, V(load_part)(src + d, n - d));
        memcpy(p + d, last, (size_t)(n - d) * sizeof *p);
    }
}

/* Rounds to nearest, ties to even. A NaN keeps its upper bits and becomes a quiet one: rounding its lower bits
 * could carry it into infinity. In plain C, which compilers turn into vectors. */
static void V(narrow_bf16)(void *dst, float *scale, const float *src, ptrdiff_t n) {
    uint16_t *p = (uint16_t *)dst;
    (void)scale;
    for (ptrdiff_t d = 0; d < n; ++d) {
        uint32_t bits;
        memcpy(&bits, src + d, sizeof bits);
        const uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
        p[d] = (uint16_t)((bits & 0x7fffffffu) > 0x7f800000u ? (bits >> 16) | 0x40u : rounded);
    }
}

/* Symmetric, by the greatest magnitude. Where that is not finite the scale is NaN, so that the head reads as NaN:
 * what cannot be stored is not taken for a number. */
static void V(narrow_i8)(void *dst, float *scale, const float *src, ptrdiff_t n) {
    int8_t *p = (int8_t *)dst;
    const V(vec) zero = V(zero)(), limit = V(set1)(127.0f);
    V(vec) size = zero, odd = zero; /* x - x: 0, or NaN where x is not finite */
    float each[LANES], most = 0.0f;
    ptrdiff_t d = 0;
    for (; d < n; d += LANES) {
        const V(vec) x = n - d < LANES ? V(load_part)(src + d, n - d) : V(load)(src + d);
        size = V(max)(V(max)(x, V(sub)(zero, x)), size);
        odd = V(add)(odd, V(sub)(x, x));
    }
    V(store)(each, size);
    for (int i = 0; i < LANES; ++i)
        most = each[i] > most ? each[i] : most;
    *scale = V(sum)(odd) == 0.0f ? most / 127.0f : NAN;
    if (*scale * 127.0f > FLT_MAX) /* it was rounded up, and what it stands for would not be finite */
        *scale = nextafterf(*scale, 0.0f);
    if (!(*scale > 0.0f)) {
        memset(p, 0, (size_t)n);
        return;
    }
    for (d = 0; d < n; d += LANES) {
        const V(vec) x = n - d < LANES ? V(load_part)(src + d, n - d) : V(load)(src + d);
        /* A scale among the subnormals is coarse: the quotient may pass 127. */
        const V(vec) q = V(max)(V(min)(V(div)(x, V(set1)(*scale)), limit), V(sub)(zero, limit));
        V(store)(each, V(to_float)(V(to_int)(q)));
        for (ptrdiff_t i = 0; i < LANES && i < n - d; ++i)
            p[d + i] = (int8_t)each[i];
    }
}

/* --- the kernels that read them --------------------------------------------------------------------- */

#define T(name) V(SIMD_PASTE(name, SIMD_DTYPE))
#define ELEMENT SIMD_PASTE(simd, SIMD_DTYPE)

#define SIMD_DTYPE f32
#include "attend_rows.h"
#undef SIMD_DTYPE
#define SIMD_DTYPE f16
#include "attend_rows.h"
#undef SIMD_DTYPE
#define SIMD_DTYPE bf16
#include "attend_rows.h"
#undef SIMD_DTYPE
#define SIMD_DTYPE i8
#include "attend_rows.h"
#undef SIMD_DTYPE

#undef T
#undef ELEMENT
