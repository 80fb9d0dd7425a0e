"""PagedKvCache: one sequence, in the words of the specification.

The table, its blocks and its guard are `BlockTable`'s, which this class makes public. Every method
follows one order: check the arguments, take the guard, take blocks, move bytes, commit.
"""

cimport cython
cimport numpy as cnp
from libc.stdint cimport INT32_MAX, int32_t
from libc.string cimport memcpy

from pagedkv._arrays cimport as_ids, as_index, as_size, describe, empty_ids
from pagedkv._kernels.parallel cimport resolve_threads
from pagedkv._kernels.rows cimport GivenRows
from pagedkv._rows cimport BlockRows
from pagedkv._store cimport NOGIL_FROM
from pagedkv._table cimport MAX_POSITIONS, BlockTable, blocks_for, check_adopted
from pagedkv.contiguous cimport KvCache
from pagedkv.store cimport PagedKvStore, as_store


@cython.no_gc_clear
cdef class PagedKvCache(BlockTable):
    """PagedKvCache()\n--\n
    One sequence in a `PagedKvStore`: a block table and a length. Holds no K/V itself.

    Every method that touches blocks takes the store as its first argument, which has to be the same one for as long as
    the cache holds blocks. Garbage collection gives the blocks back, as `release` does.

    Attributes
    ----------
    store : PagedKvStore or None
        The store whose blocks it holds; None while it holds none.

    Notes
    -----
    Threads: a cache belongs to one thread at a time, its store to all of them. A method called while a `Step` or an
    attention call runs on the cache raises RuntimeError and changes nothing. Any thread may look at its table and length.

    Method: the block table of Kwon et al., SOSP 2023, section 4, as `PagedKvStore` has it.

    Examples
    --------
    >>> import numpy as np, pagedkv
    >>> store = pagedkv.PagedKvStore(block_size=4, total_blocks=8, n_kv_heads=1, head_dim=2)
    >>> cache = pagedkv.PagedKvCache()
    >>> cache.push(store, np.ones(2, np.float32), np.zeros(2, np.float32))
    >>> cache
    PagedKvCache(seq_len=1, capacity=4, blocks=[0])
    >>> cache.to_contiguous(store).k
    array([[1., 1.]], dtype=float32)
    """

    def __init__(self):
        pass

    # --- what it is ---

    @property
    def seq_len(self):
        """Positions written so far."""
        return self.length

    @property
    def capacity(self):
        """Positions that fit into the blocks held, counted from position 0."""
        return self.n_blocks * self.block_size

    @property
    def first_position(self):
        """The first position that can still be read; above 0 after `drop_before`."""
        return self.n_dropped * self.block_size

    @property
    def block_table(self):
        """The block ids in order: a read-only int32 array ``[n_blocks]``, a snapshot.

        Position ``p`` lives in row ``p % block_size`` of block ``block_table[p // block_size]``.
        Blocks that `drop_before` gave back are -1.
        """
        cdef Py_ssize_t n = self.n_blocks
        table = empty_ids(n)
        with cython.critical_section(self):
            n = min(n, self.n_blocks)
            if n:
                memcpy(cnp.PyArray_DATA(table), &self.table[0], n * sizeof(int32_t))
        table = table[:n]
        table.flags.writeable = False
        return table

    def __repr__(self):
        blocks = self.block_table.tolist()
        shown = ", ".join(map(str, blocks[:8])) + (", ..." if len(blocks) > 8 else "")
        return f"{type(self).__name__}(seq_len={self.length}, capacity={self.capacity}, blocks=[{shown}])"

    # --- growing ---

    def push(self, store, k_step, v_step):
        """Append one position's key and value: ``seq_len`` grows by 1.

        Parameters
        ----------
        store : PagedKvStore
        k_step, v_step : array, float32
            ``[width]`` or ``[n_kv_heads, head_dim]``; one row a layer, ``[n_layers, ...]``, where the
            store has several layers. A float16 store takes float16 rows too, as they are, and a bfloat16
            store the bits of bfloat16 as uint16.

        Raises
        ------
        PagedStoreExhausted
            A block was needed and none was free. Nothing was changed.
        TypeError, ValueError, RuntimeError
            Rows of another dtype or shape; another store; in use by a running call. Nothing was changed.
        """
        cdef PagedKvStore home = as_store(store)
        if not home.holds(k_step, v_step, home.n_layers, -1):
            k_step = home.given_k(k_step, home.n_layers, -1)
            v_step = home.given_v(v_step, home.n_layers, -1, k_step)
        cdef BlockRows k_rows = home.k, v_rows = home.v
        cdef GivenRows k_given, v_given
        cdef Py_ssize_t row
        self.begin_write(home)
        try:
            self.prepare(home, 1, <cnp.ndarray>k_step, <cnp.ndarray>v_step, -1)
            k_given, v_given = k_rows.given(<cnp.ndarray>k_step), v_rows.given(<cnp.ndarray>v_step)
            row = self.table[self.length // self.block_size] * self.block_size + self.length % self.block_size
            if home.step_bytes < NOGIL_FROM:
                k_rows.put(row, k_given)
                v_rows.put(row, v_given)
            else:
                with nogil:
                    k_rows.put(row, k_given)
                    v_rows.put(row, v_given)
            self.length += 1
        finally:
            self.end_write()
        self.after_growth(home)

    def append_contiguous(self, store, k, v, count):
        """Append ``count`` positions in one go: the inverse of `to_contiguous`.

        Parameters
        ----------
        store : PagedKvStore
        k, v : array, float32
            ``[count, width]`` or ``[count, n_kv_heads, head_dim]``, with a leading ``n_layers`` axis
            where the store has several layers. Strided arrays are copied first. 16-bit rows as for `push`.
        count : int
            Rows to append; all that ``k`` and ``v`` have.

        Raises
        ------
        PagedStoreExhausted
            The blocks for all ``count`` positions are taken before the first row is written; if they
            are not there, nothing was changed.
        TypeError, ValueError, RuntimeError
            As for `push`.
        """
        cdef PagedKvStore home = as_store(store)
        cdef Py_ssize_t n = as_size(count, "count", 0, MAX_POSITIONS)
        if not home.holds(k, v, home.n_layers, n):
            k = home.given_k(k, home.n_layers, n)
            v = home.given_v(v, home.n_layers, n, k)
        cdef BlockRows k_rows = home.k, v_rows = home.v
        cdef GivenRows k_given, v_given
        cdef int n_threads = resolve_threads(0)
        self.begin_write(home)
        try:
            if n:
                self.prepare(home, n, k, v, n)
                k_given, v_given = k_rows.given(k), v_rows.given(v)
                with nogil:
                    k_rows.append(k_given, self.table, self.length, n, n_threads)
                    v_rows.append(v_given, self.table, self.length, n, n_threads)
                self.length += n
        finally:
            self.end_write()
        self.after_growth(home)

    def blocks_needed_for(self, store, n_new):
        """How many blocks appending ``n_new`` positions would take from the store.

        Counted against the capacity held, so reserved blocks are not asked for twice; a block that
        has to be copied before it is written, since others hold it too, counts as one.

        Parameters
        ----------
        store : PagedKvStore
        n_new : int
            Positions, 0 or more.

        Returns
        -------
        int

        Raises
        ------
        TypeError, ValueError, RuntimeError
            No number of positions; another store; in use by a running call that writes.
        """
        cdef Py_ssize_t n = as_size(n_new, "n_new", 0, MAX_POSITIONS)
        cdef PagedKvStore home = as_store(store)
        self.begin_read(home)
        cdef Py_ssize_t n_needed = self.n_missing(home, n) + self.n_shared(home, n)
        self.end_read()
        return n_needed

    def reserve(self, store, n_new):
        """Take the blocks that ``n_new`` more positions need, without advancing ``seq_len``.

        After it, pushes up to there cannot fail: a shared tail is copied now. Blocks that stay
        unused belong to this cache until it releases or truncates.

        Parameters
        ----------
        store : PagedKvStore
        n_new : int
            Positions beyond ``seq_len``, 0 or more.

        Raises
        ------
        PagedStoreExhausted
            Too few blocks are free. Nothing was changed.
        TypeError, ValueError, RuntimeError
            No number of positions; another store; in use by a running call.
        """
        cdef Py_ssize_t n = as_size(n_new, "n_new", 0, MAX_POSITIONS)
        cdef PagedKvStore home = as_store(store)
        self.begin_write(home)
        try:
            self.prepare(home, n, None, None, 0)
        finally:
            self.end_write()
        self.after_growth(home)

    # --- starting on others' blocks ---

    def adopt_blocks(self, block_table, seq_len, block_size, *, store=None):
        """Start on blocks that the caller holds, with ``seq_len`` positions already computed in them.

        This cache takes over one reference a block: the caller retains the blocks of a cached
        prefix, and hands that reference on.

        Parameters
        ----------
        block_table : list, tuple, range or integer array ``[n_blocks]``
            Block ids in order; at least ``seq_len // block_size``, more are reserved blocks.
        seq_len : int
            Positions, a whole number of blocks: the next append must not write into a shared block.
        block_size : int
            That of the store.
        store : PagedKvStore, optional
            The blocks' store: the ids are checked at once. Without it they are checked at the first use with
            a store, and until then garbage collection has nobody to give them back to.

        Raises
        ------
        ValueError
            A ragged ``seq_len``, too short a table, a cache that holds blocks, an id nobody holds,
            another block size. Nothing was changed, the references are still the caller's.
        TypeError, IndexError, RuntimeError
            Not integers; an id out of range; in use by a running call.
        """
        cdef PagedKvStore home = None if store is None else as_store(store)
        cdef Py_ssize_t size = as_size(block_size, "block_size", 1, MAX_POSITIONS)
        cdef Py_ssize_t n = as_size(seq_len, "seq_len", 0, MAX_POSITIONS)
        cdef int32_t[::1] table = as_ids(block_table, "block_table", INT32_MAX)
        if n % size:
            raise ValueError(f"seq_len: expected a multiple of block_size {size}, got {n}")
        if n // size > table.shape[0]:
            raise ValueError(f"block_table: expected at least {n // size} ids for seq_len {n}, got {table.shape[0]}")
        if table.shape[0] > MAX_POSITIONS // size:
            raise ValueError(f"block_size: {table.shape[0]} blocks of {size} positions are more than can be counted")
        self.lock_write()
        try:
            if self.n_blocks:
                raise ValueError(f"block_table: this cache holds {self.n_blocks - self.n_dropped} blocks already")
            if home is not None:
                check_adopted(home, table, table.shape[0], size)
            with cython.critical_section(self):
                self.table = table
                self.n_blocks = table.shape[0]
            self.block_size = size
            self.length = n
            if self.n_blocks:
                self.store = home
        finally:
            self.end_write()
        if home is not None:
            home.after_change()

    def clone(self):
        """A second sequence with the same positions, which shares every block and costs none.

        Either of the two copies a shared block before it first writes into it. Blocks that were
        reserved past ``seq_len`` are not shared. `copy.copy` and `copy.deepcopy` do the same.

        Returns
        -------
        PagedKvCache

        Raises
        ------
        RuntimeError
            In use by a running call that writes; or the blocks were adopted and no store has been seen yet.
        OverflowError
            A block has 2**31 - 1 holders.
        """
        cdef PagedKvCache other = type(self).__new__(type(self))
        self.share_into(other)
        return other

    def clone_from(self, source):
        """Give back this cache's own blocks and become a clone of ``source``, as `clone` makes one.

        Parameters
        ----------
        source : PagedKvCache
            Stays as it is. A cache that is its own source changes nothing.

        Raises
        ------
        TypeError, RuntimeError, OverflowError
            No PagedKvCache; and as for `clone`, of either of the two. Nothing was changed.
        """
        if not isinstance(source, PagedKvCache):
            raise TypeError(f"source: expected a PagedKvCache, got {describe(source)}")
        if source is not self:
            (<PagedKvCache>source).share_into(self)

    def __copy__(self):
        return self.clone()

    def __deepcopy__(self, memo):
        return self.clone()

    def __reduce__(self):
        raise TypeError("PagedKvCache: cannot be pickled, it holds blocks of a store by id")

    # --- shrinking ---

    def release(self, store):
        """Give every block back, which is free when its last holder has; the cache is empty again, also a second time.

        Parameters
        ----------
        store : PagedKvStore

        Raises
        ------
        TypeError, ValueError, RuntimeError
            No store; another one; in use by a running call.
        """
        cdef PagedKvStore home = as_store(store)
        self.begin_write(home)
        try:
            self.give_back_from(self.n_dropped)
            self.n_blocks = self.n_dropped = self.length = 0
        finally:
            self.end_write()
        home.after_change()

    def truncate(self, store, new_len):
        """Cut the sequence to ``new_len`` positions, and give back the blocks past them, reserved ones too.

        Parameters
        ----------
        store : PagedKvStore
        new_len : int
            ``first_position`` to ``seq_len``. A shared tail stays shared: it is copied when it is next written.

        Raises
        ------
        TypeError, ValueError
            ``new_len`` is no integer, is above ``seq_len``, or lies before the first position that is still held.
        RuntimeError
            In use by a running call.
        """
        cdef PagedKvStore home = as_store(store)
        cdef Py_ssize_t n = as_size(new_len, "new_len", 0, MAX_POSITIONS)
        self.begin_write(home)
        try:
            if not self.n_dropped * self.block_size <= n <= self.length:
                raise ValueError(f"new_len: expected {self.first_position} to {self.length}, got {n}")
            if self.n_blocks:
                keep = max(blocks_for(n, self.block_size), self.n_dropped)
                self.give_back_from(keep)
                self.n_blocks = keep
            self.length = n
        finally:
            self.end_write()
        home.after_change()

    def can_truncate_to(self, new_len):
        """Whether `truncate` would take this length: one that is written and still held.

        Parameters
        ----------
        new_len : int
            Positions, 0 or more.

        Returns
        -------
        bool

        Raises
        ------
        TypeError, ValueError
            ``new_len`` is no integer of at least 0.
        """
        cdef Py_ssize_t n = as_size(new_len, "new_len", 0, MAX_POSITIONS)
        return self.n_dropped * self.block_size <= n <= self.length

    def drop_before(self, store, position):
        """Give back the blocks that lie wholly before ``position``: what a sliding window has left behind.

        ``first_position`` becomes the start of the block that holds ``position``. Positions before it
        can never be read again: attention that would need them, `to_contiguous` and a truncation to
        there are refused.

        Parameters
        ----------
        store : PagedKvStore
        position : int
            0 to ``seq_len``. With a window of ``w``, the next query sees nothing before ``seq_len + 1 - w``.

        Raises
        ------
        TypeError, ValueError, RuntimeError
            No integer; ``position`` is above ``seq_len``; another store; in use by a running call.
        """
        cdef PagedKvStore home = as_store(store)
        cdef Py_ssize_t p = as_size(position, "position", 0, MAX_POSITIONS)
        cdef Py_ssize_t i, n
        self.begin_write(home)
        try:
            if p > self.length:
                raise ValueError(f"position: expected 0 to {self.length}, got {p}")
            n = p // self.block_size if self.n_blocks else 0
            if n > self.n_dropped:
                home.give_back(&self.table[self.n_dropped], n - self.n_dropped)
                for i in range(self.n_dropped, n):
                    self.table[i] = -1
                self.n_dropped = n
        finally:
            self.end_write()
        home.after_change()

    # --- reading ---

    def to_contiguous(self, store, *, layer=0, out=None):
        """Copy the K/V of one layer out of the store.

        Parameters
        ----------
        store : PagedKvStore
        layer : int, optional
            0 to ``n_layers - 1``.
        out : KvCache, optional
            Is overwritten and returned: its buffers are used again. Views of it that were taken
            before show the new rows, or keep the old ones if it had to grow.

        Returns
        -------
        KvCache
            ``seq_len`` positions: ``k`` float32 ``[seq_len, k_width]``, ``v`` float32 ``[seq_len, v_width]``.

        Raises
        ------
        ValueError
            Another store, an ``out`` of other widths, or positions that `drop_before` gave up.
        IndexError, TypeError, RuntimeError
            ``layer`` out of range; ``out`` is no KvCache; in use by a running call that writes, or ``out`` by any.
        """
        cdef PagedKvStore home = as_store(store)
        cdef Py_ssize_t index = as_index(layer, "layer", home.n_layers)
        cdef int n_threads = resolve_threads(0)
        cdef BlockRows k_rows = home.k, v_rows = home.v
        cdef float[:, ::1] k, v
        if out is None:
            out = KvCache(home.n_kv_heads, home.head_dim, v_head_dim=home.v_head_dim)
        elif not isinstance(out, KvCache):
            raise TypeError(f"out: expected a KvCache, got {describe(out)}")
        cdef KvCache target = <KvCache>out
        target.check_heads(home.n_kv_heads, home.head_dim, home.v_head_dim)
        self.begin_read(home)
        try:
            if self.n_dropped:
                raise ValueError(f"to_contiguous: positions before {self.first_position} were dropped")
            target.begin_overwriting(self.length)
            k, v = target.k_rows, target.v_rows
            if self.length:
                with nogil:
                    k_rows.gather(k, index, self.table, self.length, n_threads)
                    v_rows.gather(v, index, self.table, self.length, n_threads)
            target.end_overwriting(self.length)
        finally:
            self.end_read()
        return target
