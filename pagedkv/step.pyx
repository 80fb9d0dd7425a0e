"""Step: one forward pass of a batch as a transaction, over one store or over all KV-cache groups of a model.

While a step is open its caches are held by their guards, and what it took is out of sight: a `Growth` of each sequence in
each store, of whose table the step reads and writes. Committing makes these the sequences', which cannot fail; rolling back
gives the blocks back.
"""

cimport cython
cimport numpy as cnp
from cpython.object cimport PyObject
from libc.stdint cimport int64_t
from libc.stdlib cimport calloc, free

from pagedkv._arrays cimport as_index, as_thread_count, empty_slots
from pagedkv._groups cimport as_distinct_members, as_stores, places_of, windows_of
from pagedkv._kernels.parallel cimport resolve_threads
from pagedkv._kernels.plan cimport KvView, PlanShelf, QuerySpan, free_plans
from pagedkv._kernels.rows cimport Places, in_slots, slot_of
from pagedkv._tables cimport BlockTable, Group, Growth, first_position, rollback_growth, stage
from pagedkv.attention cimport Asked, as_asked, as_query_lens, attend, view_layer
from pagedkv.sequence cimport PagedKvCache
from pagedkv.store cimport PagedKvStore

import numpy as np


cdef enum Phase:
    NEW, READY, OPEN, COMMITTED, ROLLED_BACK


