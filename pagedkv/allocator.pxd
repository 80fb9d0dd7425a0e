cimport numpy as cnp
from cpython.object cimport PyObject
from libc.stdint cimport int32_t, int64_t, uint64_t

from pagedkv._radix.nodes cimport Key, Mark, RadixTree
from pagedkv._radix.order cimport UNKNOWN, radix_kind, radix_recount
from pagedkv._radix.picture cimport Extent, Piece
from pagedkv._radix.tree cimport Insertion

# Fills a block of the owner's with what nobody may read.
ctypedef void (*Erase)(void* owner, int32_t id) noexcept


# What is asked of one of several allocators, all of which have the same budget: blocks, into ids.
cdef struct Want:
    PyObject* blocks                # a BlockAllocator
    int32_t* ids
    Py_ssize_t n


cdef struct Account:
    Py_ssize_t limit                # bytes that blocks may take which somebody holds, prefix caches among them
    Py_ssize_t used
    Py_ssize_t resident             # bytes of the blocks that may have pages, free ones too
    uint64_t n_uses                 # of what prefix caches know: one order of use for all


cdef class ByteBudget:
    cdef Account account
    cdef PyObject** members         # allocators, owned
    cdef int n_members

    # One more member, of no other budget; its blocks may take all bytes.
    cdef int join(self, BlockAllocator blocks) except -1
    # A member whose store goes: what its blocks took is free for the others.
    cdef void leave(self, BlockAllocator blocks) noexcept
    # Bytes that are held, by the members' books; and what is left of them if the prefix caches gave up all they can.
    cdef Py_ssize_t count(self) noexcept
    cdef Py_ssize_t needed(self) noexcept
    # Bytes that they could give up.
    cdef Py_ssize_t count_evictable(self) noexcept
    # Blocks of each kind, all or none. -1, or the number of the one that there is no room for, and no change.
    cdef int take(self, const Want* wants, int n) noexcept
    # The same within a critical section of the budget.
    cdef int take_locked(self, const Want* wants, int n) noexcept
    cdef int make_room(self, const Want* wants, int n) noexcept
    cdef bint evict_one(self) noexcept
    # So many blocks of whichever members; how many went.
    cdef Py_ssize_t evict(self, Py_ssize_t n) noexcept
    # Another limit: what is over it is evicted. -1, or the bytes that are needed and are more than that, and no change.
    cdef Py_ssize_t resize(self, Py_ssize_t limit) noexcept


