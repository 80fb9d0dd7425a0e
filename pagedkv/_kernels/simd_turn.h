/* The fast Hadamard transform, in the vocabulary of simd.h. No guard: included once per instruction set.
 *
 * Neighbours that are 1, 2, 4, ... apart become their sum and their difference, in this order, and what that ends in is
 * multiplied by 1 / sqrt(width). Each value is rounded in every step and the steps have no other order, so that all
 * sets give the same bits; fma is used where its product is exact.
 */

/* Row i: -1 where lane & 1 << i. */
static const float V(signs)[4][16] = {
    {1, -1, 1, -1, 1, -1, 1, -1, 1, -1, 1, -1, 1, -1, 1, -1},
    {1, 1, -1, -1, 1, 1, -1, -1, 1, 1, -1, -1, 1, 1, -1, -1},
    {1, 1, 1, 1, -1, -1, -1, -1, 1, 1, 1, 1, -1, -1, -1, -1},
    {1, 1, 1, 1, 1, 1, 1, 1, -1, -1, -1, -1, -1, -1, -1, -1},
};

/* The steps within a vector. */
SIMD_INLINE V(vec) V(turn_lanes)(V(vec) x) {
    x = V(fma)(x, V(load)(V(signs)[0]), V(swap)(x, 1));
    x = V(fma)(x, V(load)(V(signs)[1]), V(swap)(x, 2));
#if LANES > 4
    x = V(fma)(x, V(load)(V(signs)[2]), V(swap)(x, 4));
#endif
#if LANES > 8
    x = V(fma)(x, V(load)(V(signs)[3]), V(swap)(x, 8));
#endif
    return x;
}

/* The steps between n vectors, `gap` floats one after the other. */
SIMD_INLINE void V(turn_vectors)(float *dst, const float *src, ptrdiff_t gap, int is_first, float factor, const int n) {
    V(vec) x[8];
    SIMD_UNROLL
    for (int i = 0; i < n; ++i)
        x[i] = V(load)(src + i * gap);
    if (is_first) {
        SIMD_UNROLL
        for (int i = 0; i < n; ++i)
            x[i] = V(turn_lanes)(x[i]);
    }
    SIMD_UNROLL
    for (int apart = 1; apart < n; apart *= 2) {
        SIMD_UNROLL
        for (int i = 0; i < n; ++i)
            if (!(i & apart)) {
                const V(vec) a = x[i], b = x[i + apart];
                x[i] = V(add)(a, b);
                x[i + apart] = V(sub)(a, b);
            }
    }
    SIMD_UNROLL
    for (int i = 0; i < n; ++i)
        V(store)(dst + i * gap, V(mul)(x[i], V(set1)(factor)));
}

static void V(turn)(float *dst, const float *src, ptrdiff_t n, ptrdiff_t width) {
    float factor = 1.0f;
    ptrdiff_t left = width;
    for (; left >= 4; left /= 4)
        factor *= 0.5f;
    if (left == 2)
        factor *= 0.70710678f;
    for (ptrdiff_t first = 0; first < n; first += width) {
        ptrdiff_t gap = LANES;
        const float *from = src + first;
        for (left = width / LANES; left > 0;) {
            const ptrdiff_t together = left < 8 ? left : 8;
            const float times = left > 8 ? 1.0f : factor;
            for (ptrdiff_t i = 0; i < width; i += together * gap)
                for (ptrdiff_t j = i; j < i + gap; j += LANES)
                    switch (together) {
#define TURN_VECTORS(N)                                                                                       \
    case N:                                                                                                   \
        V(turn_vectors)(dst + first + j, from + j, gap, gap == LANES, times, N);                              \
        break;
                        TURN_VECTORS(1)
                        TURN_VECTORS(2)
                        TURN_VECTORS(4)
                        TURN_VECTORS(8)
#undef TURN_VECTORS
                    }
            from = dst + first;
            gap *= together;
            left = left > 8 ? left / 8 : 0;
        }
    }
}
