cimport cython
from cpython.object cimport PyObject
from libc.stdint cimport int32_t, uint64_t

from pagedkv._arrays cimport MAX_POSITIONS
from pagedkv.contiguous cimport KvCache
from pagedkv.store cimport PagedKvStore


cdef inline Py_ssize_t blocks_for(Py_ssize_t n_positions, Py_ssize_t block_size) noexcept:
    """Blocks that hold so many positions; 0 for none, whatever the block size."""
    return (n_positions + block_size - 1) // block_size if n_positions else 0


# What a sequence becomes by growing. `stage` fills it in, out of sight; `commit` or `rollback` ends it.
cdef struct Growth:
    Py_ssize_t n_new            # positions
    Py_ssize_t n_missing        # blocks that are taken for those past the capacity
    Py_ssize_t n_copies         # blocks that are taken to copy those that others hold too
    int32_t* table              # of the sequence as it will be: its own with more behind its end, or a copy of it


# What a sequence is to become whose blocks another one has too.
cdef struct Fork:
    PyObject* store
    int32_t* table
    Py_ssize_t n_blocks, n_dropped, length, block_size


cdef class PagedKvCache:
    cdef object __weakref__
    # The store whose blocks the table names. None while it names none, and for adopted blocks until a store is seen.
    cdef readonly PagedKvStore store
    cdef int32_t* table             # n_blocks entries in use; those before n_dropped were given back
    cdef Py_ssize_t room            # entries that it has memory for
    cdef Py_ssize_t n_blocks
    cdef Py_ssize_t n_dropped
    cdef Py_ssize_t length
    cdef Py_ssize_t block_size      # of the blocks in the table
    cdef Py_ssize_t users           # 0 idle, n readers, -1 a writer
    cdef uint64_t lineage           # a number that names what it holds, as far as it was not taken back since
    cdef Py_ssize_t shortest        # that it has been since it has this number

    # A number for its first n positions, by which they are known again; and whether they still are what they were then.
    cdef inline uint64_t name_first(self, Py_ssize_t n) noexcept:
        if self.shortest < n:
            with cython.critical_section(self.store):
                self.store.n_lineages += 1
                self.lineage = self.store.n_lineages
            self.shortest = MAX_POSITIONS
        return self.lineage

    cdef inline bint has_first(self, Py_ssize_t n, uint64_t lineage) noexcept:
        return self.lineage == lineage and self.shortest >= n

    # The guard: RuntimeError, at once, if it cannot be had. ValueError if the blocks held are not the store's.
    cdef int begin_read(self, PagedKvStore store) except -1
    cdef void end_read(self) noexcept
    cdef int begin_write(self, PagedKvStore store) except -1
    cdef void end_write(self) noexcept
    cdef int lock_write(self) except -1
    cdef int bind(self, PagedKvStore store) except -1

    # Growing, by `growth.n_new` positions: `measure` says how many blocks that takes; then `stage`, below.
    cdef Py_ssize_t measure(self, PagedKvStore store, Growth* growth) noexcept
    cdef Py_ssize_t stage_alone(self, PagedKvStore store, Growth* growth) except -1
    cdef int make_room(self, Growth* growth) except -1
    cdef void place(self, PagedKvStore store, Growth* growth, const int32_t* taken) noexcept
    # The sequence has the blocks, and the first n_written of its new positions. No longer, or again, as it was.
    cdef void commit(self, PagedKvStore store, Growth* growth, Py_ssize_t n_written) noexcept
    cdef void rollback(self, PagedKvStore store, Growth* growth) noexcept
    cdef void drop_room(self, Growth* growth) noexcept

    # Its blocks from now on, whose references it has; what it held before was given back. The table's memory is its own.
    cdef void become(self, PagedKvStore store, int32_t* table, Py_ssize_t n_blocks, Py_ssize_t n_dropped,
                     Py_ssize_t length, Py_ssize_t block_size) noexcept
    # PagedKvError, or RuntimeError, unless it can give back what it holds: then `take_over` and `cut` cannot fail.
    cdef int check_own(self) except -1
    # A fork of it as it is now, whose blocks have one more holder; MemoryError, OverflowError, RuntimeError. It becomes the
    # sequence of a cache that is locked, or is dropped.
    cdef int prepare_fork(self, Fork* fork) except -1
    cdef void take_over(self, Fork* fork) noexcept
    cdef int fork_into(self, PagedKvCache other) except -1
    # Its first n positions remain, n at least what was dropped, and no reserved blocks.
    cdef void cut(self, Py_ssize_t n) noexcept
    # Its blocks that lie wholly before a position, at most the length, are dropped; all of them.
    cdef void drop_to(self, Py_ssize_t position) noexcept
    cdef void empty(self) noexcept
    # Of the layers from this one on, one for each target: all or none. A stop of -1 is the end.
    cdef int copy_out(self, PagedKvStore store, Py_ssize_t layer, Py_ssize_t start, Py_ssize_t stop,
                      list targets) except -1
    cdef int end_growth(self, PagedKvStore store) except -1


# What a transaction is to one of its stores: n sequences, and a growth of each, which says how many new positions.
cdef struct Group:
    PyObject* store             # a PagedKvStore; all have one budget
    PyObject** caches           # PagedKvCaches, borrowed
    Growth* growths


# Take the blocks of all sequences in all groups or, raising PagedStoreExhausted or MemoryError, none. Every cache is locked
# by the caller, and each is there once. Returns the number of blocks taken. Runs no code but this.
cdef Py_ssize_t stage(const Group* groups, int n_groups, Py_ssize_t n) except -1

# Memory for a table of so many entries; MemoryError.
cdef int32_t* new_table(Py_ssize_t n) except NULL
