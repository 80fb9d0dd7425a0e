"""Several sequences change together, a batch or a model's in its stores: all of them or, raising, none.

What can fail comes first, for all of them; then all change, and no code but this runs in between. What a change is to one of
them its own module says.
"""

from cpython.object cimport PyObject
from libc.stdlib cimport calloc, free

from pagedkv._arrays cimport MAX_POSITIONS, as_size
from pagedkv._tables cimport BlockTable, Group, Growth, first_position, release_table, stage
from pagedkv.sequence cimport PagedKvCache
from pagedkv.store cimport PagedKvStore


cdef struct Fork:
    PyObject* store             # of its blocks: the source may be in another one, or in none, when it is taken over
    BlockTable table


cdef int fork_all(tuple caches, tuple sources) except -1:
    cdef Py_ssize_t n = len(caches), n_ready = 0, i
    cdef Fork* forks = <Fork*>calloc(max(n, 1), sizeof(Fork))
    cdef bint done = False
    if forks is NULL:
        raise MemoryError("cannot allocate the forks of a batch")
    try:
        for i in range(n):
            (<PagedKvCache>caches[i]).check_own()
            (<PagedKvCache>sources[i]).prepare_fork(&forks[i].table)
            forks[i].store = <PyObject*>(<PagedKvCache>sources[i]).store
            n_ready += 1
        for i in range(n):
            (<PagedKvCache>caches[i]).take_over(<PagedKvStore>forks[i].store, &forks[i].table)
        done = True
    finally:
        for i in range(0 if done else n_ready):
            release_table(&forks[i].table, <PagedKvStore>forks[i].store)
            free(forks[i].table.ids)
        free(forks)
    return 0


cdef int lock_all(tuple caches) except -1:
    """For writing, and what they hold can be given back."""
    cdef Py_ssize_t n_locked = 0
    try:
        for cache in caches:
            (<PagedKvCache?>cache).lock_write()
            n_locked += 1
            (<PagedKvCache>cache).check_own()
    except BaseException:
        unlock(caches, n_locked)
        raise
    return 0


cdef void unlock(tuple caches, Py_ssize_t n) noexcept:
    cdef Py_ssize_t i
    for i in range(n):
        (<PagedKvCache>caches[i]).end_write()


cdef list homes_of(tuple caches):
    """Their stores, as far as they hold blocks: they are empty when the stores' books are looked at."""
    return [(<PagedKvCache?>cache).store for cache in caches if (<PagedKvCache?>cache).store is not None]


cdef int after_change(object stores) except -1:
    for store in stores:
        (<PagedKvStore>store).after_change()
    return 0


def truncate_all(tuple caches not None, new_len):
    """Cut each that has more to so many positions, with its reserved blocks; None: give back these of each."""
    cdef Py_ssize_t n = MAX_POSITIONS if new_len is None else as_size(new_len, "n_positions", 0, MAX_POSITIONS), i
    cdef PagedKvCache cache
    cdef list homes = homes_of(caches)
    lock_all(caches)
    try:
        for cache in caches:
            if cache.table.length > n and first_position(&cache.table) > n:
                raise ValueError(f"n_positions: expected {cache.first_position} or more, what the windows have left, got {n}")
        for i in range(len(caches)):
            cache = <PagedKvCache>caches[i]
            if new_len is None or cache.table.length > n:
                cache.cut(min(n, cache.table.length))
    finally:
        unlock(caches, len(caches))
    after_change(homes)


def drop_before_all(tuple caches not None, tuple positions not None):
    """Give back the blocks that lie wholly before a position of each, as `PagedKvCache.drop_before`."""
    cdef list starts = [as_size(position, "position", 0, MAX_POSITIONS) for position in positions]
    cdef list homes = homes_of(caches)
    cdef Py_ssize_t i
    lock_all(caches)
    for i in range(len(caches)):
        (<PagedKvCache>caches[i]).drop_to(min(<Py_ssize_t>starts[i], (<PagedKvCache>caches[i]).table.length))
    unlock(caches, len(caches))
    after_change(homes)


def release_all(tuple caches not None):
    """Give back all blocks of each, which is empty then."""
    cdef list homes = homes_of(caches)
    cdef Py_ssize_t i
    lock_all(caches)
    for i in range(len(caches)):
        (<PagedKvCache>caches[i]).empty()
    unlock(caches, len(caches))
    after_change(homes)


def reserve_all(tuple stores not None, tuple caches not None, tuple n_new not None):
    """Take the blocks that so many more positions of each need, in stores that share a budget."""
    cdef Py_ssize_t n = len(caches), i, n_locked = 0
    cdef Group* groups = <Group*>calloc(max(n, 1), sizeof(Group))
    cdef Growth* growths = <Growth*>calloc(max(n, 1), sizeof(Growth))
    cdef BlockTable** members = <BlockTable**>calloc(max(n, 1), sizeof(BlockTable*))
    cdef PagedKvCache cache
    try:
        if groups is NULL or growths is NULL or members is NULL:
            raise MemoryError("cannot allocate what is reserved")
        for i in range(n):
            growths[i].n_new = as_size(n_new[i], "n_new", 0, MAX_POSITIONS)
            (<PagedKvStore?>stores[i]).end_terms_if_short(growths[i].n_new)
        for i in range(n):
            cache = <PagedKvCache?>caches[i]
            cache.begin_write(<PagedKvStore>stores[i])
            n_locked += 1
            members[i] = &cache.table
            groups[i] = Group(<PyObject*>stores[i], &members[i], &growths[i])
        stage(groups, <int>n, 1)
        for i in range(n):
            (<PagedKvCache>caches[i]).commit(<PagedKvStore>stores[i], &growths[i], 0)
    finally:
        unlock(caches, n_locked)
        free(groups)
        free(growths)
        free(members)
    after_change(stores)
