/* The kernels in AVX2, FMA and F16C. */
#define SIMD_ISA avx2
#include "simd.h"

#ifdef SIMD_HAS_AVX
#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,fma,f16c"))), apply_to = function)
#else
#pragma GCC target("avx2,fma,f16c")
#endif

#define LANES 8

typedef __m256 V(vec);
typedef __m256i V(ivec);

SIMD_INLINE V(vec) V(zero)(void) { return _mm256_setzero_ps(); }
SIMD_INLINE V(vec) V(set1)(float x) { return _mm256_set1_ps(x); }
SIMD_INLINE V(vec) V(load)(const float *p) { return _mm256_loadu_ps(p); }
SIMD_INLINE __m256i V(first)(ptrdiff_t n) {
    return _mm256_cmpgt_epi32(_mm256_set1_epi32((int)n), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
}
SIMD_INLINE V(vec) V(load_part)(const float *p, ptrdiff_t n) {
    simd_see_load(p, n);
    return _mm256_maskload_ps(p, V(first)(n));
}
SIMD_INLINE void V(store)(float *p, V(vec) v) { _mm256_storeu_ps(p, v); }
SIMD_INLINE void V(store_part)(float *p, V(vec) v, ptrdiff_t n) {
    simd_see_store(p, n);
    _mm256_maskstore_ps(p, V(first)(n), v);
}
SIMD_INLINE V(vec) V(add)(V(vec) a, V(vec) b) { return _mm256_add_ps(a, b); }
SIMD_INLINE V(vec) V(sub)(V(vec) a, V(vec) b) { return _mm256_sub_ps(a, b); }
SIMD_INLINE V(vec) V(mul)(V(vec) a, V(vec) b) { return _mm256_mul_ps(a, b); }
SIMD_INLINE V(vec) V(div)(V(vec) a, V(vec) b) { return _mm256_div_ps(a, b); }
SIMD_INLINE V(vec) V(fma)(V(vec) a, V(vec) b, V(vec) c) { return _mm256_fmadd_ps(a, b, c); }
SIMD_INLINE V(vec) V(max)(V(vec) a, V(vec) b) { return _mm256_max_ps(a, b); }
SIMD_INLINE V(vec) V(min)(V(vec) a, V(vec) b) { return _mm256_min_ps(a, b); }
SIMD_INLINE V(vec) V(select_less)(V(vec) x, V(vec) y, V(vec) a, V(vec) b) {
    return _mm256_blendv_ps(b, a, _mm256_cmp_ps(x, y, _CMP_LT_OQ));
}
SIMD_INLINE V(ivec) V(to_int)(V(vec) x) { return _mm256_cvtps_epi32(x); }
SIMD_INLINE V(vec) V(to_float)(V(ivec) v) { return _mm256_cvtepi32_ps(v); }
SIMD_INLINE V(vec) V(pow2)(V(ivec) v) {
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(v, _mm256_set1_epi32(127)), 23));
}
SIMD_INLINE V(vec) V(swap)(V(vec) v, const int n) {
    return n == 1 ? _mm256_permute_ps(v, 0xb1) : n == 2 ? _mm256_permute_ps(v, 0x4e) : _mm256_permute2f128_ps(v, v, 1);
}
SIMD_INLINE __m128 V(fold)(V(vec) v) {
    return _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
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
SIMD_INLINE V(vec) V(load_f16)(const simd_f16 *p) {
    return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(const void *)p));
}
SIMD_INLINE V(vec) V(load_bf16)(const simd_bf16 *p) {
    __m256i wide = _mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)(const void *)p));
    return _mm256_castsi256_ps(_mm256_slli_epi32(wide, 16));
}
SIMD_INLINE V(vec) V(load_i8)(const simd_i8 *p) {
    return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)(const void *)p)));
}
SIMD_INLINE void V(store_f16)(simd_f16 *p, V(vec) v) {
    _mm_storeu_si128((__m128i *)(void *)p, _mm256_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}
SIMD_INLINE void V(store_i8)(simd_i8 *p, V(vec) v) {
    __m256i whole = _mm256_cvtps_epi32(v);
    __m128i pairs = _mm_packs_epi32(_mm256_castsi256_si128(whole), _mm256_extracti128_si256(whole, 1));
    _mm_storel_epi64((__m128i *)(void *)p, _mm_packs_epi16(pairs, pairs));
}

/* Vectors of V that the accumulation keeps in registers for each of n rows, out of 16. */
#define ACC_VECS(n) ((n) <= 2 ? 4 : (n) <= 4 ? 3 : 2)
/* Rows of K that the scores of n query rows are computed from at a time: a sum for each pair. */
#define DOT_ROWS(n) ((n) <= 2 ? 4 : 3)

/* Keeps the compiler from loading v anew at each use. */
#if defined(__GNUC__)
#define IN_REGISTER(v) __asm__("" : "+x"(v))
#else
#define IN_REGISTER(v) ((void)0)
#endif

#include "simd_bodies.h"

#if defined(__clang__)
#pragma clang attribute pop
#endif
#endif
