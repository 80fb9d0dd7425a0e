"""A sequence's block table: which blocks it holds, how it grows, and how it changes hands.

    ids          [ -1 | -1 |  7 |  3 |  9 | 12 ]        n_blocks = 6, n_dropped = 2
                   dropped   read......  ^   ^
                                         |   reserved: held, past the length
                                         tail: part-full

A table holds one reference to every block it names. It grows in one way, whoever asks: `stage` takes the blocks of a whole
batch, in all stores of a model, out of sight, and copies those that others hold too; `commit_growth` makes them the
sequence's, `rollback_growth` gives them back. And it changes hands in one way: `fork_table`, `replace_table`.

No Python objects but stores, and nothing that waits: all is decided before anything is changed.
"""

cimport cython
from cpython.object cimport PyObject
from libc.stdint cimport int32_t
from libc.stdlib cimport free, malloc
from libc.string cimport memcpy

from pagedkv.allocator cimport Want
from pagedkv.store cimport PagedKvStore

from collections import Counter

from pagedkv.errors import PagedKvError


# --- growing, one of them ----------------------------------------------------------------------------

cdef Py_ssize_t measure(const BlockTable* table, PagedKvStore store, Growth* growth) noexcept:
    cdef Py_ssize_t i, size = store.block_size, end = table.length + growth.n_new
    growth.ids = table.ids
    growth.n_missing = max(blocks_for(end, size) - table.n_blocks, 0) if growth.n_new else 0
    growth.n_copies = 0
    if growth.n_new:
        for i in range(table.length // size, min(table.n_blocks, blocks_for(end, size))):
            growth.n_copies += store.blocks.counts[table.ids[i]] > 1
    return growth.n_missing + growth.n_copies


cdef int make_room(BlockTable* table, Growth* growth) except -1:
    """Memory for the ids as they will be: of its own where blocks are replaced among them."""
    cdef Py_ssize_t n = table.n_blocks + growth.n_missing
    cdef Py_ssize_t room = n if n <= table.room else max(n, 2 * table.n_blocks, 16)
    if n <= table.room and growth.n_copies == 0:
        growth.ids = table.ids
        return 0
    growth.ids = new_ids(room)
    copy_ids(growth.ids, table.ids, table.n_blocks)
    if growth.n_copies == 0:
        swap_ids(table, growth.ids, room)
    return 0


cdef void swap_ids(BlockTable* table, int32_t* ids, Py_ssize_t room) noexcept:
    with cython.critical_section(<object>table.owner):
        free(table.ids)
        table.ids = ids
        table.room = room


cdef void free_room(const BlockTable* table, Growth* growth) noexcept:
    if growth.ids is not table.ids:
        free(growth.ids)
        growth.ids = table.ids


cdef void place(const BlockTable* table, PagedKvStore store, Growth* growth, const int32_t* taken) noexcept:
    """Copy what others hold too to the first of the taken blocks, and hang the others behind the table's end."""
    cdef Py_ssize_t i, size = store.block_size, n_left = growth.n_copies
    cdef int32_t* ids = growth.ids
    for i in range(table.length // size, table.n_blocks):
        if n_left and store.blocks.counts[ids[i]] > 1:
            store.rows.copy_block(taken[0], ids[i], min(max(table.length - i * size, 0), size))
            ids[i] = taken[0]
            taken += 1
            n_left -= 1
    store.blocks.release_each(taken, n_left)  # another holder has gone meanwhile
    growth.n_copies -= n_left
    if taken is not &ids[table.n_blocks]:
        copy_ids(&ids[table.n_blocks], &taken[n_left], growth.n_missing)


cdef void commit_growth(BlockTable* table, PagedKvStore store, Growth* growth, Py_ssize_t n_written) noexcept:
    cdef Py_ssize_t i, n = table.n_blocks
    if growth.ids is not table.ids:
        for i in range(table.length // store.block_size, n):
            if table.ids[i] != growth.ids[i]:
                store.blocks.release(&table.ids[i], 1)
        with cython.critical_section(store):
            store.copies_on_write += growth.n_copies
        swap_ids(table, growth.ids, n + growth.n_missing)
    table.n_blocks = n + growth.n_missing
    table.length += n_written
    table.block_size = store.block_size


cdef void rollback_growth(BlockTable* table, PagedKvStore store, Growth* growth) noexcept:
    cdef Py_ssize_t i
    store.blocks.release_each(&growth.ids[table.n_blocks], growth.n_missing)
    if growth.ids is not table.ids:
        for i in range(table.n_blocks - 1, table.length // store.block_size - 1, -1):
            if growth.ids[i] != table.ids[i]:
                store.blocks.release(&growth.ids[i], 1)
        free_room(table, growth)


# --- growing, all of a transaction -------------------------------------------------------------------

cdef Py_ssize_t stage_one(BlockTable* table, PagedKvStore store, Growth* growth) except -1:
    cdef Group group = Group(<PyObject*>store, &table, growth)
    return stage(&group, 1, 1)


cdef Py_ssize_t stage(const Group* groups, int n_groups, Py_ssize_t n) except -1:
    cdef int32_t few[32]
    cdef Want want
    cdef Want* wants = &want
    cdef int32_t* taken = few
    cdef Py_ssize_t n_taken = 0, n_roomy = 0, i
    cdef int g, short = 0
    cdef bint copies = False
    try:
        if n_groups > 1:
            wants = <Want*>malloc(n_groups * sizeof(Want))
            if wants is NULL:
                raise MemoryError("cannot allocate what a step takes of each store")
        for g in range(n_groups):
            wants[g].blocks = <PyObject*>(<PagedKvStore>groups[g].store).blocks
            wants[g].n = 0
            for i in range(n):
                wants[g].n += measure(groups[g].tables[i], <PagedKvStore>groups[g].store, &groups[g].growths[i])
                copies = copies or groups[g].growths[i].n_copies
            if wants[g].n > (<PagedKvStore>groups[g].store).blocks.n_most():  # more than a table should be made for
                raise exhausted(groups, n_groups, n, g)
            n_taken += wants[g].n
        if n_taken == 0:
            short = -1
            return 0
        if n_taken > 32 and (copies or n > 1):
            taken = new_ids(n_taken)
        n_taken = 0
        for g in range(n_groups):
            wants[g].ids = &taken[n_taken]
            n_taken += wants[g].n
            for i in range(n):
                make_room(groups[g].tables[i], &groups[g].growths[i])
                n_roomy += 1
            if n == 1 and not copies:  # they go where they belong at once: behind the table's end, where nobody looks
                wants[g].ids = &groups[g].growths[0].ids[groups[g].tables[0].n_blocks]
        short = (<PagedKvStore>groups[0].store).budget.take(wants, n_groups)
        if short >= 0:
            raise exhausted(groups, n_groups, n, short)
        for g in range(n_groups):
            place_all(&groups[g], n, &wants[g])
    finally:
        for i in range(n_roomy if short >= 0 else 0):
            free_room(groups[i // n].tables[i % n], &groups[i // n].growths[i % n])
        if taken is not few:
            free(taken)
        if wants is not &want:
            free(wants)
    return n_taken


cdef void place_all(const Group* group, Py_ssize_t n, const Want* want) noexcept:
    cdef PagedKvStore store = <PagedKvStore>group.store
    cdef const int32_t* ids = want.ids
    cdef Py_ssize_t i, n_placed
    if store.debug:
        store.rows.erase(ids, want.n)
    for i in range(n):
        n_placed = group.growths[i].n_copies + group.growths[i].n_missing
        place(group.tables[i], store, &group.growths[i], ids)
        ids += n_placed


cdef object exhausted(const Group* groups, int n_groups, Py_ssize_t n, int short):
    """The error for a batch that does not fit. What it would hold if all others had released theirs is counted only now.

    Told of the store that is short, with what the other ones need of the budget taken off.
    """
    cdef PagedKvStore store = <PagedKvStore>groups[short].store
    cdef Py_ssize_t needed = 0, alone = 0, elsewhere_now = 0, elsewhere_ever = 0
    cdef Py_ssize_t needed_there, alone_there
    cdef int g
    for g in range(n_groups):
        measure_alone(&groups[g], n, &needed_there, &alone_there)
        if g == short:
            needed, alone = needed_there, alone_there
        else:
            elsewhere_now += needed_there * (<PagedKvStore>groups[g].store).blocks.block_bytes
            elsewhere_ever += alone_there * (<PagedKvStore>groups[g].store).blocks.block_bytes
    return store.exhausted(needed, alone - needed, elsewhere_now, elsewhere_ever)


cdef int measure_alone(const Group* group, Py_ssize_t n, Py_ssize_t* needed, Py_ssize_t* alone) except -1:
    """Blocks that a batch needs now in a store, and those that it would hold then if all others had released theirs."""
    cdef PagedKvStore store = <PagedKvStore>group.store
    cdef const BlockTable* table
    cdef Growth growth
    cdef Py_ssize_t i, j, size = store.block_size
    holders = Counter()
    needed[0] = alone[0] = 0
    for i in range(n):
        table = group.tables[i]
        growth.n_new = group.growths[i].n_new
        needed[0] += measure(table, store, &growth)
        alone[0] += growth.n_missing
        holders.update([table.ids[j] for j in range(table.n_dropped, table.n_blocks)])
    alone[0] += len(holders)
    for i in range(n):
        table = group.tables[i]
        if group.growths[i].n_new:
            for j in range(table.length // size,
                           min(table.n_blocks, blocks_for(table.length + group.growths[i].n_new, size))):
                alone[0] += holders[table.ids[j]] > 1
    return 0


# --- changing hands ----------------------------------------------------------------------------------

cdef void copy_ids(int32_t* dst, const int32_t* src, Py_ssize_t n) noexcept:
    if n:  # a table that never had an entry has no address
        memcpy(dst, src, n * sizeof(int32_t))


cdef int32_t* new_ids(Py_ssize_t n) except NULL:
    cdef int32_t* ids = <int32_t*>malloc(max(n, 1) * sizeof(int32_t))
    if ids is NULL:
        raise MemoryError(f"cannot allocate a block table of {n} entries")
    return ids


cdef int check_table(const BlockTable* table, PagedKvStore store) except -1:
    cdef Py_ssize_t bad = -1
    if table.n_dropped < table.n_blocks:
        bad = store.blocks.find_unused(&table.ids[table.n_dropped], table.n_blocks - table.n_dropped)
    if bad >= 0:
        raise unheld(table.ids[table.n_dropped + bad])
    return 0


cdef object unheld(int32_t block):
    return PagedKvError(f"block {block} is in a table and has no holder left: someone gave back a reference that was not theirs")


cdef int empty_table(BlockTable* table, PagedKvStore store) except -1:
    cdef Py_ssize_t bad = -1
    if table.n_dropped < table.n_blocks:  # looked at and released in one pass
        bad = store.blocks.release(&table.ids[table.n_dropped], table.n_blocks - table.n_dropped)
    if bad >= 0:
        raise unheld(table.ids[table.n_dropped + bad])
    table.n_blocks = table.n_dropped = table.length = table.shortest = 0
    return 0


cdef int fork_table(BlockTable* fork, const BlockTable* table, PagedKvStore store) except -1:
    cdef Py_ssize_t n = blocks_for(table.length, table.block_size)
    fork.owner = NULL
    fork.room = fork.n_blocks = n
    fork.n_dropped = min(table.n_dropped, n)
    fork.length = table.length
    fork.block_size = table.block_size
    fork.lineage = 0
    fork.shortest = 0
    fork.ids = new_ids(n)
    copy_ids(fork.ids, table.ids, n)
    n -= fork.n_dropped
    if n and store.blocks.retain(&fork.ids[fork.n_dropped], n) >= 0:
        free(fork.ids)
        fork.ids = NULL
        raise OverflowError("caches: a block has as many holders as can be counted")
    return 0


cdef void replace_table(BlockTable* table, const BlockTable* other) noexcept:
    with cython.critical_section(<object>table.owner):
        free(table.ids)
        table.ids = other.ids
        table.room = other.room
        table.n_blocks = other.n_blocks
    table.n_dropped = other.n_dropped
    table.length = other.length
    table.block_size = other.block_size
    table.shortest = 0


cdef void release_table(const BlockTable* table, PagedKvStore store) noexcept:
    if table.n_dropped < table.n_blocks:
        store.blocks.release_each(&table.ids[table.n_dropped], table.n_blocks - table.n_dropped)


cdef void cut_table(BlockTable* table, PagedKvStore store, Py_ssize_t n) noexcept:
    cdef Py_ssize_t keep = max(blocks_for(n, table.block_size), table.n_dropped)
    if keep < table.n_blocks:
        store.blocks.release_each(&table.ids[keep], table.n_blocks - keep)
        table.n_blocks = keep
    table.length = n
    table.shortest = min(table.shortest, n)


cdef void drop_blocks_before(BlockTable* table, PagedKvStore store, Py_ssize_t position) noexcept:
    cdef Py_ssize_t i, n = position // table.block_size if table.n_blocks else 0
    if n > table.n_dropped:
        store.blocks.release_each(&table.ids[table.n_dropped], n - table.n_dropped)
        for i in range(table.n_dropped, n):
            table.ids[i] = -1
        table.n_dropped = n
