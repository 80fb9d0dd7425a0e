from libc.stdint cimport int32_t

cdef enum Kind:
    NOT_CACHED
    EVICTABLE
    PROTECTED


cdef class BlockAllocator:
    cdef int32_t* counts            # holders of each block; 0 = free
    cdef int32_t* returned          # a stack of the free blocks that were held before
    cdef Py_ssize_t n_returned
    cdef Py_ssize_t n_fresh         # blocks [total - n_fresh, total) were never held
    cdef readonly Py_ssize_t total
    cdef readonly Py_ssize_t peak_held, acquired, released, exhaustions
    cdef unsigned char* kinds       # of each block: NOT_CACHED, EVICTABLE, PROTECTED; NULL as long as nothing is cached
    cdef readonly Py_ssize_t n_evictable    # EVICTABLE blocks with one holder: the prefix cache

    cdef inline Py_ssize_t n_free(self) noexcept:
        return self.n_returned + self.n_fresh

    cdef bint take(self, int32_t* ids, Py_ssize_t n) noexcept
    cdef Py_ssize_t retain(self, const int32_t* ids, Py_ssize_t n) noexcept
    cdef Py_ssize_t give_back(self, const int32_t* ids, Py_ssize_t n) noexcept
    cdef inline void recount(self, int32_t id, int32_t before, int32_t after) noexcept:
        """A block's holders have changed: does it still belong to the prefix cache alone?"""
        if self.kinds is not NULL and self.kinds[id] == EVICTABLE:
            self.n_evictable += (after == 1) - (before == 1)

    cpdef bint is_idle(self, int32_t id) noexcept
    # IndexError or ValueError unless each id is in range and has as many holders as the ids name it.
    cdef int check_held(self, const int32_t[::1] ids, str name) except -1
    cdef tuple snapshot(self)
    cdef str fault(self)
    cdef str fault_in(self, list tables)
