"""Beam search: which sequences go on, and from which of them, in one call for the whole batch."""

cimport cython
from libc.stdint cimport int32_t

from pagedkv._arrays cimport as_index, as_items, empty_ids
from pagedkv._table cimport blocks_for
from pagedkv.attention cimport as_caches
from pagedkv.sequence cimport PagedKvCache
from pagedkv.store cimport PagedKvStore, as_store


def reorder(store, caches, parents):
    """Let every cache go on from the sequence that another one has now, as a beam search does.

    ``caches[i]`` becomes a fork of what ``caches[parents[i]]`` was. All at once and all or nothing. No rows are
    copied and no blocks are taken: forks share them, and copy a part-full one before they write into it.
    What nobody goes on from is given back.

    Parameters
    ----------
    store : PagedKvStore
        The one whose blocks they hold.
    caches : iterable of PagedKvCache
        Each of them once.
    parents : iterable of int, or integer array, ``[len(caches)]``
        Indices into ``caches``. One that is its own parent stays as it is, with what it has reserved;
        the others give up what they have reserved.

    Raises
    ------
    TypeError, ValueError, IndexError
        Wrong types; another store's cache; the same one twice; not one parent a cache; a parent out of range.
    RuntimeError
        A cache is in use by a running call.
    OverflowError
        A block would have 2**31 holders. Whatever is raised, nothing was changed.

    Notes
    -----
    Threads: the caches belong to the caller while it runs; the store may be used by others.

    Examples
    --------
    >>> import numpy as np, pagedkv
    >>> store = pagedkv.PagedKvStore(block_size=4, total_blocks=8, n_kv_heads=1, head_dim=2)
    >>> beams = [pagedkv.PagedKvCache() for _ in range(3)]
    >>> for n, beam in enumerate(beams):
    ...     beam.append_contiguous(store, *np.full((2, 6, 2), n, np.float32), 6)
    >>> pagedkv.reorder(store, beams, [1, 1, 0])         # the last beam is given up, the second goes on twice
    >>> [float(beam.to_contiguous(store).k[0, 0]) for beam in beams], store.free_block_count
    ([1.0, 1.0, 0.0], 4)
    """
    cdef PagedKvStore home = as_store(store)
    cdef tuple batch = as_caches(caches)
    cdef Py_ssize_t n = len(batch), n_locked = 0, i
    cdef list sources = as_parents(parents, n)
    if len(set(map(id, batch))) != n:
        raise ValueError("caches: expected each cache once, got one of them twice")
    try:
        for i in range(n):
            (<PagedKvCache>batch[i]).begin_write(home)
            n_locked += 1
        fork_all(home, batch, sources)
    finally:
        for i in range(n_locked):
            (<PagedKvCache>batch[i]).end_write()
    home.after_change()


cdef list as_parents(parents, Py_ssize_t n):
    given = as_items(parents, "parents", "a sequence of integers")
    if len(given) != n:
        raise ValueError(f"parents: expected one for each of {n} caches, got {len(given)}")
    return [as_index(parent, "parents", n) for parent in given]


cdef int fork_all(PagedKvStore store, tuple batch, list sources) except -1:
    """All caches are locked. Everything that can fail comes before the first table is changed."""
    cdef PagedKvCache cache, source
    cdef Py_ssize_t i, n, n_new = 0, n_old = 0, new_end = 0, old_end = 0
    cdef int32_t[::1] table, retained, given_up
    cdef list moves = []
    for i in range(len(batch)):
        cache, source = <PagedKvCache>batch[i], <PagedKvCache>batch[sources[i]]
        if cache is not source:
            n = blocks_for(source.length, source.block_size)
            table = empty_ids(n)
            if n:
                table[:] = source.table[:n]
            n_new += n - min(n, source.n_dropped)
            n_old += cache.n_blocks - cache.n_dropped
            # The lengths as they are now: the source may be a fork of another one itself.
            moves.append((cache, table, source.n_dropped, source.length, source.block_size))
    retained, given_up = empty_ids(n_new), empty_ids(n_old)
    for i in range(len(moves)):
        cache = <PagedKvCache>moves[i][0]
        table = moves[i][1]
        n = table.shape[0] - min(table.shape[0], <Py_ssize_t>moves[i][2])
        if n:
            retained[new_end:new_end + n] = table[table.shape[0] - n:]
        new_end += n
        n = cache.n_blocks - cache.n_dropped
        if n:
            given_up[old_end:old_end + n] = cache.table[cache.n_dropped:cache.n_blocks]
        old_end += n
    if n_new and store.blocks.retain(&retained[0], n_new) >= 0:
        raise OverflowError("caches: a block has as many holders as can be counted")
    if n_old:
        try:
            store.give_back(&given_up[0], n_old)
        except BaseException:
            if n_new:
                store.blocks.give_back(&retained[0], n_new)
            raise
    for cache, table, n_dropped, length, block_size in moves:
        with cython.critical_section(cache):
            cache.table = table
            cache.n_blocks = table.shape[0]
        cache.n_dropped = n_dropped
        cache.length = length
        cache.block_size = block_size
        cache.store = store
    return 0
