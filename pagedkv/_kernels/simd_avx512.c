/* The kernels in AVX-512F. */
#define SIMD_ISA avx512
#include "simd.h"

#ifdef SIMD_HAS_AVX
#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx512f"))), apply_to = function)
#else
#pragma GCC target("avx512f")
#endif

#define LANES 16

typedef __m512 V(vec);
typedef __m512i V(ivec);

SIMD_INLINE V(vec) V(zero)(void) { return _mm512_setzero_ps(); }
SIMD_INLINE V(vec) V(set1)(float x) { return _mm512_set1_ps(x); }
SIMD_INLINE V(vec) V(load)(const float *p) { return _mm512_loadu_ps(p); }
SIMD_INLINE __mmask16 V(first)(ptrdiff_t n) { return (__mmask16)((1u << n) - 1u); }
SIMD_INLINE V(vec) V(load_part)(const float *p, ptrdiff_t n) {
    simd_see_load(p, n);
    return _mm512_maskz_loadu_ps(V(first)(n), p);
}
SIMD_INLINE void V(store)(float *p, V(vec) v) { _mm512_storeu_ps(p, v); }
SIMD_INLINE void V(store_part)(float *p, V(vec) v, ptrdiff_t n) {
    simd_see_store(p, n);
    _mm512_mask_storeu_ps(p, V(first)(n), v);
}
SIMD_INLINE V(vec) V(add)(V(vec) a, V(vec) b) { return _mm512_add_ps(a, b); }
SIMD_INLINE V(vec) V(sub)(V(vec) a, V(vec) b) { return _mm512_sub_ps(a, b); }
SIMD_INLINE V(vec) V(mul)(V(vec) a, V(vec) b) { return _mm512_mul_ps(a, b); }
SIMD_INLINE V(vec) V(div)(V(vec) a, V(vec) b) { return _mm512_div_ps(a, b); }
SIMD_INLINE V(vec) V(fma)(V(vec) a, V(vec) b, V(vec) c) { return _mm512_fmadd_ps(a, b, c); }
SIMD_INLINE V(vec) V(max)(V(vec) a, V(vec) b) { return _mm512_max_ps(a, b); }
SIMD_INLINE V(vec) V(min)(V(vec) a, V(vec) b) { return _mm512_min_ps(a, b); }
SIMD_INLINE V(vec) V(select_less)(V(vec) x, V(vec) y, V(vec) a, V(vec) b) {
    return _mm512_mask_blend_ps(_mm512_cmp_ps_mask(x, y, _CMP_LT_OQ), b, a);
}
SIMD_INLINE V(ivec) V(to_int)(V(vec) x) { return _mm512_cvtps_epi32(x); }
SIMD_INLINE V(vec) V(to_float)(V(ivec) v) { return _mm512_cvtepi32_ps(v); }
SIMD_INLINE V(vec) V(pow2)(V(ivec) v) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_add_epi32(v, _mm512_set1_epi32(127)), 23));
}
SIMD_INLINE V(vec) V(swap)(V(vec) v, const int n) {
    return n == 1   ? _mm512_permute_ps(v, 0xb1)
           : n == 2 ? _mm512_permute_ps(v, 0x4e)
           : n == 4 ? _mm512_shuffle_f32x4(v, v, 0xb1)
                    : _mm512_shuffle_f32x4(v, v, 0x4e);
}
SIMD_INLINE __m128 V(fold)(V(vec) v) { /* the four quarters, added */
    __m512 half = _mm512_add_ps(v, _mm512_shuffle_f32x4(v, v, 0x4e));
    return _mm512_castps512_ps128(_mm512_add_ps(half, _mm512_shuffle_f32x4(half, half, 0xb1)));
}
SIMD_INLINE float V(sum)(V(vec) v) {
    __m128 half = V(fold)(v);
    half = _mm_add_ps(half, _mm_movehl_ps(half, half));
    return _mm_cvtss_f32(_mm_add_ss(half, _mm_shuffle_ps(half, half, 1)));
}
SIMD_INLINE void V(store_sums4)(float *p, V(vec) a, V(vec) b, V(vec) c, V(vec) d) {
    __m128 a4 = V(fold)(a), b4 = V(fold)(b), c4 = V(fold)(c), d4 = V(fold)(d);
    __m128 ab = _mm_add_ps(_mm_unpacklo_ps(a4, b4), _mm_unpackhi_ps(a4, b4)); /* a02 b02 a13 b13 */
    __m128 cd = _mm_add_ps(_mm_unpacklo_ps(c4, d4), _mm_unpackhi_ps(c4, d4));
    _mm_storeu_ps(p, _mm_add_ps(_mm_movelh_ps(ab, cd), _mm_movehl_ps(cd, ab)));
}
/* Sixteen sums at once, p[i * stride + j] of s[i][j]: half the work of four times four. Each is summed in the order of
 * sum(). */