cdef class BlockAllocator:
    # The first two: tests/helpers.py looks for them.
    cdef int32_t* counts            # holders of each block; 0 = free
    cdef int32_t* returned          # a stack of the free blocks that were held before
    cdef PyObject* budget           # owns it; all members' books have its critical section
    cdef Account* account           # the budget's
    cdef Py_ssize_t block_bytes
    cdef Py_ssize_t n_returned
    cdef Py_ssize_t n_fresh         # blocks [total - n_fresh, total) were never held
    cdef Py_ssize_t n_trimmed       # of the stack, from its bottom: they have lain there since the last trim
    cdef readonly Py_ssize_t total  # ids; the budget may allow fewer blocks
    cdef readonly Py_ssize_t peak_held, acquired, released, exhaustions
    cdef RadixTree* tree            # what the prefix cache knows; NULL without one
    cdef Erase erase                # of blocks that nobody holds any more; NULL to leave them as they are
    cdef void* owner

    cdef inline Py_ssize_t n_unheld(self) noexcept:
        return self.n_returned + self.n_fresh

    cdef inline Py_ssize_t n_held(self) noexcept:
        return self.total - self.n_returned - self.n_fresh

    # The i-th block to be handed out, of those that are free.
    cdef inline int32_t next_free(self, Py_ssize_t i) noexcept:
        if i < self.n_returned:
            return self.returned[self.n_returned - 1 - i]
        return <int32_t>(self.total - self.n_fresh + i - self.n_returned)

    # Blocks that the budget has room for too.
    cdef inline Py_ssize_t n_free(self) noexcept:
        cdef Py_ssize_t n = self.n_returned + self.n_fresh, room = self.account.limit - self.account.used
        return n if n * self.block_bytes <= room else room // self.block_bytes

    # Blocks, free and held, if no other member of the budget held any.
    cdef inline Py_ssize_t n_most(self) noexcept:
        return min(self.total, self.account.limit // self.block_bytes)

    # Holders of a block beside the prefix cache, whose own reference nobody else gives back; for whoever has the critical
    # section.
    cdef inline int32_t n_users(self, int32_t id) noexcept:
        return self.counts[id] - (self.tree is not NULL and radix_kind(self.tree, id) != UNKNOWN)

    # Bytes of the blocks that may have pages.
    cdef inline Py_ssize_t resident(self) noexcept:
        return (self.total - self.n_fresh - self.n_trimmed) * self.block_bytes

    # Blocks that the prefix cache alone holds, and no term protects; for whoever has the critical section.
    cdef inline Py_ssize_t n_evictable(self) noexcept:
        return 0 if self.tree is NULL else self.tree.n_evictable

    cdef bint take(self, int32_t* ids, Py_ssize_t n) noexcept
    # The same, for what can be done without: a refusal is not counted.
    cdef bint try_take(self, int32_t* ids, Py_ssize_t n) noexcept
    # In two steps, where something that can fail is done with the ids before: what would be handed out, as much as is missing
    # evicted; and these, if it still are these.
    cdef bint peek(self, int32_t* ids, Py_ssize_t n) noexcept
    cdef bint take_peeked(self, int32_t* ids, Py_ssize_t n) noexcept
    cdef Py_ssize_t retain(self, const int32_t* ids, Py_ssize_t n) noexcept
    cdef Py_ssize_t release(self, const int32_t* ids, Py_ssize_t n) noexcept
    # One holder less for each id that has one: the way out when nothing may be raised.
    cdef void release_each(self, const int32_t* ids, Py_ssize_t n) noexcept
    cdef inline void recount(self, int32_t id, int32_t before, int32_t after) noexcept:
        """A block's holders have changed: does it still belong to the prefix cache alone?"""
        if self.tree is not NULL:
            radix_recount(self.tree, id, before, after)

    # The same within a critical section that is open already.
    cdef bint take_locked(self, int32_t* ids, Py_ssize_t n) noexcept
    cdef void hand_out(self, int32_t* ids, Py_ssize_t n) noexcept
    cdef Py_ssize_t retain_locked(self, const int32_t* ids, Py_ssize_t n) noexcept
    cdef Py_ssize_t release_locked(self, const int32_t* ids, Py_ssize_t n) noexcept
    cdef void freed_from(self, Py_ssize_t top) noexcept

    # The ids of blocks that are free and were held before, in ascending order: their pages are about to be given back.
    cdef cnp.ndarray begin_trim(self)

    # Begin to know prefixes, of layers with a window or with 0, which sees all; and end it: ValueError if somebody does
    # already.
    cdef int know(self, Py_ssize_t block_size, int64_t window, uint64_t seed) except -1
    cdef void know_nothing(self) noexcept
    # How many of the tokens are known, and of use; their blocks go to a table, if there is one, which are as many as they
    # need, with HOLE for those that a window has left behind.
    cdef Py_ssize_t match(self, Key key, int32_t* table) noexcept
    # The same for a sequence to start on: each of the blocks, from the first one that is seen, has one more holder.
    # OverflowError. What comes of it in the end is a use of what the key says, of `n_asked` tokens.
    cdef Py_ssize_t hold(self, Key key, int32_t* table, Py_ssize_t* first) except -1
    cdef void use(self, Key key, Py_ssize_t n_asked) noexcept
    # Of these blocks and holes, those that could be given up now: a mark for each, 0 or 1.
    cdef void mark_idle(self, const int32_t* ids, Py_ssize_t n, unsigned char* marks) noexcept
    # How many blocks of a table are new under these tokens; -3 where the mark, which tokens and table follow, stands for
    # nothing any more. All that can fail, and changes nothing: MemoryError, ValueError.
    cdef Py_ssize_t prepare_insert(self, Key key, const int32_t* table, int64_t priority, double expires,
                                   const Mark* mark, Insertion* insertion) except -1
    # The same, and they are held from now on. What other threads have left no memory for meanwhile is given up at once.
    cdef Py_ssize_t insert(self, Key key, const int32_t* table, int64_t priority, double expires, Mark* mark,
                           Insertion* insertion) noexcept
    # Copies of a namespace and of all names, into room that is as large: False where it is not, and what room is needed.
    cdef bint copy_space(self, Key key, Extent* extent, Piece* pieces, int64_t* tokens, int32_t* blocks) noexcept
    cdef bint copy_names(self, int64_t* n_names, int64_t* n_bytes, int64_t* lengths, char* bytes) noexcept
    # How many blocks went.
    cdef Py_ssize_t evict(self, Py_ssize_t n) noexcept
    # Within a critical section of the budget, so that all stores of a model can be told at once.
    cdef Py_ssize_t forget_locked(self, Key key, Py_ssize_t start) noexcept
    cdef Py_ssize_t clear_locked(self, const Key* key) noexcept
    # For whom the prefix cache may go at any time.
    cdef Py_ssize_t count_evictable(self) noexcept
    cdef bint has_terms(self) noexcept
    cdef void end_terms(self, double now) noexcept
    cdef bint is_idle(self, int32_t id) noexcept
    cdef void collect(self) noexcept

    # The place of an id that nobody holds but perhaps the prefix cache; or -1.
    cdef Py_ssize_t find_unused(self, const int32_t* ids, Py_ssize_t n) noexcept
    # Which of the two, in words.
    cdef str why_unused(self, int32_t id)
    # IndexError or ValueError unless each id is in range and has as many holders as the ids name it.
    cdef int check_held(self, const int32_t[::1] ids, str name) except -1
    cdef tuple snapshot(self)
    cdef str fault(self)
    cdef Py_ssize_t find_twice(self) noexcept
    cdef const char* find_fault(self, int64_t* place) noexcept
    cdef str fault_in(self, list tables)
