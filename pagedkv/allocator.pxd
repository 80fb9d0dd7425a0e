from libc.stdint cimport int32_t


cdef class BlockAllocator:
    cdef int32_t* counts            # holders of each block; 0 = free
    cdef int32_t* returned          # a stack of the free blocks that were held before
    cdef Py_ssize_t n_returned
    cdef Py_ssize_t n_fresh         # blocks [total - n_fresh, total) were never held
    cdef readonly Py_ssize_t total
    cdef readonly Py_ssize_t peak_held, acquired, released, exhaustions

    cdef inline Py_ssize_t n_free(self) noexcept:
        return self.n_returned + self.n_fresh

    cdef bint take(self, int32_t* ids, Py_ssize_t n) noexcept
    cdef Py_ssize_t retain(self, const int32_t* ids, Py_ssize_t n) noexcept
    cdef Py_ssize_t give_back(self, const int32_t* ids, Py_ssize_t n) noexcept
    cdef str fault(self)
