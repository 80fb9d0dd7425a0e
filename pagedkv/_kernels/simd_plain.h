/* The vocabulary in plain C: for compilers and machines that the others do not know. */

#define LANES 4

typedef struct {
    float x[4];
} V(vec);
typedef struct {
    int x[4];
} V(ivec);

#define PLAIN_LANEWISE(name, expression)                                                                      \
    SIMD_INLINE V(vec) V(name)(V(vec) a, V(vec) b) {                                                          \
        V(vec) r;                                                                                             \
        for (int i = 0; i < 4; ++i)                                                                           \
            r.x[i] = expression;                                                                              \
        return r;                                                                                             \
    }
PLAIN_LANEWISE(add, a.x[i] + b.x[i])
PLAIN_LANEWISE(sub, a.x[i] - b.x[i])
PLAIN_LANEWISE(mul, a.x[i] * b.x[i])
PLAIN_LANEWISE(div, a.x[i] / b.x[i])
PLAIN_LANEWISE(max, a.x[i] > b.x[i] ? a.x[i] : b.x[i])
PLAIN_LANEWISE(min, a.x[i] < b.x[i] ? a.x[i] : b.x[i])
#undef PLAIN_LANEWISE

SIMD_INLINE V(vec) V(set1)(float x) {
    V(vec) r = {{x, x, x, x}};
    return r;
}
SIMD_INLINE V(vec) V(zero)(void) { return V(set1)(0.0f); }
SIMD_INLINE V(vec) V(load)(const float *p) {
    V(vec) r = {{p[0], p[1], p[2], p[3]}};
    return r;
}
SIMD_INLINE V(vec) V(load_part)(const float *p, ptrdiff_t n) {
    V(vec) r = {{p[0], n > 1 ? p[1] : 0.0f, n > 2 ? p[2] : 0.0f, 0.0f}};
    return r;
}
SIMD_INLINE void V(store)(float *p, V(vec) v) {
    for (int i = 0; i < 4; ++i)
        p[i] = v.x[i];
}
SIMD_INLINE void V(store_part)(float *p, V(vec) v, ptrdiff_t n) {
    for (ptrdiff_t i = 0; i < n; ++i)
        p[i] = v.x[i];
}
SIMD_INLINE V(vec) V(fma)(V(vec) a, V(vec) b, V(vec) c) { return V(add)(V(mul)(a, b), c); }
SIMD_INLINE V(vec) V(select_less)(V(vec) x, V(vec) y, V(vec) a, V(vec) b) {
    V(vec) r;
    for (int i = 0; i < 4; ++i)
        r.x[i] = x.x[i] < y.x[i] ? a.x[i] : b.x[i];
    return r;
}
SIMD_INLINE V(ivec) V(to_int)(V(vec) x) {
    V(ivec) r;
    for (int i = 0; i < 4; ++i) /* a conversion that does not fit is undefined in C */
        r.x[i] = x.x[i] > -1e6f && x.x[i] < 1e6f ? (int)lrintf(x.x[i]) : 0;
    return r;
}
SIMD_INLINE V(vec) V(to_float)(V(ivec) v) {
    V(vec) r;
    for (int i = 0; i < 4; ++i)
        r.x[i] = (float)v.x[i];
    return r;
}
SIMD_INLINE V(vec) V(pow2)(V(ivec) v) {
    V(vec) r;
    for (int i = 0; i < 4; ++i) {
        unsigned bits = ((unsigned)v.x[i] + 127u) << 23;
        memcpy(&r.x[i], &bits, sizeof bits);
    }
    return r;
}
SIMD_INLINE float V(sum)(V(vec) v) { return (v.x[0] + v.x[2]) + (v.x[1] + v.x[3]); }
SIMD_INLINE void V(store_sums4)(float *p, V(vec) a, V(vec) b, V(vec) c, V(vec) d) {
    p[0] = V(sum)(a);
    p[1] = V(sum)(b);
    p[2] = V(sum)(c);
    p[3] = V(sum)(d);
}
SIMD_INLINE V(vec) V(load_f16)(const simd_f16 *p) {
    V(vec) r;
    for (int i = 0; i < 4; ++i)
        r.x[i] = simd_from_f16(p[i]);
    return r;
}
SIMD_INLINE V(vec) V(load_bf16)(const simd_bf16 *p) {
    V(vec) r;
    for (int i = 0; i < 4; ++i)
        r.x[i] = simd_from_bits((uint32_t)p[i] << 16);
    return r;
}
SIMD_INLINE V(vec) V(load_i8)(const simd_i8 *p) {
    V(vec) r = {{p[0], p[1], p[2], p[3]}};
    return r;
}
SIMD_INLINE void V(store_f16)(simd_f16 *p, V(vec) v) {
    for (int i = 0; i < 4; ++i)
        p[i] = simd_to_f16(v.x[i]);
}

/* Vectors of V that the accumulation keeps in registers for each of n rows. */
#define ACC_VECS(n) ((n) <= 2 ? 4 : 2)
/* Rows of K that the scores of n query rows are computed from at a time: a sum for each pair. */
#define DOT_ROWS(n) ((n) <= 2 ? 4 : 3)

#define IN_REGISTER(v) ((void)0)
