"""KvCache: one sequence's K/V in private contiguous rows. KvBlockPool: a budget that such caches share."""

cimport cython
cimport numpy as cnp
from libc.string cimport memcpy, memmove

from pagedkv._arrays cimport MAX_POSITIONS, RowLayout, as_format, as_native, as_rows, as_size, check_rows, describe, empty_rows
from pagedkv._guard cimport enter_writer, leave_writer
from pagedkv._kernels.rows cimport NOGIL_FROM

from pagedkv.errors import KvPoolExhausted


cdef class KvBlockPool:
    """KvBlockPool(block_size, total_blocks)\n--\n
    A budget of blocks that contiguous caches draw on: it counts, and holds no memory.

    Parameters
    ----------
    block_size : int
        Positions a block stands for.
    total_blocks : int
        Blocks that all caches together may hold.

    Attributes
    ----------
    block_size, total_blocks : int
        As given; `resize` changes ``total_blocks``.
    held : int
        Blocks that caches hold now.

    Raises
    ------
    TypeError, ValueError
        A number that is no integer of at least 1.

    Notes
    -----
    Threads: any number of threads may draw on a pool at once.

    Examples
    --------
    >>> import pagedkv
    >>> pool = pagedkv.KvBlockPool(block_size=16, total_blocks=4)
    >>> cache = pagedkv.KvCache.with_pool(2, 64, pool, max_seq_len=40)
    >>> pool.free_blocks
    1
    >>> cache.release_to_pool()
    >>> pool.free_blocks
    4
    """

    def __cinit__(self, block_size, total_blocks):
        self.block_size = as_size(block_size, "block_size", 1, MAX_POSITIONS)
        self.total_blocks = as_size(total_blocks, "total_blocks", 1, MAX_POSITIONS)

    @property
    def free_blocks(self):
        """Blocks that no cache holds."""
        return self.total_blocks - self.held

    def resize(self, total_blocks):
        """Change the budget.

        Parameters
        ----------
        total_blocks : int
            Blocks that all caches together may hold from now on.

        Raises
        ------
        TypeError, ValueError
            No integer, or fewer than the caches hold now. Nothing was changed.
        """
        cdef Py_ssize_t total = as_size(total_blocks, "total_blocks", 1, MAX_POSITIONS)
        cdef Py_ssize_t held
        with cython.critical_section(self):
            held = self.held
            if total >= held:
                self.total_blocks = total
        if total < held:
            raise ValueError(f"total_blocks: expected at least {held}, which are held, got {total}")

    def __repr__(self):
        return f"KvBlockPool(block_size={self.block_size}, total_blocks={self.total_blocks}, free_blocks={self.free_blocks})"

    cdef int take(self, Py_ssize_t n) except -1:
        cdef Py_ssize_t free, total
        with cython.critical_section(self):
            total = self.total_blocks
            free = total - self.held
            if n <= free:
                self.held += n
        if n > free:
            raise KvPoolExhausted(n, free, total)
        return 0

    cdef void release(self, Py_ssize_t n) noexcept:
        with cython.critical_section(self):
            self.held -= n