@cython.no_gc_clear
cdef class Step:
    """Step(store, caches, query_lens=1, *, n_threads=None)\n--\n
    One forward pass of a batch: every sequence grows by its query length, or none does.

    Entering the ``with`` block takes the blocks for all new positions, or raises having changed
    nothing. Inside, each layer is written and attended. Leaving it commits: every ``seq_len`` grows
    by its query length. An exception, or a layer that was not written, rolls everything back.

    Parameters
    ----------
    store : PagedKvStore or ModelStores
        One store, or those of a model, whose layers `write` and `attend` then name by the model's numbers.
    caches : PagedKvCache or ModelSequence, or an iterable of them
        The batch, in the order of its rows; each sequence once.
    query_lens : int, or a sequence or integer array of them ``[len(caches)]``, optional
        New positions of each sequence, 0 or more: 1 is decode, more is prefill. One number stands for all.
    n_threads : int, optional
        Threads for the kernels, 1 to 256; what `get_num_threads` says without it.

    Attributes
    ----------
    store : PagedKvStore or ModelStores
        As given.
    query_lens : tuple of int
        One for each sequence.
    n_rows : int
        New positions of all sequences together: ``sum(query_lens)``.

    Raises
    ------
    TypeError, ValueError
        From the constructor: no caches, lengths that do not match, the same cache twice.
    PagedStoreExhausted
        On entering: a store has too few free blocks. Nothing was changed in any of them.
    ValueError, RuntimeError
        On entering: a cache of another store, or one that is in use.

    Notes
    -----
    ``step.__enter__()`` and `commit` or `rollback` do the same without a ``with`` block. A step is entered once. One
    that is dropped while it is open is rolled back.

    Threads: a step and its caches belong to one thread; other steps on the same store may run at
    the same time. Until it ends, any method that would change one of its caches raises RuntimeError.

    Examples
    --------
    >>> import numpy as np, pagedkv
    >>> store = pagedkv.PagedKvStore(block_size=4, total_blocks=8, n_kv_heads=1, head_dim=2)
    >>> caches = [pagedkv.PagedKvCache(), pagedkv.PagedKvCache()]
    >>> rows = np.ones((4, 1, 2), np.float32)              # 3 new positions, and 1
    >>> with pagedkv.Step(store, caches, [3, 1]) as step:
    ...     step.write(0, rows, rows)
    ...     out = step.attend(0, rows)
    >>> [cache.seq_len for cache in caches], out.shape
    ([3, 1], (4, 1, 2))
    """

    cdef object __weakref__
    cdef readonly object store
    cdef readonly tuple query_lens
    cdef readonly Py_ssize_t n_rows
    cdef tuple stores               # one for each group
    cdef tuple places, windows      # of a model's layers; None for a store's own
    cdef tuple caches               # group by group; a tuple: the collector does not empty it under an open step
    cdef int n_groups
    cdef Py_ssize_t n_caches        # of a group
    cdef Py_ssize_t n_layers        # of all groups
    cdef int n_threads
    cdef Phase phase
    cdef bint laid_out              # the spans and slots below are there
    cdef bint busy                  # a write or attend is running
    cdef Group* groups
    cdef BlockTable** members       # the caches', borrowed
    cdef Growth* growths            # and of each of them
    cdef QuerySpan* spans
    cdef PlanShelf* plans           # of each group, made once for all its layers of one kind
    cdef Py_ssize_t n_taken         # blocks
    cdef cnp.ndarray slots          # where each new row goes in each group: its row number in the store
    cdef unsigned char[::1] written  # layers

    def __cinit__(self, store, caches, query_lens=1, *, n_threads=None):
        self.store = store
        self.stores = as_stores(store)
        self.places = places_of(store)
        self.windows = windows_of(store)
        self.n_groups = <int>len(self.stores)
        self.caches = as_distinct_members(caches, store, self.n_groups)
        self.n_caches = len(self.caches) // self.n_groups
        self.query_lens = as_query_lens(query_lens, self.n_caches)
        self.n_rows = sum(self.query_lens)
        self.n_threads = resolve_threads(0 if n_threads is None else as_thread_count(n_threads, "n_threads"))
        self.n_layers = (<PagedKvStore>self.stores[0]).n_layers if self.places is None else len(self.places)
        self.written = bytearray(self.n_layers)
        self.phase = READY

    def __dealloc__(self):
        cdef int g
        if self.phase == OPEN:
            self.undo()
        if self.plans is not NULL:
            for g in range(self.n_groups):
                free_plans(&self.plans[g])
        free(self.plans)
        free(self.groups)
        free(self.members)
        free(self.growths)
        free(self.spans)

    def __enter__(self):
        """Take the blocks of all new positions, all or none; returns the step."""
        self.open()
        try:
            self.after_change()
        except BaseException:
            self.undo()
            raise
        return self

    def __exit__(self, exc_type, exc_value, traceback):
        """`commit`, or after an exception `rollback`; nothing if that was done before."""
        if self.phase == OPEN:
            if exc_type is None:
                self.commit()
            else:
                self.rollback()

    def commit(self):
        """End the step now: the new positions become part of the sequences.

        Raises
        ------
        RuntimeError
            The step is not open; a call on it is running; or a layer was not written, and everything
            was rolled back.
        """
        self.begin_call()  # and never ended: no call comes after it
        cdef Py_ssize_t layer
        for layer in range(self.n_layers if self.n_rows else 0):
            if not self.written[layer]:
                self.undo()
                raise RuntimeError(f"step: layer {layer} was not written; everything was rolled back")
        self.apply()
        self.after_change()

    def rollback(self):
        """End the step now, and leave every sequence as it was.

        Raises
        ------
        RuntimeError
            The step is not open, or a call on it is running.
        """
        self.begin_call()
        self.undo()
        self.after_change()

    # --- what a forward pass asks ---

    @property
    def state(self):
        """"ready" until it is entered, then "open", and in the end "committed" or "rolled back"."""
        return ("not made", "ready", "open", "committed", "rolled back")[self.phase]

    @property
    def unwritten_layers(self):
        """The layers that `commit` still waits for: a tuple of int. Without new rows it waits for none."""
        cdef Py_ssize_t layer
        return tuple([layer for layer in range(self.n_layers if self.n_rows else 0) if not self.written[layer]])

    @property
    def positions(self):
        """The position of each new row in its sequence, for rotary embeddings: int64 ``[n_rows]``."""
        self.check_opened()
        cdef Py_ssize_t i
        cdef list starts = [np.arange(self.spans[i].seq_len - self.spans[i].query_len, self.spans[i].seq_len)
                            for i in range(self.n_caches)]
        return np.concatenate(starts) if starts else np.empty(0, np.int64)

    @property
    def seq_lens(self):
        """Each sequence's length with its new positions: a tuple of int."""
        self.check_opened()
        return tuple([self.spans[i].seq_len for i in range(self.n_caches)])

    @property
    def new_blocks(self):
        """Blocks that the step took, of all stores together."""
        self.check_opened()
        return self.n_taken

    def write(self, layer, k, v):
        """Put the new rows of one layer into their blocks. They become visible when the step commits.

        Parameters
        ----------
        layer : int
            0 to ``n_layers - 1``, in any order. In a step over a model's stores, the model's number.
        k, v : array, float32
            ``[n_rows, width]`` or ``[n_rows, n_kv_heads, head_dim]``: the rows of all sequences, one
            after the other. Writing a layer again replaces its rows. Stored rows as for `PagedKvCache.push`.

        Raises
        ------
        IndexError, TypeError, ValueError
            ``layer`` out of range; another dtype or shape.
        RuntimeError
            The step is not open, or another call on it is running.
        """
        cdef Py_ssize_t number = as_index(layer, "layer", self.n_layers), index
        cdef int g = self.locate(number, &index)
        cdef PagedKvStore store = <PagedKvStore>self.stores[g]
        if not store.rows.holds(k, v, 1, self.n_rows):
            k = store.rows.given_k(k, 1, self.n_rows)
            v = store.rows.given_v(v, 1, self.n_rows, k)
        cdef Places places
        self.begin_call()
        places = in_slots(<int64_t*>cnp.PyArray_DATA(self.slots) + g * self.n_rows)
        store.rows.write(index, 1, k, v, &places, self.n_rows, self.n_threads)
        self.written[number] = 1
        self.busy = False

    def attend(self, layer, q, *, scale=None, window=..., softcap=None, sinks=None,
               alibi_slopes=None, causal=True, out=None, return_lse=False):
        """Attention of the new rows over their sequences, the new rows included.

        Parameters
        ----------
        layer : int
            A layer that was written.
        q : array, float32
            ``[n_rows, n_q_heads, head_dim]``; ``n_q_heads`` is a multiple of ``n_kv_heads``.
        window : int or None, optional
            As for `paged_attention`. Without it that of the layer, where a model's stores say one, and else None.
        scale, softcap, sinks, alibi_slopes, causal, out, return_lse
            As for `paged_attention`.

        Returns
        -------
        out : float32 array ``[n_rows, n_q_heads, v_head_dim]``
            Or ``(out, lse)`` with ``return_lse``.

        Raises
        ------
        IndexError, TypeError, ValueError, MemoryError
            ``layer`` out of range; arguments as for `paged_attention`.
        RuntimeError
            The step is not open, the layer was not written yet, or another call on the step is running.
        """
        cdef Py_ssize_t number = as_index(layer, "layer", self.n_layers), index
        cdef int g = self.locate(number, &index)
        cdef PagedKvStore store = <PagedKvStore>self.stores[g]
        cdef Asked asked = as_asked(
            q, store.head_dim, scale, self.windows[g] if window is ... else window, softcap, sinks, alibi_slopes, causal, out,
            return_lse)
        cdef KvView kv
        self.begin_call()
        try:
            if not self.written[number] and self.n_rows:
                raise RuntimeError(f"step: layer {number} was not written yet")
            view_layer(&kv, store, index)
            return attend(asked, &kv, &self.plans[g], &self.spans[g * self.n_caches], self.n_caches, self.n_rows, self.n_threads)
        finally:
            self.busy = False

    def __repr__(self):
        return f"{type(self).__name__}(sequences={self.n_caches}, n_rows={self.n_rows}, {self.state})"

    # --- the transaction ---

    cdef int open(self) except -1:
        cdef PagedKvCache cache
        cdef Py_ssize_t i, n_locked = 0, n = self.n_groups * self.n_caches
        with cython.critical_section(self):
            ready = self.phase == READY
            if ready:
                self.phase = ROLLED_BACK  # until all is done; a step is opened once
        if not ready:
            raise RuntimeError("step: was opened before; make a new one for each forward pass")
        self.make_groups()
        for store in self.stores:
            (<PagedKvStore>store).end_terms_if_short(self.n_rows + 2 * self.n_caches * (<PagedKvStore>store).block_size)
        try:
            for i in range(n):
                cache = <PagedKvCache>self.caches[i]
                cache.begin_write(<PagedKvStore>self.stores[i // self.n_caches])
                n_locked += 1
                self.members[i] = &cache.table
                self.growths[i].n_new = self.query_lens[i % self.n_caches]
                if cache.table.length != self.members[i % self.n_caches].length:
                    raise ValueError(f"caches[{i % self.n_caches}]: expected as many positions in each store, got "
                                     f"{self.members[i % self.n_caches].length} and {cache.table.length}")
            self.n_taken = stage(self.groups, self.n_groups, self.n_caches)
            self.lay_out()
        except BaseException:
            for i in range(n_locked):
                (<PagedKvCache>self.caches[i]).end_write()
            raise
        self.phase = OPEN
        return 0

    cdef int make_groups(self) except -1:
        cdef Py_ssize_t n = max(self.n_groups * self.n_caches, 1)
        cdef int g
        self.groups = <Group*>calloc(self.n_groups, sizeof(Group))
        self.plans = <PlanShelf*>calloc(self.n_groups, sizeof(PlanShelf))
        self.members = <BlockTable**>calloc(n, sizeof(BlockTable*))
        self.growths = <Growth*>calloc(n, sizeof(Growth))
        self.spans = <QuerySpan*>calloc(n, sizeof(QuerySpan))
        if (self.groups is NULL or self.plans is NULL or self.members is NULL or self.growths is NULL
                or self.spans is NULL):
            raise MemoryError("step: cannot allocate the plan of the batch")
        for g in range(self.n_groups):
            self.groups[g].store = <PyObject*>self.stores[g]
            self.groups[g].tables = &self.members[g * self.n_caches]
            self.groups[g].growths = &self.growths[g * self.n_caches]
        return 0

    cdef int lay_out(self) except -1:
        """Number the new rows; where there is no memory for that, nothing was staged."""
        cdef Py_ssize_t size = (<PagedKvStore>self.stores[0]).block_size
        cdef const BlockTable* table
        cdef QuerySpan* span
        cdef Py_ssize_t i, p, row = 0
        cdef int64_t* slots
        try:
            self.slots = empty_slots(self.n_groups * self.n_rows)
        except BaseException:
            self.rollback_all()
            raise
        slots = <int64_t*>cnp.PyArray_DATA(self.slots)
        for i in range(self.n_groups * self.n_caches):
            table = self.members[i]
            span = &self.spans[i]
            span.table = self.growths[i].ids
            span.query_len = self.growths[i].n_new
            span.seq_len = table.length + span.query_len
            span.first_row = row - i // self.n_caches * self.n_rows
            span.first_position = first_position(table)
            for p in range(table.length, span.seq_len):
                slots[row] = slot_of(span.table, size, p)
                row += 1
        self.laid_out = True
        return 0

    cdef void apply(self) noexcept:
        cdef PagedKvCache cache
        cdef Py_ssize_t i
        for i in range(self.n_groups * self.n_caches):
            cache = <PagedKvCache>self.caches[i]
            cache.commit(<PagedKvStore>self.stores[i // self.n_caches], &self.growths[i], self.growths[i].n_new)
            cache.end_write()
        self.phase = COMMITTED

    cdef void undo(self) noexcept:
        cdef Py_ssize_t i
        self.phase = ROLLED_BACK
        self.rollback_all()
        for i in range(self.n_groups * self.n_caches):
            (<PagedKvCache>self.caches[i]).end_write()

    cdef void rollback_all(self) noexcept:
        cdef Py_ssize_t i
        for i in range(self.n_groups * self.n_caches - 1, -1, -1):  # so that blocks are handed out again in their order
            rollback_growth(self.members[i], <PagedKvStore>self.stores[i // self.n_caches], &self.growths[i])

    cdef int after_change(self) except -1:
        for store in self.stores:
            (<PagedKvStore>store).after_change()
        return 0

    cdef int locate(self, Py_ssize_t layer, Py_ssize_t* index) except -1:
        """The group of a layer, and its number there."""
        cdef Py_ssize_t g = 0
        index[0] = layer
        if self.places is not None:
            g, index[0] = self.places[layer]
            if not (0 <= g < self.n_groups and 0 <= index[0] < (<PagedKvStore>self.stores[g]).n_layers):
                raise IndexError(f"layer: {layer} is in no store, places has {self.places[layer]} for it")
        return <int>g

    cdef int begin_call(self) except -1:
        """One call at a time, and only while the step is open."""
        cdef bint idle
        with cython.critical_section(self):
            idle = self.phase == OPEN and not self.busy
            if idle:
                self.busy = True
        if not idle:
            if self.phase == OPEN:
                raise RuntimeError("step: another call on it is running")
            raise RuntimeError(f"step: expected it to be open, got {self!r}")
        return 0

    cdef int check_opened(self) except -1:
        if not self.laid_out:
            raise RuntimeError("step: not entered yet")
        return 0
