"""A store and its sequences, or a model's KV-cache groups and theirs: what a caller named, in one form for both.

A model whose layers differ in window or widths has a store for each kind, and a sequence of it a `PagedKvCache` in each.
Whatever works on a store works on these: on anything with `stores`, `places` and `windows`, whose sequences have `caches`,
as `ModelStores` and `ModelSequence` do. One store is a model of one group.
"""

cimport cython

from pagedkv._arrays cimport as_items, describe
from pagedkv.sequence cimport PagedKvCache
from pagedkv.store cimport PagedKvStore, as_store


cdef tuple as_stores(object store):
    cdef PagedKvStore first, other
    if isinstance(store, PagedKvStore):
        return (as_store(store),)
    stores = None if isinstance(store, type) else getattr(store, "stores", None)
    if type(stores) is not tuple or not stores:
        raise TypeError(f"store: expected a PagedKvStore or ModelStores, got {describe(store)}")
    first = as_store(stores[0])
    for member in stores:
        other = as_store(member)
        if other.budget is not first.budget or other.block_size != first.block_size:
            raise ValueError("store: expected stores that share a budget, as those of ModelStores do")
    return stores


cdef tuple places_of(object store):
    return None if isinstance(store, PagedKvStore) else tuple(store.places)


cdef tuple windows_of(object store):
    return (None,) if isinstance(store, PagedKvStore) else tuple(store.windows)


cdef tuple caches_of(object sequence):
    return (sequence,) if isinstance(sequence, PagedKvCache) else sequence.caches


def share_budget(tuple stores not None, Py_ssize_t limit):
    """From now on these have one budget, of so many bytes. None of them has been used yet."""
    cdef PagedKvStore first = as_store(stores[0]), other
    for store in stores[1:]:
        other = as_store(store)
        other.join(first)
    first.budget.account.limit = limit


def resize_budget(tuple stores not None, Py_ssize_t limit):
    """As `PagedKvStore.resize`, for all that share a budget."""
    (<PagedKvStore>as_store(stores[0])).resize_all(limit)


def bytes_of(tuple stores not None):
    """Bytes of the budget that stores share: all of them; those of blocks that are held; those of these that prefix caches
    could give up. Of one moment.
    """
    cdef PagedKvStore first = as_store(stores[0])
    cdef Py_ssize_t limit, used, needed
    first.end_terms_of_all()
    with cython.critical_section(first.budget):
        limit, used, needed = first.budget.account.limit, first.budget.account.used, first.budget.needed()
    return limit, used, used - needed


cdef bint is_sequence(object item, Py_ssize_t n_stores):
    """Whether it has a PagedKvCache for each store."""
    if isinstance(item, PagedKvCache):
        return n_stores == 1
    caches = None if isinstance(item, type) else getattr(item, "caches", None)
    if type(caches) is not tuple or len(<tuple>caches) != n_stores:
        return False
    for cache in <tuple>caches:
        if not isinstance(cache, PagedKvCache):
            return False
    return True


cdef tuple as_sequences(object caches, object store, Py_ssize_t n_stores):
    cdef str wanted = "PagedKvCache" if n_stores == 1 else "ModelSequence"
    if is_sequence(caches, n_stores):
        check_whose(caches, store, "caches")
        return (caches,)
    # What is checked is what is used, whatever it would say the next time.
    batch = as_items(caches, "caches", f"a {wanted} or several of them")
    for i, sequence in enumerate(batch):
        if not is_sequence(sequence, n_stores):
            raise TypeError(f"caches[{i}]: expected a {wanted}, got {describe(sequence)}")
        check_whose(sequence, store, f"caches[{i}]")
    return batch


cdef int check_whose(object sequence, object store, str name) except -1:
    """One that knows its stores is used with them alone. What a PagedKvCache knows it looks at itself."""
    if not isinstance(sequence, PagedKvCache):
        home = getattr(sequence, "stores", store)
        if home is not store:
            raise ValueError(f"{name}: expected a sequence of {store!r}, got one of {home!r}")
    return 0


cdef tuple as_distinct_sequences(object caches, object store, Py_ssize_t n_stores):
    batch = as_sequences(caches, store, n_stores)
    if len(set(map(id, batch))) != len(batch):
        raise ValueError("caches: expected each cache once, got one of them twice")
    return batch


cdef tuple as_sequence(object sequence, tuple stores):
    if not is_sequence(sequence, len(stores)):
        raise TypeError(f"cache: expected a {'PagedKvCache' if len(stores) == 1 else 'ModelSequence'}, got {describe(sequence)}")
    if not isinstance(sequence, PagedKvCache):
        home = getattr(sequence, "stores", None)
        if getattr(home, "stores", stores) != stores:
            raise ValueError(f"cache: expected a sequence of the stores whose prefixes these are, got one of {home!r}")
    return caches_of(sequence)


cdef tuple members_of(tuple sequences, Py_ssize_t n_stores):
    cdef list members = []
    cdef Py_ssize_t g
    if n_stores == 1 and all([isinstance(sequence, PagedKvCache) for sequence in sequences]):
        return sequences
    each = [caches_of(sequence) for sequence in sequences]
    for g in range(n_stores):
        members += [caches[g] for caches in each]
    return tuple(members)
