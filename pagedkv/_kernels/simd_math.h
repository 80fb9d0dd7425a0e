/* exp and tanh of a vector, in the vocabulary of simd.h. No guard: included once per instruction set.
 *
 * The polynomials are minimax fits of this project (Remez exchange, weighted for relative error). */

/* e**x for x <= 88; 0 below -87.33, where the result would be subnormal; NaN for NaN.
 * Relative error below 1.5e-7 (tests compare every set against float64). x = n * ln 2 + r with |r| <= ln 2 / 2,
 * e**r = 1 + r + r**2 * P(r), where P alone is good to 3.1e-9. */
/* n vectors at a time, step by step, since each step waits for the one before it. */
SIMD_INLINE void V(exp_each)(V(vec) *x, const int n) {
    V(ivec) whole[4];
    V(vec) r[4], p[4];
#define EACH(statement)                                                                                       \
    SIMD_UNROLL                                                                                               \
    for (int i = 0; i < n; ++i)                                                                               \
        statement;
    EACH(whole[i] = V(to_int)(V(mul)(x[i], V(set1)(1.44269504f))))
    EACH(r[i] = V(to_float)(whole[i]))
    /* ln 2 in two parts: the first has 9 bits and n has 8, so their product is exact. */
    EACH(p[i] = V(fma)(r[i], V(set1)(-0.693359375f), x[i]))
    EACH(r[i] = V(fma)(r[i], V(set1)(2.12194440e-4f), p[i]))
    EACH(p[i] = V(fma)(r[i], V(set1)(1.38145986467e-3f), V(set1)(8.36871687973e-3f)))
    EACH(p[i] = V(fma)(p[i], r[i], V(set1)(4.16683880453e-2f)))
    EACH(p[i] = V(fma)(p[i], r[i], V(set1)(1.66665206317e-1f)))
    EACH(p[i] = V(fma)(p[i], r[i], V(set1)(4.99999934478e-1f)))
    EACH(p[i] = V(add)(V(fma)(p[i], V(mul)(r[i], r[i]), r[i]), V(set1)(1.0f)))
    EACH(p[i] = V(mul)(p[i], V(pow2)(whole[i])))
    EACH(x[i] = V(select_less)(x[i], V(set1)(-87.33f), V(zero)(), p[i]))
#undef EACH
}
SIMD_INLINE V(vec) V(exp)(V(vec) x) {
    V(exp_each)(&x, 1);
    return x;
}

/* tanh x, relative error below 3e-7. Near zero an odd polynomial, since 1 - 2 / (e**2x + 1) cancels there. */
SIMD_INLINE V(vec) V(tanh)(V(vec) x) {
    V(vec) minus = V(sub)(V(zero)(), x);
    V(vec) size = V(max)(minus, x);
    V(vec) z = V(mul)(x, x);
    V(vec) p = V(set1)(-5.70498699346e-3f);
    p = V(fma)(p, z, V(set1)(2.06390872447e-2f));
    p = V(fma)(p, z, V(set1)(-5.37397150858e-2f));
    p = V(fma)(p, z, V(set1)(1.33314421982e-1f));
    p = V(fma)(p, z, V(set1)(-3.33332819420e-1f));
    V(vec) near = V(fma)(V(mul)(p, z), x, x);
    V(vec) one = V(set1)(1.0f);
    V(vec) e = V(exp)(V(min)(V(set1)(20.0f), V(add)(size, size)));
    V(vec) far = V(sub)(one, V(div)(V(set1)(2.0f), V(add)(e, one)));
    far = V(select_less)(x, V(zero)(), V(sub)(V(zero)(), far), far);
    return V(select_less)(size, V(set1)(0.625f), near, far);
}
