"""BlockStore: the bytes of all blocks and who holds them, at C level. What `PagedKvStore` makes public.

Everything here trusts its arguments, but for what a caller gave as rows, and for ids that have no holder left.
"""

cimport cython
cimport numpy as cnp
from libc.stdint cimport int32_t

from pagedkv._arrays cimport as_rows, check_rows, holds_rows
from pagedkv._rows cimport BlockRows
from pagedkv.allocator cimport BlockAllocator

import os
import weakref

from pagedkv.errors import PagedKvError, PagedStoreExhausted


@cython.no_gc_clear  # its caches give their blocks back when they go, in whatever order a cycle is taken apart
cdef class BlockStore:
    """What `PagedKvStore` makes public."""

    def __cinit__(self):
        # Until __init__ has run, a store of no blocks, on which every request is refused.
        self.blocks = BlockAllocator(0)
        self.k = BlockRows()
        self.v = BlockRows()
        self.block_size = 1
        self.dtype = "float32"

    cdef int check_held(self, Py_ssize_t block, str name) except -1:
        if self.blocks.counts[block] == 0:
            raise ValueError(f"{name}: expected a block that someone holds, got {block}, which is free")
        return 0

    # --- holders ---

    cdef int take(self, int32_t* ids, Py_ssize_t n, Py_ssize_t held) except -1:
        if n > self.blocks.n_free():
            self.end_terms()
        if not self.blocks.take(ids, n):
            raise self.exhausted(n, held)
        if self.debug:
            self.erase(ids, n)
        return 0

    cdef int end_terms(self) except -1:
        if self.blocks.tree is not NULL and self.blocks.tree.terms.n:
            prefixes = self.prefixes()
            if prefixes is not None:
                prefixes._end_terms()
        return 0

    cdef object exhausted(self, Py_ssize_t needed, Py_ssize_t held):
        if needed > self.blocks.total:
            self.end_terms()  # was not asked for before: the error says what would be evictable now
        return PagedStoreExhausted(needed, self.blocks.n_free(), self.blocks.total, held, self.blocks.n_evictable())

    cdef int know_prefixes(self, object prefixes) except -1:
        reference = weakref.ref(prefixes)
        self.blocks.know(self.block_size, int.from_bytes(os.urandom(8), "little"))
        self.prefixes = reference
        return 0

    cdef int give_back(self, const int32_t* ids, Py_ssize_t n) except -1:
        cdef Py_ssize_t bad = self.drop(ids, n)
        if bad >= 0:
            raise PagedKvError(f"block {ids[bad]} is in a table and has no holder left: "
                               "someone gave back a reference that was not theirs")
        return 0

    cdef Py_ssize_t drop(self, const int32_t* ids, Py_ssize_t n) noexcept:
        return self.blocks.give_back(ids, n)

    cdef void drop_each(self, const int32_t* ids, Py_ssize_t n) noexcept:
        cdef Py_ssize_t i
        for i in range(n - 1, -1, -1):  # from the end, so that they are handed out again in their order
            self.drop(&ids[i], 1)

    cdef void erase(self, const int32_t* ids, Py_ssize_t n) noexcept:
        """Fill blocks that are not written yet, or not held any more, with NaN."""
        cdef Py_ssize_t i
        for i in range(n):
            self.k.erase_block(ids[i])
            self.v.erase_block(ids[i])

    # --- bytes ---

    cdef bint holds(self, object k, object v, Py_ssize_t n_layers, Py_ssize_t n) noexcept:
        cdef BlockRows k_rows = self.k, v_rows = self.v
        return (holds_rows(k, self.kind, n_layers, n, k_rows.n_heads, k_rows.head_dim)
                and holds_rows(v, self.kind, n_layers, n, v_rows.n_heads, v_rows.head_dim)
                and not (k_rows.overlaps(<cnp.ndarray>k) or v_rows.overlaps(<cnp.ndarray>k)
                         or k_rows.overlaps(<cnp.ndarray>v) or v_rows.overlaps(<cnp.ndarray>v)))

    cdef cnp.ndarray given_k(self, object array, Py_ssize_t n_layers, Py_ssize_t n):
        cdef str name = "k_step" if n < 0 else "k"
        return self.apart(as_rows(array, name, self.kind, n_layers, n, self.k.n_heads, self.k.head_dim))

    cdef cnp.ndarray given_v(self, object array, Py_ssize_t n_layers, Py_ssize_t n, cnp.ndarray k):
        cdef str name = "v_step" if n < 0 else "v"
        cdef cnp.ndarray v = as_rows(array, name, self.kind, n_layers, n, self.v.n_heads, self.v.head_dim)
        self.check_given(k, v, n_layers, n)
        return self.apart(v)

    cdef int check_given(self, cnp.ndarray k, cnp.ndarray v, Py_ssize_t n_layers, Py_ssize_t n) except -1:
        check_rows(k, "k_step" if n < 0 else "k", self.kind, n_layers, n, self.k.n_heads, self.k.head_dim)
        check_rows(v, "v_step" if n < 0 else "v", self.kind, n_layers, n, self.v.n_heads, self.v.head_dim)
        return 0

    cdef cnp.ndarray apart(self, cnp.ndarray rows):
        """The rows, or a copy where they are a view of this store."""
        return rows.copy() if self.k.overlaps(rows) or self.v.overlaps(rows) else rows

    cdef void copy_prefix_rows(self, int32_t dst, int32_t src, Py_ssize_t n) noexcept:
        if self.debug:
            self.erase(&dst, 1)
        self.copy_shared_rows(dst, src, n)

    cdef void copy_shared_rows(self, int32_t dst, int32_t src, Py_ssize_t n) noexcept:
        cdef BlockRows k = self.k, v = self.v
        if n * self.step_bytes < NOGIL_FROM:
            k.copy_block(dst, src, n)
            v.copy_block(dst, src, n)
        else:
            with nogil:
                k.copy_block(dst, src, n)
                v.copy_block(dst, src, n)


cdef void erase_freed(void* owner, int32_t id) noexcept:
    (<BlockStore>owner).erase(&id, 1)
