from pagedkv._table cimport BlockTable


cdef class PagedKvCache(BlockTable):
    pass
