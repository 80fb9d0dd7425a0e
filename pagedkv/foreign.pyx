"""AttentionBatch: attention over K and V that somebody else allocates, counts and names.

A batch is tables, lengths and how the blocks are laid out; the blocks themselves come with each call, a layer's at a
time. Tables are copied before they are checked, once a step, so that no layer looks at them again: an array's number of
blocks is compared with the greatest id.
"""

cimport cython
cimport numpy as cnp
from libc.stdint cimport int32_t, int64_t
from libc.stdlib cimport calloc, free, malloc
from libc.string cimport memset

from pagedkv._arrays cimport (
    MAX_ROWS, as_counts, as_format, as_ids, as_size, as_thread_count, check_apart, describe, empty_floats, empty_slots)
from pagedkv._kernels.parallel cimport resolve_threads
from pagedkv._kernels.plan cimport AttendOptions, HeadsView, KvView, PlanShelf, QuerySpan, RowView, free_plans
from pagedkv._kernels.rows cimport place_rows
from pagedkv._kernels.simd cimport SIMD_BF16, simd_dtype_number
from pagedkv._tensors cimport Tensor, as_integers, as_tensor, empty_like, view_integers, view_tensor
from pagedkv.attention cimport Asked, as_options, read_heads, run

import numpy as np

cdef Py_ssize_t MAX_BLOCK_SIZE = 1 << 31
cdef object MAX_ID = 2**31 - 1

# How the axes of blocks are ordered, and how errors write that.
cdef dict SHAPES = {
    "NHD": "[n_blocks, block_size, n_kv_heads, head_dim]",
    "HND": "[n_blocks, n_kv_heads, block_size, head_dim]",
}


