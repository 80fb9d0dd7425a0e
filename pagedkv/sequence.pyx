"""PagedKvCache: one sequence, in the words of the specification: a block table, a length, and the guard that keeps calls apart.

What its table is and how it changes says `_tables`. Here is what a caller gives and gets, and who may use it now.

A public method goes in one order: it converts what the caller gave, looks at it, takes the guard, stages, moves bytes, and
commits.
"""

cimport cython
cimport numpy as cnp
from cpython.object cimport PyObject
from libc.stdint cimport INT32_MAX, int32_t, int64_t
from libc.stdlib cimport free

from pagedkv._arrays cimport MAX_POSITIONS, after_dropped, as_ids, as_index, as_items, as_size, describe, empty_ids
from pagedkv._guard cimport enter_reader, enter_writer, leave_reader, leave_writer
from pagedkv._kernels.parallel cimport resolve_threads
from pagedkv._kernels.rows cimport Places, in_blocks, in_slots, slot_of
from pagedkv._tables cimport (
    BlockTable, Growth, check_table, commit_growth, copy_ids, cut_table, drop_blocks_before, empty_table,
    first_position as first_kept, fork_table, measure,
    new_ids, release_table, replace_table, stage_one)
from pagedkv.contiguous cimport KvCache, as_target
from pagedkv.store cimport PagedKvStore, as_store


