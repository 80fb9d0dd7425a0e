/* Scores and accumulation for few query rows, straight from rows of any dtype: what decoding runs on. No guard:
 * included once per instruction set and dtype (see simd_dtypes.h), where T(name) is name_<isa>_<dtype>, and
 * LOAD(p) is a vector of the floats that LANES values at p stand for, but for their group's scale.
 *
 * A tile is a few positions whose rows of K and V are given by pointers. Each row is read and converted once for
 * up to four or six query rows that share it; what is kept in registers meanwhile is said at each kernel.
 */

#define LOAD(p) T(load)(p)
#define LOAD_PART(p, n) T(load_part)(p, n)
/* Times the scale of the group that the value at d is in; a vector is in one group. Scaled as they are read: scaling the
 * sums of each group is more work from two query rows on. */
#define SCALED(x, scales, d) (HAS_SCALES ? V(mul)(x, V(set1)((scales)[(d) / SIMD_GROUP])) : (x))
/* Values at a time, and values in a cache line: what one prefetch brings. */
#define STRIDE (HAS_SCALES ? SIMD_GROUP : 16)
#define LINE (64 / (ptrdiff_t)sizeof(ELEMENT))

/* --- scores: lanes along head_dim ------------------------------------------------------------------ */

/* nt rows of K by nr query rows, nt * nr sums in registers. */
SIMD_INLINE void T(dot_block)(float *s, ptrdiff_t s_stride, const float *q, ptrdiff_t q_stride,
                              const char *const *k_rows, const float *scales, ptrdiff_t scale_stride,
                              const char *const *ahead, ptrdiff_t k_offset, ptrdiff_t ahead_offset, ptrdiff_t head_dim,
                              const int nt, const int nr) {
    const ELEMENT *k[4], *next[4];
    V(vec) sums[4][4];
    SIMD_UNROLL
    for (int i = 0; i < nt; ++i) {
        k[i] = (const ELEMENT *)k_rows[i] + k_offset;
        next[i] = (const ELEMENT *)ahead[i] + ahead_offset;
        SIMD_UNROLL
        for (int j = 0; j < nr; ++j)
            sums[i][j] = V(zero)();
    }
    ptrdiff_t d = 0;
    for (; d + STRIDE <= head_dim; d += STRIDE) {
        if (d % LINE == 0) { /* always, where a line holds no more values than a stride */
            SIMD_UNROLL
            for (int i = 0; i < nt; ++i)
                SIMD_PREFETCH(next[i] + d);
        }
        SIMD_UNROLL
        for (int u = 0; u < STRIDE; u += LANES) {
            V(vec) row[4];
            SIMD_UNROLL
            for (int i = 0; i < nt; ++i) {
                row[i] = SCALED(LOAD(k[i] + d + u), scales + i * scale_stride, d);
                if (nr > 1)
                    IN_REGISTER(row[i]);
            }
            SIMD_UNROLL
            for (int j = 0; j < nr; ++j) {
                V(vec) query = V(load)(q + j * q_stride + d + u);
                if (nt != 3) /* with all of 16 registers taken, the compiler does better by itself */
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
            V(vec) row = left < LANES ? LOAD_PART(k[i] + d, left) : LOAD(k[i] + d);
            row = SCALED(row, scales + i * scale_stride, d);
            SIMD_UNROLL
            for (int j = 0; j < nr; ++j)
                sums[i][j] = V(fma)(row, V(load)(q + j * q_stride + d), sums[i][j]);
        }
    }
#ifdef STORES_SUMS16
    if (nt == 4 && nr == 4) {
        V(store_sums16)(s, s_stride, sums);
        return;
    }
#endif
    if (nr == 4) {
        SIMD_UNROLL
        for (int i = 0; i < nt; ++i)
            V(store_sums4)(s + i * s_stride, sums[i][0], sums[i][1], sums[i][2], sums[i][3]);
    } else if (nt == 4) { /* four rows of K make it four sums as well */
        SIMD_UNROLL
        for (int j = 0; j < nr; ++j) {
            float four[4];
            V(store_sums4)(four, sums[0][j], sums[1][j], sums[2][j], sums[3][j]);
            SIMD_UNROLL
            for (int i = 0; i < 4; ++i)
                s[i * s_stride + j] = four[i];
        }
    } else {
        SIMD_UNROLL
        for (int i = 0; i < nt; ++i)
            SIMD_UNROLL
            for (int j = 0; j < nr; ++j)
                s[i * s_stride + j] = V(sum)(sums[i][j]);
    }
}

/* The rows [t, end) of K by nr query rows of one head. Few query rows leave registers for more rows of K. */
SIMD_INLINE void T(dot_column)(float *s, ptrdiff_t s_stride, const float *q, ptrdiff_t q_stride,
                               const char *const *k_rows, const float *scales, ptrdiff_t scale_stride,
                               const char *const *ahead, ptrdiff_t k_offset, ptrdiff_t ahead_offset, ptrdiff_t head_dim,
                               ptrdiff_t t, ptrdiff_t end, const int nr) {
#define DOT_BLOCK(NT)                                                                                         \
    T(dot_block)(s + t * s_stride, s_stride, q, q_stride, k_rows + t, scales + t * scale_stride, scale_stride, ahead + t, \
                 k_offset, ahead_offset, head_dim, NT, nr)
    if (DOT_ROWS(nr) == 4)
        for (; t + 4 <= end; t += 4)
            DOT_BLOCK(4);
    for (; t + 3 <= end; t += 3)
        DOT_BLOCK(3);
    for (; t + 2 <= end; t += 2)
        DOT_BLOCK(2);
    if (t < end)
        DOT_BLOCK(1);
#undef DOT_BLOCK
}

static void T(score_dots)(float *s, ptrdiff_t s_stride, const float *q, ptrdiff_t q_stride,
                          const char *const *k_rows, ptrdiff_t k_stride, const simd_scales *scales, int by_head,
                          const char *const *ahead, ptrdiff_t ahead_stride, ptrdiff_t n, ptrdiff_t n_heads,
                          ptrdiff_t n_rows, ptrdiff_t head_dim) {
    /* Few query rows: in the order in which K lies in memory, which is a few rows at a time with all their heads, or a head
     * at a time. Many: a head at a time, whose rows of K stay in the nearest cache while one query row after another
     * passes. */
    const ptrdiff_t step = by_head || n_rows > 4 ? n : DOT_ROWS(n_rows);
    for (ptrdiff_t t = 0; t < n; t += step) {
        const ptrdiff_t end = t + step < n ? t + step : n;
        for (ptrdiff_t h = 0; h < n_heads; ++h) {
            for (ptrdiff_t r = 0; r < n_rows;) {
                const ptrdiff_t nr = n_rows - r < 4 ? n_rows - r : 4, row = h * n_rows + r;
#define DOT_COLUMN(NR)                                                                                        \
    case NR:                                                                                                  \
        T(dot_column)(s + row, s_stride, q + row * q_stride, q_stride, k_rows, scales->scales + h * scales->per_head, \
                      scales->stride, ahead, h * k_stride, h * ahead_stride, head_dim, t, end, NR);           \
        break;
                switch (nr) {
                    DOT_COLUMN(1)
                    DOT_COLUMN(2)
                    DOT_COLUMN(3)
                    DOT_COLUMN(4)
                }
#undef DOT_COLUMN
                r += nr;
            }
        }
    }
}

/* --- accumulation: lanes along v_head_dim ---------------------------------------------------------- */

/* nr query rows by nv vectors of the output stay in registers over all positions of the tile. */
SIMD_INLINE void T(add_block)(float *acc, ptrdiff_t acc_stride, const float *p, ptrdiff_t p_stride,
                              const char *const *v_rows, ptrdiff_t v_offset, const float *scales, ptrdiff_t scale_stride,
                              const char *ahead, ptrdiff_t d, ptrdiff_t n, const int nr, const int nv) {
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
            value[u] = SCALED(LOAD((const ELEMENT *)v_rows[t] + v_offset + d + u * LANES), scales + t * scale_stride,
                              d + u * LANES);
        SIMD_PREFETCH(ahead + t * SIMD_LINE_BYTES);
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
SIMD_INLINE void T(add_tail)(float *acc, ptrdiff_t acc_stride, const float *p, ptrdiff_t p_stride,
                             const char *const *v_rows, ptrdiff_t v_offset, const float *scales, ptrdiff_t scale_stride,
                             ptrdiff_t d, ptrdiff_t n, ptrdiff_t nr, ptrdiff_t left) {
    for (ptrdiff_t j = 0; j < nr; ++j) {
        V(vec) sum = V(load)(acc + j * acc_stride);
        for (ptrdiff_t t = 0; t < n; ++t) {
            const V(vec) value = LOAD_PART((const ELEMENT *)v_rows[t] + v_offset + d, left);
            sum = V(fma)(V(set1)(p[t * p_stride + j]), SCALED(value, scales + t * scale_stride, d), sum);
        }
        V(store)(acc + j * acc_stride, sum);
    }
}

/* nr query rows of one head over the whole head dimension. */
SIMD_INLINE void T(add_rows)(float *acc, ptrdiff_t acc_stride, const float *p, ptrdiff_t p_stride,
                             const char *const *v_rows, ptrdiff_t v_offset, const float *scales, ptrdiff_t scale_stride,
                             simd_ahead *ahead, ptrdiff_t n, ptrdiff_t v_head_dim, const int nr) {
    const int most = ACC_VECS(nr);
    ptrdiff_t d = 0, left = v_head_dim / LANES;
    while (left > 0) {
        /* As many vectors as fit into registers, but rather 2 + 2 than 3 + 1. */
        const ptrdiff_t nv = left <= most ? left : left == most + 1 ? (left + 1) / 2 : most;
        const char *run = simd_next_run(ahead, n, acc);
#define ADD_BLOCK(NV)                                                                                         \
    case NV:                                                                                                  \
        if (NV <= most)                                                                                       \
            T(add_block)(acc + d, acc_stride, p, p_stride, v_rows, v_offset, scales, scale_stride, run, d, n, nr, NV); \
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
        T(add_tail)(acc + d, acc_stride, p, p_stride, v_rows, v_offset, scales, scale_stride, d, n, nr, v_head_dim - d);
}

static void T(accumulate_rows)(float *acc, ptrdiff_t acc_stride, const float *p, ptrdiff_t p_stride,
                               const char *const *v_rows, ptrdiff_t v_offset, ptrdiff_t v_stride,
                               const simd_scales *scales, simd_ahead *ahead, ptrdiff_t n, ptrdiff_t n_heads,
                               ptrdiff_t n_rows, ptrdiff_t v_head_dim) {
    for (ptrdiff_t h = 0; h < n_heads; ++h) {
        for (ptrdiff_t r = 0; r < n_rows;) {
            const ptrdiff_t left = n_rows - r, nr = left >= 6 && left != 8 ? 6 : left >= 4 ? 4 : left;
            const ptrdiff_t row = h * n_rows + r;
#define ADD_ROWS(NR)                                                                                          \
    case NR:                                                                                                  \
        T(add_rows)(acc + row * acc_stride, acc_stride, p + row, p_stride, v_rows,                            \
                    v_offset + h * v_stride, scales->scales + h * scales->per_head, scales->stride, ahead, n, \
                    v_head_dim, NR);                                                                          \
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

#undef LOAD
#undef LOAD_PART
#undef SCALED
#undef STRIDE
#undef LINE
