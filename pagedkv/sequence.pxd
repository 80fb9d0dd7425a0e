from libc.stdint cimport int32_t

from pagedkv.store cimport PagedKvStore


cdef class PagedKvCache:
    cdef object __weakref__
    # The store whose blocks the table names. None while it names none, and for adopted blocks until a store is seen.
    cdef readonly PagedKvStore store
    cdef int32_t[::1] table         # n_blocks entries in use; those before n_dropped were given back
    cdef Py_ssize_t n_blocks
    cdef Py_ssize_t n_dropped
    cdef Py_ssize_t length
    cdef Py_ssize_t block_size      # of the blocks in the table
    cdef Py_ssize_t users           # 0 idle, n readers, -1 a writer

    # The guard: RuntimeError, at once, if it cannot be had. ValueError if the blocks held are not the store's.
    cdef int begin_read(self, PagedKvStore store) except -1
    cdef void end_read(self) noexcept
    cdef int begin_write(self, PagedKvStore store) except -1
    cdef void end_write(self) noexcept

    # What the next n_new positions take: blocks past the capacity, and copies of blocks that others hold too.
    cdef Py_ssize_t n_missing(self, PagedKvStore store, Py_ssize_t n_new) noexcept
    cdef Py_ssize_t n_shared(self, PagedKvStore store, Py_ssize_t n_new) noexcept
    # Table entries for that many blocks; their contents and the length are untouched.
    cdef int make_room(self, Py_ssize_t n_entries) except -1

    cdef int lock_write(self) except -1
    cdef int bind(self, PagedKvStore store) except -1
    cdef int prepare(self, PagedKvStore store, Py_ssize_t n_new) except -1
    cdef int copy_shared(self, Py_ssize_t n_missing, Py_ssize_t n_copies) except -1
    cdef int give_back_from(self, Py_ssize_t first) except -1
    cdef PagedKvCache share_into(self, PagedKvCache other)
