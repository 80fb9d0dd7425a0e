"""BlockTable: a sequence's blocks and length at C level, and the guard that keeps calls apart.

    table    [ -1 | -1 |  7 |  3 |  9 | 12 ]        n_blocks = 6, n_dropped = 2
               dropped   read......  ^   ^
                                     |   reserved: held, past the length
                                     tail: part-full

A table holds one reference to every block it names.
"""

cimport cython
cimport numpy as cnp
from libc.stdint cimport int32_t

from pagedkv._arrays cimport empty_ids
from pagedkv._guard cimport enter_reader, enter_writer, leave_reader, leave_writer
from pagedkv.store cimport PagedKvStore

import numpy as np


@cython.no_gc_clear  # the blocks go back to the store when the table goes: it must still be there
cdef class BlockTable:
    """What `PagedKvCache` makes public."""

    def __dealloc__(self):
        if self.store is not None and self.n_dropped < self.n_blocks:
            self.store.drop_each(&self.table[self.n_dropped], self.n_blocks - self.n_dropped)

    # --- the guard ---

    cdef int lock_write(self) except -1:
        return enter_writer(self, &self.users)

    cdef int begin_write(self, PagedKvStore store) except -1:
        enter_writer(self, &self.users)
        if self.store is not store and self.n_blocks:
            try:
                self.bind(store)
            except BaseException:
                self.end_write()
                raise
        return 0

    cdef void end_write(self) noexcept:
        if self.n_blocks == 0 and self.store is not None:
            self.store = None
        leave_writer(self, &self.users)

    cdef int begin_read(self, PagedKvStore store) except -1:
        enter_reader(self, &self.users)
        if self.store is not store and self.n_blocks:
            try:
                self.bind(store)
            except BaseException:
                self.end_read()
                raise
        return 0

    cdef void end_read(self) noexcept:
        leave_reader(self, &self.users)

    cdef int bind(self, PagedKvStore store) except -1:
        """Tie adopted blocks to the first store they are used with."""
        if self.store is not None:
            raise ValueError("store: expected the store whose blocks this cache holds, got another")
        check_adopted(store, self.table, self.n_blocks, self.block_size)
        self.store = store
        return 0

    # --- the table ---

    cdef Py_ssize_t n_missing(self, PagedKvStore store, Py_ssize_t n_new) noexcept:
        cdef Py_ssize_t n = self.length + n_new - self.n_blocks * store.block_size
        return blocks_for(n, store.block_size) if n > 0 else 0

    cdef Py_ssize_t n_shared(self, PagedKvStore store, Py_ssize_t n_new) noexcept:
        cdef Py_ssize_t i, n = 0, size = store.block_size
        if n_new and self.length < self.n_blocks * size:
            for i in range(self.length // size, min(self.n_blocks, blocks_for(self.length + n_new, size))):
                n += store.blocks.counts[self.table[i]] > 1
        return n

    cdef int make_room(self, Py_ssize_t n_entries) except -1:
        if n_entries <= self.table.shape[0]:
            return 0
        larger = empty_ids(max(n_entries, 2 * self.n_blocks, 16))
        if self.n_blocks:
            larger[:self.n_blocks] = np.asarray(self.table[:self.n_blocks])
        with cython.critical_section(self):
            self.table = larger
        return 0

    cdef int prepare(self, PagedKvStore store, Py_ssize_t n_new, cnp.ndarray k, cnp.ndarray v, Py_ssize_t count) except -1:
        cdef Py_ssize_t n_missing = self.n_missing(store, n_new)
        cdef Py_ssize_t n_shared = self.n_shared(store, n_new)
        cdef Py_ssize_t n_taken = n_missing + n_shared
        cdef Py_ssize_t kept = self.n_blocks - self.n_dropped - n_shared
        if n_taken == 0:
            return 0
        if n_taken > store.blocks.total:  # more than a table should be made for
            raise store.exhausted(n_taken, kept)
        # Taking may ask a prefix cache, and making room let the collector run: somebody's code, that may change the rows.
        cdef bint look_again = k is not None and (
            n_taken > store.blocks.n_free() or self.n_blocks + n_taken > self.table.shape[0] or store.debug)
        self.make_room(self.n_blocks + n_taken)
        store.take(&self.table[self.n_blocks], n_taken, kept)
        if look_again:
            try:
                store.check_given(k, v, store.n_layers, count)
            except BaseException:
                store.drop_each(&self.table[self.n_blocks], n_taken)
                raise
        self.store = store
        self.block_size = store.block_size
        self.n_blocks += n_missing
        if n_shared:
            self.copy_shared(n_missing, n_shared)
        return 0

    cdef int copy_shared(self, Py_ssize_t n_missing, Py_ssize_t n_copies) except -1:
        """Replace the shared blocks from the length on by the copies that wait behind the table's end."""
        cdef PagedKvStore store = self.store
        cdef Py_ssize_t copy = self.n_blocks, end = self.n_blocks + n_copies, size = self.block_size
        cdef Py_ssize_t i
        cdef int32_t old
        for i in range(self.length // size, self.n_blocks - n_missing):
            old = self.table[i]
            if copy < end and store.blocks.counts[old] > 1:
                store.copy_shared_rows(self.table[copy], old, min(max(self.length - i * size, 0), size))
                self.table[i] = self.table[copy]
                store.give_back(&old, 1)
                store.copies_on_write += 1
                copy += 1
        if copy < end:  # another holder let go meanwhile
            store.give_back(&self.table[copy], end - copy)
        return 0

    cdef int give_back_from(self, Py_ssize_t first) except -1:
        """Give back the blocks of the entries [first, n_blocks)."""
        if first < self.n_blocks:
            self.store.give_back(&self.table[first], self.n_blocks - first)
        return 0

    cdef int share_into(self, BlockTable other) except -1:
        cdef Py_ssize_t n, bad = -1
        cdef int32_t[::1] table
        cdef BlockTable cache
        for cache in (self, other):
            if cache.store is None and cache.n_blocks:
                raise RuntimeError("clone: blocks were adopted and their store is not known yet; "
                                   "name it in adopt_blocks(..., store=store)")
        self.begin_read(self.store)
        try:
            other.lock_write()
            try:
                n = blocks_for(self.length, self.block_size)
                table = empty_ids(n)
                if n:
                    table[:] = self.table[:n]
                if n > self.n_dropped:
                    bad = self.store.blocks.retain(&table[self.n_dropped], n - self.n_dropped)
                if bad >= 0:
                    raise OverflowError("clone: a block has as many holders as can be counted")
                try:
                    other.give_back_from(other.n_dropped)
                except BaseException:
                    if n > self.n_dropped:
                        self.store.blocks.give_back(&table[self.n_dropped], n - self.n_dropped)
                    raise
                with cython.critical_section(other):
                    other.table = table
                    other.n_blocks = n
                other.n_dropped = self.n_dropped
                other.block_size = self.block_size
                other.length = self.length
                other.store = self.store
            finally:
                other.end_write()
        finally:
            self.end_read()
        if other.store is not None:
            other.store.after_change()
        return 0


cdef int check_adopted(PagedKvStore store, int32_t[::1] table, Py_ssize_t n, Py_ssize_t block_size) except -1:
    if block_size != store.block_size:
        raise ValueError(f"block_size: expected {store.block_size}, the store's, got {block_size}")
    store.blocks.check_held(table[:n], "block_table")
    return 0
