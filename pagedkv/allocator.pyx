"""Block ids, who holds them, and which are free. Integers only: no bytes, no Python objects.

    counts     1  2  0  1  0  0 | 0  0  0  0        holders of block 0, 1, 2 ...
    returned   [4, 5, 2]  ^ top                     free, held before: taken first, last in first out
    fresh                         6  7  8  9        free, never held: taken in ascending order

Blocks that were held before go first, since their pages exist and may still be in a cache; memory
that no sequence ever needed is never touched. A list that comes back is stacked so that it is
handed out again in its own order: neighbouring blocks stay neighbours, and are copied as one.

What a prefix cache knows, a tree, belongs to the same books: whoever takes or gives back a block, what could be evicted
is known at any time, and a request that is short of blocks takes what is evicted for it in the same moment. Where nothing
is known, this costs nothing.

Every change is one critical section in which no Python code can run, so it is atomic with the GIL and without. Allocators
of blocks of several sizes, those of a model's KV-cache groups, may have one budget of bytes: then that is one critical
section for all of them, a request for blocks of each is met or refused as a whole, and where bytes are short, whatever was
used least recently is evicted, in whichever of them it lies.
"""

cimport cython
cimport numpy as cnp
from cpython.object cimport PyObject
from cpython.ref cimport Py_DECREF, Py_INCREF
from libc.stdint cimport INT32_MAX, INT32_MIN, int32_t, int64_t, uint64_t
from libc.stdlib cimport calloc, free, malloc
from libc.string cimport memcpy

from pagedkv._arrays cimport as_index, empty_ids
from pagedkv._radix.faults cimport radix_fault
from pagedkv._radix.nodes cimport HOLE, Key, Mark, RadixTree, first_needed, radix_free, radix_new
from pagedkv._radix.order cimport UNKNOWN, radix_end_terms, radix_goes_before, radix_is_idle, radix_kind
from pagedkv._radix.picture cimport Extent, Piece, radix_copy_names, radix_copy_space
from pagedkv._radix.tree cimport (
    Insertion, radix_blocks, radix_clear, radix_discard, radix_evict, radix_forget, radix_insert, radix_is_prepared,
    radix_match, radix_prepare_insert, radix_use)

from collections import Counter

import numpy as np


