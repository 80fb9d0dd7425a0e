from libc.stdint cimport int32_t, int64_t, uint64_t

from pagedkv._radix.nodes cimport Event, Events, RadixTree

cdef enum EventKind:
    STORED
    REMOVED
    CLEARED

cdef enum:
    ALL_NAMESPACES = -2             # in place of a name's length

# Room for so many. -1: no memory.
cdef int make_events(Events* events, int64_t room, Py_ssize_t block_size) noexcept nogil
# What all are read of.
cdef void free_events(Events* events) noexcept nogil
# Up to n events from this number on, or from the first later one that is still there; how many. Their names are held.
cdef int64_t copy_events(const Events* events, Py_ssize_t block_size, uint64_t* number, int64_t n, Event* items,
                         int64_t* tokens) noexcept nogil
cdef void drop_events(Event* items, int64_t n) noexcept nogil
# Those before this number were read.
cdef void mark_read(Events* events, uint64_t number) noexcept nogil
# The number of the oldest that has not been read and is there.
cdef uint64_t first_event(const Events* events) noexcept nogil

cdef void write_events(RadixTree* tree, EventKind kind, int32_t node, int64_t first, int64_t end) noexcept nogil
cdef void write_cleared(RadixTree* tree, int32_t space) noexcept nogil

# Places [first, end) of a node have their blocks now, or are about to lose them. For several at once: where nobody reads,
# a loop over blocks costs what it would without.
cdef inline void tell(RadixTree* tree, EventKind kind, int32_t node, int64_t first, int64_t end) noexcept nogil:
    if tree.events is not NULL:
        write_events(tree, kind, node, first, end)

# A namespace is about to be forgotten as a whole; 0 for all of them.
cdef inline void tell_cleared(RadixTree* tree, int32_t space) noexcept nogil:
    if tree.events is not NULL:
        write_cleared(tree, space)
