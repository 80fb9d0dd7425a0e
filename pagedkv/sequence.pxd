from pagedkv._table cimport BlockTable


cdef class PagedKvCache(BlockTable):
    # Make `other` a second holder of this sequence's written blocks; it gives back its own.
    cdef PagedKvCache share_into(self, PagedKvCache other)
