/* Inner kernels for every instruction set, in one portable build.
 *
 * One vocabulary of vector operations is written once per instruction set (simd_<isa>.h); the bodies
 * (simd_math.h, attend_kernels.h) are written once in that vocabulary and compiled once per set. Which
 * table of kernels runs is chosen when the module is imported. Only these headers hold intrinsics.
 *
 *     simd_<isa>.h                the words below, for one instruction set
 *     simd_math.h                 exp, tanh                         } compiled for each
 *     attend_kernels.h            scores, softmax, accumulation     }
 *     simd.h                      puts them together, and chooses
 *
 * The vocabulary, where V(name) is name_<isa>:
 *
 *     vec, LANES                  LANES floats in a register
 *     ivec                        LANES 32-bit integers
 *     zero()  set1(x)
 *     load(p)  store(p, v)        no alignment asked
 *     load_part(p, n)             0 < n < LANES: the first n floats, zeros after; reads nothing beyond
 *     store_part(p, v, n)
 *     add sub mul div             lane by lane
 *     fma(a, b, c)                a * b + c, fused where the set has it
 *     max(a, b)  min(a, b)        b where either is NaN (NEON: NaN)
 *     select_less(x, y, a, b)     x < y ? a : b, so b where either is NaN
 *     to_int(x)  to_float(i)      to nearest, for |x| < 2**31
 *     pow2(i)                     2.0**i for i in [-126, 127]
 *     sum(v)                      of all lanes
 *     store_sums4(p, a, b, c, d)  the four sums, to p[0..3]
 */
#ifndef PAGEDKV_SIMD_H
#define PAGEDKV_SIMD_H

#include <stddef.h>
#include <string.h>

#if defined(__x86_64__) || defined(_M_X64)
#include <immintrin.h> /* before any target is pushed: its functions carry their own */
#elif defined(__aarch64__) && defined(__ARM_NEON)
#include <arm_neon.h>
#endif

#if defined(__GNUC__) || defined(__clang__)
#define SIMD_INLINE static inline __attribute__((always_inline))
#define SIMD_PREFETCH(p) __builtin_prefetch(p)
#elif defined(_MSC_VER)
#define SIMD_INLINE static __forceinline
#if defined(_M_X64)
#define SIMD_PREFETCH(p) _mm_prefetch((const char *)(p), _MM_HINT_T0)
#else
#define SIMD_PREFETCH(p) ((void)(p))
#endif
#else
#define SIMD_INLINE static inline
#define SIMD_PREFETCH(p) ((void)(p))
#endif

#if defined(__GNUC__) && !defined(__clang__)
#define SIMD_UNROLL _Pragma("GCC unroll 16")
#elif defined(__clang__)
#define SIMD_UNROLL _Pragma("clang loop unroll(full)")
#else
#define SIMD_UNROLL
#endif

#define SIMD_PASTE_(name, isa) name##_##isa
#define SIMD_PASTE(name, isa) SIMD_PASTE_(name, isa)
#define V(name) SIMD_PASTE(name, SIMD_ISA)

/* A cache line, in floats: what one prefetch brings. */
#define SIMD_LINE 16

/* Where prefetches go while a tile is worked on: through the rows of the next one, a run at a time.
 * A hint only: it may fall short of the rows or overshoot them. */
typedef struct {
    const float *const *rows;
    ptrdiff_t n_rows;
    ptrdiff_t width; /* floats of a row that will be read */
    ptrdiff_t row;   /* the next run starts here */
    ptrdiff_t column;
} simd_ahead;

/* The kernels of one instruction set. Rows of K and V are given by pointers, so that no kernel knows of
 * blocks. Scores of a tile lie position by position, s[t * s_stride + r], where r counts the query rows
 * of all heads, head by head: softmax works on all rows at once, with nothing to sum across lanes. */
