/* What a value of K or V may be stored as, for one instruction set: how it is read and written, and the kernels
 * that read it. No guard: included once per instruction set.
 *
 *     f32     float
 *     f16     IEEE 754 binary16
 *     bf16    the upper half of a float
 *     i8      an integer in [-127, 127], times a binary16 that its group of SIMD_GROUP values has
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

#define WIDEN(name)                                                                                           \
    static void V(widen_##name)(float *dst, const void *src, const simd_f16 *scales, ptrdiff_t n) {           \
        const simd_##name *p = (const simd_##name *)src;                                                      \
        ptrdiff_t d = 0;                                                                                      \
        (void)scales;                                                                                         \
        for (; d + LANES <= n; d += LANES)                                                                    \
            V(store)(dst + d, V(load_##name)(p + d));                                                         \
        if (d < n)                                                                                            \
            V(store_part)(dst + d, V(load_part_##name)(p + d, n - d), n - d);                                 \
    }
WIDEN(f16)
WIDEN(bf16)
#undef WIDEN

static void V(widen_f32)(float *dst, const void *src, const simd_f16 *scales, ptrdiff_t n) {
    (void)scales;
    memcpy(dst, src, (size_t)n * sizeof(float));
}

static void V(narrow_f32)(void *dst, simd_f16 *scales, const float *src, ptrdiff_t n) {
    (void)scales;
    memcpy(dst, src, (size_t)n * sizeof(float));
}

static void V(narrow_f16)(void *dst, simd_f16 *scales, const float *src, ptrdiff_t n) {
    uint16_t *p = (uint16_t *)dst, last[LANES];
    ptrdiff_t d = 0;
    (void)scales;
    for (; d + LANES <= n; d += LANES)
        V(store_f16)(p + d, V(load)(src + d));
    if (d < n) {
        V(store_f16)(last, V(load_part)(src + d, n - d));
        memcpy(p + d, last, (size_t)(n - d) * sizeof *p);
    }
}

/* Rounds to nearest, ties to even. A NaN keeps its upper bits and becomes a quiet one: rounding its lower bits
 * could carry it into infinity. In plain C, which compilers turn into vectors. */
static void V(narrow_bf16)(void *dst, simd_f16 *scales, const float *src, ptrdiff_t n) {
    uint16_t *p = (uint16_t *)dst;
    (void)scales;
    for (ptrdiff_t d = 0; d < n; ++d) {
        uint32_t bits;
        memcpy(&bits, src + d, sizeof bits);
        const uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
        p[d] = (uint16_t)((bits & 0x7fffffffu) > 0x7f800000u ? (bits >> 16) | 0x40u : rounded);
    }
}

/* So many groups at a time. */
#define GROUPS 32

static void V(widen_i8)(float *dst, const void *src, const simd_f16 *scales, ptrdiff_t n) {
    const simd_i8 *p = (const simd_i8 *)src;
    float factors[GROUPS];
    for (; n > 0; n -= GROUPS * SIMD_GROUP) {
        const ptrdiff_t part = n < GROUPS * SIMD_GROUP ? n : GROUPS * SIMD_GROUP;
        V(widen_f16)(factors, scales, NULL, (part + SIMD_GROUP - 1) / SIMD_GROUP);
        for (ptrdiff_t d = 0; d < part; d += LANES) {
            const V(vec) factor = V(set1)(factors[d / SIMD_GROUP]);
            if (part - d < LANES)
                V(store_part)(dst + d, V(mul)(V(load_part_i8)(p + d, part - d), factor), part - d);
            else
                V(store)(dst + d, V(mul)(V(load_i8)(p + d), factor));
        }
        dst += part;
        p += part;
        scales += GROUPS;
    }
}

/* The greatest lane, in all of them. */
SIMD_INLINE V(vec) V(max_lane)(V(vec) x) {
    x = V(max)(x, V(swap)(x, 1));
    x = V(max)(x, V(swap)(x, 2));
#if LANES > 4
    x = V(max)(x, V(swap)(x, 4));
#endif
#if LANES > 8
    x = V(max)(x, V(swap)(x, 8));
#endif
    return x;
}

