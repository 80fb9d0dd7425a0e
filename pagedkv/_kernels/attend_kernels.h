/* The kernels of attention over one tile, in the vocabulary of simd.h. No guard: included once per
 * instruction set. Signatures and meaning: simd_kernels in simd.h.
 *
 * A tile is a few positions whose rows of K and V are given by pointers. Each row is read once for all
 * the query rows that share it; what is kept in registers meanwhile is said at each kernel.
 */

/* --- scores: lanes along head_dim, for few query rows ---------------------------------------------- */

/* nt rows of K by nr query rows, nt * nr sums in registers. */
SIMD_INLINE void V(dot_block)(float *s, ptrdiff_t s_stride, const float *q, ptrdiff_t q_stride,
                              const float *const *k_rows, const float *const *ahead, ptrdiff_t k_offset,
                              ptrdiff_t ahead_offset, ptrdiff_t head_dim, const int nt, const int nr) {
    const float *k[4], *next[4];
    V(vec) sums[4][4];
    SIMD_UNROLL
    for (int i = 0; i < nt; ++i) {
        k[i] = k_rows[i] + k_offset;
        next[i] = ahead[i] + ahead_offset;
        SIMD_UNROLL
        for (int j = 0; j < nr; ++j)
            sums[i][j] = V(zero)();
    }
    ptrdiff_t d = 0;
    for (; d + SIMD_LINE <= head_dim; d += SIMD_LINE) {
        SIMD_UNROLL
        for (int i = 0; i < nt; ++i)
            SIMD_PREFETCH(next[i] + d);
        SIMD_UNROLL
        for (int u = 0; u < SIMD_LINE; u += LANES) {
            V(vec) row[4];
            SIMD_UNROLL
            for (int i = 0; i < nt; ++i) {
                row[i] = V(load)(k[i] + d + u);
                if (nr > 1)
                    IN_REGISTER(row[i]);
            }
            SIMD_UNROLL
            for (int j = 0; j < nr; ++j) {
                V(vec) query = V(load)(q + j * q_stride + d + u);
                IN_REGISTER(query);
                SIMD_UNROLL
                for (int i = 0; i < nt; ++i)
                    sums[i][j] = V(fma)(row[i], query, sums[i][j]);
            }
        }
    }
    for (; d < head_dim; d += LANES) {
        const ptrdiff_t left = head_dim - d;
        SIMD_UNROLL
        for (int i = 0; i < nt; ++i) {
            V(vec) row = left < LANES ? V(load_part)(k[i] + d, left) : V(load)(k[i] + d);
            SIMD_UNROLL
            for (int j = 0; j < nr; ++j)
                sums[i][j] = V(fma)(row, V(load)(q + j * q_stride + d), sums[i][j]);
        }
    }
    SIMD_UNROLL
    for (int i = 0; i < nt; ++i) {
        if (nr == 4) {
            V(store_sums4)(s + i * s_stride, sums[i][0], sums[i][1], sums[i][2], sums[i][3]);
        } else {
            SIMD_UNROLL
            for (int j = 0; j < nr; ++j)
                s[i * s_stride + j] = V(sum)(sums[i][j]);
        }
    }
}

/* nt rows of K by the query rows [first, end) of every head, nr at a time: heads go in the order in which they
 * lie in memory. */
#define DOT_STRIP(NT, NR, first, end)                                                                         \
    for (ptrdiff_t h = 0; h < n_heads; ++h)                                                                   \
        for (ptrdiff_t r = first; r < end; r += NR)                                                           \
            V(dot_block)(s + t * s_stride + h * n_rows + r, s_stride, q + (h * n_rows + r) * q_stride, q_stride, \
                         k_rows + t, ahead + t, h * head_dim, h * ahead_dim, head_dim, NT, NR);

static void V(score_dots)(float *s, ptrdiff_t s_stride, const float *q, ptrdiff_t q_stride,
                          const float *const *k_rows, const float *const *ahead, ptrdiff_t ahead_dim, ptrdiff_t n,
                          ptrdiff_t n_heads, ptrdiff_t n_rows, ptrdiff_t head_dim) {
    const ptrdiff_t fours = n_rows / 4 * 4, rest = n_rows - fours;
    ptrdiff_t t = 0;
    /* Few query rows leave registers for more rows of K. */
    for (; n_rows <= 2 && t + 4 <= n; t += 4) {
        if (n_rows == 1) {
            DOT_STRIP(4, 1, 0, 1)
        } else {
            DOT_STRIP(4, 2, 0, 2)
        }
    }
    for (; t + 2 <= n; t += 2) {
        DOT_STRIP(2, 4, 0, fours)
        if (rest == 3) {
            DOT_STRIP(2, 3, fours, n_rows)
        } else if (rest == 2) {
            DOT_STRIP(2, 2, fours, n_rows)
        } else if (rest == 1) {
            DOT_STRIP(2, 1, fours, n_rows)
        }
    }
    for (; t < n; ++t)
        DOT_STRIP(1, 1, 0, n_rows)
}
#undef DOT_STRIP

