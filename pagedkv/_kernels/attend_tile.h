/* The kernels of attention that see floats only, in the vocabulary of simd.h, and the table of all kernels of a set.
 * No guard: included once per instruction set, the last of all. Signatures and meaning: simd_kernels in simd.h.
 */

#if SIMD_PAD % (2 * LANES)
#error "a panel is wider than what rows are padded to"
#endif

/* --- scores: lanes along query rows, for many of them ---------------------------------------------- */

/* nt rows of K by two vectors of query rows; q comes from a panel, [head_dim][2 * LANES]. Nothing is
 * summed across lanes, and K is read a float at a time, so head_dim has no tail. */
SIMD_INLINE void V(panel_block)(float *s, ptrdiff_t s_stride, const float *panel, const float *k_rows,
                                ptrdiff_t k_stride, ptrdiff_t head_dim, const int nt) {
    const float *k[6];
    V(vec) sums[6][2];
    SIMD_UNROLL
    for (int i = 0; i < nt; ++i) {
        k[i] = k_rows + i * k_stride;
        sums[i][0] = sums[i][1] = V(zero)();
    }
    for (ptrdiff_t d = 0; d < head_dim; ++d) {
        V(vec) q0 = V(load)(panel + d * 2 * LANES);
        V(vec) q1 = V(load)(panel + d * 2 * LANES + LANES);
        SIMD_UNROLL
        for (int i = 0; i < nt; ++i) {
            V(vec) key = V(set1)(k[i][d]);
            sums[i][0] = V(fma)(key, q0, sums[i][0]);
            sums[i][1] = V(fma)(key, q1, sums[i][1]);
        }
    }
    SIMD_UNROLL
    for (int i = 0; i < nt; ++i) {
        V(store)(s + i * s_stride, sums[i][0]);
        V(store)(s + i * s_stride + LANES, sums[i][1]);
    }
}

static void V(score_panels)(float *s, ptrdiff_t s_stride, const float *panels, const float *k, ptrdiff_t k_stride,
                            ptrdiff_t n, ptrdiff_t n_rows, ptrdiff_t head_dim) {
    for (ptrdiff_t r = 0; r < n_rows; r += 2 * LANES) {
        const float *panel = panels + r * head_dim;
        for (ptrdiff_t t = 0; t < n;) {
            const ptrdiff_t nt = n - t >= 6 ? 6 : n - t >= 4 ? 4 : n - t >= 2 ? 2 : 1;
            float *scores = s + t * s_stride + r;
            switch (nt) {
            case 6:
                V(panel_block)(scores, s_stride, panel, k + t * k_stride, k_stride, head_dim, 6);
                break;
            case 4:
                V(panel_block)(scores, s_stride, panel, k + t * k_stride, k_stride, head_dim, 4);
                break;
            case 2:
                V(panel_block)(scores, s_stride, panel, k + t * k_stride, k_stride, head_dim, 2);
                break;
            default:
                V(panel_block)(scores, s_stride, panel, k + t * k_stride, k_stride, head_dim, 1);
            }
            t += nt;
        }
    }
}

/* --- what is done to scores ------------------------------------------------------------------------ */

static void V(load_scales)(float *dst, ptrdiff_t stride, const char *const *rows, ptrdiff_t offset, ptrdiff_t n,
                           ptrdiff_t width) {
    for (ptrdiff_t t = 0; t < n; ++t)
        V(widen_f16)(dst + t * stride, rows[t] + offset, NULL, width);
}

static void V(cap_scores)(float *s, ptrdiff_t s_stride, ptrdiff_t n, ptrdiff_t width, float cap) {
    const V(vec) limit = V(set1)(cap), inverse = V(set1)(1.0f / cap);
    for (ptrdiff_t t = 0; t < n; ++t)
        for (ptrdiff_t r = 0; r < width; r += LANES) {
            float *p = s + t * s_stride + r;
            V(store)(p, V(mul)(limit, V(tanh)(V(mul)(V(load)(p), inverse))));
        }
}

