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


cdef tuple caches_of(object item, Py_ssize_t n_stores):
    """Its PagedKvCaches, one for each store; None where it has others. `caches` is read once: it may say something else then."""
    if isinstance(item, PagedKvCache):
        return (item,) if n_stores == 1 else None
    caches = None if isinstance(item, type) else getattr(item, "caches", None)
    if type(caches) is not tuple or len(<tuple>caches) != n_stores:
        return None
    for cache in <tuple>caches:
        if not isinstance(cache, PagedKvCache):
            return None
    return caches


cdef tuple as_members(object caches, object store, Py_ssize_t n_stores):
    cdef str wanted = "PagedKvCache" if n_stores == 1 else "ModelSequence"
    cdef tuple batch, each = caches_of(caches, n_stores)
    cdef list found = []
    cdef Py_ssize_t g
    if each is not None:
        check_whose(caches, store, "caches")
        return each
    batch = as_items(caches, "caches", f"a {wanted} or several of them")
    for i, sequence in enumerate(batch):
        if n_stores == 1 and isinstance(sequence, PagedKvCache):
            found.append(sequence)
            continue
        each = caches_of(sequence, n_stores)
        if each is None:
            raise TypeError(f"caches[{i}]: expected a {wanted}, got {describe(sequence)}")
        check_whose(sequence, store, f"caches[{i}]")
        found.append(each[0] if n_stores == 1 else each)
    return tuple(found) if n_stores == 1 else tuple([each[g] for g in range(n_stores) for each in found])


cdef int check_whose(object sequence, object store, str name) except -1:
    """One that knows its stores is used with them alone. What a PagedKvCache knows it looks at itself."""
    if not isinstance(sequence, PagedKvCache):
        home = getattr(sequence, "stores", store)
        if home is not store:
            raise ValueError(f"{name}: expected a sequence of {store!r}, got one of {home!r}")
    return 0


cdef tuple as_distinct_members(object caches, object store, Py_ssize_t n_stores):
    members = as_members(caches, store, n_stores)
    if len(set(map(id, members))) != len(members):
        raise ValueError("caches: expected each cache once, got one of them twice")
    return members


cdef tuple as_sequence(object sequence, tuple stores):
    cdef tuple caches = caches_of(sequence, len(stores))
    if caches is None:
        raise TypeError(f"cache: expected a {'PagedKvCache' if len(stores) == 1 else 'ModelSequence'}, got {describe(sequence)}")
    if not isinstance(sequence, PagedKvCache):
        home = getattr(sequence, "stores", None)
        if getattr(home, "stores", stores) != stores:
            raise ValueError(f"cache: expected a sequence of the stores whose prefixes these are, got one of {home!r}")
    return caches
