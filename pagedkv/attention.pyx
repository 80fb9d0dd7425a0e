"""paged_attention and attention: what the caller gave, checked and handed to the kernels.

Everything is checked here; below this floor nothing is. First all arguments are converted, which may run
the caller's code; then the caches are held as readers, so that their tables cannot move under the kernel, and
sizes and addresses are looked at.
"""

cimport numpy as cnp
from libc.math cimport INFINITY, expf, logf, sqrt
from libc.stdint cimport int32_t
from libc.stdlib cimport calloc, free
from libc.string cimport memcpy, memset

from pagedkv._arrays cimport (
    MAX_POSITIONS, MAX_ROWS, as_flag, as_float32, as_index, as_items, as_native, as_real, as_result, as_size, as_thread_count,
    check_apart, check_float32, check_out, describe, empty_floats)
from pagedkv._groups cimport as_members
from pagedkv._kernels.attend cimport run_attend
from pagedkv._kernels.parallel cimport resolve_threads
from pagedkv._kernels.plan cimport (
    AttendOptions, AttendPlan, HeadsView, KvView, PlanShelf, QuerySpan, RowView, find_plan, free_plans)
from pagedkv._kernels.simd cimport SIMD_F32, simd_in_use, simd_kernels
from pagedkv._tables cimport first_position
from pagedkv.sequence cimport PagedKvCache
from pagedkv.store cimport PagedKvStore, as_store

cdef str KV_WANTED = "float32 [s, width] or [s, n_kv_heads, head_dim]"