@cython.no_gc_clear  # the blocks go back to the store when the sequence goes: it must still be there
cdef class PagedKvCache:
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

    def __cinit__(self):
        self.table.owner = <PyObject*>self

    def __init__(self):
        pass

    def __dealloc__(self):
        if self.store is not None:
            release_table(&self.table, self.store)
        free(self.table.ids)

    # --- what it is ---

    @property
    def seq_len(self):
        """Positions written so far."""
        return self.table.length

    @property
    def capacity(self):
        """Positions that fit into the blocks held, counted from position 0."""
        return self.table.n_blocks * self.table.block_size

    @property
    def first_position(self):
        """The first position that can still be read; above 0 after `drop_before`."""
        return first_kept(&self.table)

    @property
    def block_table(self):
        """The block ids in order: a read-only int32 array ``[n_blocks]``, a snapshot.

        Position ``p`` lives in row ``p % block_size`` of block ``block_table[p // block_size]``.
        Blocks that `drop_before` gave back are -1.
        """
        cdef Py_ssize_t n = self.table.n_blocks
        table = empty_ids(n)
        with cython.critical_section(self):
            n = min(n, self.table.n_blocks)
            if n:
                copy_ids(<int32_t*>cnp.PyArray_DATA(table), self.table.ids, n)
        table = table[:n]
        table.flags.writeable = False
        return table

    def __repr__(self):
        blocks = self.block_table.tolist()
        shown = ", ".join(map(str, blocks[:8])) + (", ..." if len(blocks) > 8 else "")
        return f"{type(self).__name__}(seq_len={self.table.length}, capacity={self.capacity}, blocks=[{shown}])"

    # --- growing ---

    def push(self, store, k_step, v_step):
        """Append one position's key and value: ``seq_len`` grows by 1.

        Parameters
        ----------
        store : PagedKvStore
        k_step, v_step : array, float32
            ``[width]`` or ``[n_kv_heads, head_dim]``; one row a layer, ``[n_layers, ...]``, where the
            store has several layers. Rows as they are stored are taken too: float16, the bits of bfloat16 as uint16, a
            tuple of int8 values, turned, and their float16 scales ``[..., n_kv_heads, groups]``; in any dtype uint8, the
            bytes of whole rows as `PagedKvStore.pieces` shows them.

        Raises
        ------
        PagedStoreExhausted
            A block was needed and none was free. Nothing was changed.
        TypeError, ValueError, RuntimeError
            Rows of another dtype or shape; another store; in use by a running call. Nothing was changed.
        """
        cdef PagedKvStore home = as_store(store)
        home.end_terms_if_short(1)
        if not home.rows.holds(k_step, v_step, home.n_layers, -1):
            k_step = home.rows.given_k(k_step, home.n_layers, -1)
            v_step = home.rows.given_v(v_step, home.n_layers, -1, k_step)
        cdef Growth growth
        cdef int64_t slot
        cdef Places places = in_slots(&slot)
        growth.n_new = 1
        self.begin_write(home)
        try:
            if measure(&self.table, home, &growth):
                stage_one(&self.table, home, &growth)
            slot = slot_of(growth.ids, home.block_size, self.table.length)
            home.rows.write(0, home.n_layers, k_step, v_step, &places, 1, 1)
            self.commit(home, &growth, 1)
        finally:
            self.end_write()
        self.end_growth(home)

    def append_contiguous(self, store, k, v, count):
        """Append ``count`` positions in one go: the inverse of `to_contiguous`.

        Parameters
        ----------
        store : PagedKvStore
        k, v : array, float32
            ``[count, width]`` or ``[count, n_kv_heads, head_dim]``, with a leading ``n_layers`` axis
            where the store has several layers. Strided arrays are copied first. Stored rows as for `push`.
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
        home.end_terms_if_short(n)
        if not home.rows.holds(k, v, home.n_layers, n):
            k = home.rows.given_k(k, home.n_layers, n)
            v = home.rows.given_v(v, home.n_layers, n, k)
        cdef int n_threads = resolve_threads(0)
        cdef Growth growth
        cdef Places places
        growth.n_new = n
        self.begin_write(home)
        try:
            stage_one(&self.table, home, &growth)
            places = in_blocks(growth.ids, home.block_size, self.table.length)
            home.rows.write(0, home.n_layers, k, v, &places, n, n_threads)
            self.commit(home, &growth, n)
        finally:
            self.end_write()
        self.end_growth(home)

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
        cdef Growth growth
        growth.n_new = n
        self.begin_read(home)
        cdef Py_ssize_t n_needed = measure(&self.table, home, &growth)
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
        cdef Growth growth
        growth.n_new = n
        home.end_terms_if_short(n)
        self.begin_write(home)
        try:
            stage_one(&self.table, home, &growth)
            self.commit(home, &growth, 0)
        finally:
            self.end_write()
        self.end_growth(home)

    # --- starting on others' blocks ---

    def adopt_blocks(self, block_table, seq_len, block_size, *, store=None, first_position=0):
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
        first_position : int, optional
            A whole number of blocks that are not there, as `drop_before` leaves them: ``block_table`` has -1 for each.

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
        cdef Py_ssize_t i, first = as_size(first_position, "first_position", 0, n), n_dropped = first // size
        if first % size:
            raise ValueError(f"first_position: expected a multiple of block_size {size}, got {first}")
        cdef int32_t[::1] table = as_ids(after_dropped(block_table, n_dropped), "block_table", INT32_MAX)
        cdef Py_ssize_t n_blocks = n_dropped + table.shape[0]
        if n % size:
            raise ValueError(f"seq_len: expected a multiple of block_size {size}, got {n}")
        if n // size > n_blocks:
            raise ValueError(f"block_table: expected at least {n // size} ids for seq_len {n}, got {n_blocks}")
        if n_blocks > MAX_POSITIONS // size:
            raise ValueError(f"block_size: {n_blocks} blocks of {size} positions are more than can be counted")
        cdef BlockTable own = BlockTable(NULL, new_ids(n_blocks), n_blocks, n_blocks, n_dropped, n, size, 0, 0)
        for i in range(n_dropped):
            own.ids[i] = -1
        if table.shape[0]:
            copy_ids(&own.ids[n_dropped], &table[0], table.shape[0])
        cdef bint started = False
        try:
            self.lock_write()
            try:
                if self.table.n_blocks:
                    raise ValueError(f"block_table: this cache holds {self.table.n_blocks - self.table.n_dropped} blocks already")
                if home is not None:
                    check_adopted(home, table, size)
                self.become(home, &own)
                started = True
            finally:
                self.end_write()
        finally:
            if not started:
                free(own.ids)
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
        self.fork_into(other)
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
            (<PagedKvCache>source).fork_into(self)

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
            self.check_bound()
            empty_table(&self.table, self.store)
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
            if not first_kept(&self.table) <= n <= self.table.length:
                raise ValueError(f"new_len: expected {self.first_position} to {self.table.length}, got {n}")
            self.check_own()
            self.cut(n)
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
        return first_kept(&self.table) <= n <= self.table.length

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
        self.begin_write(home)
        try:
            if p > self.table.length:
                raise ValueError(f"position: expected 0 to {self.table.length}, got {p}")
            self.check_own()
            self.drop_to(p)
        finally:
            self.end_write()
        home.after_change()

    # --- reading ---

    def to_contiguous(self, store, *, layer=0, start=0, stop=None, out=None):
        """Copy K/V out of the store: those of one layer, or of all, and of all positions, or a part.

        Parameters
        ----------
        store : PagedKvStore
        layer : int or None, optional
            0 to ``n_layers - 1``; None is all of them.
        start, stop : int, optional
            The first position, and the one after the last: ``first_position <= start <= stop <= seq_len``. To the end
            without ``stop``.
        out : KvCache, or with ``layer=None`` a list of them, optional
            Is overwritten and returned: its buffers are used again. Views of it that were taken
            before show the new rows, or keep the old ones if it had to grow.

        Returns
        -------
        KvCache, or with ``layer=None`` a list of one for each layer
            ``n = stop - start`` positions: ``k`` float32 ``[n, k_width]``, ``v`` float32 ``[n, v_width]``.

        Raises
        ------
        ValueError
            Another store, an ``out`` of other widths or layers, positions that are not there, or that `drop_before` gave
            up.
        IndexError, TypeError, RuntimeError
            ``layer`` out of range; ``out`` is no KvCache; in use by a running call that writes, or ``out`` by any.
        """
        cdef PagedKvStore home = as_store(store)
        cdef Py_ssize_t first = as_size(start, "start", 0, MAX_POSITIONS)
        cdef Py_ssize_t end = -1 if stop is None else as_size(stop, "stop", 0, MAX_POSITIONS)
        cdef Py_ssize_t index
        if layer is not None:
            index = as_index(layer, "layer", home.n_layers)
            target = as_target(out, "out", home.n_kv_heads, home.head_dim, home.v_head_dim)
            self.copy_out(home, index, first, end, [target])
            return target
        if out is None:
            out = [None] * home.n_layers
        targets = [as_target(target, f"out[{i}]", home.n_kv_heads, home.head_dim, home.v_head_dim)
                   for i, target in enumerate(as_items(out, "out", "several KvCaches"))]
        if len(targets) != home.n_layers or len(set(map(id, targets))) != home.n_layers:
            raise ValueError(f"out: expected {home.n_layers} KvCaches, one for each layer, got {len(targets)}")
        self.copy_out(home, 0, first, end, targets)
        return targets

    cdef int copy_out(self, PagedKvStore store, Py_ssize_t layer, Py_ssize_t start, Py_ssize_t stop,
                      list targets) except -1:
        cdef int n_threads = resolve_threads(0)
        cdef float[:, ::1] k, v
        cdef Places places
        cdef Py_ssize_t i, n, n_begun = 0, n_ended = 0
        cdef KvCache target
        self.begin_read(store)
        try:
            if start < first_kept(&self.table):
                raise ValueError(f"to_contiguous: positions before {self.first_position} were dropped")
            if start > self.table.length:
                raise ValueError(f"start: expected at most {self.table.length}, got {start}")
            stop = self.table.length if stop < 0 else stop
            if not start <= stop <= self.table.length:
                raise ValueError(f"stop: expected {start} to {self.table.length}, got {stop}")
            n = stop - start
            places = in_blocks(self.table.ids, store.block_size, start)
            for target in targets:  # all that can fail, for all of them
                target.begin_overwriting(n)
                n_begun += 1
            for i in range(n_begun):
                target = <KvCache>targets[i]
                k, v = target.k_rows, target.v_rows
                if n:
                    store.rows.gather(k, v, layer + i, &places, n, n_threads)
                target.end_overwriting(n)
                n_ended += 1
        finally:
            for i in range(n_ended, n_begun):
                target = <KvCache>targets[i]
                target.end_overwriting(target.seq_len)
            self.end_read()
        return 0

    # --- the guard ---

    cdef int lock_write(self) except -1:
        return enter_writer(self, &self.users)

    cdef int begin_write(self, PagedKvStore store) except -1:
        enter_writer(self, &self.users)
        if self.store is not store and self.table.n_blocks:
            try:
                self.bind(store)
            except BaseException:
                self.end_write()
                raise
        return 0

    cdef void end_write(self) noexcept:
        if self.table.n_blocks == 0 and self.store is not None:
            self.store = None
        leave_writer(self, &self.users)

    cdef int begin_read(self, PagedKvStore store) except -1:
        enter_reader(self, &self.users)
        if self.store is not store and self.table.n_blocks:
            try:
                self.bind(store)
            except BaseException:
                self.end_read()
                raise
        return 0

    cdef void end_read(self) noexcept:
        leave_reader(self, &self.users)

    cdef int bind(self, PagedKvStore store) except -1:
        """Tie adopted blocks to the first store they are used with."""
        if self.store is not None:
            raise ValueError("store: expected the store whose blocks this cache holds, got another")
        if self.table.n_dropped < self.table.n_blocks:
            check_adopted(store, <int32_t[:self.table.n_blocks - self.table.n_dropped]>&self.table.ids[self.table.n_dropped],
                          self.table.block_size)
        self.store = store
        return 0

    # --- growing ---

    cdef void commit(self, PagedKvStore store, Growth* growth, Py_ssize_t n_written) noexcept:
        commit_growth(&self.table, store, growth, n_written)
        if self.table.n_blocks:
            self.store = store

    cdef int end_growth(self, PagedKvStore store) except -1:
        """A store in debug mode checks its books, and that this table is among them."""
        if store.debug:
            store.check_books()
            if self.table.n_dropped < self.table.n_blocks and store.blocks.find_unused(
                    &self.table.ids[self.table.n_dropped], self.table.n_blocks - self.table.n_dropped) >= 0:
                store.check((self,))
        return store.after_change() if store.is_over() else 0

    # --- changing hands ---

    cdef void become(self, PagedKvStore store, const BlockTable* table) noexcept:
        replace_table(&self.table, table)
        self.store = store if table.n_blocks else None

    cdef int check_bound(self) except -1:
        if self.store is None and self.table.n_blocks:
            raise RuntimeError("clone: blocks were adopted and their store is not known yet; "
                               "name it in adopt_blocks(..., store=store)")
        return 0

    cdef int check_own(self) except -1:
        self.check_bound()
        return check_table(&self.table, self.store)

    cdef int prepare_fork(self, BlockTable* fork) except -1:
        self.check_own()
        return fork_table(fork, &self.table, self.store)

    cdef void take_over(self, PagedKvStore store, const BlockTable* fork) noexcept:
        if self.store is not None:
            release_table(&self.table, self.store)
        self.become(store, fork)

    cdef int fork_into(self, PagedKvCache other) except -1:
        cdef BlockTable fork
        self.begin_read(self.store)
        try:
            other.lock_write()
            try:
                other.check_own()
                self.prepare_fork(&fork)
                other.take_over(self.store, &fork)
            finally:
                other.end_write()
        finally:
            self.end_read()
        if other.store is not None:
            other.store.after_change()
        return 0

    cdef void cut(self, Py_ssize_t n) noexcept:
        cut_table(&self.table, self.store, n)

    cdef void drop_to(self, Py_ssize_t position) noexcept:
        drop_blocks_before(&self.table, self.store, position)

    cdef void empty(self) noexcept:
        self.cut(first_kept(&self.table))
        self.table.n_blocks = self.table.n_dropped = self.table.length = self.table.shortest = 0


cdef int check_adopted(PagedKvStore store, int32_t[::1] table, Py_ssize_t block_size) except -1:
    """ValueError or IndexError unless the ids are blocks of the store that someone holds."""
    if block_size != store.block_size:
        raise ValueError(f"block_size: expected {store.block_size}, the store's, got {block_size}")
    store.blocks.check_held(table, "block_table")
    return 0