cdef class AttentionBatch:
    """AttentionBatch(block_tables, seq_lens, query_lens=1, *, block_size, indptr=None, layout="NHD", dtype=None,
                      n_threads=None)\n--\n
    A batch of sequences whose K and V lie in somebody else's blocks: planned once a step, for all layers.

    The kernels are those of `paged_attention`, and so is what a query sees. Nothing is kept of the arrays that the methods
    are given, and nobody counts blocks here: an engine that has a block manager of its own calls this in the place of its
    attention.

    Parameters
    ----------
    block_tables : integer array ``[n_seqs, max_blocks]``, or a list of lists of int
        Position ``p`` of sequence ``i`` is row ``p % block_size`` of block ``block_tables[i, p // block_size]``. Entries
        past a sequence's length may be anything. With ``indptr`` ``[n_ids]``: the tables one after the other.
    seq_lens : sequence or integer array of int ``[n_seqs]``
        Positions of each sequence, the new ones included.
    query_lens : int, or a sequence or integer array of them ``[n_seqs]``, optional
        New positions of each, its last ones, 0 or more: 1 is decode, more is prefill. One number stands for all.
    block_size : int
        Positions of a block.
    indptr : sequence or integer array of int ``[n_seqs + 1]``, optional
        Sequence ``i`` has the ids ``block_tables[indptr[i]:indptr[i + 1]]``.
    layout : "NHD" or "HND", optional
        The order of a block's axes: ``[block_size, n_kv_heads, head_dim]``, or ``[n_kv_heads, block_size, head_dim]``.
    dtype : "float32", "float16" or "bfloat16", optional
        What K and V have to be; any of the three without it. With "bfloat16", arrays of uint16 are taken for its bits.
    n_threads : int, optional
        1 to 256; what `get_num_threads` says without it. The result is the same to the bit for any number.

    Attributes
    ----------
    n_seqs : int
        Sequences.
    n_rows : int
        New positions of all of them together: the rows of q.
    block_size : int
        As given.
    layout : str
        As given.

    Raises
    ------
    TypeError, ValueError
        An argument of another type, shape or range; a sequence longer than its table; a query length above its length.
    IndexError
        An id below 0 or above ``2**31 - 1`` among those that the lengths reach.
    MemoryError
        No memory for the tables.

    Notes
    -----
    K and V of a layer are two arrays in the layout's shape, or one array, with None for V, of which the first half is K and the
    second V: ``[n_blocks, 2, ...]`` or ``[2, n_blocks, ...]``, with ``2 * block_size`` rows, or with heads of
    ``2 * head_dim`` values. Strides may be any, as long as a head's values lie side by side.

    Arrays come from NumPy or by DLPack (torch and others), or are buffers, in float32, float16 or bfloat16, and are read
    and written where they lie, each in its own dtype. bfloat16 comes from ml_dtypes, by DLPack, or as ``dtype`` says.

    Sequences whose tables begin with the same ids are computed together, as in `paged_attention`.

    Threads: a batch belongs to one thread at a time, other uses raise RuntimeError; methods run without the GIL. Tables and
    lengths are copied before they are looked at, and may change afterwards. Nothing may resize the arrays of a call, or write
    into what it reads, until it returns.

    Method: Ye et al. 2025, "FlashInfer", section 3.3 (a plan for all layers of a step); and as for `paged_attention`.

    Examples
    --------
    >>> import numpy as np, pagedkv
    >>> k_cache, v_cache = np.zeros((2, 8, 4, 1, 2), np.float32)     # 8 blocks of 4 rows of one head of two values
    >>> batch = pagedkv.AttentionBatch([[5, 3]], [6], [6], block_size=4)
    >>> rows = np.ones((6, 1, 2), np.float32)
    >>> batch.write(k_cache, v_cache, rows, rows)
    >>> batch.attend(rows, k_cache, v_cache)[5].tolist()
    [[1.0, 1.0]]
    >>> k_cache[3, :, 0, 0].tolist()                                 # the last two positions
    [1.0, 1.0, 0.0, 0.0]
    """

    cdef object __weakref__
    cdef readonly Py_ssize_t n_seqs
    cdef readonly Py_ssize_t n_rows
    cdef readonly Py_ssize_t block_size
    cdef readonly str layout
    cdef int kind                       # SIMD_F32 ..., or -1: that of the arrays
    cdef int n_threads
    cdef bint busy                      # a call is running
    cdef int32_t* ids                   # of all sequences, as far as they reach
    cdef int32_t max_id                 # or -1
    cdef QuerySpan* spans               # whose tables lie in ids
    cdef PlanShelf plans
    cdef cnp.ndarray own_slots          # where the tables put the new rows, or None
    cdef bint slots_are_apart           # was looked at

    def __cinit__(self, block_tables, seq_lens, query_lens=1, *, block_size, indptr=None, layout="NHD", dtype=None,
                  n_threads=None):
        cdef cnp.ndarray lengths, queries, ends, tables
        memset(&self.plans, 0, sizeof(PlanShelf))
        self.max_id = -1
        self.block_size = as_size(block_size, "block_size", 1, MAX_BLOCK_SIZE)
        if type(layout) is not str or layout not in SHAPES:
            raise ValueError(f"layout: expected 'NHD' or 'HND', got {layout!r}")
        self.layout = layout
        self.kind = -1
        if dtype is not None:
            name = as_format(dtype).name
            if name not in ("float32", "float16", "bfloat16"):
                raise ValueError(f"dtype: expected float32, float16 or bfloat16, got {name}")
            self.kind = simd_dtype_number(name)
        self.n_threads = resolve_threads(0 if n_threads is None else as_thread_count(n_threads, "n_threads"))
        lengths = as_counts(seq_lens, "seq_lens", -1, MAX_ROWS)
        self.n_seqs = lengths.shape[0]
        queries = as_counts(query_lens, "query_lens", self.n_seqs, MAX_ROWS)
        if isinstance(block_tables, (list, tuple)) and indptr is None:
            tables, ends = chain_tables(block_tables)
        else:
            ends = None if indptr is None else as_counts(indptr, "indptr", -1, MAX_ROWS)
            if isinstance(block_tables, (list, tuple)):
                block_tables = as_ids(block_tables, "block_tables", MAX_ID + 1)
            tables = as_integers(block_tables, "block_tables", tables_wanted(ends is not None))
        # Nothing of the caller's runs any more.
        self.take_lengths(lengths, queries)
        self.take_tables(tables, ends)

    def __dealloc__(self):
        free_plans(&self.plans)
        free(self.spans)
        free(self.ids)

    @property
    def positions(self):
        """The position of each new row in its sequence, for rotary embeddings: int64 ``[n_rows]``."""
        cdef cnp.ndarray result = empty_slots(self.n_rows)
        cdef int64_t* out = <int64_t*>cnp.PyArray_DATA(result)
        cdef Py_ssize_t i, p, row = 0
        for i in range(self.n_seqs):
            for p in range(self.spans[i].seq_len - self.spans[i].query_len, self.spans[i].seq_len):
                out[row] = p
                row += 1
        return result

    @property
    def slots(self):
        """Where the tables put each new row: ``block * block_size + row``, int64 ``[n_rows]``."""
        cdef cnp.ndarray result = empty_slots(self.n_rows)
        cdef int64_t* out = <int64_t*>cnp.PyArray_DATA(result)
        cdef Py_ssize_t i, p, row = 0, size = self.block_size
        for i in range(self.n_seqs):
            for p in range(self.spans[i].seq_len - self.spans[i].query_len, self.spans[i].seq_len):
                out[row] = <int64_t>self.spans[i].table[p // size] * size + p % size
                row += 1
        return result

    def write(self, k_cache, v_cache, k, v, slots=None):
        """Put new rows of one layer into their blocks.

        Parameters
        ----------
        k_cache : array, float32, float16 or bfloat16 ``[n_blocks, block_size, n_kv_heads, head_dim]``
            The layer's blocks, which are written; shapes as the class says.
        v_cache : array or None, float32, float16 or bfloat16 ``[n_blocks, block_size, n_kv_heads, v_head_dim]``
            In the dtype of ``k_cache``; None where that holds V too.
        k, v : array, float32, float16 or bfloat16 ``[n, n_kv_heads, head_dim]``
            Rows in any of the three dtypes; they are converted where the blocks hold another.
        slots : sequence or integer array of int ``[n]``, optional
            Where each row goes: ``block * block_size + row``. The last positions of each sequence without it, as `slots` has
            them, with ``n = n_rows``.

        Raises
        ------
        TypeError, ValueError
            An array of another dtype or shape; one that is read-only, or whose values are not all in places of their own; K and V
            of the cache, or rows, in one place; two rows for one slot.
        IndexError
            A slot, or an id of a table, out of range.
        RuntimeError
            Another call on the batch is running.
        MemoryError
            No memory for looking at the slots.
        """
        cdef bint bits = self.kind == SIMD_BF16
        cdef cnp.ndarray k_blocks = as_tensor(k_cache, "k_cache", SHAPES[self.layout], bits, True), v_blocks = None
        cdef cnp.ndarray k_rows, v_rows, places = None
        cdef Tensor k_given, v_given
        cdef HeadsView k_heads, v_heads
        cdef KvView kv
        cdef Py_ssize_t n_blocks, n
        if v_cache is not None:
            v_blocks = as_tensor(v_cache, "v_cache", SHAPES[self.layout], bits, True)
        k_rows = as_tensor(k, "k", "[n, n_kv_heads, head_dim]", bits, False)
        v_rows = as_tensor(v, "v", "[n, n_kv_heads, v_head_dim]", bits, False)
        if slots is not None:
            places = as_counts(slots, "slots", -1, MAX_ROWS)
        self.begin_call()
        try:
            n_blocks = self.view_blocks(&kv, k_blocks, v_blocks, True)
            if places is None:
                self.check_ids(n_blocks)
                if self.own_slots is None:
                    self.own_slots = self.slots
                places = self.own_slots
            n = places.shape[0]
            view_tensor(&k_given, k_rows, "k", "[n, n_kv_heads, head_dim]", 3, False)
            view_tensor(&v_given, v_rows, "v", "[n, n_kv_heads, v_head_dim]", 3, False)
            check_heads(&k_given, k_rows, "k", n, kv.n_kv_heads, kv.k.head_dim)
            check_heads(&v_given, v_rows, "v", n, kv.n_kv_heads, kv.v.head_dim)
            for rows, name in ((k_rows, "k"), (v_rows, "v")):
                check_apart(k_blocks, "k_cache", rows, name)
                if v_blocks is not None:
                    check_apart(v_blocks, "v_cache", rows, name)
            if not are_apart(&kv, n_blocks):
                raise ValueError("v_cache: expected values that are none of k_cache's")
            if places is not self.own_slots or not self.slots_are_apart:
                check_slots(places, n_blocks * self.block_size)
                self.slots_are_apart = self.slots_are_apart or places is self.own_slots
            view_heads(&k_heads, &k_given)
            view_heads(&v_heads, &v_given)
            with nogil:
                place_rows(&kv.k, kv.block_size, &k_heads, kv.n_kv_heads,
                           <const int64_t*>cnp.PyArray_DATA(places), n, self.n_threads)
                place_rows(&kv.v, kv.block_size, &v_heads, kv.n_kv_heads,
                           <const int64_t*>cnp.PyArray_DATA(places), n, self.n_threads)
        finally:
            self.busy = False

    def attend(self, q, k_cache, v_cache=None, *, scale=None, window=None, softcap=None, sinks=None, alibi_slopes=None,
               causal=True, out=None, return_lse=False):
        """Attention of the new rows over their sequences, in one layer.

        Parameters
        ----------
        q : array, float32, float16 or bfloat16 ``[n_rows, n_q_heads, head_dim]``
            The query rows of all sequences, one after the other. ``n_q_heads`` is a multiple of ``n_kv_heads``.
        k_cache : array, float32, float16 or bfloat16 ``[n_blocks, block_size, n_kv_heads, head_dim]``
            The layer's blocks, which hold the new rows already; shapes as the class says.
        v_cache : array, float32, float16 or bfloat16 ``[n_blocks, block_size, n_kv_heads, v_head_dim]``, optional
            In the dtype of ``k_cache``; None where that holds V too.
        scale, window, softcap, sinks, alibi_slopes, causal, return_lse : optional
            As for `paged_attention`.
        out : array, float32, float16 or bfloat16 ``[n_rows, n_q_heads, v_head_dim]``, optional
            Gets the result. It must not overlap an input.

        Returns
        -------
        out : array ``[n_rows, n_q_heads, v_head_dim]``
            ``out``, or a new NumPy array of q's dtype: uint16 for the bits of bfloat16, unless q is an array of ml_dtypes.
        lse : float32 array ``[n_rows, n_q_heads]``, with ``return_lse``
            As for `paged_attention`.

        Raises
        ------
        TypeError, ValueError
            An array of another dtype or shape, or options as for `paged_attention`.
        IndexError
            A table names a block that the arrays do not have.
        RuntimeError
            Another call on the batch is running.
        MemoryError
            No memory for the result or for intermediate sums.
        """
        cdef bint bits = self.kind == SIMD_BF16
        cdef cnp.ndarray queries = as_tensor(q, "q", "[n_rows, n_q_heads, head_dim]", bits, False)
        cdef cnp.ndarray k_blocks = as_tensor(k_cache, "k_cache", SHAPES[self.layout], bits, False), v_blocks = None
        cdef cnp.ndarray result = None, lse
        cdef float* lse_data = NULL
        cdef Py_ssize_t n_q_heads, head_dim
        cdef AttendOptions options
        cdef HeadsView q_view, out_view
        cdef Tensor q_given, out_given
        cdef KvView kv
        cdef Asked asked
        if v_cache is not None:
            v_blocks = as_tensor(v_cache, "v_cache", SHAPES[self.layout], bits, False)
        if out is not None:
            result = as_tensor(out, "out", "[n_rows, n_q_heads, v_head_dim]", bits, True)
        view_tensor(&q_given, queries, "q", "[n_rows, n_q_heads, head_dim]", 3, False)
        n_q_heads, head_dim = q_given.shape[1], q_given.shape[2]
        asked = as_options(n_q_heads, head_dim, scale, window, softcap, sinks, alibi_slopes, causal, return_lse)
        self.begin_call()
        try:
            self.check_ids(self.view_blocks(&kv, k_blocks, v_blocks, False))
            if n_q_heads == 0 or n_q_heads % kv.n_kv_heads:
                raise ValueError(f"q: expected a multiple of {kv.n_kv_heads} heads, got {describe(queries)}")
            view_tensor(&q_given, queries, "q", "[n_rows, n_q_heads, head_dim]", 3, False)
            check_heads(&q_given, queries, "q", self.n_rows, n_q_heads, kv.k.head_dim)
            if head_dim != kv.k.head_dim:
                raise ValueError(f"q: expected heads of {head_dim} values, got {describe(queries)} after another argument was "
                                 "read")
            if result is None:
                result = empty_like(queries, (self.n_rows, n_q_heads, kv.v.head_dim))
            view_tensor(&out_given, result, "out", "[n_rows, n_q_heads, v_head_dim]", 3, True)
            check_heads(&out_given, result, "out", self.n_rows, n_q_heads, kv.v.head_dim)
            check_apart(result, "out", queries, "q")
            check_apart(result, "out", k_blocks, "k_cache")
            check_apart(result, "out", v_blocks, "v_cache")
            options = asked.options
            options.sinks = read_heads(asked.sinks, "sinks", n_q_heads, result)
            options.alibi_slopes = read_heads(asked.alibi_slopes, "alibi_slopes", n_q_heads, result)
            if asked.return_lse:
                lse = empty_floats((self.n_rows, n_q_heads))
                lse_data = <float*>cnp.PyArray_DATA(lse)
            view_heads(&q_view, &q_given)
            view_heads(&out_view, &out_given)
            run(&self.plans, &out_view, lse_data, &q_view, n_q_heads, &kv, self.spans, self.n_seqs, &options, self.n_threads)
        finally:
            self.busy = False
        given = result if out is None else out
        if out is None and q_given.dtype == SIMD_BF16 and isinstance(q, np.ndarray):
            given = result.view(q.dtype)  # of ml_dtypes, or uint16
        return given if lse_data is NULL else (given, lse)

    def __repr__(self):
        return f"AttentionBatch(n_seqs={self.n_seqs}, n_rows={self.n_rows}, block_size={self.block_size}, layout={self.layout!r})"

    # --- the plan ---

    cdef int begin_call(self) except -1:
        """One call at a time: a call may make a plan, which another could be using."""
        cdef bint idle
        with cython.critical_section(self):
            idle = not self.busy
            self.busy = True
        if not idle:
            raise RuntimeError("batch: another call on it is running")
        return 0

    cdef int take_lengths(self, cnp.ndarray lengths, cnp.ndarray queries) except -1:
        cdef const int64_t* seq_lens = <const int64_t*>cnp.PyArray_DATA(lengths)
        cdef const int64_t* query_lens = <const int64_t*>cnp.PyArray_DATA(queries)
        cdef Py_ssize_t i, row = 0
        self.spans = <QuerySpan*>calloc(max(self.n_seqs, 1), sizeof(QuerySpan))
        if self.spans is NULL:
            raise MemoryError("seq_lens: cannot allocate the plan of the batch")
        for i in range(self.n_seqs):
            if query_lens[i] > seq_lens[i]:
                raise ValueError(f"query_lens[{i}]: expected at most the sequence's {seq_lens[i]} positions, got "
                                 f"{query_lens[i]}")
            self.spans[i].seq_len = seq_lens[i]
            self.spans[i].query_len = query_lens[i]
            self.spans[i].first_row = row
            row += query_lens[i]
            if row > MAX_ROWS:
                raise ValueError(f"query_lens: expected at most {MAX_ROWS} rows together")
        self.n_rows = row
        return 0

    cdef int take_tables(self, cnp.ndarray tables, cnp.ndarray ends) except -1:
        """Copy what the lengths reach, and look at the copy."""
        cdef const int64_t* indptr = NULL
        cdef Tensor given
        cdef const char* row
        cdef Py_ssize_t i, n, width, total = 0
        cdef int32_t* ids
        view_integers(&given, tables, "block_tables", tables_wanted(ends is not None), 1 if ends is not None else 2)
        if ends is not None:
            indptr = <const int64_t*>cnp.PyArray_DATA(ends)
            check_indptr(indptr, ends.shape[0], self.n_seqs, given.shape[0])
        elif given.shape[0] != self.n_seqs:
            raise ValueError(f"block_tables: expected {self.n_seqs} tables, one for each of seq_lens, got {describe(tables)}")
        for i in range(self.n_seqs):
            width = indptr[i + 1] - indptr[i] if indptr is not NULL else given.shape[1]
            n = self.blocks_of(i)
            if n > width:
                raise ValueError(f"seq_lens[{i}]: expected at most the {width * self.block_size} positions of the {width} blocks "
                                 f"in its table, got {self.spans[i].seq_len}")
            total += n
        self.ids = ids = <int32_t*>malloc(max(total, 1) * sizeof(int32_t))
        if ids is NULL:
            raise MemoryError("block_tables: cannot allocate a copy of the tables")
        for i in range(self.n_seqs):
            row = given.data + (indptr[i] if indptr is not NULL else i) * given.strides[0]
            n = self.blocks_of(i)
            width = copy_ids(ids, row, given.strides[given.n_axes - 1], given.dtype, n, &self.max_id)
            if width < n:
                got = tables[indptr[i] + width] if indptr is not NULL else tables[i, width]
                raise IndexError(f"block_tables: expected ids from 0 to {MAX_ID}, got {got} for block {width} of sequence {i}")
            self.spans[i].table = ids
            ids += n
        return 0

    cdef inline Py_ssize_t blocks_of(self, Py_ssize_t i) noexcept:
        return (self.spans[i].seq_len + self.block_size - 1) // self.block_size

    cdef int check_ids(self, Py_ssize_t n_blocks) except -1:
        cdef Py_ssize_t i, j
        if self.max_id < n_blocks:
            return 0
        for i in range(self.n_seqs):
            for j in range(self.blocks_of(i)):
                if self.spans[i].table[j] >= n_blocks:
                    raise IndexError(f"block_tables: expected ids from 0 to {n_blocks - 1}, the blocks of k_cache, got "
                                     f"{self.spans[i].table[j]} for block {j} of sequence {i}")
        return 0

    # --- the blocks ---

    cdef Py_ssize_t view_blocks(self, KvView* kv, cnp.ndarray k_blocks, cnp.ndarray v_blocks, bint writable) except -1:
        """K and V of a layer as the kernels see them; returns how many blocks there are."""
        cdef str shape = SHAPES[self.layout]
        cdef int rows = 1 if self.layout == "NHD" else 2, heads = 3 - rows
        cdef Tensor k, v
        if v_blocks is None:
            view_tensor(&k, k_blocks, "k_cache", f"K and V {shape} in one array", 5 if k_blocks.ndim == 5 else 4, writable)
            halve(&k, &v, k_blocks, rows, self.block_size)
        else:
            view_tensor(&k, k_blocks, "k_cache", shape, 4, writable)
            view_tensor(&v, v_blocks, "v_cache", shape, 4, writable)
        check_blocks(&k, k_blocks, "k_cache", rows, self.block_size)
        check_blocks(&v, k_blocks if v_blocks is None else v_blocks, "v_cache", rows, self.block_size)
        if v.shape[0] != k.shape[0] or v.shape[heads] != k.shape[heads]:
            raise ValueError(f"v_cache: expected {k.shape[0]} blocks of {k.shape[heads]} heads, as k_cache has, got "
                             f"{describe(v_blocks)}")
        if v.dtype != k.dtype:
            raise TypeError(f"v_cache: expected the dtype of k_cache, {k_blocks.dtype}, got {describe(v_blocks)}")
        if self.kind >= 0 and k.dtype != self.kind:
            raise TypeError(f"k_cache: expected what dtype says, got {describe(k_blocks)}")
        kv.block_size = self.block_size
        kv.n_kv_heads = k.shape[heads]
        view_rows(&kv.k, &k, rows)
        view_rows(&kv.v, &v, rows)
        return k.shape[0]


# --- looking at blocks -------------------------------------------------------------------------------

cdef int halve(Tensor* k, Tensor* v, cnp.ndarray blocks, int rows, Py_ssize_t block_size) except -1:
    """K and V of an array that holds both."""
    cdef int axis, i
    if k.n_axes == 5:
        axis = 1 if k.shape[1] == 2 else 0
        if k.shape[axis] != 2:
            raise ValueError(f"k_cache: expected K and V in one array, [n_blocks, 2, ...], got {describe(blocks)}")
        v[0] = k[0]
        v.data += k.strides[axis]
        for i in range(axis, 4):
            k.shape[i] = v.shape[i] = k.shape[i + 1]
            k.strides[i] = v.strides[i] = k.strides[i + 1]
        k.n_axes = v.n_axes = 4
        return 0
    axis = rows if k.shape[rows] == 2 * block_size else 3
    if axis == 3 and k.shape[3] % 2:
        raise ValueError(f"k_cache: expected K and V in one array, of twice as many rows or values, got {describe(blocks)}")
    k.shape[axis] //= 2
    v[0] = k[0]
    v.data += k.shape[axis] * k.strides[axis]
    return 0


cdef int check_blocks(const Tensor* given, cnp.ndarray blocks, str name, int rows, Py_ssize_t block_size) except -1:
    cdef int axis
    if given.shape[rows] != block_size or given.shape[3] == 0 or given.shape[3 - rows] == 0:
        raise ValueError(f"{name}: expected {SHAPES['NHD' if rows == 1 else 'HND']} with block_size {block_size}, got "
                         f"{describe(blocks)}")
    for axis in range(3):
        if given.strides[axis] < 0 and given.shape[axis] > 1 and given.shape[0]:
            raise ValueError(f"{name}: expected no strides below 0, got {[given.strides[i] for i in range(4)]}")
    return 0


cdef void view_rows(RowView* view, const Tensor* given, int rows) noexcept:
    cdef int heads = 3 - rows
    view.rows = given.data
    view.block_bytes = given.strides[0]
    view.row_bytes = given.strides[rows]
    view.head_dim = given.shape[3]
    view.item_bytes = given.item_bytes
    view.dtype = given.dtype
    # NumPy says nothing of the stride of one head; the kernels are told of heads side by side.
    view.head_bytes = given.strides[heads] if given.shape[heads] > 1 else view.head_dim * view.item_bytes
    view.scales = view.n_scales = view.turn_width = 0


cdef void view_heads(HeadsView* view, const Tensor* given) noexcept:
    view.data = given.data
    view.dtype = given.dtype
    view.row_bytes = given.strides[0]
    view.head_bytes = given.strides[1]


cdef int check_heads(const Tensor* given, cnp.ndarray rows, str name, Py_ssize_t n, Py_ssize_t n_heads,
                     Py_ssize_t head_dim) except -1:
    if given.shape[0] != n or given.shape[1] != n_heads or given.shape[2] != head_dim:
        raise ValueError(f"{name}: expected [{n}, {n_heads}, {head_dim}], got {describe(rows)}")
    return 0


cdef Py_ssize_t common_divisor(Py_ssize_t a, Py_ssize_t b) noexcept:
    while b:
        a, b = b, a % b
    return a


cdef bint are_apart(const KvView* kv, Py_ssize_t n_blocks) noexcept:
    """Whether no value of K is one of V, where they may lie in turns in one array.

    For some of the axes, K and V each fill a part of what the others' strides step over, and the same part in every step.
    """
    cdef Py_ssize_t* k_strides = [kv.k.block_bytes, kv.k.row_bytes, kv.k.head_bytes]
    cdef Py_ssize_t* v_strides = [kv.v.block_bytes, kv.v.row_bytes, kv.v.head_bytes]
    cdef Py_ssize_t* sizes = [n_blocks, kv.block_size, kv.n_kv_heads]
    cdef Py_ssize_t k_reach, v_reach, step, distance
    cdef int outer, axis
    if n_blocks == 0:
        return True
    for outer in range(8):
        step = 0
        k_reach = kv.k.head_dim * kv.k.item_bytes
        v_reach = kv.v.head_dim * kv.v.item_bytes
        for axis in range(3):
            if sizes[axis] == 1:
                continue
            if outer >> axis & 1:
                step = common_divisor(common_divisor(step, k_strides[axis]), v_strides[axis])
            else:
                k_reach += (sizes[axis] - 1) * k_strides[axis]
                v_reach += (sizes[axis] - 1) * v_strides[axis]
        distance = kv.v.rows - kv.k.rows
        if step == 0:
            if distance >= k_reach or -distance >= v_reach:
                return True
            continue
        distance = (distance % step + step) % step
        if distance >= k_reach and distance + v_reach <= step:
            return True
    return False


# --- tables and slots --------------------------------------------------------------------------------

cdef str tables_wanted(bint ragged):
    return "[n_ids], with indptr" if ragged else "[n_seqs, max_blocks]"


cdef tuple chain_tables(object block_tables):
    """Tables one after the other, and where each begins."""
    cdef list tables = [as_ids(table, "block_tables", MAX_ID + 1) for table in block_tables]
    ends = np.cumsum([0, *[table.shape[0] for table in tables]], dtype=np.int64)
    return np.concatenate([np.empty(0, np.int32), *tables]), ends


cdef int check_indptr(const int64_t* indptr, Py_ssize_t n, Py_ssize_t n_seqs, Py_ssize_t n_ids) except -1:
    cdef Py_ssize_t i
    if n != n_seqs + 1:
        raise ValueError(f"block_tables: expected {n_seqs} tables, one for each of seq_lens, got {n - 1}")
    for i in range(n_seqs):
        if indptr[i] > indptr[i + 1]:
            raise ValueError(f"indptr: expected numbers that do not fall, got {indptr[i]} before {indptr[i + 1]}")
    if indptr[n_seqs] > n_ids:
        raise ValueError(f"indptr: expected at most the {n_ids} ids of block_tables, got {indptr[n_seqs]}")
    return 0


cdef Py_ssize_t copy_ids(int32_t* dst, const char* src, Py_ssize_t stride, int item_bytes, Py_ssize_t n,
                         int32_t* max_id) noexcept nogil:
    """How many of n ids are ones, up to the first that is none. Each is read once, and it is what was read that counts."""
    cdef Py_ssize_t i
    cdef int64_t id
    cdef int32_t most = max_id[0]
    for i in range(n):
        id = (<const int32_t*>(src + i * stride))[0] if item_bytes == 4 else (<const int64_t*>(src + i * stride))[0]
        if not 0 <= id <= 0x7fffffff:
            return i
        dst[i] = <int32_t>id
        most = max(most, <int32_t>id)
    max_id[0] = most
    return n


cdef int check_slots(cnp.ndarray places, Py_ssize_t n_slots) except -1:
    """Slots that are there, each once."""
    cdef const int64_t* slots = <const int64_t*>cnp.PyArray_DATA(places)
    cdef Py_ssize_t i, n = places.shape[0], size = 16
    cdef int64_t* seen
    cdef bint rising = True
    for i in range(n):
        if slots[i] >= n_slots:
            raise IndexError(f"slots: expected 0 to {n_slots - 1}, got {slots[i]}")
        rising = rising and (i == 0 or slots[i - 1] < slots[i])
    if rising:
        return 0
    while size < 2 * n:
        size *= 2
    seen = <int64_t*>calloc(size, sizeof(int64_t))
    if seen is NULL:
        raise MemoryError("slots: cannot allocate memory for looking at them")
    i = find_twice(slots, n, seen, size)
    free(seen)
    if i >= 0:
        raise ValueError(f"slots: expected a place of its own for each row, got {slots[i]} twice")
    return 0


cdef Py_ssize_t find_twice(const int64_t* slots, Py_ssize_t n, int64_t* seen, Py_ssize_t size) noexcept nogil:
    """The first number that came before, or -1. `seen` is a hash table of zeros, of a power of two."""
    cdef Py_ssize_t i, place
    for i in range(n):
        place = <Py_ssize_t>(<size_t>slots[i] * <size_t>0x9e3779b97f4a7c15 >> 20) & (size - 1)
        while seen[place]:
            if seen[place] == slots[i] + 1:
                return i
            place = (place + 1) & (size - 1)
        seen[place] = slots[i] + 1
    return -1
