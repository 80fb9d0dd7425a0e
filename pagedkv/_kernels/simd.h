/* Inner kernels for every instruction set, in one portable build.
 *
 * One vocabulary of vector operations is written once per instruction set; the bodies are written once in
 * that vocabulary and compiled once per set, each set in a file of its own, so that they compile side by side. Which
 * table of kernels runs is chosen when the module is imported.
 *
 *     simd.h                      what a table of kernels is
 *     simd_<isa>.c                the words below, for one instruction set, and in them (simd_bodies.h)
 *         simd_math.h             exp, tanh
 *         simd_dtypes.h           reading and writing each dtype
 *         attend_rows.h           scores and accumulation, for each dtype
 *         attend_tile.h           panels, softmax, and the set's table: all that other files see of it
 *     simd_sets.h                 asks the machine which of them it can run
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
 *     swap(v, n)                  lane i holds what lane i ^ n held, for n in 1, 2, ... LANES / 2: a constant
 *     store_sums4(p, a, b, c, d)  the four sums, to p[0..3]
 *     load_f16(p) load_bf16(p) load_i8(p)     LANES values of these dtypes, as floats
 *     store_f16(p, v)             to nearest, ties to even
 *     store_i8(p, v)              the same, for whole parts in [-127, 127]
 */
#ifndef PAGEDKV_SIMD_H
#define PAGEDKV_SIMD_H

#include <float.h>
#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#if defined(__x86_64__) || defined(_M_X64)
#include <immintrin.h> /* before any target is set: its functions carry their own */
#elif defined(__aarch64__) && defined(__ARM_NEON)
#include <arm_neon.h>
#endif

/* What this compiler can aim at, beside plain C. A set that it cannot aim at is an empty file. */
#if defined(__x86_64__) || defined(_M_X64)
#define SIMD_HAS_SSE2 1
#endif
#if defined(__x86_64__) && defined(__GNUC__)
#define SIMD_HAS_AVX 1 /* AVX2 and AVX-512: named in the file, whatever the flags of the build */
#endif
#if defined(__aarch64__) && defined(__ARM_NEON)
#define SIMD_HAS_NEON 1
#endif

/* A build with sanitizers (setup.py) has one copy of each kernel, and loops in it: the same loads and stores are checked
 * in far less code, which a compiler gets done in seconds instead of half an hour. */
#if defined(PAGEDKV_SANITIZE)
#define SIMD_INLINE static inline
#elif defined(__GNUC__) || defined(__clang__)
#define SIMD_INLINE static inline __attribute__((always_inline))
#elif defined(_MSC_VER)
#define SIMD_INLINE static __forceinline
#else
#define SIMD_INLINE static inline
#endif

/* For what is long, and not to be had in every loop anew. */
#if defined(__GNUC__) || defined(__clang__)
#define SIMD_OUTLINE static __attribute__((noinline))
#define SIMD_PREFETCH(p) __builtin_prefetch(p)
#elif defined(_MSC_VER) && defined(_M_X64)
#define SIMD_OUTLINE static __declspec(noinline)
#define SIMD_PREFETCH(p) _mm_prefetch((const char *)(p), _MM_HINT_T0)
#else
#define SIMD_OUTLINE static
#define SIMD_PREFETCH(p) ((void)(p))
#endif

#if defined(PAGEDKV_SANITIZE)
#define SIMD_UNROLL
#elif defined(__GNUC__) && !defined(__clang__)
#define SIMD_UNROLL _Pragma("GCC unroll 16")
#elif defined(__clang__)
#define SIMD_UNROLL _Pragma("clang loop unroll(full)")
#else
#define SIMD_UNROLL
#endif

#define SIMD_PASTE_(name, isa) name##_##isa
#define SIMD_PASTE(name, isa) SIMD_PASTE_(name, isa)
#define V(name) SIMD_PASTE(name, SIMD_ISA)

#define SIMD_LINE_BYTES 64 /* what one prefetch brings */
#define SIMD_GROUP 32      /* values of a head that share a scale, in the dtypes that have scales; a head's last may be fewer */
#define SIMD_TURN_MOST 1024 /* values that are turned together, at most: formats.py */
#define SIMD_PAD 32        /* rows of scores, of q and of acc start on multiples of so many floats: two vectors of any set */

/* What a value of K or V is stored as: its name in the kernels, its C type, and its name in formats.py. */
#define SIMD_EACH_DTYPE(X)                                                                                    \
    X(f32, float, "float32")                                                                                  \
    X(f16, uint16_t, "float16")                                                                               \
    X(bf16, uint16_t, "bfloat16")                                                                             \
    X(i8, int8_t, "int8")