static void V(slope_scores)(float *s, ptrdiff_t s_stride, ptrdiff_t n, ptrdiff_t width, const float *slopes,
                            const float *places, float first) {
    for (ptrdiff_t t = 0; t < n; ++t) {
        const V(vec) place = V(set1)(first + (float)t);
        for (ptrdiff_t r = 0; r < width; r += LANES) {
            float *p = s + t * s_stride + r;
            V(vec) distance = V(sub)(V(load)(places + r), place);
            distance = V(max)(distance, V(sub)(V(zero)(), distance));
            V(store)(p, V(sub)(V(load)(p), V(mul)(V(load)(slopes + r), distance)));
        }
    }
}

/* Milakov & Gimelshein 2018, "Online normalizer calculation for softmax", algorithm 3, a tile at a time.
 * row_max starts at -FLT_MAX, not at minus infinity: a score of minus infinity then gives exp(-inf) = 0
 * whatever came before it. max(s, row_max) leaves row_max where s is NaN, and exp carries the NaN into
 * row_sum and p. */
static int V(softmax_tile)(float *s, ptrdiff_t s_stride, ptrdiff_t n, ptrdiff_t width, float *row_max,
                           float *row_sum, float *rescale) {
    V(vec) moved = V(zero)();
    for (ptrdiff_t r = 0; r < width; r += LANES) {
        const V(vec) before = V(load)(row_max + r);
        V(vec) after = before;
        for (ptrdiff_t t = 0; t < n; ++t)
            after = V(max)(V(load)(s + t * s_stride + r), after);
        const V(vec) f = V(exp)(V(sub)(before, after));
        V(vec) sum = V(mul)(V(load)(row_sum + r), f);
        ptrdiff_t t = 0;
        for (; t + 4 <= n; t += 4) {
            V(vec) p[4];
            SIMD_UNROLL
            for (int i = 0; i < 4; ++i)
                p[i] = V(sub)(V(load)(s + (t + i) * s_stride + r), after);
            V(exp_each)(p, 4);
            SIMD_UNROLL
            for (int i = 0; i < 4; ++i) {
                V(store)(s + (t + i) * s_stride + r, p[i]);
                sum = V(add)(sum, p[i]);
            }
        }
        for (; t < n; ++t) {
            const V(vec) p = V(exp)(V(sub)(V(load)(s + t * s_stride + r), after));
            V(store)(s + t * s_stride + r, p);
            sum = V(add)(sum, p);
        }
        V(store)(row_max + r, after);
        V(store)(row_sum + r, sum);
        V(store)(rescale + r, f);
        moved = V(add)(moved, V(sub)(V(set1)(1.0f), f));
    }
    return V(sum)(moved) != 0.0f;
}

/* --- whole rows ------------------------------------------------------------------------------------ */

static void V(scale_row)(float *dst, const float *src, float factor, ptrdiff_t n) {
    const V(vec) f = V(set1)(factor);
    ptrdiff_t d = 0;
    for (; d + LANES <= n; d += LANES)
        V(store)(dst + d, V(mul)(f, V(load)(src + d)));
    if (d < n)
        V(store_part)(dst + d, V(mul)(f, V(load_part)(src + d, n - d)), n - d);
}

static void V(add_scaled_row)(float *dst, const float *src, float factor, ptrdiff_t n) {
    const V(vec) f = V(set1)(factor);
    ptrdiff_t d = 0;
    for (; d + LANES <= n; d += LANES)
        V(store)(dst + d, V(fma)(f, V(load)(src + d), V(load)(dst + d)));
    if (d < n)
        V(store_part)(dst + d, V(fma)(f, V(load_part)(src + d, n - d), V(load_part)(dst + d, n - d)), n - d);
}

#define STRINGIZE_(x) #x
#define STRINGIZE(x) STRINGIZE_(x)
#define DTYPE(name, type, text)                                                                               \
    {text, V(score_dots_##name), V(accumulate_rows_##name), V(widen_##name), V(narrow_##name)},
const simd_kernels V(simd_kernels) = {
    STRINGIZE(SIMD_ISA),
    LANES,
    {SIMD_EACH_DTYPE(DTYPE)},
    V(score_panels),
    V(load_scales),
    V(turn),
    V(cap_scores),
    V(slope_scores),
    V(softmax_tile),
    V(scale_row),
    V(add_scaled_row),
};