@cython.no_gc_clear
cdef class KvCache:
    """KvCache(n_kv_heads, head_dim, *, v_head_dim=None)\n--\n
    One sequence's keys and values in contiguous float32 rows of its own.

    Parameters
    ----------
    n_kv_heads, head_dim : int
        Heads, and values of a K head: a K row is ``n_kv_heads * head_dim`` values.
    v_head_dim : int, optional
        Values of a V head where they are not ``head_dim``.

    Attributes
    ----------
    seq_len : int
        Positions written so far.
    n_kv_heads, head_dim, v_head_dim : int
        As given; ``v_head_dim`` is ``head_dim`` where it was not.

    Raises
    ------
    TypeError, ValueError, MemoryError
        A number that is no integer of at least 1, or more than memory can hold.

    Notes
    -----
    Memory grows by doubling; rows that were never written cost none.

    Threads: a cache belongs to one thread at a time. A method that would change it while another call does, or while
    rows are copied into it, raises RuntimeError and changes nothing. Its length and its views may be looked at by any
    thread: a view keeps its memory.

    Examples
    --------
    >>> import numpy as np, pagedkv
    >>> cache = pagedkv.KvCache(n_kv_heads=1, head_dim=2)
    >>> cache.push(np.ones(2, np.float32), np.zeros(2, np.float32))
    >>> cache.seq_len, cache.k
    (1, array([[1., 1.]], dtype=float32))
    """

    def __cinit__(self):
        self.planned = -1
        self.set_empty(0, 0)

    def __init__(self, n_kv_heads, head_dim, *, v_head_dim=None):
        cdef Py_ssize_t heads = as_size(n_kv_heads, "n_kv_heads", 1, MAX_POSITIONS)
        cdef Py_ssize_t k_dim = as_size(head_dim, "head_dim", 1, MAX_POSITIONS)
        cdef Py_ssize_t v_dim = k_dim if v_head_dim is None else as_size(v_head_dim, "v_head_dim", 1, MAX_POSITIONS)
        for name, dim in (("head_dim", k_dim), ("v_head_dim", v_dim)):
            if dim > MAX_POSITIONS // heads:
                raise ValueError(f"{name}: expected at most {MAX_POSITIONS // heads} with {heads} heads, so that a row can be "
                                 f"addressed, got {dim}")
        cdef RowLayout k_layout = RowLayout.of(as_format("float32"), heads, k_dim)
        cdef RowLayout v_layout = RowLayout.of(as_format("float32"), heads, v_dim)
        enter_writer(self, &self.users)
        try:
            if self.n_kv_heads:  # asked last: what came before may have run the caller's code
                raise RuntimeError("KvCache: __init__ runs once")
            self.set_empty(heads * k_dim, heads * v_dim)
            self.n_kv_heads = heads
            self.head_dim = k_dim
            self.v_head_dim = v_dim
            self.k_layout = k_layout
            self.v_layout = v_layout
        finally:
            leave_writer(self, &self.users)

    def __dealloc__(self):
        if self.pool is not None:
            self.pool.release(self.pool_blocks)

    @classmethod
    def with_capacity(cls, n_kv_heads, head_dim, max_seq_len, *, v_head_dim=None):
        """A cache with room for ``max_seq_len`` positions from the start: no push up to there moves a row.

        Parameters
        ----------
        n_kv_heads, head_dim, v_head_dim
            As for the class.
        max_seq_len : int
            Positions, 0 or more. A longer sequence is no error: then the cache grows.

        Returns
        -------
        KvCache

        Raises
        ------
        TypeError, ValueError, MemoryError
            As the class.
        """
        cdef Py_ssize_t n = as_size(max_seq_len, "max_seq_len", 0, MAX_POSITIONS)
        cdef KvCache cache = cls(n_kv_heads, head_dim, v_head_dim=v_head_dim)
        cache.check_made()
        enter_writer(cache, &cache.users)
        try:
            cache.make_room(n, None, None, 0)
            cache.planned = n
        finally:
            leave_writer(cache, &cache.users)
        return cache

    @classmethod
    def with_pool(cls, n_kv_heads, head_dim, pool, max_seq_len, *, v_head_dim=None):
        """A cache whose blocks count against a pool's budget.

        The blocks for ``max_seq_len`` positions, at least one, are taken now; each block beyond
        them when a push needs it. Memory is set aside for what is taken. The budget goes back by
        `release_to_pool`, or with the cache.

        Parameters
        ----------
        n_kv_heads, head_dim, v_head_dim
            As for the class.
        pool : KvBlockPool
        max_seq_len : int
            Positions, 0 or more.

        Returns
        -------
        KvCache

        Raises
        ------
        KvPoolExhausted
            The pool has too few. Nothing was changed.
        TypeError, ValueError, MemoryError
            No pool; and as the class.
        """
        if not isinstance(pool, KvBlockPool):
            raise TypeError(f"pool: expected a KvBlockPool, got {describe(pool)}")
        cdef Py_ssize_t n = as_size(max_seq_len, "max_seq_len", 0, MAX_POSITIONS)
        cdef KvCache cache = cls(n_kv_heads, head_dim, v_head_dim=v_head_dim)
        cdef Py_ssize_t size = (<KvBlockPool>pool).block_size
        cdef Py_ssize_t n_blocks = max(1, (n + size - 1) // size)
        cache.check_made()
        enter_writer(cache, &cache.users)
        try:
            if cache.pool is not None or cache.usable:
                raise RuntimeError("KvCache: with_pool makes a new cache, and got one that is in use")
            cache.pool = pool
            cache.make_room(n_blocks * size, None, None, 0)
            cache.planned = n
        finally:
            leave_writer(cache, &cache.users)
        return cache

    # --- what it is ---

    @property
    def k(self):
        """The keys: a read-only float32 view ``[seq_len, n_kv_heads * head_dim]``. Later rows are not in it."""
        with cython.critical_section(self):
            rows, n = self.k_array, self.seq_len
        return rows[:n]

    @property
    def v(self):
        """The values: a read-only float32 view ``[seq_len, n_kv_heads * v_head_dim]``. Later rows are not in it."""
        with cython.critical_section(self):
            rows, n = self.v_array, self.seq_len
        return rows[:n]

    @property
    def allocated_bytes(self):
        """Bytes set aside for K and V, used or not."""
        with cython.critical_section(self):
            k, v = self.k_array, self.v_array
        return k.nbytes + v.nbytes

    @property
    def is_within_planned_capacity(self):
        """Whether a size was planned (`with_capacity`, `with_pool`) and never exceeded."""
        return self.planned >= 0

    def __repr__(self):
        return (f"KvCache(seq_len={self.seq_len}, n_kv_heads={self.n_kv_heads}, "
                f"head_dim={self.head_dim}, v_head_dim={self.v_head_dim})")

    def __reduce__(self):
        raise TypeError("KvCache: cannot be copied or pickled; its rows are in .k and .v")

    # --- changing it ---

    def push(self, k_step, v_step):
        """Append one position: ``seq_len`` grows by 1.

        Parameters
        ----------
        k_step, v_step : array, float32
            ``[n_kv_heads, head_dim]`` and ``[n_kv_heads, v_head_dim]``, or flat, ``[width]``.

        Raises
        ------
        KvPoolExhausted
            One more block of the pool was needed. Nothing was changed.
        TypeError, ValueError, MemoryError
            Another dtype or shape; no memory to grow. Nothing was changed.
        RuntimeError
            In use by another call. Nothing was changed.
        """
        self.check_made()
        cdef cnp.ndarray k = as_rows(k_step, "k_step", self.k_layout, 1, -1)
        cdef cnp.ndarray v = as_rows(v_step, "v_step", self.v_layout, 1, -1)
        if v is not v_step:  # the caller's code may have run, and changed k
            self.check_given(k, v, -1)
        self.write(k, v, -1)

    def extend(self, k, v):
        """Append ``n`` positions at once, all or none.

        Parameters
        ----------
        k, v : array, float32
            ``[n, n_kv_heads, head_dim]`` and ``[n, n_kv_heads, v_head_dim]``, or flat, ``[n, width]``.

        Raises
        ------
        KvPoolExhausted, TypeError, ValueError, MemoryError, RuntimeError
            As for `push`. Nothing was changed.
        """
        self.check_made()
        cdef object rows = as_native(k, "k", f"float32 [n, {self.n_kv_heads * self.head_dim}]")
        cdef Py_ssize_t n = len(rows) if rows.ndim else 0
        cdef cnp.ndarray k_new = as_rows(rows, "k", self.k_layout, 1, n)
        cdef cnp.ndarray v_new = as_rows(v, "v", self.v_layout, 1, n)
        if v_new is not v:
            self.check_given(k_new, v_new, n)
        self.write(k_new, v_new, n)

    def truncate(self, n):
        """Cut the sequence to its first ``n`` positions; memory and budget stay.

        Parameters
        ----------
        n : int
            0 to ``seq_len``.

        Raises
        ------
        TypeError, ValueError
            No integer, or above ``seq_len``.
        RuntimeError
            In use by another call.
        """
        cdef Py_ssize_t size = as_size(n, "n", 0, MAX_POSITIONS)
        enter_writer(self, &self.users)
        cdef Py_ssize_t most = self.seq_len
        self.seq_len = min(size, most)
        leave_writer(self, &self.users)
        if size > most:
            raise ValueError(f"n: expected an integer from 0 to {most}, got {size}")

    def clear(self):
        """Cut the sequence to nothing; memory and budget stay. RuntimeError while another call changes it."""
        enter_writer(self, &self.users)
        self.seq_len = 0
        leave_writer(self, &self.users)

    def release_to_pool(self):
        """Give the whole budget back, and the memory with it. A second time it does nothing.

        A cache without a pool only gives its memory back. A later push draws on the pool again.

        Raises
        ------
        RuntimeError
            In use by another call. Nothing was changed.
        """
        enter_writer(self, &self.users)
        try:
            self.set_empty(self.k_rows.shape[1], self.v_rows.shape[1])
            if self.pool is not None:
                self.pool.release(self.pool_blocks)
            self.seq_len = self.usable = self.pool_blocks = 0
            self.planned = -1
        finally:
            leave_writer(self, &self.users)

    # --- at C level ---

    cdef int check_made(self) except -1:
        if self.n_kv_heads == 0:
            raise RuntimeError("KvCache: its __init__ has not run")
        return 0

    cdef int check_given(self, cnp.ndarray k, cnp.ndarray v, Py_ssize_t n) except -1:
        check_rows(k, "k_step" if n < 0 else "k", self.k_layout, 1, n)
        check_rows(v, "v_step" if n < 0 else "v", self.v_layout, 1, n)
        return 0

    cdef int write(self, cnp.ndarray k, cnp.ndarray v, Py_ssize_t n) except -1:
        """Append n rows, or a step for -1, that were checked: all that can fail, then the bytes, then the length."""
        cdef Py_ssize_t count = 1 if n < 0 else n
        cdef Py_ssize_t k_row = self.k_rows.shape[1] * sizeof(float), v_row = self.v_rows.shape[1] * sizeof(float)
        cdef char* k_dst
        cdef char* v_dst
        cdef const char* k_src
        cdef const char* v_src
        enter_writer(self, &self.users)
        try:
            if count > self.usable - self.seq_len:
                self.make_room(self.seq_len + count, k, v, n)
            k_src, v_src = <const char*>cnp.PyArray_DATA(k), <const char*>cnp.PyArray_DATA(v)
            k_dst = <char*>cnp.PyArray_DATA(<cnp.ndarray>self.k_array) + self.seq_len * k_row
            v_dst = <char*>cnp.PyArray_DATA(<cnp.ndarray>self.v_array) + self.seq_len * v_row
            # Not memcpy: they may be rows of this cache, from before it was truncated.
            if count * (k_row + v_row) < NOGIL_FROM:
                memmove(k_dst, k_src, count * k_row)
                memmove(v_dst, v_src, count * v_row)
            else:
                with nogil:
                    memmove(k_dst, k_src, count * k_row)
                    memmove(v_dst, v_src, count * v_row)
            self.set_len(self.seq_len + count)
        finally:
            leave_writer(self, &self.users)
        return 0

    cdef int make_room(self, Py_ssize_t n, cnp.ndarray k, cnp.ndarray v, Py_ssize_t n_new) except -1:
        cdef Py_ssize_t allocated = self.k_rows.shape[0], n_blocks = 0
        cdef float[:, ::1] k_rows = self.k_rows, v_rows = self.v_rows
        cdef object k_array = self.k_array, v_array = self.v_array
        if n <= self.usable:
            return 0
        if self.pool is not None:
            n_blocks = max(0, (n + self.pool.block_size - 1) // self.pool.block_size - self.pool_blocks)
            self.pool.take(n_blocks)
        try:
            if n > allocated:
                # The first allocation is exact, it may be a plan; growth doubles.
                allocated = max(n, 2 * allocated)
                k_array = empty_rows((allocated, self.k_rows.shape[1]))
                v_array = empty_rows((allocated, self.v_rows.shape[1]))
                k_rows, v_rows = k_array, v_array
                if self.seq_len:
                    memcpy(&k_rows[0, 0], &self.k_rows[0, 0], self.seq_len * k_rows.shape[1] * sizeof(float))
                    memcpy(&v_rows[0, 0], &self.v_rows[0, 0], self.seq_len * v_rows.shape[1] * sizeof(float))
                seal(k_array), seal(v_array)
            if k is not None:
                self.check_given(k, v, n_new)
        except BaseException:
            if self.pool is not None:
                self.pool.release(n_blocks)
            raise
        self.set_rows(k_array, v_array, k_rows, v_rows)
        self.pool_blocks += n_blocks
        self.usable = allocated if self.pool is None else min(allocated, self.pool_blocks * self.pool.block_size)
        return 0

    cdef int set_empty(self, Py_ssize_t k_width, Py_ssize_t v_width) except -1:
        k, v = empty_rows((0, k_width)), empty_rows((0, v_width))
        cdef float[:, ::1] k_rows = k, v_rows = v
        seal(k), seal(v)
        self.set_rows(k, v, k_rows, v_rows)
        return 0

    cdef void set_rows(self, object k, object v, float[:, ::1] k_rows, float[:, ::1] v_rows) noexcept:
        with cython.critical_section(self):
            self.k_rows, self.v_rows = k_rows, v_rows
            self.k_array, self.v_array = k, v

    cdef void set_len(self, Py_ssize_t n) noexcept:
        self.seq_len = n
        if n > self.planned:
            self.planned = -1

    cdef int begin_overwriting(self, Py_ssize_t n) except -1:
        enter_writer(self, &self.users)
        try:
            self.make_room(n, None, None, 0)
        except BaseException:
            leave_writer(self, &self.users)
            raise
        return 0

    cdef void end_overwriting(self, Py_ssize_t n) noexcept:
        self.set_len(n)
        leave_writer(self, &self.users)

    cdef int check_heads(self, Py_ssize_t n_kv_heads, Py_ssize_t head_dim, Py_ssize_t v_head_dim) except -1:
        self.check_made()
        if (self.n_kv_heads, self.head_dim, self.v_head_dim) != (n_kv_heads, head_dim, v_head_dim):
            raise ValueError(
                f"out: expected a KvCache of {n_kv_heads} heads of {head_dim} and {v_head_dim} values, "
                f"got {self.n_kv_heads} heads of {self.head_dim} and {self.v_head_dim}")
        return 0


cdef KvCache as_target(object out, str name, Py_ssize_t n_kv_heads, Py_ssize_t head_dim, Py_ssize_t v_head_dim):
    if out is None:
        return KvCache(n_kv_heads, head_dim, v_head_dim=v_head_dim)
    if not isinstance(out, KvCache):
        raise TypeError(f"{name}: expected a KvCache, got {describe(out)}")
    (<KvCache>out).check_heads(n_kv_heads, head_dim, v_head_dim)
    return <KvCache>out


cdef object seal(object rows):
    """Views that are handed out must not be made writable again: NumPy asks the owner."""
    rows.base.flags.writeable = False
    rows.flags.writeable = False
    return rows


cdef extern from "Python.h":
    const Py_ssize_t PY_SSIZE_T_MAX