#define SIMD_NUMBER(name, type, text) SIMD_DTYPE_##name,
enum { SIMD_EACH_DTYPE(SIMD_NUMBER) SIMD_DTYPES };
#undef SIMD_NUMBER
#define SIMD_TYPE(name, type, text) typedef type simd_##name;
SIMD_EACH_DTYPE(SIMD_TYPE)
#undef SIMD_TYPE

/* --- binary16, one value at a time: for the sets that have no instruction for it -------------------- */

SIMD_INLINE float simd_from_bits(uint32_t bits) {
    float x;
    memcpy(&x, &bits, sizeof x);
    return x;
}
SIMD_INLINE uint32_t simd_to_bits(float x) {
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    return bits;
}

/* A subnormal is a count of 2**-24, made without one of float's own: those are slow, and some programs have them
 * flushed to zero. */
SIMD_INLINE float simd_from_f16(simd_f16 half) {
    const uint32_t size = half & 0x7fffu, sign = (uint32_t)(half & 0x8000u) << 16;
    if (size < 0x400u)
        return simd_from_bits(sign | simd_to_bits((float)size * (1.0f / 16777216.0f)));
    return simd_from_bits(sign | ((size << 13) + (size < 0x7c00u ? 112u << 23 : 224u << 23)));
}

/* To nearest, ties to even. */
SIMD_INLINE simd_f16 simd_to_f16(float x) {
    const uint32_t bits = simd_to_bits(x), size = bits & 0x7fffffffu, sign = (bits >> 16) & 0x8000u;
    uint32_t half;
    if (size > 0x7f800000u) {
        half = 0x7e00u | ((size >> 13) & 0x3ffu); /* NaN */
    } else if (size >= 0x47800000u) {
        half = 0x7c00u; /* 65536 and more */
    } else if (size >= 0x38800000u) {
        const uint32_t rebased = size - (112u << 23);
        half = (rebased + 0xfffu + ((rebased >> 13) & 1u)) >> 13; /* may carry into infinity, as it should */
    } else {
        half = simd_to_bits(simd_from_bits(size) + 0.5f) - 0x3f000000u; /* a unit of 0.5's last place is 2**-24 */
    }
    return (simd_f16)(sign | half);
}

/* Sanitizers are blind to loads and stores under a mask. These show them the ends of what is touched. */
SIMD_INLINE void simd_see_load(const float *p, ptrdiff_t n) {
#if defined(PAGEDKV_SANITIZE)
    (void)*(const volatile float *)p;
    (void)*(const volatile float *)(p + n - 1);
#else
    (void)p, (void)n;
#endif
}
SIMD_INLINE void simd_see_store(float *p, ptrdiff_t n) {
#if defined(PAGEDKV_SANITIZE)
    *(volatile float *)p = 0.0f;
    *(volatile float *)(p + n - 1) = 0.0f;
#else
    (void)p, (void)n;
#endif
}

/* --- what a table of kernels is --------------------------------------------------------------------- */

/* Where prefetches go while a tile is worked on: through the rows of the next one, a run at a time.
 * A hint only: it may fall short of the rows or overshoot them. */
typedef struct {
    const char *const *rows;
    ptrdiff_t n_rows;
    ptrdiff_t width;      /* bytes of a row that will be read in one go */
    ptrdiff_t n_heads;    /* 1, or where each head's rows lie by themselves, so many times all rows, */
    ptrdiff_t head_bytes; /* each so far behind the last */
    ptrdiff_t head;       /* the next run starts here */
    ptrdiff_t row;
    ptrdiff_t column;
} simd_ahead;

/* Where the next n lines to prefetch begin. Past the end: lines that are in the cache already. */
SIMD_INLINE const char *simd_next_run(simd_ahead *ahead, ptrdiff_t n, const void *resident) {
    if (ahead->row >= ahead->n_rows) {
        if (ahead->n_rows == 0 || ahead->head + 1 >= ahead->n_heads)
            return (const char *)resident;
        ahead->head += 1;
        ahead->row = ahead->column = 0;
    }
    const char *run = ahead->rows[ahead->row] + ahead->head * ahead->head_bytes + ahead->column;
    ahead->column += n * SIMD_LINE_BYTES;
    while (ahead->column >= ahead->width) { /* rows of a block adjoin, so a run may span several */
        ahead->column -= ahead->width;
        ahead->row += 1;
    }
    return run;
}

/* The scales of a tile's rows, as floats: the group g of head h in row t has scales[t * stride + h * per_head + g].
 * Without meaning for a dtype that has none. */
