# A sequence's block table at C level, and the two ways in which it changes: it grows, and it changes hands. See _tables.pyx.

cimport cython
from cpython.object cimport PyObject
from libc.stdint cimport int32_t, uint64_t

from pagedkv._arrays cimport MAX_POSITIONS
from pagedkv.store cimport PagedKvStore


cdef inline Py_ssize_t blocks_for(Py_ssize_t n_positions, Py_ssize_t block_size) noexcept:
    """Blocks that hold so many positions; 0 for none, whatever the block size."""
    return (n_positions + block_size - 1) // block_size if n_positions else 0


# What a sequence holds. Its ids are swapped in a critical section of its owner, so that any thread may look at them there.
cdef struct BlockTable:
    PyObject* owner             # a PagedKvCache, whose field it is; NULL for one that is only prepared
    int32_t* ids                # n_blocks of them in use; those before n_dropped are -1
    Py_ssize_t room             # ids that there is memory for
    Py_ssize_t n_blocks, n_dropped
    Py_ssize_t length           # positions written
    Py_ssize_t block_size       # of these blocks
    uint64_t lineage            # a number that names what it holds, as far as it was not taken back since
    Py_ssize_t shortest         # that it has been since it has this number


# A number for its first n positions, by which they are known again; and whether they still are what they were then.
cdef inline uint64_t name_first(BlockTable* table, PagedKvStore store, Py_ssize_t n) noexcept:
    if table.shortest < n:
        with cython.critical_section(store):
            store.n_lineages += 1
            table.lineage = store.n_lineages
        table.shortest = MAX_POSITIONS
    return table.lineage


cdef inline bint has_first(const BlockTable* table, Py_ssize_t n, uint64_t lineage) noexcept:
    return table.lineage == lineage and table.shortest >= n


cdef inline Py_ssize_t first_position(const BlockTable* table) noexcept:
    """The first one that can still be read."""
    return table.n_dropped * table.block_size


# --- growing ---

# What a table becomes by growing. `stage` fills it in, out of sight; `commit_growth` or `rollback_growth` ends it.
cdef struct Growth:
    Py_ssize_t n_new            # positions
    Py_ssize_t n_missing        # blocks that are taken for those past the capacity
    Py_ssize_t n_copies         # blocks that are taken to copy those that others hold too
    int32_t* ids                # as they will be: the table's own with more behind their end, or a copy of them


# What a transaction is to one of its stores: n sequences, and a growth of each, which says how many new positions.
cdef struct Group:
    PyObject* store             # a PagedKvStore; all have one budget
    BlockTable** tables
    Growth* growths


# How many blocks a growth takes.
cdef Py_ssize_t measure(const BlockTable* table, PagedKvStore store, Growth* growth) noexcept
# Take the blocks of all sequences in all groups or, raising PagedStoreExhausted or MemoryError, none. Every owner is locked
# by the caller, and each is there once. Returns the number of blocks taken. Runs no code but this.
cdef Py_ssize_t stage(const Group* groups, int n_groups, Py_ssize_t n) except -1
cdef Py_ssize_t stage_one(BlockTable* table, PagedKvStore store, Growth* growth) except -1
# The sequence has the blocks, and the first n_written of its new positions. No longer, or again, as it was.
cdef void commit_growth(BlockTable* table, PagedKvStore store, Growth* growth, Py_ssize_t n_written) noexcept
cdef void rollback_growth(BlockTable* table, PagedKvStore store, Growth* growth) noexcept

# --- changing hands ---

# Memory for so many ids; MemoryError. And one for these blocks, whose references it is to have.
cdef int32_t* new_ids(Py_ssize_t n) except NULL
cdef void copy_ids(int32_t* dst, const int32_t* src, Py_ssize_t n) noexcept
# PagedKvError unless somebody holds all that it names: then it can give them up without fail.
cdef int check_table(const BlockTable* table, PagedKvStore store) except -1
# Release all that it names, or PagedKvError as for `check_table`.
cdef int empty_table(BlockTable* table, PagedKvStore store) except -1
# A fork of a table as it is now, whose blocks have one more holder; MemoryError, OverflowError. It replaces another one's,
# or is released.
cdef int fork_table(BlockTable* fork, const BlockTable* table, PagedKvStore store) except -1
# The table is another one from now on, whose memory and references it has; what it held itself was released before.
cdef void replace_table(BlockTable* table, const BlockTable* other) noexcept
# One holder less for each of its blocks.
cdef void release_table(const BlockTable* table, PagedKvStore store) noexcept
# Its first n positions remain, n at least what was dropped, and no reserved blocks.
cdef void cut_table(BlockTable* table, PagedKvStore store, Py_ssize_t n) noexcept
# Its blocks that lie wholly before a position, at most the length, are dropped.
cdef void drop_blocks_before(BlockTable* table, PagedKvStore store, Py_ssize_t position) noexcept