def paged_attention(q, store, caches, *, layer=0, query_lens=None, scale=None, window=None,
                    softcap=None, sinks=None, alibi_slopes=None, causal=True, out=None, return_lse=False,
                    n_threads=None):
    """Attention of a batch of sequences, straight through their block tables.

    Query ``i`` of a sequence with query length ``L`` stands at position ``seq_len - L + i``, sees itself
    and what comes before, and its score against position ``j`` is ``scale * q . k[j]``. Then, where
    asked for: ``score = softcap * tanh(score / softcap)``, and ``score -= alibi_slopes[head] * distance``.

    Parameters
    ----------
    q : array, float32 ``[n_rows, n_q_heads, head_dim]``
        The query rows of all sequences, one after the other: ``n_rows = sum(query_lens)``. ``n_q_heads``
        is a multiple of ``n_kv_heads``; neighbouring query heads share one head of K and V.
    store : PagedKvStore
    caches : PagedKvCache, or an iterable of them
        They hold the K and V of the query positions already. One may occur several times.
    layer : int, optional
        0 to ``n_layers - 1``.
    query_lens : int, or a sequence or integer array of them ``[len(caches)]``, optional
        Query rows of each sequence, 0 or more; 1 without it.
    scale : float, optional
        ``1 / sqrt(head_dim)`` without it.
    window : int, optional
        How many positions a query sees at most, itself included. Without ``causal``, as many after it.
    softcap : float, optional
        Above 0 (Gemma 2). Scores are not capped without it.
    sinks : array, float32 ``[n_q_heads]``, optional
        One more score in each head's softmax, as it is, with no value behind it (gpt-oss).
    alibi_slopes : array, float32 ``[n_q_heads]``, optional
        Above or below 0, per position of distance (Press et al. 2022, "Train Short, Test Long", section 3).
    causal : bool, optional
        Without it, a query sees what comes after it too.
    out : float32 array ``[n_rows, n_q_heads, v_head_dim]``, optional
        C-contiguous; gets the result. It must not overlap an input.
    return_lse : bool, optional
        Whether to return the log-sum-exp too.
    n_threads : int, optional
        1 to 256; what `get_num_threads` says without it. The result is the same to the bit for any number.

    Returns
    -------
    out : float32 array ``[n_rows, n_q_heads, v_head_dim]``
        Zeros where nothing is visible. A score that overflows to ``-inf`` hides its position too, so that a query all of
        whose scores do gets zeros, and an ``lse`` of ``-inf``, where a softmax in NumPy or torch gives NaN.
    lse : float32 array ``[n_rows, n_q_heads]``, with ``return_lse``
        Natural logarithm of the sum of ``exp(score)``, sinks included; ``-inf`` where that sum is empty.

    Raises
    ------
    TypeError, ValueError, IndexError
        An argument of another type, dtype, shape or range; a query length above its ``seq_len``; a cache
        of another store; a window that reaches back to positions that were dropped.
    RuntimeError
        A cache is in use by a `Step`, or a call that changes it.
    MemoryError
        No memory for the result or for intermediate sums.

    Notes
    -----
    Leading blocks that several sequences have in common are read once, for the queries of all of them;
    a sequence's result then differs from the one it has alone by rounding. Prefills of many rows and
    windows that hide some of those positions are computed each for itself.

    Threads: runs without the GIL. Until it returns, calls that would change one of the caches raise
    RuntimeError.

    Method: Milakov & Gimelshein 2018, "Online normalizer calculation for softmax", section 3; Dao 2023,
    "FlashAttention-2", section 3.1; Dao et al. 2023, "Flash-Decoding" (long sequences in parts, merged by
    log-sum-exp); Juravsky et al. 2024, "Hydragen", section 3 (shared prefixes).

    Examples
    --------
    >>> import numpy as np, pagedkv
    >>> store = pagedkv.PagedKvStore(block_size=4, total_blocks=8, n_kv_heads=1, head_dim=2)
    >>> cache = pagedkv.PagedKvCache()
    >>> cache.push(store, np.ones(2, np.float32), np.array([3, 4], np.float32))
    >>> q = np.ones((1, 2, 2), np.float32)                 # one row of two query heads
    >>> pagedkv.paged_attention(q, store, [cache]).tolist()
    [[[3.0, 4.0], [3.0, 4.0]]]
    """
    cdef PagedKvStore home = as_store(store)
    cdef tuple batch = as_members(caches, store, 1)
    cdef Py_ssize_t n_caches = len(batch), n_reading = 0, n_rows, row = 0, i
    cdef Py_ssize_t index = as_index(layer, "layer", home.n_layers)
    cdef int threads = resolve_threads(0 if n_threads is None else as_thread_count(n_threads, "n_threads"))
    cdef tuple lens = as_query_lens(1 if query_lens is None else query_lens, n_caches)
    cdef Asked asked = as_asked(
        q, home.head_dim, scale, window, softcap, sinks, alibi_slopes, causal, out, return_lse)
    cdef PagedKvCache cache
    cdef QuerySpan* spans
    cdef PlanShelf shelf
    cdef KvView kv
    memset(&shelf, 0, sizeof(shelf))
    n_rows = sum(lens)
    view_layer(&kv, home, index)
    spans = <QuerySpan*>calloc(max(n_caches, 1), sizeof(QuerySpan))
    if spans is NULL:
        raise MemoryError("caches: cannot allocate the plan of the batch")
    try:
        for i in range(n_caches):
            cache = <PagedKvCache>batch[i]
            cache.begin_read(home)
            n_reading += 1
            spans[i].query_len = lens[i]
            if spans[i].query_len > cache.table.length:
                raise ValueError(f"query_lens[{i}]: expected at most the sequence's {cache.table.length} positions, "
                                 f"got {spans[i].query_len}")
            spans[i].table = cache.table.ids
            spans[i].seq_len = cache.table.length
            spans[i].first_position = first_position(&cache.table)
            spans[i].first_row = row
            row += spans[i].query_len
        return attend(asked, &kv, &shelf, spans, n_caches, n_rows, threads)
    finally:
        for i in range(n_reading):
            (<PagedKvCache>batch[i]).end_read()
        free_plans(&shelf)
        free(spans)


