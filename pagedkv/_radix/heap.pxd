"""A binary heap of numbers, each of which can be found in it: the books of what goes first.

The owner says which of two items goes before the other, and is told where each of them lies, so that any of them can be
taken out or moved when its place in the order changes. Room is reserved beforehand: nothing here allocates.
"""

from libc.stdint cimport int32_t, int64_t

cdef struct Heap:
    int32_t* items
    int32_t n
    int64_t room

ctypedef bint (*IsBefore)(const void* owner, int32_t a, int32_t b) noexcept nogil
ctypedef void (*IsAt)(void* owner, int32_t item, int32_t at) noexcept nogil


cdef inline void heap_rise(Heap* heap, int32_t at, void* owner, IsBefore before, IsAt moved) noexcept nogil:
    cdef int32_t item = heap.items[at], above
    while at:
        above = (at - 1) // 2
        if not before(owner, item, heap.items[above]):
            break
        heap.items[at] = heap.items[above]
        moved(owner, heap.items[at], at)
        at = above
    heap.items[at] = item
    moved(owner, item, at)


cdef inline void heap_sink(Heap* heap, int32_t at, void* owner, IsBefore before, IsAt moved) noexcept nogil:
    cdef int32_t item = heap.items[at], below = 2 * at + 1
    while below < heap.n:
        if below + 1 < heap.n and before(owner, heap.items[below + 1], heap.items[below]):
            below += 1
        if not before(owner, heap.items[below], item):
            break
        heap.items[at] = heap.items[below]
        moved(owner, heap.items[at], at)
        at = below
        below = 2 * at + 1
    heap.items[at] = item
    moved(owner, item, at)


cdef inline void heap_mend(Heap* heap, int32_t at, void* owner, IsBefore before, IsAt moved) noexcept nogil:
    """The item at this place may have come to go earlier or later."""
    if at and before(owner, heap.items[at], heap.items[(at - 1) // 2]):
        heap_rise(heap, at, owner, before, moved)
    else:
        heap_sink(heap, at, owner, before, moved)


cdef inline void heap_push(Heap* heap, int32_t item, void* owner, IsBefore before, IsAt moved) noexcept nogil:
    heap.items[heap.n] = item
    heap.n += 1
    heap_rise(heap, heap.n - 1, owner, before, moved)


cdef inline void heap_remove(Heap* heap, int32_t at, void* owner, IsBefore before, IsAt moved) noexcept nogil:
    """Take out what is at this place; its owner knows that it is nowhere then."""
    heap.n -= 1
    if at < heap.n:
        heap.items[at] = heap.items[heap.n]
        moved(owner, heap.items[at], at)
        heap_mend(heap, at, owner, before, moved)
