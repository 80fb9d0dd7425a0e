/* The kernels in SSE2, which every x86-64 has. */
#define SIMD_ISA sse2
#include "simd.h"

#ifdef SIMD_HAS_SSE2

#define LANES 4

typedef __m128 V(vec);
typedef __m128i V(ivec);

SIMD_INLINE V(vec) V(zero)(void) { return _mm_setzero_ps(); }
SIMD_INLINE V(vec) V(set1)(float x) { return _mm_set1_ps(x); }
SIMD_INLINE V(vec) V(load)(const float *p) { return _mm_loadu_ps(p); }
SIMD_INLINE V(vec) V(load_part)(const float *p, ptrdiff_t n) {
    if (n == 1)
        return _mm_load_ss(p);
    __m128 low = _mm_castsi128_ps(_mm_loadl_epi64((const __m128i *)(const void *)p));
    return n == 2 ? low : _mm_movelh_ps(low, _mm_load_ss(p + 2));
}
SIMD_INLINE void V(store)(float *p, V(vec) v) { _mm_storeu_ps(p, v); }
SIMD_INLINE void V(store_part)(float *p, V(vec) v, ptrdiff_t n) {
    if (n == 1) {
        _mm_store_ss(p, v);
        return;
    }
    _mm_storel_epi64((__m128i *)(void *)p, _mm_castps_si128(v));
    if (n == 3)
        _mm_store_ss(p + 2, _mm_movehl_ps(v, v));
}
SIMD_INLINE V(vec) V(add)(V(vec) a, V(vec) b) { return _mm_add_ps(a, b); }
SIMD_INLINE V(vec) V(sub)(V(vec) a, V(vec) b) { return _mm_sub_ps(a, b); }
SIMD_INLINE V(vec) V(mul)(V(vec) a, V(vec) b) { return _mm_mul_ps(a, b); }
SIMD_INLINE V(vec) V(div)(V(vec) a, V(vec) b) { return _mm_div_ps(a, b); }
SIMD_INLINE V(vec) V(fma)(V(vec) a, V(vec) b, V(vec) c) { return _mm_add_ps(_mm_mul_ps(a, b), c); }
SIMD_INLINE V(vec) V(max)(V(vec) a, V(vec) b) { return _mm_max_ps(a, b); }
SIMD_INLINE V(vec) V(min)(V(vec) a, V(vec) b) { return _mm_min_ps(a, b); }
SIMD_INLINE V(vec) V(select_less)(V(vec) x, V(vec) y, V(vec) a, V(vec) b) {
    __m128 less = _mm_cmplt_ps(x, y);
    return _mm_or_ps(_mm_and_ps(less, a), _mm_andnot_ps(less, b));
}
SIMD_INLINE V(ivec) V(to_int)(V(vec) x) { return _mm_cvtps_epi32(x); }
SIMD_INLINE V(vec) V(to_float)(V(ivec) v) { return _mm_cvtepi32_ps(v); }
SIMD_INLINE V(vec) V(pow2)(V(ivec) v) {
    return _mm_castsi128_ps(_mm_slli_epi32(_mm_add_epi32(v, _mm_set1_epi32(127)), 23));
}
SIMD_INLINE float V(sum)(V(vec) v) {
    v = _mm_add_ps(v, _mm_movehl_ps(v, v));
    return _mm_cvtss_f32(_mm_add_ss(v, _mm_shuffle_ps(v, v, 1)));
}
SIMD_INLINE V(vec) V(swap)(V(vec) v, const int n) {
    return n == 1 ? _mm_shuffle_ps(v, v, 0xb1) : _mm_shuffle_ps(v, v, 0x4e);
}
SIMD_INLINE void V(store_sums4)(float *p, V(vec) a, V(vec) b, V(vec) c, V(vec) d) {
    __m128 ab = _mm_add_ps(_mm_unpacklo_ps(a, b), _mm_unpackhi_ps(a, b)); /* a02 b02 a13 b13 */
    __m128 cd = _mm_add_ps(_mm_unpacklo_ps(c, d), _mm_unpackhi_ps(c, d));
    _mm_storeu_ps(p, _mm_add_ps(_mm_movelh_ps(ab, cd), _mm_movehl_ps(cd, ab)));
}
SIMD_INLINE V(vec) V(load_f16)(const simd_f16 *p) { /* as simd_from_f16 */
    const __m128i bias = _mm_set1_epi32(112 << 23);
    __m128i bits = _mm_unpacklo_epi16(_mm_loadl_epi64((const __m128i *)(const void *)p), _mm_setzero_si128());
    __m128i size = _mm_and_si128(bits, _mm_set1_epi32(0x7fff));
    __m128i sign = _mm_slli_epi32(_mm_xor_si128(bits, size), 16);
    __m128i normal = _mm_add_epi32(_mm_slli_epi32(size, 13), bias);
    normal = _mm_add_epi32(normal, _mm_and_si128(_mm_cmpgt_epi32(size, _mm_set1_epi32(0x7bff)), bias));
    __m128i small = _mm_castps_si128(_mm_mul_ps(_mm_cvtepi32_ps(size), _mm_set1_ps(0x1p-24f)));
    __m128i is_small = _mm_cmplt_epi32(size, _mm_set1_epi32(0x400));
    size = _mm_or_si128(_mm_and_si128(is_small, small), _mm_andnot_si128(is_small, normal));
    return _mm_castsi128_ps(_mm_or_si128(size, sign));
}
SIMD_INLINE V(vec) V(load_bf16)(const simd_bf16 *p) {
    __m128i bits = _mm_loadl_epi64((const __m128i *)(const void *)p);
    return _mm_castsi128_ps(_mm_unpacklo_epi16(_mm_setzero_si128(), bits));
}
SIMD_INLINE V(vec) V(load_i8)(const simd_i8 *p) {
    int four;
    memcpy(&four, p, sizeof four);
    __m128i x = _mm_cvtsi32_si128(four);
    x = _mm_unpacklo_epi8(x, x);
    return _mm_cvtepi32_ps(_mm_srai_epi32(_mm_unpacklo_epi16(x, x), 24));
}
SIMD_INLINE void V(store_f16)(simd_f16 *p, V(vec) v) {
    float x[4];
    _mm_storeu_ps(x, v);
    for (int i = 0; i < 4; ++i)
        p[i] = simd_to_f16(x[i]);
}
SIMD_INLINE void V(store_i8)(simd_i8 *p, V(vec) v) {
    __m128i pairs = _mm_cvtps_epi32(v);
    pairs = _mm_packs_epi32(pairs, pairs);
    const int four = _mm_cvtsi128_si32(_mm_packs_epi16(pairs, pairs));
    memcpy(p, &four, sizeof four);
}

/* Vectors of V that the accumulation keeps in registers for each of n rows, out of 16. */
#define ACC_VECS(n) ((n) <= 2 ? 4 : 2)
/* Rows of K that the scores of n query rows are computed from at a time: a sum for each pair. */
#define DOT_ROWS(n) ((n) <= 2 ? 4 : 3)

/* Keeps the compiler from loading v anew at each use. */
#if defined(__GNUC__)
#define IN_REGISTER(v) __asm__("" : "+x"(v))
#else
#define IN_REGISTER(v) ((void)0)
#endif

#include "simd_bodies.h"

#endif
