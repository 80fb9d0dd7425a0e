/* The kernels in plain C: for compilers and machines that the other sets do not know. */
#define SIMD_ISA plain
#include "simd.h"

#define LANES 4

/* The compiler's own vectors, where it has any: vector instructions on whatever machine, and less to compile. */
#if defined(__GNUC__)
typedef float V(vec) __attribute__((vector_size(16)));
typedef int V(ivec) __attribute__((vector_size(16)));
#define AT(v, i) (v)[i]
#define LANEWISE(name, operator)                                                                              \
    SIMD_INLINE V(vec) V(name)(V(vec) a, V(vec) b) { return a operator b; }
#else
typedef struct {
    float x[4];
} V(vec);
typedef struct {
    int x[4];
} V(ivec);
#define AT(v, i) (v).x[i]
#define LANEWISE(name, operator)                                                                              \
    SIMD_INLINE V(vec) V(name)(V(vec) a, V(vec) b) {                                                          \
        for (int i = 0; i < 4; ++i)                                                                           \
            AT(a, i) = AT(a, i) operator AT(b, i);                                                            \
        return a;                                                                                             \
    }
#endif
LANEWISE(add, +)
LANEWISE(sub, -)
LANEWISE(mul, *)
LANEWISE(div, /)
#undef LANEWISE

SIMD_INLINE V(vec) V(set1)(float x) {
    V(vec) r = {x, x, x, x};
    return r;
}
SIMD_INLINE V(vec) V(zero)(void) { return V(set1)(0.0f); }
SIMD_INLINE V(vec) V(load)(const float *p) {
    V(vec) r;
    memcpy(&r, p, sizeof r);
    return r;
}
SIMD_INLINE V(vec) V(load_part)(const float *p, ptrdiff_t n) {
    V(vec) r = {p[0], n > 1 ? p[1] : 0.0f, n > 2 ? p[2] : 0.0f, 0.0f};
    return r;
}
SIMD_INLINE void V(store)(float *p, V(vec) v) { memcpy(p, &v, sizeof v); }
SIMD_INLINE void V(store_part)(float *p, V(vec) v, ptrdiff_t n) { memcpy(p, &v, (size_t)n * sizeof *p); }
SIMD_INLINE V(vec) V(fma)(V(vec) a, V(vec) b, V(vec) c) { return V(add)(V(mul)(a, b), c); }
SIMD_INLINE V(vec) V(select_less)(V(vec) x, V(vec) y, V(vec) a, V(vec) b) {
    V(vec) r;
    for (int i = 0; i < 4; ++i)
        AT(r, i) = AT(x, i) < AT(y, i) ? AT(a, i) : AT(b, i);
    return r;
}
SIMD_INLINE V(vec) V(max)(V(vec) a, V(vec) b) { return V(select_less)(b, a, a, b); }
SIMD_INLINE V(vec) V(min)(V(vec) a, V(vec) b) { return V(select_less)(a, b, a, b); }
SIMD_INLINE V(ivec) V(to_int)(V(vec) x) {
    V(ivec) r;
    for (int i = 0; i < 4; ++i) /* a conversion that does not fit is undefined in C */
        AT(r, i) = AT(x, i) > -1e6f && AT(x, i) < 1e6f ? (int)lrintf(AT(x, i)) : 0;
    return r;
}
SIMD_INLINE V(vec) V(to_float)(V(ivec) v) {
    V(vec) r;
    for (int i = 0; i < 4; ++i)
        AT(r, i) = (float)AT(v, i);
    return r;
}
SIMD_INLINE V(vec) V(pow2)(V(ivec) v) {
    V(vec) r;
    for (int i = 0; i < 4; ++i)
        AT(r, i) = simd_from_bits(((uint32_t)AT(v, i) + 127u) << 23);
    return r;
}
SIMD_INLINE float V(sum)(V(vec) v) { return (AT(v, 0) + AT(v, 2)) + (AT(v, 1) + AT(v, 3)); }
SIMD_INLINE V(vec) V(swap)(V(vec) v, const int n) {
    V(vec) r = {AT(v, n), AT(v, 1 ^ n), AT(v, 2 ^ n), AT(v, 3 ^ n)};
    return r;
}
SIMD_INLINE void V(store_sums4)(float *p, V(vec) a, V(vec) b, V(vec) c, V(vec) d) {
    p[0] = V(sum)(a);
    p[1] = V(sum)(b);
    p[2] = V(sum)(c);
    p[3] = V(sum)(d);
}
SIMD_OUTLINE V(vec) V(load_f16)(const simd_f16 *p) {
    V(vec) r;
    for (int i = 0; i < 4; ++i)
        AT(r, i) = simd_from_f16(p[i]);
    return r;
}
SIMD_INLINE V(vec) V(load_bf16)(const simd_bf16 *p) {
    V(vec) r;
    for (int i = 0; i < 4; ++i)
        AT(r, i) = simd_from_bits((uint32_t)p[i] << 16);
    return r;
}
SIMD_INLINE V(vec) V(load_i8)(const simd_i8 *p) {
    V(vec) r = {p[0], p[1], p[2], p[3]};
    return r;
}
SIMD_INLINE void V(store_f16)(simd_f16 *p, V(vec) v) {
    for (int i = 0; i < 4; ++i)
        p[i] = simd_to_f16(AT(v, i));
}
SIMD_INLINE void V(store_i8)(simd_i8 *p, V(vec) v) {
    const V(ivec) whole = V(to_int)(v);
    for (int i = 0; i < 4; ++i)
        p[i] = (simd_i8)AT(whole, i);
}

/* Vectors of V that the accumulation keeps in registers for each of n rows. */
#define ACC_VECS(n) ((n) <= 2 ? 4 : 2)
/* Rows of K that the scores of n query rows are computed from at a time: a sum for each pair. */
#define DOT_ROWS(n) ((n) <= 2 ? 4 : 3)

#define IN_REGISTER(v) ((void)0)

#include "simd_bodies.h"