typedef struct {
    const char *name;
    ptrdiff_t lanes;
    /* s[t, h * n_rows + r] = q[h * n_rows + r] . k_rows[t][h * head_dim ...]; q padded to q_stride with zeros. */
    void (*score_dots)(float *s, ptrdiff_t s_stride, const float *q, ptrdiff_t q_stride, const float *const *k_rows,
                       const float *const *ahead, ptrdiff_t ahead_dim, ptrdiff_t n, ptrdiff_t n_heads,
                       ptrdiff_t n_rows, ptrdiff_t head_dim);
    /* The same for one head and many rows: q from pack_panels. Writes whole panels. */
    void (*score_panels)(float *s, ptrdiff_t s_stride, const float *panels, const float *const *k_rows, ptrdiff_t n,
                         ptrdiff_t n_rows, ptrdiff_t head_dim);
    /* s = cap * tanh(s / cap) over n positions of `width` rows. */
    void (*cap_scores)(float *s, ptrdiff_t s_stride, ptrdiff_t n, ptrdiff_t width, float cap);
    /* s[t, r] -= slopes[r] * |places[r] - (first + t)| */
    void (*slope_scores)(float *s, ptrdiff_t s_stride, ptrdiff_t n, ptrdiff_t width, const float *slopes,
                         const float *places, float first);
    /* One step of the online softmax: most[r] and total[r] take in a tile; s becomes exp(s - most), fade[r] is
     * by how much what was accumulated before has to shrink. Returns whether any fade is not 1. */
    int (*softmax_tile)(float *s, ptrdiff_t s_stride, ptrdiff_t n, ptrdiff_t width, float *most, float *total,
                        float *fade);
    /* acc[h * n_rows + r] += sum over t of p[t, h * n_rows + r] * v_rows[t][v_offset + h * v_head_dim ...] */
    void (*accumulate_rows)(float *acc, ptrdiff_t acc_stride, const float *p, ptrdiff_t p_stride,
                            const float *const *v_rows, ptrdiff_t v_offset, simd_ahead *ahead, ptrdiff_t n,
                            ptrdiff_t n_heads, ptrdiff_t n_rows, ptrdiff_t v_head_dim);
    /* dst = factor * src, and dst += factor * src. */
    void (*scale_row)(float *dst, const float *src, float factor, ptrdiff_t n);
    void (*add_scaled_row)(float *dst, const float *src, float factor, ptrdiff_t n);
} simd_kernels;

/* --- every instruction set that this compiler can aim at, the plainest first ----------------------- */

#define SIMD_ISA plain
#include "simd_plain.h"
#include "simd_math.h"
#include "attend_kernels.h"
#include "simd_end.h"

#if defined(__SSE2__) || defined(_M_X64)
#define SIMD_HAS_SSE2 1
#define SIMD_ISA sse2
#include "simd_sse2.h"
#include "simd_math.h"
#include "attend_kernels.h"
#include "simd_end.h"
#endif

#if defined(__x86_64__) && defined(__GNUC__)
#define SIMD_HAS_AVX 1

#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,fma"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx2,fma")
#endif
#define SIMD_ISA avx2
#include "simd_avx2.h"
#include "simd_math.h"
#include "attend_kernels.h"
#include "simd_end.h"
#if defined(__clang__)
#pragma clang attribute pop
#pragma clang attribute push(__attribute__((target("avx512f"))), apply_to = function)
#else
#pragma GCC pop_options
#pragma GCC push_options
#pragma GCC target("avx512f")
#endif
#define SIMD_ISA avx512
#include "simd_avx512.h"
#include "simd_math.h"
#include "attend_kernels.h"
#include "simd_end.h"
#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif
#endif

#if defined(__aarch64__) && defined(__ARM_NEON)
#define SIMD_HAS_NEON 1
#define SIMD_ISA neon
#include "simd_neon.h"
#include "simd_math.h"
#include "attend_kernels.h"
#include "simd_end.h"
#endif

/* The i-th set that this machine can run, the best first; NULL past the last. */
static const simd_kernels *simd_supported(int i) {
    const simd_kernels *sets[5];
    int n = 0;
#ifdef SIMD_HAS_AVX
    if (__builtin_cpu_supports("avx512f"))
        sets[n++] = &kernels_avx512;
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"))
        sets[n++] = &kernels_avx2;
#endif
#ifdef SIMD_HAS_SSE2
    sets[n++] = &kernels_sse2;
#endif
#ifdef SIMD_HAS_NEON
    sets[n++] = &kernels_neon;
#endif
    sets[n++] = &kernels_plain;
    return i >= 0 && i < n ? sets[i] : NULL;
}

#endif
