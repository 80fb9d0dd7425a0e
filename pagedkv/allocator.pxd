cimport numpy as cnp
from libc.stdint cimport int32_t, int64_t, uint64_t

from pagedkv._radix.nodes cimport Key, Mark, RadixTree
from pagedkv._radix.order cimport radix_recount

# Fills a block of the owner's with what nobody may read.
ctypedef void (*Erase)(void* owner, int32_t id) noexcept


cdef class BlockAllocator:
    cdef int32_t* counts            # holders of each block; 0 = free
    cdef int32_t* returned          # a stack of the free blocks that were held before
    cdef Py_ssize_t n_returned
    cdef Py_ssize_t n_fresh         # blocks [total - n_fresh, total) were never held
    cdef readonly Py_ssize_t total
    cdef readonly Py_ssize_t peak_held, acquired, released, exhaustions
    cdef RadixTree* tree            # what the prefix cache knows; NULL without one
    cdef Erase erase                # of blocks that nobody holds any more; NULL to leave them as they are
    cdef void* owner

    cdef inline Py_ssize_t n_free(self) noexcept:
        return self.n_returned + self.n_fresh

    # Blocks that the prefix cache alone holds, and no term protects; for whoever has the critical section.
    cdef inline Py_ssize_t n_evictable(self) noexcept:
        return 0 if self.tree is NULL else self.tree.n_evictable

    cdef bint take(self, int32_t* ids, Py_ssize_t n) noexcept
    cdef Py_ssize_t retain(self, const int32_t* ids, Py_ssize_t n) noexcept
    cdef Py_ssize_t give_back(self, const int32_t* ids, Py_ssize_t n) noexcept
    cdef inline void recount(self, int32_t id, int32_t before, int32_t after) noexcept:
        """A block's holders have changed: does it still belong to the prefix cache alone?"""
        if self.tree is not NULL:
            radix_recount(self.tree, id, before, after)

    # The same within a critical section that is open already.
    cdef bint take_locked(self, int32_t* ids, Py_ssize_t n) noexcept
    cdef Py_ssize_t retain_locked(self, const int32_t* ids, Py_ssize_t n) noexcept
    cdef Py_ssize_t give_back_locked(self, const int32_t* ids, Py_ssize_t n) noexcept
    cdef void freed_from(self, Py_ssize_t top) noexcept

    # The ids of blocks that are free and were held before, in ascending order.
    cdef cnp.ndarray used_before(self)

    # Begin to know prefixes, and end it: ValueError if somebody does already.
    cdef int know(self, Py_ssize_t block_size, uint64_t seed) except -1
    cdef void know_nothing(self) noexcept
    # How many of the tokens are known; their blocks go to a table, if there is one, which are as many as they need.
    cdef Py_ssize_t match(self, Key key, int32_t* table) noexcept
    # The same for a sequence to start on. The blocks have one more holder. Where the last one is known in part, `tail` is
    # a block to copy it to, held once; without one to be had, that part does not count. MemoryError, OverflowError.
    cdef Py_ssize_t share(self, Key key, Py_ssize_t n_asked, int32_t* table, int32_t* tail) except -1
    # How many blocks of a table were new under these tokens, and are held from now on; -3 where the mark, after which the
    # tokens come, stands for nothing any more. MemoryError, ValueError.
    cdef Py_ssize_t insert(self, Key key, const int32_t* table, int64_t priority, double expires, Mark* mark) except -1
    # How many blocks went.
    cdef Py_ssize_t evict(self, Py_ssize_t n, bint all_or_none) noexcept
    cdef Py_ssize_t forget(self, Key key, Py_ssize_t start) noexcept
    cdef Py_ssize_t clear(self, const Key* key) noexcept
    # For whom the prefix cache may go at any time.
    cdef Py_ssize_t count_evictable(self) noexcept
    cdef bint has_terms(self) noexcept
    cdef void end_terms(self, double now) noexcept
    cdef bint is_idle(self, int32_t id) noexcept
    cdef void collect(self) noexcept

    # IndexError or ValueError unless each id is in range and has as many holders as the ids name it.
    cdef int check_held(self, const int32_t[::1] ids, str name) except -1
    cdef tuple snapshot(self)
    cdef str fault(self)
    cdef const char* find_fault(self, int32_t* seen, int64_t* place) noexcept
    cdef str fault_in(self, list tables)
