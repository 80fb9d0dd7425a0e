from pagedkv._store cimport BlockStore


cdef class PagedKvStore(BlockStore):
    # Ends every call that changed something: a store in debug mode checks its books.
    cdef int after_change(self) except -1
    cdef object view(self, object blocks, object id, object layer, object offset)
    cdef list tables_of(self, object caches)


# RuntimeError or TypeError that says why it is no store to work with.
cdef object not_a_store(object store)


cdef inline PagedKvStore as_store(object store):
    """The store that a caller named. One whose __init__ has run stays as it is: it runs once."""
    if isinstance(store, PagedKvStore) and (<PagedKvStore>store).blocks.total:
        return <PagedKvStore>store
    raise not_a_store(store)
