"""Block ids, who holds them, and which are free. Integers only: no bytes, no Python objects.

    counts     1  2  0  1  0  0 | 0  0  0  0        holders of block 0, 1, 2 ...
    returned   [4, 5, 2]  ^ top                     free, held before: taken first, last in first out
    fresh                         6  7  8  9        free, never held: taken in ascending order

Blocks that were held before go first, since their pages exist and may still be in a cache; memory
that no sequence ever needed is never touched. A list that comes back is stacked so that it is
handed out again in its own order: neighbouring blocks stay neighbours, and are copied as one.

A prefix cache marks the blocks that it holds, so that how many it could give up is known at any
time, whoever else takes or drops them. Where nothing is marked, this costs nothing.

Every change is one critical section with no Python object made in it, so it is atomic with the GIL
and without.
"""

cimport cython
from libc.stdint cimport INT32_MAX, int32_t
from libc.stdlib cimport calloc, free, malloc
from libc.string cimport memcpy

from pagedkv._arrays cimport as_index

from collections import Counter

import numpy as np


cdef class BlockAllocator:
    """Counts holders of the blocks ``0 .. total - 1``."""

    def __cinit__(self, Py_ssize_t total):
        self.total = total
        self.n_fresh = total
        # Untouched memory: a large store costs what it uses.
        self.counts = <int32_t*>calloc(max(total, 1), sizeof(int32_t))
        self.returned = <int32_t*>malloc(max(total, 1) * sizeof(int32_t))
        if self.counts is NULL or self.returned is NULL:
            raise MemoryError(f"cannot allocate the counts of {total} blocks")

    def __dealloc__(self):
        free(self.counts)
        free(self.returned)
        free(self.kinds)

    cdef bint take(self, int32_t* ids, Py_ssize_t n) noexcept:
        """Write n free block ids, each now held once; False, with nothing changed, if there are fewer."""
        cdef Py_ssize_t i, n_old, fresh, held
        cdef bint enough
        with cython.critical_section(self):
            enough = n <= self.n_free()
            if enough:
                n_old = min(n, self.n_returned)
                for i in range(n_old):
                    ids[i] = self.returned[self.n_returned - 1 - i]
                self.n_returned -= n_old
                fresh = self.total - self.n_fresh
                for i in range(n_old, n):
                    ids[i] = <int32_t>(fresh + i - n_old)
                self.n_fresh -= n - n_old
                for i in range(n):
                    self.counts[ids[i]] = 1
                self.acquired += n
                held = self.total - self.n_free()
                self.peak_held = max(self.peak_held, held)
            else:
                self.exhaustions += 1
        return enough

    cdef Py_ssize_t retain(self, const int32_t* ids, Py_ssize_t n) noexcept:
        """One more holder for each id; -1, or the place of the first that cannot have one, and no change."""
        cdef Py_ssize_t i, bad = -1
        with cython.critical_section(self):
            for i in range(n):
                if self.counts[ids[i]] == 0 or self.counts[ids[i]] == INT32_MAX:
                    bad = i
                    break
                self.counts[ids[i]] += 1
                self.recount(ids[i], self.counts[ids[i]] - 1, self.counts[ids[i]])
            if bad >= 0:
                for i in range(bad):
                    self.counts[ids[i]] -= 1
                    self.recount(ids[i], self.counts[ids[i]] + 1, self.counts[ids[i]])
        return bad

    cdef Py_ssize_t give_back(self, const int32_t* ids, Py_ssize_t n) noexcept:
        """One holder less for each id; -1, or the place of one that nobody holds, and no change."""
        cdef Py_ssize_t i, j, top, bad = -1
        with cython.critical_section(self):
            top = self.n_returned
            for i in range(n - 1, -1, -1):
                if self.counts[ids[i]] == 0:
                    bad = i
                    break
                self.counts[ids[i]] -= 1
                self.recount(ids[i], self.counts[ids[i]] + 1, self.counts[ids[i]])
                if self.counts[ids[i]] == 0:
                    self.returned[self.n_returned] = ids[i]
                    self.n_returned += 1
            if bad >= 0:
                self.n_returned = top
                for j in range(bad + 1, n):
                    self.counts[ids[j]] += 1
                    self.recount(ids[j], self.counts[ids[j]] - 1, self.counts[ids[j]])
            else:
                self.released += self.n_returned - top
        return bad

    # --- for the prefix cache ---

    def mark(self, const int32_t[::1] ids not None, Kind kind):
        """Say of blocks that the prefix cache holds whether it may give them up, or that it no longer holds them."""
        cdef Py_ssize_t i
        cdef unsigned char* kinds
        for i in range(ids.shape[0]):
            if not 0 <= ids[i] < self.total:
                raise IndexError(f"ids: expected 0 to {self.total - 1}, got {ids[i]}")
        if self.kinds is NULL:
            kinds = <unsigned char*>calloc(max(self.total, 1), 1)
            if kinds is NULL:
                raise MemoryError(f"cannot allocate the marks of {self.total} blocks")
            with cython.critical_section(self):
                self.kinds = kinds
        with cython.critical_section(self):
            for i in range(ids.shape[0]):
                if self.counts[ids[i]] == 1:
                    self.n_evictable += (kind == EVICTABLE) - (self.kinds[ids[i]] == EVICTABLE)
                self.kinds[ids[i]] = kind

    def n_idle_at_end(self, const int32_t[::1] ids not None):
        """How many of the last ids, without a gap, are blocks that could be given up now."""
        cdef Py_ssize_t i = ids.shape[0]
        while i and self.is_idle(ids[i - 1]):
            i -= 1
        return ids.shape[0] - i

    def end_of_idle(self, const int32_t[::1] ids not None):
        """The place after the last of the ids whose block could be given up now; 0 if none can."""
        cdef Py_ssize_t i = ids.shape[0]
        while i and not self.is_idle(ids[i - 1]):
            i -= 1
        return i

    cpdef bint is_idle(self, int32_t id) noexcept:
        """Whether a block could be given up now."""
        return (0 <= id < self.total and self.counts[id] == 1
                and self.kinds is not NULL and self.kinds[id] == EVICTABLE)

    cdef int check_held(self, const int32_t[::1] ids, str name) except -1:
        # Sorted, so that a block's occurrences are counted without a table of all blocks.
        cdef const int32_t[::1] ordered = np.sort(ids)
        cdef Py_ssize_t i = 0, first
        while i < ordered.shape[0]:
            first = i
            as_index(ordered[i], name, self.total)
            while i < ordered.shape[0] and ordered[i] == ordered[first]:
                i += 1
            if self.counts[ordered[first]] == 0:
                raise ValueError(f"{name}: expected blocks that someone holds, got {ordered[first]}, which is free")
            if self.counts[ordered[first]] < i - first:
                raise ValueError(f"{name}: expected no block more often than it has holders, got {ordered[first]} "
                                 f"{i - first} times, with {self.counts[ordered[first]]}")
        return 0

    cdef tuple snapshot(self):
        """Holders of every block and what it is to the prefix cache, ``[total]`` each, of one moment."""
        holders = np.empty(self.total, np.int32)
        kinds = np.zeros(self.total, np.uint8)
        cdef int32_t[::1] counts = holders
        cdef unsigned char[::1] marks = kinds
        with cython.critical_section(self):
            if self.total:
                memcpy(&counts[0], self.counts, self.total * sizeof(int32_t))
                if self.kinds is not NULL:
                    memcpy(&marks[0], self.kinds, self.total)
        return holders, kinds

    cdef str fault(self):
        """What is wrong with the counts and the free blocks, or None. Walks over every block."""
        cdef Py_ssize_t i, n_zero = 0, n_idle = 0
        cdef Py_ssize_t fresh = self.total - self.n_fresh
        seen = set()
        for i in range(self.n_returned):
            if not 0 <= self.returned[i] < fresh:
                return f"free list holds {self.returned[i]}, not an id of a block that was ever held"
            if self.returned[i] in seen:
                return f"block {self.returned[i]} is twice in the free list"
            if self.counts[self.returned[i]] != 0:
                return f"block {self.returned[i]} is in the free list with {self.counts[self.returned[i]]} holders"
            seen.add(self.returned[i])
        for i in range(self.total):
            if self.counts[i] < 0:
                return f"block {i} has {self.counts[i]} holders"
            n_idle += self.is_idle(<int32_t>i)
            if self.counts[i] == 0:
                n_zero += 1
                if self.kinds is not NULL and self.kinds[i] != NOT_CACHED:
                    return f"block {i} is in the prefix cache and has no holder"
            elif i >= fresh:
                return f"block {i} was never handed out and has {self.counts[i]} holders"
        if n_zero != self.n_free():
            return f"{n_zero} blocks have no holder, {self.n_free()} are free"
        if n_idle != self.n_evictable:
            return f"{n_idle} blocks can be evicted, {self.n_evictable} are counted"
        return None

    cdef str fault_in(self, list tables):
        """What is wrong with block tables, lists of ids and -1, that all hold what they name; or None."""
        named = Counter([block for table in tables for block in table if block != -1])
        for block, count in named.items():
            if count > self.counts[<int32_t>block]:
                return f"block {block} is in {count} tables and has {self.counts[<int32_t>block]} holders"
        return None