typedef struct {
    const float *scales;
    ptrdiff_t stride;
    ptrdiff_t per_head;
} simd_scales;

/* The kernels that read rows as they are stored. Rows of K and V are given by pointers, so that no kernel knows of
 * blocks; what a pointer points to is the first value of a head. */
typedef struct {
    const char *name;
    /* s[t, h * n_rows + r] = q[h * n_rows + r] . k_rows[t][h * k_stride ...]; q padded to q_stride with zeros. by_head:
     * neighbours in memory are rows of one head, not heads of one row. */
    void (*score_dots)(float *s, ptrdiff_t s_stride, const float *q, ptrdiff_t q_stride, const char *const *k_rows,
                       ptrdiff_t k_stride, const simd_scales *scales, int by_head, const char *const *ahead,
                       ptrdiff_t ahead_stride, ptrdiff_t n, ptrdiff_t n_heads, ptrdiff_t n_rows, ptrdiff_t head_dim);
    /* acc[h * n_rows + r] += sum over t of p[t, h * n_rows + r] * v_rows[t][v_offset + h * v_stride ...] */
    void (*accumulate_rows)(float *acc, ptrdiff_t acc_stride, const float *p, ptrdiff_t p_stride,
                            const char *const *v_rows, ptrdiff_t v_offset, ptrdiff_t v_stride, const simd_scales *scales,
                            simd_ahead *ahead, ptrdiff_t n, ptrdiff_t n_heads, ptrdiff_t n_rows, ptrdiff_t v_head_dim);
    /* n values to floats, times their groups' scales if they have any; and back, where scales are found and written. */
    void (*widen)(float *dst, const void *src, const simd_f16 *scales, ptrdiff_t n);
    void (*narrow)(void *dst, simd_f16 *scales, const float *src, ptrdiff_t n);
} simd_dtype;

/* The kernels of one instruction set. Scores of a tile lie position by position, s[t * s_stride + r], where r
 * counts the query rows of all heads, head by head: softmax works on all rows at once, with nothing to sum
 * across lanes. */
typedef struct {
    const char *name;
    ptrdiff_t lanes;
    simd_dtype dtypes[SIMD_DTYPES];
    /* Scores of one head and many rows, lanes along the rows. q in panels, [head_dim][2 * lanes] each. Writes whole panels. */
    void (*score_panels)(float *s, ptrdiff_t s_stride, const float *panels, const float *k, ptrdiff_t k_stride,
                         ptrdiff_t n, ptrdiff_t n_rows, ptrdiff_t head_dim);
    /* dst[t * stride + i] = the i-th of `width` binary16 at rows[t] + offset. */
    void (*load_scales)(float *dst, ptrdiff_t stride, const char *const *rows, ptrdiff_t offset, ptrdiff_t n, ptrdiff_t width);
    /* dst = n values, `width` (a power of two, from 16 on) at a time times the orthonormal Hadamard matrix, which undoes
     * itself; dst may be src. The same bits from every set: see simd_turn.h. */
    void (*turn)(float *dst, const float *src, ptrdiff_t n, ptrdiff_t width);
    /* s = cap * tanh(s / cap) over n positions of `width` rows. */
    void (*cap_scores)(float *s, ptrdiff_t s_stride, ptrdiff_t n, ptrdiff_t width, float cap);
    /* s[t, r] -= slopes[r] * |places[r] - (first + t)| */
    void (*slope_scores)(float *s, ptrdiff_t s_stride, ptrdiff_t n, ptrdiff_t width, const float *slopes,
                         const float *places, float first);
    /* One step of the online softmax: row_max[r] and row_sum[r] take in a tile; s becomes exp(s - row_max), and
     * rescale[r] is what was accumulated before has to be multiplied by. Returns whether any of them is not 1. */
    int (*softmax_tile)(float *s, ptrdiff_t s_stride, ptrdiff_t n, ptrdiff_t width, float *row_max, float *row_sum,
                        float *rescale);
    /* dst = factor * src, and dst += factor * src. */
    void (*scale_row)(float *dst, const float *src, float factor, ptrdiff_t n);
    void (*add_scaled_row)(float *dst, const float *src, float factor, ptrdiff_t n);
} simd_kernels;

/* Each from its own file. What is compiled for a set is static but for this table: nothing of it can stand in for code
 * that runs on every machine. */
extern const simd_kernels simd_kernels_plain, simd_kernels_sse2, simd_kernels_avx2, simd_kernels_avx512, simd_kernels_neon;

#endif