@cython.no_gc  # what it refers to refers to nothing
cdef class ByteBudget:
    """How many bytes the blocks of some allocators may take together. It owns them; a store owns it."""

    def __dealloc__(self):
        cdef int i
        for i in range(self.n_members):
            Py_DECREF(<object>self.members[i])
        free(self.members)

    cdef int join(self, BlockAllocator blocks) except -1:
        cdef PyObject** old
        cdef PyObject** members = <PyObject**>malloc((self.n_members + 1) * sizeof(PyObject*))
        if members is NULL:
            raise MemoryError("cannot allocate the members of a budget")
        Py_INCREF(blocks)
        with cython.critical_section(self):
            if self.n_members:
                memcpy(members, self.members, self.n_members * sizeof(PyObject*))
            members[self.n_members] = <PyObject*>blocks
            old = self.members
            self.members = members
            self.n_members += 1
            blocks.budget = <PyObject*>self
            blocks.account = &self.account
        free(old)
        return 0

    cdef void leave(self, BlockAllocator blocks) noexcept:
        cdef int i
        if self.n_members <= 1:  # it goes with its last member; there was no memory to join
            return
        with cython.critical_section(self):
            self.account.used -= blocks.n_held() * blocks.block_bytes
            self.account.resident -= blocks.resident()
            for i in range(self.n_members):
                if self.members[i] is <PyObject*>blocks:
                    self.n_members -= 1
                    self.members[i] = self.members[self.n_members]
                    break
        Py_DECREF(blocks)

    cdef int take(self, const Want* wants, int n) noexcept:
        cdef int short
        with cython.critical_section(self):
            short = self.take_locked(wants, n)
            if short >= 0:
                (<BlockAllocator>wants[short].blocks).exhaustions += 1
        return short

    cdef int take_locked(self, const Want* wants, int n) noexcept:
        cdef int i, short = self.make_room(wants, n)
        if short < 0:
            for i in range(n):
                (<BlockAllocator>wants[i].blocks).hand_out(wants[i].ids, wants[i].n)
        return short

    cdef int make_room(self, const Want* wants, int n) noexcept:
        """Evict what is missing, for all of them, or nothing."""
        cdef BlockAllocator blocks
        cdef Py_ssize_t missing, n_bytes, asked = 0, most = -1
        cdef int i, largest = 0
        # First what each lacks itself, then the bytes that all of them lack; and only then is anything evicted.
        for i in range(n):
            blocks = <BlockAllocator>wants[i].blocks
            missing = wants[i].n - blocks.n_unheld()
            if missing > 0 and missing > blocks.n_evictable():
                return i
            n_bytes = wants[i].n * blocks.block_bytes
            asked += n_bytes
            if n_bytes > most:
                most = n_bytes
                largest = i
        if self.account.used + asked > self.account.limit and self.needed() + asked > self.account.limit:
            return largest
        for i in range(n):
            blocks = <BlockAllocator>wants[i].blocks
            missing = wants[i].n - blocks.n_unheld()
            if missing > 0:
                radix_evict(blocks.tree, missing)
                blocks.collect()
                if wants[i].n > blocks.n_unheld():
                    return i
        while self.account.used + asked > self.account.limit:
            if not self.evict_one():
                return largest
        return -1

    cdef Py_ssize_t count(self) noexcept:
        cdef Py_ssize_t n = 0
        cdef int i
        for i in range(self.n_members):
            n += (<BlockAllocator>self.members[i]).n_held() * (<BlockAllocator>self.members[i]).block_bytes
        return n

    cdef Py_ssize_t needed(self) noexcept:
        cdef Py_ssize_t n = self.account.used
        cdef int i
        for i in range(self.n_members):
            n -= (<BlockAllocator>self.members[i]).n_evictable() * (<BlockAllocator>self.members[i]).block_bytes
        return n

    cdef Py_ssize_t count_evictable(self) noexcept:
        cdef Py_ssize_t n
        with cython.critical_section(self):
            n = self.account.used - self.needed()
        return n

    cdef bint evict_one(self) noexcept:
        """A block of the member whose turn it is: where what would go next was used before what would go elsewhere."""
        cdef BlockAllocator blocks, first = None
        cdef int i
        for i in range(self.n_members):
            blocks = <BlockAllocator>self.members[i]
            if blocks.n_evictable() and (first is None or radix_goes_before(blocks.tree, first.tree)):
                first = blocks
        if first is None or radix_evict(first.tree, 1) == 0:
            return False
        first.collect()
        return True

    cdef Py_ssize_t evict(self, Py_ssize_t n) noexcept:
        cdef Py_ssize_t n_gone = 0
        with cython.critical_section(self):
            while n_gone < n and self.evict_one():
                n_gone += 1
        return n_gone

    cdef Py_ssize_t resize(self, Py_ssize_t limit) noexcept:
        cdef Py_ssize_t n_needed
        with cython.critical_section(self):
            n_needed = self.needed()
            if n_needed <= limit:
                n_needed = -1
                self.account.limit = limit
                while self.account.used > limit and self.evict_one():
                    pass
        return n_needed


