"""BlockRows: the K, or the V, of all blocks of a store, in whatever dtype (formats.py).

A float32 row is `n_heads * head_dim` floats. Every other row is bytes, which only the kernels and the views
that users see look into.
"""

cimport numpy as cnp
from libc.stdint cimport int32_t, int64_t

from pagedkv._arrays cimport RowLayout, as_format, empty_bytes, is_float32
from pagedkv._kernels.rows cimport append_rows, copy_rows, erase_rows, gather_blocks, put_step, scatter_rows
from pagedkv._kernels.simd cimport SIMD_F32

import numpy as np

cdef extern from "pages.h" nogil:
    Py_ssize_t give_back_pages(char* start, char* end)


cdef class BlockRows:

    def __cinit__(self, object format=as_format("float32"), n_layers=0, total_blocks=0, Py_ssize_t block_size=1,
                  Py_ssize_t n_heads=0, Py_ssize_t head_dim=0, bint prefault=False, cnp.ndarray given=None):
        cdef object rows, row_bytes = format.layout(int(n_heads), int(head_dim)).row_bytes
        cdef cnp.ndarray memory = given
        cdef RowLayout layout = RowLayout.of(format, n_heads, head_dim)
        self.is_lent = given is not None
        if not self.is_lent:
            memory = empty_bytes(n_layers * total_blocks * block_size * row_bytes)
        if prefault:
            (<object>memory).fill(0)
        self.layout = layout
        self.is_float32 = layout.row.dtype == SIMD_F32
        self.n_layers = n_layers
        self.block_size = block_size
        self.n_heads = n_heads
        self.head_dim = head_dim
        self.row_bytes = row_bytes
        self.memory = <const char*>cnp.PyArray_DATA(memory)
        self.n_bytes = (<object>memory).nbytes
        rows = (<object>memory).reshape(n_layers, total_blocks * block_size, row_bytes)
        if self.is_float32:
            self.floats = rows.view(np.float32)
        else:
            self.packed = rows
        # Views that are handed out must not be made writable again: NumPy asks the owner. Of lent memory it is the lender.
        if not self.is_lent:
            (<object>memory).base.flags.writeable = False
        rows = (<object>memory).reshape(n_layers, total_blocks, block_size, row_bytes)
        rows.flags.writeable = False
        self.blocks = rows[..., :n_heads * layout.row.head_bytes].view(format.stored)
        self.scales = None
        if format.scale is not None:
            self.scales = rows[..., layout.row.scales:].view(format.scale)

    # --- what callers give ---

    cdef GivenRows given(self, cnp.ndarray rows) noexcept:
        cdef GivenRows given
        given.data = <const char*>cnp.PyArray_DATA(rows)
        given.stored = True
        given.row_bytes = self.row_bytes
        if not self.is_float32 and is_float32(rows):
            given.stored = False
            given.row_bytes = self.n_heads * self.head_dim * <Py_ssize_t>sizeof(float)
        return given

    # --- moving them ---

    cdef inline const RowFormat* conversion(self, GivenRows src) noexcept nogil:
        """What floats are converted to; NULL for rows that are as they are stored."""
        return NULL if src.stored else &self.layout.row

    cdef void put(self, Py_ssize_t row, GivenRows src) noexcept nogil:
        if self.is_float32:
            put_step(self.floats, row, src, NULL)
        else:
            put_step(self.packed, row, src, self.conversion(src))

    cdef void append(self, GivenRows src, const int32_t* table, Py_ssize_t start, Py_ssize_t n,
                     int n_threads) noexcept nogil:
        cdef const RowFormat* format = self.conversion(src)
        cdef Py_ssize_t layer
        for layer in range(self.n_layers):
            if self.is_float32:
                append_rows(self.floats[layer], src, NULL, table, self.block_size, start, n, n_threads)
            else:
                append_rows(self.packed[layer], src, format, table, self.block_size, start, n, n_threads)
            src.data += n * src.row_bytes

    cdef void scatter(self, Py_ssize_t layer, GivenRows src, const int64_t[::1] slots, Py_ssize_t n,
                      int n_threads) noexcept nogil:
        if self.is_float32:
            scatter_rows(self.floats[layer], src, NULL, slots, n, n_threads)
        else:
            scatter_rows(self.packed[layer], src, self.conversion(src), slots, n, n_threads)

    cdef void gather(self, float[:, ::1] dst, Py_ssize_t layer, const int32_t* table, Py_ssize_t start,
                     Py_ssize_t n, int n_threads) noexcept nogil:
        if self.is_float32:
            gather_blocks(dst, self.floats[layer], NULL, table, self.block_size, start, n, n_threads)
        else:
            gather_blocks(dst, self.packed[layer], &self.layout.row, table, self.block_size, start, n, n_threads)

    cdef void copy_block(self, int32_t dst, int32_t src, Py_ssize_t n) noexcept nogil:
        cdef Py_ssize_t layer, size = self.block_size
        for layer in range(self.n_layers):
            if self.is_float32:
                copy_rows(self.floats[layer], dst * size, src * size, n)
            else:
                copy_rows(self.packed[layer], dst * size, src * size, n)

    cdef void erase_block(self, int32_t block) noexcept nogil:
        cdef Py_ssize_t layer, size = self.block_size
        for layer in range(self.n_layers):
            if self.is_float32:
                erase_rows(self.floats[layer], block * size, size)
            else:
                erase_rows(self.packed[layer], block * size, size)

    cdef Py_ssize_t trim(self, Py_ssize_t block, Py_ssize_t n) noexcept nogil:
        """Give the memory of n neighbouring blocks back to the system, as far as they have whole pages; returns bytes."""
        cdef Py_ssize_t layer, n_bytes = 0
        if self.is_lent:
            return 0
        for layer in range(self.n_layers):
            n_bytes += give_back_pages(self.address(layer, block), self.address(layer, block + n))
        return n_bytes

    cdef bint is_finite(self, Py_ssize_t block) except -1:
        """Whether all values of a block are, in all layers."""
        cdef int32_t table = <int32_t>block
        cdef Py_ssize_t layer
        values = np.empty((self.block_size, self.n_heads * self.head_dim), np.float32)
        cdef float[:, ::1] floats = values
        for layer in range(self.n_layers):
            self.gather(floats, layer, &table, 0, self.block_size, 1)
            if not np.isfinite(values).all():
                return False
        return True

    # --- reading them ---

    cdef void view_layer(self, RowView* view, Py_ssize_t layer) noexcept nogil:
        if self.is_float32:
            view.rows = <const char*>&self.floats[layer, 0, 0]
        else:
            view.rows = <const char*>&self.packed[layer, 0, 0]
        view.block_bytes = self.block_size * self.row_bytes
        view.row_bytes = self.row_bytes
        view.head_bytes = self.layout.row.head_bytes
        view.head_dim = self.head_dim
        view.item_bytes = self.layout.row.head_bytes // self.head_dim
        view.dtype = self.layout.row.dtype
        view.scales = self.layout.row.scales
