"""The last things that a radix tree has learned and forgotten: a ring of records in memory that was had before.

    room = 4        n_read = 5, n_written = 11      events 7, 8, 9 and 10 are there, 5 and 6 have gone unread
    [8 9 10 7]

Writing one cannot fail, and where the ring is full the oldest goes: its number says to the reader that it did.
"""

from libc.stdint cimport int32_t, int64_t, uint64_t
from libc.string cimport memcpy, memset

from pagedkv._radix.nodes cimport (
    HOLE, Event, Events, Node, RadixTree, Space, drop_name, hold_name, raw_calloc, raw_free)


cdef int make_events(Events* events, int64_t room, Py_ssize_t block_size) noexcept nogil:
    memset(events, 0, sizeof(Events))
    events.items = <Event*>raw_calloc(room, sizeof(Event))  # untouched memory costs nothing
    events.tokens = <int64_t*>raw_calloc(room, block_size * sizeof(int64_t))
    events.room = room
    if events.items is NULL or events.tokens is NULL:
        free_events(events)
        return -1
    return 0


cdef void free_events(Events* events) noexcept nogil:
    raw_free(events.items)
    raw_free(events.tokens)
    events.items = NULL
    events.tokens = NULL


cdef void drop_events(Event* items, int64_t n) noexcept nogil:
    cdef int64_t i
    for i in range(n):
        drop_name(items[i].name)
        items[i].name = NULL


cdef uint64_t first_event(const Events* events) noexcept nogil:
    cdef uint64_t room = <uint64_t>events.room
    return max(events.n_read, events.n_written - room if events.n_written > room else 0)


cdef int64_t copy_events(const Events* events, Py_ssize_t block_size, uint64_t* number, int64_t n, Event* items,
                         int64_t* tokens) noexcept nogil:
    cdef int64_t i, at
    number[0] = max(number[0], first_event(events))
    n = min(n, <int64_t>(events.n_written - number[0]))
    for i in range(n):
        at = <int64_t>((number[0] + <uint64_t>i) % <uint64_t>events.room)
        items[i] = events.items[at]
        hold_name(items[i].name)
        memcpy(&tokens[i * block_size], &events.tokens[at * block_size], block_size * sizeof(int64_t))
    return n


cdef void mark_read(Events* events, uint64_t number) noexcept nogil:
    cdef uint64_t at = first_event(events)
    while at < number:
        drop_events(&events.items[at % <uint64_t>events.room], 1)
        at += 1
    events.n_read = number


cdef Event* next_event(Events* events) noexcept nogil:
    """Where the next one goes, in place of the oldest."""
    cdef Event* it = &events.items[events.n_written % <uint64_t>events.room]
    events.n_written += 1
    drop_name(it.name)
    memset(it, 0, sizeof(Event))
    return it


cdef void write_event(RadixTree* tree, EventKind kind, int32_t node, int64_t i) noexcept nogil:
    cdef const Node* at = &tree.nodes[node]
    cdef const Space* space = &tree.spaces[at.space]
    cdef int64_t size = tree.block_size, place = at.start // size + i, position = place * size, first
    cdef int64_t end = position + size if kind == STORED else position  # of the tokens that are to be told
    cdef int64_t* tokens = &tree.events.tokens[<int64_t>(tree.events.n_written % <uint64_t>tree.events.room) * size]
    cdef Event* it = next_event(tree.events)
    it.kind = kind
    it.name = hold_name(space.name)
    it.n_bytes = space.n_bytes
    it.id = at.first_id + <uint64_t>place
    it.position = position
    it.block = at.blocks[i]
    while True:  # the tokens may begin in a node above, and the place before is in the last of these
        first = max(at.start, position)
        if end > first:
            memcpy(&tokens[first - position], &at.key[first - at.start], (end - first) * sizeof(int64_t))
            end = first
        if at.start < position or at.start == 0:
            break
        at = &tree.nodes[at.parent]
    if place:
        it.parent = at.first_id + <uint64_t>(place - 1)


cdef void write_events(RadixTree* tree, EventKind kind, int32_t node, int64_t first, int64_t end) noexcept nogil:
    """A block that is stored comes after those before it, and goes before them."""
    cdef int64_t i, at
    for i in range(end - first):
        at = first + i if kind == STORED else end - 1 - i
        if tree.nodes[node].blocks[at] != HOLE:
            write_event(tree, kind, node, at)


cdef void write_cleared(RadixTree* tree, int32_t space) noexcept nogil:
    cdef Event* it = next_event(tree.events)
    it.kind = CLEARED
    it.block = HOLE
    it.n_bytes = ALL_NAMESPACES
    if space:
        it.name = hold_name(tree.spaces[space].name)
        it.n_bytes = tree.spaces[space].n_bytes