/* Groups that are not finite, or whose scale is not: what cannot be stored is not taken for a number. */
SIMD_OUTLINE void V(spoil_groups)(simd_i8 *p, simd_f16 *scales, const float *src, ptrdiff_t n) {
    for (ptrdiff_t first = 0; first < n; first += SIMD_GROUP) {
        const ptrdiff_t size = n - first < SIMD_GROUP ? n - first : SIMD_GROUP;
        int is_finite = scales[first / SIMD_GROUP] < 0x7c00u;
        for (ptrdiff_t d = first; d < first + size; ++d)
            is_finite &= (simd_to_bits(src[d]) & 0x7fffffffu) < 0x7f800000u;
        if (!is_finite) {
            scales[first / SIMD_GROUP] = 0x7e00u; /* NaN */
            memset(p + first, 0, (size_t)size);
        }
    }
}

/* At most GROUPS of them. A scale is the greatest magnitude / 127, rounded; values are multiplied by its inverse. */
static void V(narrow_groups)(simd_i8 *p, simd_f16 *scales, const float *src, ptrdiff_t n) {
    const V(vec) zero = V(zero)(), limit = V(set1)(127.0f);
    float most[GROUPS + LANES], inverse[GROUPS + LANES];
    simd_f16 halves[GROUPS + LANES];
    V(vec) odd = zero; /* NaN where anything is not finite */
    ptrdiff_t n_groups = 0, first = 0;
    for (; first < n; first += SIMD_GROUP) {
        V(vec) size = zero;
        for (ptrdiff_t d = first; d < n && d < first + SIMD_GROUP; d += LANES) {
            const V(vec) x = n - d < LANES ? V(load_part)(src + d, n - d) : V(load)(src + d);
            size = V(max)(V(max)(x, V(sub)(zero, x)), size);
            odd = V(fma)(x, zero, odd);
        }
        V(store)(most + n_groups++, V(max_lane)(size)); /* and beyond it, where the next one comes */
    }
    for (ptrdiff_t g = 0; g < n_groups; g += LANES) {
        V(store_f16)(halves + g, V(div)(V(load)(most + g), limit));
        const V(vec) scale = V(load_f16)(halves + g);
        odd = V(fma)(scale, zero, odd);
        V(store)(inverse + g, V(select_less)(zero, scale, V(div)(V(set1)(1.0f), scale), zero));
    }
    memcpy(scales, halves, (size_t)n_groups * sizeof *scales);
    for (ptrdiff_t d = 0; d < n; d += LANES) {
        const V(vec) x = n - d < LANES ? V(load_part)(src + d, n - d) : V(load)(src + d);
        /* A scale among the subnormals is coarse: the quotient may pass 127. */
        const V(vec) q = V(max)(V(min)(V(mul)(x, V(set1)(inverse[d / SIMD_GROUP])), limit), V(sub)(zero, limit));
        if (n - d < LANES) {
            simd_i8 last[LANES];
            V(store_i8)(last, q);
            memcpy(p + d, last, (size_t)(n - d));
        } else {
            V(store_i8)(p + d, q);
        }
    }
    if (!(V(sum)(odd) == 0.0f))
        V(spoil_groups)(p, scales, src, n);
}

static void V(narrow_i8)(void *dst, simd_f16 *scales, const float *src, ptrdiff_t n) {
    for (ptrdiff_t d = 0; d < n; d += GROUPS * SIMD_GROUP)
        V(narrow_groups)((simd_i8 *)dst + d, scales + d / SIMD_GROUP, src + d,
                         n - d < GROUPS * SIMD_GROUP ? n - d : GROUPS * SIMD_GROUP);
}
#undef GROUPS

/* --- the kernels that read them --------------------------------------------------------------------- */

#define T(name) V(SIMD_PASTE(name, SIMD_DTYPE))
#define ELEMENT SIMD_PASTE(simd, SIMD_DTYPE)

#define HAS_SCALES 0
#define SIMD_DTYPE f32
#include "attend_rows.h"
#undef SIMD_DTYPE
#define SIMD_DTYPE f16
#include "attend_rows.h"
#undef SIMD_DTYPE
#define SIMD_DTYPE bf16
#include "attend_rows.h"
#undef SIMD_DTYPE
#undef HAS_SCALES

#define HAS_SCALES 1
#define SIMD_DTYPE i8
#include "attend_rows.h"
#undef SIMD_DTYPE
#undef HAS_SCALES

#undef T
#undef ELEMENT
