"""BlockRows: the K, or the V, of all blocks of a store, in whatever dtype (formats.py).

A float32 row is `n_heads * head_dim` floats. Every other row is bytes, which only the kernels and the views
that users see look into.
"""

cimport numpy as cnp
from libc.stdint cimport int32_t, uint16_t

from pagedkv._arrays cimport RowLayout, as_format, empty_bytes
from pagedkv._kernels.rows cimport copy_rows, erase_rows, gather_rows, in_blocks, row_at, write_row, write_rows
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
        self.layer_bytes = total_blocks * block_size * row_bytes
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
            scales = rows[..., layout.row.scales:].view(format.scale)
            self.scales = scales.reshape(*scales.shape[:3], n_heads, -1)

    # --- moving them ---

    cdef inline const RowFormat* conversion(self, const GivenRows* src) noexcept nogil:
        """What floats are converted to; NULL for rows that are as they are stored."""
        return NULL if src.stored else &self.layout.row

    cdef void write(self, Py_ssize_t layer, Py_ssize_t n_layers, const GivenRows* src, const Places* places, Py_ssize_t n,
                    int n_threads) noexcept nogil:
        cdef const RowFormat* format = self.conversion(src)
        cdef char* row
        cdef Py_ssize_t j
        if n == 1:  # decoding does little else: no more than a copy in each layer
            row = <char*>self.memory + layer * self.layer_bytes + row_at(places, 0) * self.row_bytes
            for j in range(n_layers):
                write_row(row + j * self.layer_bytes, src, j, format)
        elif self.is_float32:
            write_rows(self.floats, layer, n_layers, src, format, places, n, n_threads)
        else:
            write_rows(self.packed, layer, n_layers, src, format, places, n, n_threads)

    cdef void gather(self, float[:, ::1] dst, Py_ssize_t layer, const Places* places, Py_ssize_t n, int n_threads) noexcept nogil:
        if self.is_float32:
            gather_rows(dst, self.floats[layer], NULL, places, n, n_threads)
        else:
            gather_rows(dst, self.packed[layer], &self.layout.row, places, n, n_threads)

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
        cdef Places places = in_blocks(&table, self.block_size, 0)
        cdef Py_ssize_t layer
        values = np.empty((self.block_size, self.n_heads * self.head_dim), np.float32)
        cdef float[:, ::1] floats = values
        for layer in range(self.n_layers):
            self.gather(floats, layer, &places, self.block_size, 1)
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
        view.n_scales = self.layout.row.scale_bytes // <Py_ssize_t>sizeof(uint16_t)
        view.turn_width = self.layout.row.turn_width
