cimport cython
from cpython.object cimport PyObject

from pagedkv._tables cimport BlockTable, Growth
from pagedkv.contiguous cimport KvCache
from pagedkv.store cimport PagedKvStore


cdef class PagedKvCache:
    cdef object __weakref__
    # The store whose blocks the table names. None while it names none, and for adopted blocks until a store is seen.
    cdef readonly PagedKvStore store
    cdef BlockTable table
    cdef Py_ssize_t users           # 0 idle, n readers, -1 a writer

    # The guard: RuntimeError, at once, if it cannot be had. ValueError if the blocks held are not the store's.
    cdef int begin_read(self, PagedKvStore store) except -1
    cdef void end_read(self) noexcept
    cdef int begin_write(self, PagedKvStore store) except -1
    cdef void end_write(self) noexcept
    cdef int lock_write(self) except -1
    cdef int bind(self, PagedKvStore store) except -1

    # What `_tables` does to a table, and whose store it then is. All but the first trust that it is locked.
    cdef void commit(self, PagedKvStore store, Growth* growth, Py_ssize_t n_written) noexcept
    # PagedKvError, or RuntimeError, unless it can release what it holds: then `take_over` and `cut` cannot fail.
    cdef int check_bound(self) except -1
    cdef int check_own(self) except -1
    cdef void become(self, PagedKvStore store, const BlockTable* table) noexcept
    # A fork of it as it is now, which becomes the sequence of a cache that is locked, or is released; as `fork_table`.
    cdef int prepare_fork(self, BlockTable* fork) except -1
    cdef void take_over(self, PagedKvStore store, const BlockTable* fork) noexcept
    cdef int fork_into(self, PagedKvCache other) except -1
    cdef void cut(self, Py_ssize_t n) noexcept
    cdef void drop_to(self, Py_ssize_t position) noexcept
    cdef void empty(self) noexcept
    # Of the layers from this one on, one for each target: all or none. A stop of -1 is the end.
    cdef int copy_out(self, PagedKvStore store, Py_ssize_t layer, Py_ssize_t start, Py_ssize_t stop,
                      list targets) except -1
    cdef int end_growth(self, PagedKvStore store) except -1
