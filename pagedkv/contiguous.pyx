"""KvCache: one sequence's K/V in private contiguous rows. KvBlockPool: a budget that such caches share."""

cimport cython
from libc.string cimport memcpy

from pagedkv._arrays cimport as_native, as_rows, as_size, as_step, describe, empty_rows
from pagedkv._kernels.simd cimport SIMD_F32
cimport numpy as cnp

import numpy as np

from pagedkv.errors import KvPoolExhausted

cdef Py_ssize_t MAX_SIZE = PY_SSIZE_T_MAX // 4  # sums of two stay far from overflow


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
        self.block_size = as_size(block_size, "block_size", 1, MAX_SIZE)
        self.total_blocks = as_size(total_blocks, "total_blocks", 1, MAX_SIZE)

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
        cdef Py_ssize_t total = as_size(total_blocks, "total_blocks", 1, MAX_SIZE)
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

    cdef void give_back(self, Py_ssize_t n) noexcept:
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

    Threads: a cache belongs to one thread at a time.

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
        self.set_rows(empty_rows((0, 0)), empty_rows((0, 0)))

    def __init__(self, n_kv_heads, head_dim, *, v_head_dim=None):
        cdef Py_ssize_t heads = as_size(n_kv_heads, "n_kv_heads", 1, MAX_SIZE)
        cdef Py_ssize_t k_dim = as_size(head_dim, "head_dim", 1, MAX_SIZE)
        cdef Py_ssize_t v_dim = k_dim if v_head_dim is None else as_size(v_head_dim, "v_head_dim", 1, MAX_SIZE)
        if self.n_kv_heads:  # asked last: what came before may have run the caller's code
            raise RuntimeError("KvCache: __init__ runs once")
        self.set_rows(empty_rows((0, int(heads) * int(k_dim))), empty_rows((0, int(heads) * int(v_dim))))
        self.seq_len = self.usable = 0
        self.n_kv_heads = heads
        self.head_dim = k_dim
        self.v_head_dim = v_dim

    def __dealloc__(self):
        if self.pool is not None:
            self.pool.give_back(self.pool_blocks)

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
        cdef Py_ssize_t n = as_size(max_seq_len, "max_seq_len", 0, MAX_SIZE)
        cdef KvCache cache = cls(n_kv_heads, head_dim, v_head_dim=v_head_dim)
        cache.make_room(n)
        cache.planned = n
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
        cdef Py_ssize_t n = as_size(max_seq_len, "max_seq_len", 0, MAX_SIZE)
        cdef KvCache cache = cls(n_kv_heads, head_dim, v_head_dim=v_head_dim)
        cdef Py_ssize_t size = (<KvBlockPool>pool).block_size
        cdef Py_ssize_t n_blocks = max(1, (n + size - 1) // size)
        (<KvBlockPool>pool).take(n_blocks)
        cache.pool = pool  # from here on the budget goes back with the cache
        cache.pool_blocks = n_blocks
        cache.make_room(n_blocks * size)
        cache.planned = n
        return cache

    # --- what it is ---

    @property
    def k(self):
        """The keys: a read-only float32 view ``[seq_len, n_kv_heads * head_dim]``. Later rows are not in it."""
        return self.k_array[:self.seq_len]

    @property
    def v(self):
        """The values: a read-only float32 view ``[seq_len, n_kv_heads * v_head_dim]``. Later rows are not in it."""
        return self.v_array[:self.seq_len]

    @property
    def allocated_bytes(self):
        """Bytes set aside for K and V, used or not."""
        return self.k_rows.shape[0] * (self.k_rows.shape[1] + self.v_rows.shape[1]) * sizeof(float)

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
            Another dtype or shape; no memory to grow.
        """
        cdef cnp.ndarray k = as_step(k_step, "k_step", SIMD_F32, 1, self.n_kv_heads, self.head_dim)
        cdef cnp.ndarray v = as_step(v_step, "v_step", SIMD_F32, 1, self.n_kv_heads, self.v_head_dim)
        if self.seq_len == self.usable:
            self.make_room(self.seq_len + 1)
        memcpy(&self.k_rows[self.seq_len, 0], cnp.PyArray_DATA(k), self.k_rows.shape[1] * sizeof(float))
        memcpy(&self.v_rows[self.seq_len, 0], cnp.PyArray_DATA(v), self.v_rows.shape[1] * sizeof(float))
        self.seq_len += 1
        if self.seq_len > self.planned:
            self.planned = -1

    def extend(self, k, v):
        """Append ``n`` positions at once, all or none.

        Parameters
        ----------
        k, v : array, float32
            ``[n, n_kv_heads, head_dim]`` and ``[n, n_kv_heads, v_head_dim]``, or flat, ``[n, width]``.

        Raises
        ------
        KvPoolExhausted, TypeError, ValueError, MemoryError
            As for `push`. Nothing was changed.
        """
        cdef object rows = as_native(k, "k", f"float32 [n, {self.k_rows.shape[1]}]")
        cdef Py_ssize_t n = len(rows) if rows.ndim else 0
        k_new = as_rows(rows, "k", SIMD_F32, 1, n, self.n_kv_heads, self.head_dim)[0]
        v_new = as_rows(v, "v", SIMD_F32, 1, n, self.n_kv_heads, self.v_head_dim)[0]
        cdef Py_ssize_t start = self.seq_len
        self.resize(start + n)
        np.asarray(self.k_rows)[start:start + n] = k_new
        np.asarray(self.v_rows)[start:start + n] = v_new

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
        """
        self.seq_len = as_size(n, "n", 0, self.seq_len)

    def clear(self):
        """Cut the sequence to nothing; memory and budget stay."""
        self.seq_len = 0

    def release_to_pool(self):
        """Give the whole budget back, and the memory with it. A second time it does nothing.

        A cache without a pool only gives its memory back. A later push draws on the pool again.
        """
        cdef Py_ssize_t n = self.pool_blocks
        self.set_rows(empty_rows((0, self.k_rows.shape[1])), empty_rows((0, self.v_rows.shape[1])))
        self.seq_len = 0
        self.pool_blocks = 0
        self.planned = -1
        self.usable = 0
        if self.pool is not None:
            self.pool.give_back(n)

    cdef int make_room(self, Py_ssize_t n) except -1:
        cdef Py_ssize_t allocated = self.k_rows.shape[0], used = self.seq_len, n_blocks = 0
        if n <= self.usable:
            return 0
        k, v = self.k_array, self.v_array
        if n > allocated:
            # The first allocation is exact, it may be a plan; growth doubles.
            allocated = max(n, 2 * allocated)
            k = empty_rows((allocated, self.k_rows.shape[1]))
            v = empty_rows((allocated, self.v_rows.shape[1]))
            k[:used] = self.k_array[:used]
            v[:used] = self.v_array[:used]
        if self.pool is not None:
            n_blocks = max(0, (n + self.pool.block_size - 1) // self.pool.block_size - self.pool_blocks)
            self.pool.take(n_blocks)
            self.pool_blocks += n_blocks
            allocated = min(allocated, self.pool_blocks * self.pool.block_size)
        if k is not self.k_array:
            self.set_rows(k, v)
        self.usable = allocated
        return 0

    cdef int set_rows(self, object k, object v) except -1:
        cdef float[:, ::1] k_rows = k, v_rows = v
        for rows in (k, v):
            # Views that are handed out must not be made writable again: NumPy asks the owner.
            (<object>rows).base.flags.writeable = False
            (<object>rows).flags.writeable = False
        self.k_rows, self.v_rows = k_rows, v_rows
        self.k_array, self.v_array = k, v
        return 0

    cdef int resize(self, Py_ssize_t n) except -1:
        self.make_room(n)
        self.seq_len = n
        if n > self.planned:
            self.planned = -1
        return 0

    cdef int check_heads(self, Py_ssize_t n_kv_heads, Py_ssize_t head_dim, Py_ssize_t v_head_dim) except -1:
        if (self.n_kv_heads, self.head_dim, self.v_head_dim) != (n_kv_heads, head_dim, v_head_dim):
            raise ValueError(
                f"out: expected a KvCache of {n_kv_heads} heads of {head_dim} and {v_head_dim} values, "
                f"got {self.n_kv_heads} heads of {self.head_dim} and {self.v_head_dim}")
        return 0


cdef extern from "Python.h":
    const Py_ssize_t PY_SSIZE_T_MAX