/* --- scores: lanes along query rows, for many of them ---------------------------------------------- */

/* nt rows of K by two vectors of query rows; q comes from a panel, [head_dim][2 * LANES]. Nothing is
 * summed across lanes, and K is read a float at a time, so head_dim has no tail. */
SIMD_INLINE void V(panel_block)(float *s, ptrdiff_t s_stride, const float *panel, const float *const *k_rows,
                                ptrdiff_t head_dim, const int nt) {
    const float *k[6];
    V(vec) sums[6][2];
    SIMD_UNROLL
    for (int i = 0; i < nt; ++i) {
        k[i] = k_rows[i];
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

static void V(score_panels)(float *s, ptrdiff_t s_stride, const float *panels, const float *const *k_rows,
                            ptrdiff_t n, ptrdiff_t n_rows, ptrdiff_t head_dim) {
    for (ptrdiff_t r = 0; r < n_rows; r += 2 * LANES) {
        const float *panel = panels + r * head_dim;
        for (ptrdiff_t t = 0; t < n;) {
            const ptrdiff_t nt = n - t >= 6 ? 6 : n - t >= 4 ? 4 : n - t >= 2 ? 2 : 1;
            float *scores = s + t * s_stride + r;
            switch (nt) {
            case 6:
                V(panel_block)(scores, s_stride, panel, k_rows + t, head_dim, 6);
                break;
            case 4:
                V(panel_block)(scores, s_stride, panel, k_rows + t, head_dim, 4);
                break;
            case 2:
                V(panel_block)(scores, s_stride, panel, k_rows + t, head_dim, 2);
                break;
            default:
                V(panel_block)(scores, s_stride, panel, k_rows + t, head_dim, 1);
            }
            t += nt;
        }
    }
}

/* --- what is done to scores ------------------------------------------------------------------------ */

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
 * most starts at -FLT_MAX, not at minus infinity: a score of minus infinity then gives exp(-inf) = 0
 * whatever came before it. max(s, most) leaves most where s is NaN, and exp carries the NaN into
 * total and p. */
static int V(softmax_tile)(float *s, ptrdiff_t s_stride, ptrdiff_t n, ptrdiff_t width, float *most,
                           float *total, float *fade) {
    V(vec) moved = V(zero)();
    for (ptrdiff_t r = 0; r < width; r += LANES) {
        const V(vec) before = V(load)(most + r);
        V(vec) after = before;
        for (ptrdiff_t t = 0; t < n; ++t)
            after = V(max)(V(load)(s + t * s_stride + r), after);
        const V(vec) f = V(exp)(V(sub)(before, after));
        V(vec) sum = V(mul)(V(load)(total + r), f);
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
        V(store)(most + r, after);
        V(store)(total + r, sum);
        V(store)(fade + r, f);
        moved = V(add)(moved, V(sub)(V(set1)(1.0f), f));
    }
    return V(sum)(moved) != 0.0f;
}

/* --- accumulation: lanes along v_head_dim ---------------------------------------------------------- */

/* nr query rows by nv vectors of the output stay in registers over all positions of the tile. */
SIMD_INLINE void V(add_block)(float *acc, ptrdiff_t acc_stride, const float *p, ptrdiff_t p_stride,
                              const float *const *v_rows, ptrdiff_t v_offset, const float *ahead, ptrdiff_t n,
                              const int nr, const int nv) {
    V(vec) sums[6][4];
    SIMD_UNROLL
    for (int j = 0; j < nr; ++j)
        SIMD_UNROLL
        for (int u = 0; u < nv; ++u)
            sums[j][u] = V(load)(acc + j * acc_stride + u * LANES);
    for (ptrdiff_t t = 0; t < n; ++t) {
        V(vec) value[4];
        SIMD_UNROLL
        for (int u = 0; u < nv; ++u)
            value[u] = V(load)(v_rows[t] + v_offset + u * LANES);
        SIMD_PREFETCH(ahead + t * SIMD_LINE);
        SIMD_UNROLL
        for (int j = 0; j < nr; ++j) {
            const V(vec) weight = V(set1)(p[t * p_stride + j]);
            SIMD_UNROLL
            for (int u = 0; u < nv; ++u)
                sums[j][u] = V(fma)(weight, value[u], sums[j][u]);
        }
    }
    SIMD_UNROLL
    for (int j = 0; j < nr; ++j)
        SIMD_UNROLL
        for (int u = 0; u < nv; ++u)
            V(store)(acc + j * acc_stride + u * LANES, sums[j][u]);
}

/* The last, partial vector of the head. */
SIMD_INLINE void V(add_tail)(float *acc, ptrdiff_t acc_stride, const float *p, ptrdiff_t p_stride,
                             const float *const *v_rows, ptrdiff_t v_offset, ptrdiff_t n, ptrdiff_t nr,
                             ptrdiff_t left) {
    for (ptrdiff_t j = 0; j < nr; ++j) {
        V(vec) sum = V(load)(acc + j * acc_stride);
        for (ptrdiff_t t = 0; t < n; ++t)
            sum = V(fma)(V(set1)(p[t * p_stride + j]), V(load_part)(v_rows[t] + v_offset, left), sum);
        V(store)(acc + j * acc_stride, sum);
    }
}

/* Where the next n lines to prefetch begin. Past the end: lines that are in the cache already. */
SIMD_INLINE const float *V(next_run)(simd_ahead *ahead, ptrdiff_t n, const float *resident) {
    if (ahead->row >= ahead->n_rows)
        return resident;
    const float *run = ahead->rows[ahead->row] + ahead->column;
    ahead->column += n * SIMD_LINE;
    while (ahead->column >= ahead->width) { /* rows of a block adjoin, so a run may span several */
        ahead->column -= ahead->width;
        ahead->row += 1;
    }
    return run;
}

/* nr query rows of one head over the whole head dimension. */
SIMD_INLINE void V(add_rows)(float *acc, ptrdiff_t acc_stride, const float *p, ptrdiff_t p_stride,
                             const float *const *v_rows, ptrdiff_t v_offset, simd_ahead *ahead, ptrdiff_t n,
                             ptrdiff_t v_head_dim, const int nr) {
    const int most = ACC_VECS(nr);
    ptrdiff_t d = 0, left = v_head_dim / LANES;
    while (left > 0) {
        /* As many vectors as fit into registers, but rather 2 + 2 than 3 + 1. */
        const ptrdiff_t nv = left <= most ? left : left == most + 1 ? (left + 1) / 2 : most;
        const float *run = V(next_run)(ahead, n, acc);
#define ADD_BLOCK(NV)                                                                                         \
    case NV:                                                                                                  \
        if (NV <= most)                                                                                       \
            V(add_block)(acc + d, acc_stride, p, p_stride, v_rows, v_offset + d, run, n, nr, NV);             \
        break;
        switch (nv) {
            ADD_BLOCK(1)
            ADD_BLOCK(2)
            ADD_BLOCK(3)
            ADD_BLOCK(4)
        }
#undef ADD_BLOCK
        d += nv * LANES;
        left -= nv;
    }
    if (d < v_head_dim)
        V(add_tail)(acc + d, acc_stride, p, p_stride, v_rows, v_offset + d, n, nr, v_head_dim - d);
}

static void V(accumulate_rows)(float *acc, ptrdiff_t acc_stride, const float *p, ptrdiff_t p_stride,
                               const float *const *v_rows, ptrdiff_t v_offset, simd_ahead *ahead, ptrdiff_t n,
                               ptrdiff_t n_heads, ptrdiff_t n_rows, ptrdiff_t v_head_dim) {
    for (ptrdiff_t h = 0; h < n_heads; ++h) {
        for (ptrdiff_t r = 0; r < n_rows;) {
            const ptrdiff_t left = n_rows - r, nr = left >= 6 && left != 8 ? 6 : left >= 4 ? 4 : left;
            const ptrdiff_t row = h * n_rows + r;
#define ADD_ROWS(NR)                                                                                          \
    case NR:                                                                                                  \
        V(add_rows)(acc + row * acc_stride, acc_stride, p + row, p_stride, v_rows,                            \
                    v_offset + h * v_head_dim, ahead, n, v_head_dim, NR);                                     \
        break;
            switch (nr) {
                ADD_ROWS(1)
                ADD_ROWS(2)
                ADD_ROWS(3)
                ADD_ROWS(4)
                ADD_ROWS(6)
            }
#undef ADD_ROWS
            r += nr;
        }
    }
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
static const simd_kernels V(kernels) = {
    STRINGIZE(SIMD_ISA), LANES,           V(score_dots),      V(score_panels), V(cap_scores), V(slope_scores),
    V(softmax_tile),     V(accumulate_rows), V(scale_row),    V(add_scaled_row),
};
#undef STRINGIZE
#undef STRINGIZE_