@cython.no_gc
cdef class BlockAllocator:
    """Counts holders of the blocks ``0 .. total - 1``."""

    def __cinit__(self, Py_ssize_t total, Py_ssize_t block_bytes):
        self.total = total
        self.block_bytes = block_bytes
        self.n_fresh = total
        # Untouched memory: a large store costs what it uses.
        self.counts = <int32_t*>calloc(max(total, 1), sizeof(int32_t))
        self.returned = <int32_t*>calloc(max(total, 1), sizeof(int32_t))
        if self.counts is NULL or self.returned is NULL:
            raise MemoryError(f"cannot allocate the counts of {total} blocks")

    def __dealloc__(self):
        radix_free(self.tree)
        free(self.counts)
        free(self.returned)

    cdef bint take(self, int32_t* ids, Py_ssize_t n) noexcept:
        """Write n free block ids, each now held once; False, with nothing changed, if there are not as many.

        Missing ones are evicted, if that is enough.
        """
        cdef Want want = Want(<PyObject*>self, ids, n)
        return (<ByteBudget>self.budget).take(&want, 1) < 0

    cdef bint try_take(self, int32_t* ids, Py_ssize_t n) noexcept:
        cdef bint enough
        with cython.critical_section(<object>self.budget):
            enough = self.take_locked(ids, n)
        return enough

    cdef bint take_locked(self, int32_t* ids, Py_ssize_t n) noexcept:
        cdef Want want = Want(<PyObject*>self, ids, n)
        return (<ByteBudget>self.budget).take_locked(&want, 1) < 0

    cdef void hand_out(self, int32_t* ids, Py_ssize_t n) noexcept:
        """Of the free blocks, which are as many at least."""
        cdef Py_ssize_t i, n_old = min(n, self.n_returned)
        cdef Py_ssize_t resident = self.resident()
        for i in range(n):
            ids[i] = self.next_free(i)
            self.counts[ids[i]] = 1
        self.n_returned -= n_old
        self.n_trimmed = min(self.n_trimmed, self.n_returned)
        self.n_fresh -= n - n_old
        self.acquired += n
        self.account.used += n * self.block_bytes
        self.account.resident += self.resident() - resident
        self.peak_held = max(self.peak_held, self.n_held())

    cdef bint peek(self, int32_t* ids, Py_ssize_t n) noexcept:
        cdef Want want = Want(<PyObject*>self, ids, n)
        cdef Py_ssize_t i
        cdef bint enough
        with cython.critical_section(<object>self.budget):
            enough = (<ByteBudget>self.budget).make_room(&want, 1) < 0
            self.exhaustions += not enough
            for i in range(n if enough else 0):
                ids[i] = self.next_free(i)
        return enough

    cdef bint take_peeked(self, int32_t* ids, Py_ssize_t n) noexcept:
        cdef Py_ssize_t i = 0
        with cython.critical_section(<object>self.budget):
            while i < n <= self.n_free() and ids[i] == self.next_free(i):
                i += 1
            if i == n:
                self.hand_out(ids, n)
        return i == n

    cdef Py_ssize_t retain(self, const int32_t* ids, Py_ssize_t n) noexcept:
        """One more holder for each id; -1, or the place of the first that cannot have one, and no change."""
        cdef Py_ssize_t bad
        with cython.critical_section(<object>self.budget):
            bad = self.retain_locked(ids, n)
        return bad

    cdef Py_ssize_t retain_locked(self, const int32_t* ids, Py_ssize_t n) noexcept:
        cdef Py_ssize_t i, bad = -1
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

    cdef Py_ssize_t release(self, const int32_t* ids, Py_ssize_t n) noexcept:
        """One holder less for each id; -1, or the place of one that nobody holds, and no change."""
        cdef Py_ssize_t bad
        with cython.critical_section(<object>self.budget):
            bad = self.release_locked(ids, n)
        return bad

    cdef void release_each(self, const int32_t* ids, Py_ssize_t n) noexcept:
        cdef Py_ssize_t i
        with cython.critical_section(<object>self.budget):
            if self.release_locked(ids, n) >= 0:
                for i in range(n - 1, -1, -1):
                    self.release_locked(&ids[i], 1)

    cdef Py_ssize_t release_locked(self, const int32_t* ids, Py_ssize_t n) noexcept:
        cdef int32_t* counts = self.counts  # in locals, since for all that C knows a count that is written may be `self.counts`
        cdef int32_t* returned = self.returned
        cdef bint known = self.tree is not NULL
        cdef Py_ssize_t i, j, top = self.n_returned, end = top, bad = -1
        cdef int32_t block
        for i in range(n - 1, -1, -1):  # from the end, so that they are handed out again in their order
            block = ids[i]
            if (self.n_users(block) if known else counts[block]) <= 0:
                bad = i
                break
            counts[block] -= 1
            if known:
                self.recount(block, counts[block] + 1, counts[block])
            if counts[block] == 0:
                returned[end] = block
                end += 1
        if bad >= 0:
            for j in range(bad + 1, n):
                counts[ids[j]] += 1
                if known:
                    self.recount(ids[j], counts[ids[j]] - 1, counts[ids[j]])
        else:
            self.n_returned = end
            self.freed_from(top)
        return bad

    cdef void freed_from(self, Py_ssize_t top) noexcept:
        """The blocks from this place of the stack on are free now."""
        cdef Py_ssize_t i
        self.released += self.n_returned - top
        self.account.used -= (self.n_returned - top) * self.block_bytes
        if self.erase is not NULL:
            for i in range(top, self.n_returned):
                self.erase(self.owner, self.returned[i])

    cdef cnp.ndarray begin_trim(self):
        cdef Py_ssize_t n = self.n_returned, i, resident
        ids = empty_ids(n)
        cdef int32_t[::1] out = ids
        with cython.critical_section(<object>self.budget):
            n = min(n, self.n_returned)
            for i in range(n):
                out[i] = self.returned[i]
            resident = self.resident()
            self.n_trimmed = n
            self.account.resident += self.resident() - resident
        return np.sort(ids[:n])

    # --- what a prefix cache knows ---

    cdef int know(self, Py_ssize_t block_size, int64_t window, uint64_t seed) except -1:
        cdef RadixTree* tree = radix_new(block_size, self.total, window, self.counts, seed)
        cdef bint taken
        if tree is NULL:
            raise MemoryError(f"cannot allocate the books of a prefix cache for {self.total} blocks")
        with cython.critical_section(<object>self.budget):
            taken = self.tree is not NULL
            if not taken:
                tree.n_uses = &self.account.n_uses
                self.tree = tree
        if taken:
            radix_free(tree)
            raise ValueError("store: expected one without a prefix cache, got one that has it")
        return 0

    cdef void know_nothing(self) noexcept:
        cdef RadixTree* tree
        with cython.critical_section(<object>self.budget):
            tree = self.tree
            if tree is not NULL:
                radix_clear(tree, NULL)
                self.collect()
                self.tree = NULL
        radix_free(tree)

    cdef void collect(self) noexcept:
        """Take back the tree's reference to each block that has left it."""
        cdef RadixTree* tree = self.tree
        cdef Py_ssize_t top = self.n_returned
        cdef int32_t block, left = tree.gone_first
        while left:
            block = left - 1
            left = tree.places[block].more
            tree.places[block].more = 0
            self.counts[block] -= 1
            if self.counts[block] == 0:
                self.returned[self.n_returned] = block
                self.n_returned += 1
        tree.gone_first = tree.gone_last = 0
        self.freed_from(top)

    cdef Py_ssize_t match(self, Key key, int32_t* table) noexcept:
        cdef Py_ssize_t n
        with cython.critical_section(<object>self.budget):
            n = radix_match(self.tree, key) if table is NULL else radix_blocks(self.tree, key, table)
        return n

    cdef Py_ssize_t hold(self, Key key, int32_t* table, Py_ssize_t* first) except -1:
        cdef Py_ssize_t n, bad, size = self.tree.block_size
        with cython.critical_section(<object>self.budget):
            n = radix_blocks(self.tree, key, table)
            first[0] = first_needed(self.tree, n) // size
            bad = self.retain_locked(&table[first[0]], (n + size - 1) // size - first[0])
        if bad >= 0:
            raise OverflowError(f"tokens: block {table[first[0] + bad]} has as many holders as can be counted")
        return n

    cdef void use(self, Key key, Py_ssize_t n_asked) noexcept:
        with cython.critical_section(<object>self.budget):
            radix_use(self.tree, key)
            self.tree.hit_tokens += key.n
            self.tree.missed_tokens += n_asked - key.n

    cdef void mark_idle(self, const int32_t* ids, Py_ssize_t n, unsigned char* marks) noexcept:
        cdef Py_ssize_t i
        with cython.critical_section(<object>self.budget):
            for i in range(n):
                marks[i] = ids[i] != HOLE and radix_is_idle(self.tree, ids[i])

    cdef Py_ssize_t prepare_insert(self, Key key, const int32_t* table, int64_t priority, double expires,
                                   const Mark* mark, Insertion* insertion) except -1:
        cdef Py_ssize_t n
        with cython.critical_section(<object>self.budget):
            n = radix_prepare_insert(self.tree, key, table, priority, expires, mark, insertion)
        if n == -1:
            raise MemoryError("cannot allocate the books of a prefix")
        if n == -2:
            raise ValueError("cache: a block has no holder left, or as many as can be counted")
        return n

    cdef Py_ssize_t insert(self, Key key, const int32_t* table, int64_t priority, double expires, Mark* mark,
                           Insertion* insertion) noexcept:
        cdef Py_ssize_t n
        with cython.critical_section(<object>self.budget):
            n = insertion.n_added
            if not radix_is_prepared(self.tree, table, insertion):
                radix_discard(insertion)
                n = radix_prepare_insert(self.tree, key, table, priority, expires, mark, insertion)
            if n >= 0:
                radix_insert(self.tree, key, table, priority, expires, mark, insertion)
        return max(n, 0)

    cdef bint copy_space(self, Key key, Extent* extent, Piece* pieces, int64_t* tokens, int32_t* blocks) noexcept:
        cdef bint done
        with cython.critical_section(<object>self.budget):
            done = radix_copy_space(self.tree, key, extent, pieces, tokens, blocks)
        return done

    cdef bint copy_names(self, int64_t* n_names, int64_t* n_bytes, int64_t* lengths, char* bytes) noexcept:
        cdef bint done
        with cython.critical_section(<object>self.budget):
            done = radix_copy_names(self.tree, n_names, n_bytes, lengths, bytes)
        return done

    cdef Py_ssize_t evict(self, Py_ssize_t n) noexcept:
        cdef Py_ssize_t n_gone
        with cython.critical_section(<object>self.budget):
            n_gone = radix_evict(self.tree, n)
            self.collect()
        return n_gone

    cdef Py_ssize_t forget_locked(self, Key key, Py_ssize_t start) noexcept:
        cdef Py_ssize_t n = radix_forget(self.tree, key, start)
        self.collect()
        return n

    cdef Py_ssize_t clear_locked(self, const Key* key) noexcept:
        cdef Py_ssize_t n = radix_clear(self.tree, key)
        self.collect()
        return n

    cdef Py_ssize_t count_evictable(self) noexcept:
        cdef Py_ssize_t n
        with cython.critical_section(<object>self.budget):
            n = self.n_evictable()
        return n

    cdef bint has_terms(self) noexcept:
        cdef bint found
        with cython.critical_section(<object>self.budget):
            found = self.tree is not NULL and self.tree.terms.n > 0
        return found

    cdef void end_terms(self, double now) noexcept:
        with cython.critical_section(<object>self.budget):
            if self.tree is not NULL:
                radix_end_terms(self.tree, now)

    cdef bint is_idle(self, int32_t id) noexcept:
        cdef bint idle
        with cython.critical_section(<object>self.budget):
            idle = self.tree is not NULL and radix_is_idle(self.tree, id)
        return idle

    cdef Py_ssize_t find_unused(self, const int32_t* ids, Py_ssize_t n) noexcept:
        cdef Py_ssize_t i, found = -1
        cdef const int32_t* counts = self.counts
        cdef bint known
        with cython.critical_section(<object>self.budget):
            known = self.tree is not NULL
            for i in range(n):
                if (self.n_users(ids[i]) if known else counts[ids[i]]) <= 0:
                    found = i
                    break
        return found

    cdef str why_unused(self, int32_t id):
        return "is free" if self.counts[id] == 0 else "the prefix cache alone holds"

    cdef int check_held(self, const int32_t[::1] ids, str name) except -1:
        # Sorted, so that a block's occurrences are counted without a table of all blocks.
        cdef const int32_t[::1] ordered = np.sort(ids)
        cdef Py_ssize_t i = 0, first, n_users
        while i < ordered.shape[0]:
            first = i
            as_index(ordered[i], name, self.total)
            while i < ordered.shape[0] and ordered[i] == ordered[first]:
                i += 1
            with cython.critical_section(<object>self.budget):
                n_users = self.n_users(ordered[first])
            if n_users <= 0:
                raise ValueError(f"{name}: expected blocks that the caller holds, got {ordered[first]}, "
                                 f"which {self.why_unused(ordered[first])}")
            if n_users < i - first:
                raise ValueError(f"{name}: expected no block more often than it has holders, got {ordered[first]} "
                                 f"{i - first} times, with {n_users}")
        return 0

    cdef tuple snapshot(self):
        """Holders of every block and what it is to the prefix cache, ``[total]`` each, of one moment."""
        holders = np.empty(self.total, np.int32)
        kinds = np.zeros(self.total, np.uint8)
        cdef int32_t[::1] counts = holders
        cdef unsigned char[::1] marks = kinds
        cdef Py_ssize_t i
        with cython.critical_section(<object>self.budget):
            if self.total:
                memcpy(&counts[0], self.counts, self.total * sizeof(int32_t))
            if self.tree is not NULL:
                for i in range(self.total):
                    marks[i] = radix_kind(self.tree, <int32_t>i)
        return holders, kinds

    cdef str fault(self):
        """What is wrong with the counts and the free blocks, or None. Walks over every block."""
        cdef int64_t place = 0
        cdef const char* fault
        with cython.critical_section(<object>self.budget):
            fault = self.find_fault(&place)
            if fault is NULL and self.tree is not NULL:
                fault = radix_fault(self.tree, &place)
        return None if fault is NULL else fault.decode().replace("#", str(place))

    cdef Py_ssize_t find_twice(self) noexcept:
        """A place of the free list whose block has another one there; or -1. Signs mark what was seen: ids have none."""
        cdef Py_ssize_t i, n = self.n_returned
        for i in range(self.n_returned):
            if self.returned[self.returned[i] & INT32_MAX] < 0:
                n = i
                break
            self.returned[self.returned[i] & INT32_MAX] |= INT32_MIN
        for i in range(n):
            self.returned[self.returned[i] & INT32_MAX] &= INT32_MAX
        return n if n < self.n_returned else -1

    cdef const char* find_fault(self, int64_t* place) noexcept:
        cdef Py_ssize_t i, n_zero = 0, fresh = self.total - self.n_fresh
        for i in range(self.n_returned):
            place[0] = self.returned[i]
            if not 0 <= self.returned[i] < fresh:
                return b"the free list holds #, not an id of a block that was ever held"
            if self.counts[self.returned[i]] != 0:
                return b"block # is in the free list and has holders"
        i = self.find_twice()
        if i >= 0:
            place[0] = self.returned[i]
            return b"block # is twice in the free list"
        for i in range(self.total):
            place[0] = i
            if self.counts[i] < 0:
                return b"block # has less than no holders"
            if self.counts[i] == 0:
                n_zero += 1
                if self.tree is not NULL and radix_kind(self.tree, <int32_t>i) != UNKNOWN:
                    return b"block # is in the prefix cache and has no holder"
            elif i >= fresh:
                return b"block # was never handed out and has holders"
        place[0] = n_zero
        if n_zero != self.n_unheld():
            return b"# blocks have no holder, another number is free"
        place[0] = self.account.used
        if self.account.used > self.account.limit or self.account.used != (<ByteBudget>self.budget).count():
            return b"# bytes are counted as held, others are, or that is more than the budget has"
        return NULL

    cdef str fault_in(self, list tables):
        """What is wrong with block tables, lists of ids and -1, that all hold what they name; or None."""
        cdef Py_ssize_t n_users
        named = Counter([block for table in tables for block in table if block != -1])
        for block, count in named.items():
            with cython.critical_section(<object>self.budget):
                n_users = self.n_users(<int32_t>block)
            if count > n_users:
                return f"block {block} is in {count} tables and has {n_users} holders beside the prefix cache"
        return None