SIMD_INLINE void V(store_sums16)(float *p, ptrdiff_t stride, V(vec) s[4][4]) {
    V(vec) column[4]; /* j: its four sums, each folded into one quarter */
    SIMD_UNROLL
    for (int j = 0; j < 4; ++j) {
        V(vec) a = _mm512_add_ps(_mm512_shuffle_f32x4(s[0][j], s[1][j], 0x44), _mm512_shuffle_f32x4(s[0][j], s[1][j], 0xee));
        V(vec) b = _mm512_add_ps(_mm512_shuffle_f32x4(s[2][j], s[3][j], 0x44), _mm512_shuffle_f32x4(s[2][j], s[3][j], 0xee));
        column[j] = _mm512_add_ps(_mm512_shuffle_f32x4(a, b, 0x88), _mm512_shuffle_f32x4(a, b, 0xdd));
    }
    V(vec) ab = _mm512_add_ps(_mm512_unpacklo_ps(column[0], column[1]), _mm512_unpackhi_ps(column[0], column[1]));
    V(vec) cd = _mm512_add_ps(_mm512_unpacklo_ps(column[2], column[3]), _mm512_unpackhi_ps(column[2], column[3]));
    V(vec) r = _mm512_add_ps(_mm512_shuffle_ps(ab, cd, 0x44), _mm512_shuffle_ps(ab, cd, 0xee));
    _mm_storeu_ps(p, _mm512_castps512_ps128(r));
    _mm_storeu_ps(p + stride, _mm512_extractf32x4_ps(r, 1));
    _mm_storeu_ps(p + 2 * stride, _mm512_extractf32x4_ps(r, 2));
    _mm_storeu_ps(p + 3 * stride, _mm512_extractf32x4_ps(r, 3));
}
#define STORES_SUMS16
SIMD_INLINE V(vec) V(load_f16)(const simd_f16 *p) {
    return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)(const void *)p));
}
SIMD_INLINE V(vec) V(load_bf16)(const simd_bf16 *p) {
    __m512i wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)(const void *)p));
    return _mm512_castsi512_ps(_mm512_slli_epi32(wide, 16));
}
SIMD_INLINE V(vec) V(load_i8)(const simd_i8 *p) {
    return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)(const void *)p)));
}
SIMD_INLINE void V(store_f16)(simd_f16 *p, V(vec) v) {
    _mm256_storeu_si256((__m256i *)(void *)p, _mm512_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}
SIMD_INLINE void V(store_i8)(simd_i8 *p, V(vec) v) {
    _mm_storeu_si128((__m128i *)(void *)p, _mm512_cvtepi32_epi8(_mm512_cvtps_epi32(v)));
}

/* Vectors of V that the accumulation keeps in registers for each of n rows, out of 32. */
#define ACC_VECS(n) 4
/* Rows of K that the scores of n query rows are computed from at a time: a sum for each pair. */
#define DOT_ROWS(n) 4

/* Keeps the compiler from loading v anew at each use. */
#if defined(__GNUC__)
#define IN_REGISTER(v) __asm__("" : "+v"(v))
#else
#define IN_REGISTER(v) ((void)0)
#endif

#include "simd_bodies.h"

#if defined(__clang__)
#pragma clang attribute pop
#endif
#endif
