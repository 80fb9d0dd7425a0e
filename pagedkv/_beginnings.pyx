"""Beginnings of sequences, in all stores of a model at once: how far they are known, a sequence that starts on one, and one
whose blocks are to be known.

A store by itself is a model of one. A beginning is known as far as all stores know it, and all of them change or none.
"""

cimport cython
from libc.stdint cimport int32_t, int64_t
from libc.stdlib cimport calloc, free
from libc.string cimport memcpy

from pagedkv._arrays cimport empty_ids
from pagedkv._radix.nodes cimport Key
from pagedkv._radix.tree cimport radix_discard
from pagedkv._tables cimport BlockTable, blocks_for, has_first, name_first, new_ids
from pagedkv.known cimport key_of
from pagedkv.sequence cimport PagedKvCache
from pagedkv.store cimport PagedKvStore

import numpy as np

from pagedkv._keys import as_token_ids


# What a sequence is given in one store.
cdef struct Share:
    int32_t* ids            # of blocks that it holds already, from the first one that is seen
    Py_ssize_t first
    Py_ssize_t n_blocks
    int32_t tail            # where the rows of the last block go that match; -1 without one


cdef inline PagedKvStore at(tuple stores, Py_ssize_t i):
    return <PagedKvStore>stores[i]


# --- how far they are known --------------------------------------------------------------------------

cdef Py_ssize_t match_all(tuple stores, Key key) noexcept:
    # Where a window is, a beginning of what is of use need not be: each is asked again until all say the same.
    cdef Py_ssize_t n_stores = len(stores), n_agreed = 0, n, i = 0
    while n_agreed < n_stores:
        n = at(stores, i).blocks.match(key, NULL)
        n_agreed = n_agreed + 1 if n == key.n else 1
        key.n = n
        i = (i + 1) % n_stores
    return key.n


