from pagedkv._store cimport BlockStore


cdef class PagedKvStore(BlockStore):
    # Ends every call that changed something: a store in debug mode checks its books.
    cdef int after_change(self) except -1
    cdef object view(self, object blocks, object id, object layer)
    cdef list tables_of(self, object caches)
