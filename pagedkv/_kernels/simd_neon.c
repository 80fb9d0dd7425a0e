/* The kernels in AArch64 NEON. */
#define SIMD_ISA neon
#include "simd.h"

#ifdef SIMD_HAS_NEON

#define LANES 4

typedef float32x4_t V(vec);
typedef int32x4_t V(ivec);

SIMD_INLINE V(vec) V(zero)(void) { return vdupq_n_f32(0.0f); }
SIMD_INLINE V(vec) V(set1)(float x) { return vdupq_n_f32(x); }
SIMD_INLINE V(vec) V(load)(const float *p) { return vld1q_f32(p); }
SIMD_INLINE V(vec) V(load_part)(const float *p, ptrdiff_t n) {
    float32x4_t v = vld1q_lane_f32(p, vdupq_n_f32(0.0f), 0);
    if (n > 1)
        v = vld1q_lane_f32(p + 1, v, 1);
    return n > 2 ? vld1q_lane_f32(p + 2, v, 2) : v;
}
SIMD_INLINE void V(store)(float *p, V(vec) v) { vst1q_f32(p, v); }
SIMD_INLINE void V(store_part)(float *p, V(vec) v, ptrdiff_t n) {
    vst1q_lane_f32(p, v, 0);
    if (n > 1)
        vst1q_lane_f32(p + 1, v, 1);
    if (n > 2)
        vst1q_lane_f32(p + 2, v, 2);
}
SIMD_INLINE V(vec) V(add)(V(vec) a, V(vec) b) { return vaddq_f32(a, b); }
SIMD_INLINE V(vec) V(sub)(V(vec) a, V(vec) b) { return vsubq_f32(a, b); }
SIMD_INLINE V(vec) V(mul)(V(vec) a, V(vec) b) { return vmulq_f32(a, b); }
SIMD_INLINE V(vec) V(div)(V(vec) a, V(vec) b) { return vdivq_f32(a, b); }
SIMD_INLINE V(vec) V(fma)(V(vec) a, V(vec) b, V(vec) c) { return vfmaq_f32(c, a, b); }
SIMD_INLINE V(vec) V(max)(V(vec) a, V(vec) b) { return vmaxq_f32(a, b); }
SIMD_INLINE V(vec) V(min)(V(vec) a, V(vec) b) { return vminq_f32(a, b); }
SIMD_INLINE V(vec) V(select_less)(V(vec) x, V(vec) y, V(vec) a, V(vec) b) {
    return vbslq_f32(vcltq_f32(x, y), a, b);
}
SIMD_INLINE V(ivec) V(to_int)(V(vec) x) { return vcvtnq_s32_f32(x); }
SIMD_INLINE V(vec) V(to_float)(V(ivec) v) { return vcvtq_f32_s32(v); }
SIMD_INLINE V(vec) V(pow2)(V(ivec) v) {
    return vreinterpretq_f32_s32(vshlq_n_s32(vaddq_s32(v, vdupq_n_s32(127)), 23));
}
SIMD_INLINE float V(sum)(V(vec) v) { return vaddvq_f32(v); }
SIMD_INLINE V(vec) V(swap)(V(vec) v, const int n) { return n == 1 ? vrev64q_f32(v) : vextq_f32(v, v, 2); }
SIMD_INLINE void V(store_sums4)(float *p, V(vec) a, V(vec) b, V(vec) c, V(vec) d) {
    vst1q_f32(p, vpaddq_f32(vpaddq_f32(a, b), vpaddq_f32(c, d)));
}
SIMD_INLINE V(vec) V(load_f16)(const simd_f16 *p) { return vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(p))); }
SIMD_INLINE V(vec) V(load_bf16)(const simd_bf16 *p) {
    return vreinterpretq_f32_u32(vshll_n_u16(vld1_u16(p), 16));
}
SIMD_INLINE V(vec) V(load_i8)(const simd_i8 *p) {
    int32_t four;
    memcpy(&four, p, sizeof four);
    int16x8_t wide = vmovl_s8(vreinterpret_s8_s32(vdup_n_s32(four)));
    return vcvtq_f32_s32(vmovl_s16(vget_low_s16(wide)));
}
SIMD_INLINE void V(store_f16)(simd_f16 *p, V(vec) v) { vst1_u16(p, vreinterpret_u16_f16(vcvt_f16_f32(v))); }
SIMD_INLINE void V(store_i8)(simd_i8 *p, V(vec) v) {
    int16x4_t pairs = vmovn_s32(vcvtnq_s32_f32(v));
    const int32_t four = vget_lane_s32(vreinterpret_s32_s8(vmovn_s16(vcombine_s16(pairs, pairs))), 0);
    memcpy(p, &four, sizeof four);
}

/* Vectors of V that the accumulation keeps in registers for each of n rows, out of 32. */
#define ACC_VECS(n) 4
/* Rows of K that the scores of n query rows are computed from at a time: a sum for each pair. */
#define DOT_ROWS(n) 4

/* Keeps the compiler from loading v anew at each use. */
#if defined(__GNUC__)
#define IN_REGISTER(v) __asm__("" : "+w"(v))
#else
#define IN_REGISTER(v) ((void)0)
#endif

#include "simd_bodies.h"

#endif