cdef tuple find_all(tuple stores, bytes name, const int64_t[::1] ids):
    cdef Py_ssize_t size = at(stores, 0).block_size, n_known = ids.shape[0] - 1, n
    cdef PagedKvStore store
    cdef int32_t[::1] table
    cdef unsigned char[::1] marks
    cdef list found = []
    if len(stores) > 1:
        n_known = match_all(stores, key_of(name, ids, n_known))
    for store in stores:
        blocks = empty_ids(ids.shape[0] // size + 1)
        idle = np.zeros(len(blocks), bool)
        table, marks = blocks, idle.view(np.uint8)
        n = store.blocks.match(key_of(name, ids, n_known), &table[0])
        store.blocks.mark_idle(&table[0], n // size, &marks[0])
        found.append((blocks[:n // size], idle[:n // size]))
        n_known = min(n_known, n)
    return max(n_known, 0), tuple(found)


# --- starting on them --------------------------------------------------------------------------------

cdef Py_ssize_t start_all(tuple stores, tuple caches, bytes name, const int64_t[::1] ids) except -1:
    cdef Py_ssize_t n_stores = len(stores), n_locked = 0, n = 0, size = at(stores, 0).block_size, i
    cdef Share* shares = <Share*>calloc(n_stores, sizeof(Share))
    cdef BlockTable table
    cdef PagedKvCache cache
    if shares is NULL:
        raise MemoryError("cannot allocate what is shared")
    try:
        for i in range(n_stores):
            cache = caches[i]
            cache.lock_write()
            n_locked += 1
            if cache.table.n_blocks:
                raise ValueError(f"cache: expected one that holds no blocks, got {cache!r}")
            shares[i].tail = -1
            shares[i].ids = new_ids(max(ids.shape[0] - 1, 0) // size + 1)
        n = hold_all(stores, shares, key_of(name, ids, ids.shape[0] - 1))
        for i in range(n_stores):
            at(stores, i).blocks.use(key_of(name, ids, n), ids.shape[0])
            table = BlockTable(NULL, shares[i].ids, shares[i].n_blocks, shares[i].n_blocks, shares[i].first, n, size, 0, 0)
            (<PagedKvCache>caches[i]).become(at(stores, i), &table)
            shares[i].ids = NULL
    finally:
        for i in range(n_locked):
            if shares[i].ids is not NULL:
                release_share(at(stores, i), &shares[i])
                free(shares[i].ids)
            (<PagedKvCache>caches[i]).end_write()
        free(shares)
    return n


cdef Py_ssize_t hold_all(tuple stores, Share* shares, Key key) except -1:
    """One more holder for the blocks of what all stores know, and a copy of the last one where that is known in part."""
    cdef Py_ssize_t n_stores = len(stores), size = at(stores, 0).block_size, i
    cdef PagedKvStore store
    cdef int32_t source
    cdef bint enough = True
    key.n = hold_common(stores, shares, key)
    if key.n % size:  # a copy in each store, or in none: what one cannot have the others need not
        for i in range(n_stores):
            enough = enough and at(stores, i).blocks.try_take(&shares[i].tail, 1)
        if not enough:
            for i in range(n_stores):
                if shares[i].tail >= 0:
                    at(stores, i).blocks.release(&shares[i].tail, 1)
                    shares[i].tail = -1
            key.n -= key.n % size
            key.n = hold_common(stores, shares, key)  # whole blocks now
    for i in range(n_stores):
        store = at(stores, i)
        if shares[i].tail >= 0:
            source = shares[i].ids[shares[i].n_blocks - 1]
            shares[i].ids[shares[i].n_blocks - 1] = shares[i].tail
            if store.debug:
                store.rows.erase(&shares[i].tail, 1)
            store.rows.copy_block(shares[i].tail, source, key.n % size)
            store.blocks.release(&source, 1)
    return key.n


cdef Py_ssize_t hold_common(tuple stores, Share* shares, Key key) except -1:
    """The longest beginning that all stores know at once, of the key at most: its blocks have one more holder in each."""
    # As `match_all`.
    cdef Py_ssize_t n_stores = len(stores), n_agreed = 0, n, i = 0
    cdef PagedKvStore store
    while n_agreed < n_stores:
        store = at(stores, i)
        release_share(store, &shares[i])
        n = store.blocks.hold(key, shares[i].ids, &shares[i].first)
        shares[i].n_blocks = blocks_for(n, store.block_size)
        n_agreed = n_agreed + 1 if n == key.n else 1
        key.n = n
        i = (i + 1) % n_stores
    return key.n


cdef void release_share(PagedKvStore store, Share* share) noexcept:
    store.blocks.release_each(&share.ids[share.first], share.n_blocks - share.first)
    share.first = share.n_blocks = 0


# --- remembering them --------------------------------------------------------------------------------

cdef Py_ssize_t tell_all(tuple stores, tuple caches, object tokens, bytes name, int64_t priority, double expires,
                         Told* told) except -1:
    cdef Py_ssize_t n_stores = len(stores), n_new = 0, before = told[0].start, n_tokens, n_given, i
    cdef const int64_t[::1] ids
    for i in range(n_stores):
        before = min(before, told[i].start)
    ids = as_token_ids(tokens[before:] if before else tokens)
    n_tokens = before + ids.shape[0]
    n_given = len(tokens) if before else n_tokens
    try:
        for i in range(n_stores):
            if min(n_tokens, n_given) < told[i].start:
                raise ValueError(f"tokens: expected the {told[i].start} that were inserted by this handle and what "
                                 f"follows, got {n_given}")
            told[i].ids = new_ids((n_tokens - told[i].start) // at(stores, i).block_size + 1)
            if at(stores, i).debug:
                check_finite(at(stores, i), caches[i], told[i].start, n_tokens)
        # From here on nobody else runs, and the sequences are what they are.
        for i in range(n_stores):
            if told[i].start and not has_first(&(<PagedKvCache>caches[i]).table, told[i].start, told[i].lineage):
                return -2 - i
            look_at(at(stores, i), caches[i], n_tokens, &told[i])
        for i in range(n_stores):
            if told[i].n and at(stores, i).blocks.prepare_insert(
                    rest_of(name, ids, before, &told[i]), told[i].ids, priority, expires, &told[i].mark,
                    &told[i].insertion) < 0:
                return -2 - i
        for i in range(n_stores):
            if told[i].n:
                n_new += at(stores, i).blocks.insert(
                    rest_of(name, ids, before, &told[i]), told[i].ids, priority, expires, &told[i].mark,
                    &told[i].insertion)
                told[i].lineage = name_first(&(<PagedKvCache>caches[i]).table, at(stores, i), told[i].mark.n)
    finally:
        for i in range(n_stores):
            radix_discard(&told[i].insertion)
            free(told[i].ids)
            told[i].ids = NULL
    return n_new


cdef int look_at(PagedKvStore store, PagedKvCache cache, Py_ssize_t n_tokens, Told* told) except -1:
    """The blocks of a sequence that this store can be told of."""
    cdef Py_ssize_t size = store.block_size, n = min(n_tokens, cache.table.length) // size, first = told.start // size
    told.n = 0
    if n == 0 or n < first:
        return 0
    if cache.store is not store:
        raise ValueError(f"cache: expected a sequence of {store!r}, got one of {cache.store!r}")
    with cython.critical_section(cache):
        n = min(n, cache.table.n_blocks)
        if n > first:
            memcpy(told.ids, &cache.table.ids[first], (n - first) * sizeof(int32_t))
    told.n = n * size if n >= first else 0
    return 0


cdef Key rest_of(bytes name, const int64_t[::1] ids, Py_ssize_t before, const Told* told) noexcept:
    """The tokens that follow what this store has been told, of those after the first `before`."""
    cdef Key key = key_of(name, ids, told.n - told.start)
    if key.n:
        key.ids = &ids[told.start - before]
    return key


cdef int check_finite(PagedKvStore store, PagedKvCache cache, Py_ssize_t start, Py_ssize_t n) except -1:
    """In a store with debug=True, nobody is given K/V that are not finite."""
    cdef Py_ssize_t i
    if cache.store is not store:
        return 0
    ids = cache.block_table.tolist()
    for i in range(start // store.block_size, min(n, cache.table.length) // store.block_size):
        if ids[i] >= 0 and not store.rows.is_finite(ids[i]):
            raise ValueError(f"cache: expected K and V that are finite, got others in positions {i * store.block_size} "
                             f"to {(i + 1) * store.block_size - 1}")
    return 0
