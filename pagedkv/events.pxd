from libc.stdint cimport int64_t, uint64_t

from pagedkv._radix.nodes cimport Event, Events
from pagedkv.store cimport PagedKvStore


cdef class PrefixEvents:
    cdef object __weakref__
    cdef PagedKvStore store         # whose prefix cache writes them; it may go before this does
    cdef Events ring                # of the books: all of it, and whether it has memory, is theirs to look at
    cdef uint64_t n_missed          # dropped, and read over
    cdef uint64_t number            # the incarnation, in the process that has this id
    cdef int64_t process

    # One that reads what the prefix cache of a store learns and forgets from now on: ValueError where somebody does.
    @staticmethod
    cdef PrefixEvents of(PagedKvStore store, int64_t capacity)
    cdef int check_open(self) except -1
    cdef uint64_t incarnation_now(self) except? 0
    # Values of up to n events from a number on, at the end of a list. The number is that of what follows them.
    cdef int read(self, list found, uint64_t* at, int64_t n, uint64_t incarnation, Event* items, int64_t* tokens) except -1
    cdef void end(self) noexcept
