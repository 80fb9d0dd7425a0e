"""What a prefix cache knows, looked at from outside: its namespaces, and the blocks in each of them.

One namespace at a time is copied at one moment, in the books' critical section, where no Python code runs; values are made of
the copy afterwards.
"""

cimport cython
cimport numpy as cnp
from libc.stdint cimport int32_t, int64_t, uint64_t
from libc.string cimport memcpy

from pagedkv._radix.nodes cimport HOLE, NEVER, Key
from pagedkv._radix.picture cimport Extent, Piece
from pagedkv.allocator cimport BlockAllocator

import numpy as np

from pagedkv.stats import KnownBlock


cdef Key key_of(bytes name, const int64_t[::1] ids, Py_ssize_t n) noexcept:
    cdef Key key = key_of_all(name)
    if n > 0:
        key.n = n
        key.ids = &ids[0]
    return key


cdef Key key_of_all(bytes name) noexcept:
    cdef Key key
    key.name = NULL if name is None else <char*>name
    key.n_bytes = -1 if name is None else len(name)
    key.n = 0
    key.ids = NULL
    return key


cdef list names_of(BlockAllocator blocks):
    cdef int64_t n_names = 0, n_bytes = 0, at = 0, i
    cdef int64_t[::1] lengths
    cdef char[::1] letters
    while True:
        lengths, letters = np.empty(n_names + 1, np.int64), np.empty(n_bytes + 1, np.int8)
        if blocks.copy_names(&n_names, &n_bytes, &lengths[0], &letters[0]):
            break
    cdef list names = []
    for i in range(n_names):
        if lengths[i] < 0:
            names.insert(0, None)
        else:
            names.append((&letters[at])[:lengths[i]])
            at += lengths[i]
    return names


@cython.final
cdef class Picture:
    """A namespace as it was at one moment. It stays as it is."""

    cdef bytes name
    cdef double now
    cdef Extent extent
    cdef unsigned char[::1] memory  # of the pieces
    cdef int64_t[::1] tokens
    cdef int32_t[::1] held

    cdef inline const Piece* piece(self, int64_t number) noexcept:
        return &(<const Piece*>&self.memory[0])[number]

    cdef bint find(self, int64_t* number, int64_t* place, int64_t size) noexcept:
        """The first block from this place of a piece on."""
        cdef const Piece* it
        while number[0] < self.extent.n_pieces:
            it = self.piece(number[0])
            place[0] = max(place[0], it.start // size)
            while place[0] < it.end // size:
                if self.held[it.blocks + place[0] - it.start // size] != HOLE:
                    return True
                place[0] += 1
            number[0] += 1
            place[0] = 0
        return False

    cdef object value(self, int64_t number, int64_t place, int64_t size):
        cdef const Piece* it = self.piece(number)
        cdef const Piece* at = it
        cdef int64_t position = place * size, end = position + size, first
        cdef cnp.ndarray tokens = np.empty(size, np.int64)
        cdef int64_t* out = <int64_t*>cnp.PyArray_DATA(tokens)
        cdef uint64_t parent = 0
        cdef object remaining = None
        while True:  # they may begin in a piece above, and what comes before them lies in the last of these
            first = max(at.start, position)
            if end > first:
                memcpy(&out[first - position], &self.tokens[at.tokens + first - at.start], (end - first) * sizeof(int64_t))
                end = first
            if at.start < position or at.parent < 0:
                break
            at = self.piece(at.parent)
        if place:
            parent = at.first_id + <uint64_t>(place - 1)
        if it.expires > NEVER:
            remaining = max(it.expires - self.now, 0.0)
        tokens.flags.writeable = False
        return KnownBlock(self.name, it.first_id + <uint64_t>place, parent, position, tokens,
                          self.held[it.blocks + place - it.start // size], it.priority, remaining)


cdef Picture picture_of(BlockAllocator blocks, bytes name, double now):
    cdef Picture it = Picture()
    cdef Extent extent = Extent(0, 0, 0)
    it.name, it.now = name, now
    while True:
        it.memory = np.empty(extent.n_pieces * sizeof(Piece) + 1, np.uint8)
        it.tokens, it.held = np.empty(extent.n_tokens + 1, np.int64), np.empty(extent.n_blocks + 1, np.int32)
        if blocks.copy_space(key_of_all(name), &extent, <Piece*>&it.memory[0], &it.tokens[0], &it.held[0]):
            break
    it.extent = extent
    return it


@cython.final
cdef class Walk:
    """An iterator of `KnownBlock`."""

    cdef BlockAllocator blocks
    cdef object prefixes            # whose blocks these are; for its clock, and so that it stays
    cdef Py_ssize_t block_size
    cdef list names                 # that are still to come, the next one last
    cdef Picture picture
    cdef int64_t number, place      # in it, of what comes next

    def __iter__(self):
        return self

    def __next__(self):
        cdef Picture picture
        cdef int64_t number, place
        cdef bint found
        while True:
            with cython.critical_section(self):
                picture = self.picture
                found = picture is not None and picture.find(&self.number, &self.place, self.block_size)
                number, place = self.number, self.place
                self.place += 1
            if found:
                return picture.value(number, place, self.block_size)
            if not self.names:
                raise StopIteration
            name = self.names[len(self.names) - 1]
            picture = picture_of(self.blocks, name, self.prefixes._now())
            with cython.critical_section(self):
                if self.names and self.names[len(self.names) - 1] is name:
                    self.names.pop()
                    self.picture = picture
                    self.number = self.place = 0

    def __reduce__(self):
        raise TypeError("walk: cannot be copied or pickled, it looks at a prefix cache")


cdef object walk(BlockAllocator blocks, object prefixes, Py_ssize_t block_size, list names):
    """Each of these namespaces when it is reached."""
    cdef Walk it = Walk()
    it.blocks, it.prefixes, it.block_size, it.names = blocks, prefixes, block_size, names[::-1]
    return it