def attention(q, k, v, *, scale=None, window=None, softcap=None, sinks=None, alibi_slopes=None, causal=True,
              out=None, return_lse=False, n_threads=None):
    """Attention of one sequence over contiguous K and V, by the kernels of `paged_attention`.

    Parameters
    ----------
    q : array, float32 ``[n, n_q_heads, head_dim]``
        The last ``n`` of the ``s`` positions of K and V ask.
    k, v : array, float32
        ``[s, n_kv_heads, head_dim]`` and ``[s, n_kv_heads, v_head_dim]``, or flat ``[s, width]``, as the
        ``k`` and ``v`` of a `KvCache` are. ``n_kv_heads`` of a flat ``k`` is its width by ``head_dim``.
    scale, window, softcap, sinks, alibi_slopes, causal, out, return_lse, n_threads
        As for `paged_attention`. ``causal`` asks for ``n <= s``.

    Returns
    -------
    out : float32 array ``[n, n_q_heads, v_head_dim]``
        Or ``(out, lse)`` with ``return_lse``, ``lse`` float32 ``[n, n_q_heads]``.

    Raises
    ------
    TypeError, ValueError, MemoryError
        As for `paged_attention`.

    Notes
    -----
    Threads: runs without the GIL; nothing may change the arrays until it returns.

    Method: as for `paged_attention`.

    Examples
    --------
    >>> import numpy as np, pagedkv
    >>> k = v = np.eye(2, dtype=np.float32)                # two positions, one head of two values
    >>> q = np.zeros((2, 1, 2), np.float32)
    >>> pagedkv.attention(q, k, v).tolist()
    [[[1.0, 0.0]], [[0.5, 0.5]]]
    """
    cdef int threads = resolve_threads(0 if n_threads is None else as_thread_count(n_threads, "n_threads"))
    cdef Asked asked = as_asked(q, -1, scale, window, softcap, sinks, alibi_slopes, causal, out, return_lse)
    cdef cnp.ndarray k_rows = as_kv(k, "k")
    cdef cnp.ndarray v_rows = as_kv(v, "v")
    cdef int32_t table = 0
    cdef QuerySpan span
    cdef PlanShelf shelf
    cdef KvView kv
    memset(&shelf, 0, sizeof(shelf))
    # Nothing of the caller's runs any more.
    check_float32(asked.q, "q", (None, None, None))
    check_kv(k_rows, "k")
    check_kv(v_rows, "v")
    cdef Py_ssize_t n = asked.q.shape[0], head_dim = asked.q.shape[2], s = k_rows.shape[0]
    cdef Py_ssize_t k_width = width_of(k_rows), v_width = width_of(v_rows)
    cdef Py_ssize_t n_kv_heads = k_rows.shape[1] if k_rows.ndim == 3 else k_width // max(1, head_dim)
    if head_dim == 0 or n_kv_heads == 0 or k_width != n_kv_heads * head_dim:
        raise ValueError(f"k: expected heads of {head_dim} values, as q has, got {describe(k_rows)}")
    if v_rows.shape[0] != s or v_width == 0 or v_width % n_kv_heads or (
            v_rows.ndim == 3 and v_rows.shape[1] != n_kv_heads):
        raise ValueError(f"v: expected {s} rows of {n_kv_heads} heads, as k has, got {describe(v_rows)}")
    kv.n_kv_heads = n_kv_heads
    kv.block_size = max(1, s)
    view_floats(&kv.k, k_rows, k_width, head_dim)
    view_floats(&kv.v, v_rows, v_width, v_width // n_kv_heads)
    if asked.options.causal and n > s:
        raise ValueError(f"q: expected at most the {s} rows of k while causal, got {n}")
    if out is not None:
        as_result(out, "out", (n, asked.q.shape[1], kv.v.head_dim))
        check_apart(out, "out", k_rows, "k")
        check_apart(out, "out", v_rows, "v")
    span.table = &table
    span.seq_len = s
    span.first_position = 0
    span.query_len = n
    span.first_row = 0
    try:
        return attend(asked, &kv, &shelf, &span, 1, n, threads)
    finally:
        free_plans(&shelf)


def merge_attention_states(out_a, lse_a, out_b, lse_b):
    """Attention over two sets of positions, of what each gave alone.

    What a long context is cut up for: parts that lie in different stores, or that different processes attend to. Parts
    have no position in common, and of more than two any order will do.

    Parameters
    ----------
    out_a : array, float32 ``[n, n_q_heads, v_head_dim]``
        What attention gave over the first set.
    lse_a : array, float32 ``[n, n_q_heads]``
        The logarithms of the sums of its exponentials, as ``return_lse`` gives them. Where one is minus infinity, nothing was
        seen there, and what stands in ``out_a`` does not matter. Sinks, if any, are counted in one of the two sets alone.
    out_b : array, float32 ``[n, n_q_heads, v_head_dim]``
        What it gave over the second one.
    lse_b : array, float32 ``[n, n_q_heads]``
        As ``lse_a``.

    Returns
    -------
    out, lse : float32 arrays ``[n, n_q_heads, v_head_dim]`` and ``[n, n_q_heads]``
        As of one call over both.

    Raises
    ------
    TypeError, ValueError
        An array of another dtype, or of a shape that does not go with the first's.
    MemoryError
        The results cannot be had.

    Notes
    -----
    Threads: runs without the GIL; nothing may change the arrays until it returns.

    Method: Ye et al., "FlashInfer: Efficient and Customizable Attention Engine for LLM Inference Serving", MLSys 2025,
    section 2.2 (attention states and their composition).

    Examples
    --------
    >>> import numpy as np, pagedkv
    >>> q, k, v = np.ones((1, 2, 4), np.float32), *np.random.randn(2, 9, 1, 4).astype(np.float32)
    >>> parts = [pagedkv.attention(q, k[at], v[at], return_lse=True) for at in (slice(5), slice(5, 9))]
    >>> out, lse = pagedkv.merge_attention_states(*parts[0], *parts[1])
    >>> bool(np.allclose(out, pagedkv.attention(q, k, v), atol=1e-6))
    True
    """
    cdef cnp.ndarray a = as_float32(out_a, "out_a", (None, None, None)), b, lse_of_a, lse_of_b, out, lse
    lse_of_a = as_float32(lse_a, "lse_a", (None, None))
    b = as_float32(out_b, "out_b", (None, None, None))
    lse_of_b = as_float32(lse_b, "lse_b", (None, None))
    # Nothing of the caller's runs any more.
    check_float32(a, "out_a", (None, None, None))
    cdef tuple shape = (a.shape[0], a.shape[1], a.shape[2])
    check_float32(lse_of_a, "lse_a", shape[:2])
    check_float32(b, "out_b", shape)
    check_float32(lse_of_b, "lse_b", shape[:2])
    out, lse = as_result(None, "out", shape), as_result(None, "lse", shape[:2])
    cdef float* sums = <float*>cnp.PyArray_DATA(lse)
    cdef float* rows = <float*>cnp.PyArray_DATA(out)
    cdef const float* a_rows = <const float*>cnp.PyArray_DATA(a)
    cdef const float* b_rows = <const float*>cnp.PyArray_DATA(b)
    cdef const float* a_sums = <const float*>cnp.PyArray_DATA(lse_of_a)
    cdef const float* b_sums = <const float*>cnp.PyArray_DATA(lse_of_b)
    cdef Py_ssize_t i, n = a.shape[0] * a.shape[1], width = a.shape[2]
    with nogil:
        for i in range(n):
            sums[i] = merge_states(rows + i * width, a_rows + i * width, a_sums[i], b_rows + i * width, b_sums[i], width)
    return out, lse


cdef float merge_states(float* out, const float* a, float lse_a, const float* b, float lse_b, Py_ssize_t n) noexcept nogil:
    """One row; returns its lse."""
    cdef const simd_kernels* kernels = simd_in_use()
    cdef float most = max(lse_a, lse_b), weight_a, weight_b, total
    if lse_a == -INFINITY or lse_b == -INFINITY:  # what weighs nothing may be NaN
        if lse_a == lse_b:
            memset(out, 0, n * sizeof(float))
        else:
            memcpy(out, b if lse_a == -INFINITY else a, n * sizeof(float))
        return lse_b if lse_a == -INFINITY else lse_a
    weight_a, weight_b = expf(lse_a - most), expf(lse_b - most)
    total = weight_a + weight_b
    kernels.scale_row(out, a, weight_a / total, n)
    kernels.add_scaled_row(out, b, weight_b / total, n)
    return most + logf(total)


cdef void view_floats(RowView* view, cnp.ndarray rows, Py_ssize_t width, Py_ssize_t head_dim) noexcept:
    """Contiguous rows as the kernels see them."""
    view.rows = <const char*>cnp.PyArray_DATA(rows)
    view.block_bytes = 0
    view.row_bytes = width * sizeof(float)
    view.head_bytes = head_dim * sizeof(float)
    view.head_dim = head_dim
    view.item_bytes = sizeof(float)
    view.dtype = SIMD_F32
    view.scales = view.n_scales = view.turn_width = 0


# --- for whoever has a batch ready -------------------------------------------------------------------

cdef void view_layer(KvView* kv, PagedKvStore store, Py_ssize_t layer) noexcept:
    store.rows.k.view_layer(&kv.k, layer)
    store.rows.v.view_layer(&kv.v, layer)
    kv.block_size = store.block_size
    kv.n_kv_heads = store.n_kv_heads


cdef class Asked:
    """What a call asks. See attention.pxd."""


cdef Asked as_asked(
        object q, Py_ssize_t head_dim, object scale, object window, object softcap, object sinks, object alibi_slopes,
        object causal, object out, object return_lse):
    cdef cnp.ndarray rows = as_float32(q, "q", (None, None, None if head_dim < 0 else head_dim))
    cdef Asked asked = as_options(
        rows.shape[1], rows.shape[2], scale, window, softcap, sinks, alibi_slopes, causal, return_lse)
    asked.q = rows
    check_out(out, "out")
    asked.out = out
    return asked


cdef Asked as_options(
        Py_ssize_t n_q_heads, Py_ssize_t head_dim, object scale, object window, object softcap, object sinks,
        object alibi_slopes, object causal, object return_lse):
    cdef Asked asked = Asked.__new__(Asked)
    cdef AttendOptions* options = &asked.options
    options.scale = 1 / sqrt(head_dim) if scale is None else as_real(scale, "scale", False)
    options.softcap = 0 if softcap is None else as_real(softcap, "softcap", True)
    options.window = 0 if window is None else as_size(window, "window", 1, MAX_POSITIONS)
    options.causal = as_flag(causal, "causal")
    asked.return_lse = as_flag(return_lse, "return_lse")
    if sinks is not None:
        asked.sinks = as_float32(sinks, "sinks", (n_q_heads,))
    if alibi_slopes is not None:
        asked.alibi_slopes = as_float32(alibi_slopes, "alibi_slopes", (n_q_heads,))
    return asked


cdef object attend(Asked asked, const KvView* kv, PlanShelf* shelf, const QuerySpan* spans, Py_ssize_t n_spans,
                   Py_ssize_t n_rows, int n_threads):
    cdef cnp.ndarray q = asked.q, result, lse
    cdef Py_ssize_t n_q_heads = q.shape[1] if q.ndim == 3 else 0
    cdef AttendOptions options = asked.options
    cdef HeadsView q_view, out_view
    cdef float* lse_data = NULL
    check_readable(spans, n_spans, &options)
    if n_q_heads == 0 or n_q_heads % kv.n_kv_heads:
        raise ValueError(f"q: expected a multiple of {kv.n_kv_heads} heads, got {describe(q)}")
    check_float32(q, "q", (n_rows, n_q_heads, kv.k.head_dim))
    result = as_result(asked.out, "out", (n_rows, n_q_heads, kv.v.head_dim))
    check_apart(result, "out", q, "q")
    options.sinks = read_heads(asked.sinks, "sinks", n_q_heads, result)
    options.alibi_slopes = read_heads(asked.alibi_slopes, "alibi_slopes", n_q_heads, result)
    if asked.return_lse:
        lse = empty_floats((n_rows, n_q_heads))
        lse_data = <float*>cnp.PyArray_DATA(lse)
    view_heads(&q_view, q, kv.k.head_dim)
    view_heads(&out_view, result, kv.v.head_dim)
    run(shelf, &out_view, lse_data, &q_view, n_q_heads, kv, spans, n_spans, &options, n_threads)
    return result if lse_data is NULL else (result, lse)


cdef int run(PlanShelf* shelf, const HeadsView* out, float* lse, const HeadsView* q, Py_ssize_t n_q_heads, const KvView* kv,
             const QuerySpan* spans, Py_ssize_t n_spans, const AttendOptions* options, int n_threads) except -1:
    cdef const AttendPlan* plan
    cdef bint failed = True
    with nogil:
        plan = find_plan(shelf, kv, spans, n_spans, n_q_heads, options)
        if plan is not NULL:
            failed = run_attend(plan, out, lse, q, kv, options, n_threads)
    if failed:
        raise MemoryError("attention: cannot allocate the memory for intermediate sums")
    return 0


cdef void view_heads(HeadsView* view, cnp.ndarray rows, Py_ssize_t head_dim) noexcept:
    """Contiguous float32 [n_rows, n_heads, head_dim] as the kernels see it."""
    view.data = <char*>cnp.PyArray_DATA(rows)
    view.dtype = SIMD_F32
    view.head_bytes = head_dim * sizeof(float)
    view.row_bytes = rows.shape[1] * view.head_bytes


cdef const float* read_heads(cnp.ndarray values, str name, Py_ssize_t n_q_heads, cnp.ndarray result) except? NULL:
    """The address of a number for each query head; NULL for None."""
    if values is None:
        return NULL
    check_float32(values, name, (n_q_heads,))
    check_apart(result, "out", values, name)
    return <const float*>cnp.PyArray_DATA(values)


cdef int check_readable(const QuerySpan* spans, Py_ssize_t n_spans, const AttendOptions* options) except -1:
    """Refuse a batch in which a query would read positions that were given back."""
    cdef Py_ssize_t i, first
    for i in range(n_spans):
        if spans[i].first_position == 0 or spans[i].query_len == 0:
            continue
        first = 0
        if options.window:
            first = max(0, spans[i].seq_len - spans[i].query_len - options.window + 1)
        if first < spans[i].first_position:
            raise ValueError(
                f"window: sequence {i} would be read from position {first} on, but those before "
                f"{spans[i].first_position} were dropped")
    return 0


# --- arguments ---------------------------------------------------------------------------------------

cdef tuple as_query_lens(query_lens, Py_ssize_t n):
    if hasattr(query_lens, "__index__") and not getattr(query_lens, "ndim", 0):
        lens = (as_size(query_lens, "query_lens", 0, MAX_ROWS),) * n
    elif not hasattr(query_lens, "__len__") or isinstance(query_lens, (str, bytes, dict, set)):
        raise TypeError(f"query_lens: expected an integer or one for each cache, got {describe(query_lens)}")
    else:
        given = as_items(query_lens, "query_lens", "an integer or one for each cache")
        lens = tuple([as_size(length, f"query_lens[{i}]", 0, MAX_ROWS) for i, length in enumerate(given)])
    if len(lens) != n:
        raise ValueError(f"query_lens: expected {n} lengths, one for each cache, got {len(lens)}")
    as_size(sum(lens), "query_lens", 0, MAX_ROWS)
    return lens


cdef cnp.ndarray as_kv(array, str name):
    """K or V of `attention`: [s, width] or [s, heads, dim]."""
    return as_float32(as_native(array, name, KV_WANTED), name, None)


cdef int check_kv(cnp.ndarray rows, str name) except -1:
    if rows.ndim not in (2, 3):
        raise ValueError(f"{name}: expected {KV_WANTED}, got {describe(rows)}")
    check_float32(rows, name, None)
    return 0


cdef Py_ssize_t width_of(cnp.ndarray rows) except -1:
    """Values of a row, where there may be no row."""
    width = 1
    for i in range(1, rows.ndim):
        width *= rows.shape[i]
    return width
