"""Beam search: which sequences go on, and from which of them, in one call for the whole batch."""

from pagedkv._arrays cimport as_index, as_items
from pagedkv._batch cimport fork_all
from pagedkv._groups cimport as_distinct_members, as_stores
from pagedkv.sequence cimport PagedKvCache
from pagedkv.store cimport PagedKvStore


def reorder(store, caches, parents):
    """Let every cache go on from the sequence that another one has now, as a beam search does.

    ``caches[i]`` becomes a fork of what ``caches[parents[i]]`` was. All at once and all or nothing. No rows are
    copied and no blocks are taken: forks share them, and copy a part-full one before they write into it.
    What nobody goes on from is given back.

    Parameters
    ----------
    store : PagedKvStore or ModelStores
        The one whose blocks they hold; a model's sequences go on in all its stores or in none.
    caches : iterable of PagedKvCache or ModelSequence
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
    cdef tuple stores = as_stores(store), members
    cdef Py_ssize_t n_stores = len(stores), n, n_locked = 0, i
    members = as_distinct_members(caches, store, n_stores)
    n = len(members) // n_stores
    cdef list sources = as_parents(parents, n)
    cdef list moves = [i for i in range(n_stores * n) if sources[i % n] != i % n]
    cdef tuple moved = tuple([members[i] for i in moves])
    cdef tuple gone_on_from = tuple([members[i - i % n + sources[i % n]] for i in moves])
    try:
        for i in range(n_stores * n):
            (<PagedKvCache>members[i]).begin_write(<PagedKvStore>stores[i // n])
            n_locked += 1
        fork_all(moved, gone_on_from)
    finally:
        for i in range(n_locked):
            (<PagedKvCache>members[i]).end_write()
    for home in stores:
        (<PagedKvStore>home).after_change()


cdef list as_parents(parents, Py_ssize_t n):
    given = as_items(parents, "parents", "a sequence of integers")
    if len(given) != n:
        raise ValueError(f"parents: expected one for each of {n} caches, got {len(given)}")
    return [as_index(parent, "parents", n) for parent in given]
