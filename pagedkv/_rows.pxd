# BlockRows: the K, or the V, of all blocks of a store, in whatever dtype. See _rows.pyx.

cimport numpy as cnp
from libc.stdint cimport int32_t

from pagedkv._arrays cimport RowLayout, is_float32
from pagedkv._kernels.plan cimport RowView
from pagedkv._kernels.rows cimport GivenRows, Places, RowFormat


cdef class BlockRows:
    cdef RowLayout layout
    cdef bint is_float32
    cdef Py_ssize_t n_layers, block_size, n_heads, head_dim, row_bytes
    cdef const char* memory                 # of all rows
    cdef Py_ssize_t n_bytes, layer_bytes
    cdef bint is_lent                       # the memory is a caller's: bytes that were given, as many as the rows have
    cdef float[:, :, ::1] floats            # float32: [n_layers, total_blocks * block_size, width]
    cdef unsigned char[:, :, ::1] packed    # any other: [n_layers, total_blocks * block_size, row_bytes]
    cdef object blocks                      # what is stored, read-only: [n_layers, total_blocks, block_size, width]
    cdef object scales                      # the same of scales, [..., n_heads, groups], or None where the dtype has none

    # What an array that _arrays has checked holds, a row a position of each layer; valid as long as the array.
    cdef inline GivenRows given(self, cnp.ndarray rows) noexcept:
        cdef bint stored = self.is_float32 or not is_float32(rows)
        return GivenRows(<const char*>cnp.PyArray_DATA(rows),
                         self.row_bytes if stored else self.n_heads * self.head_dim * <Py_ssize_t>sizeof(float), stored)

    cdef inline bint overlaps(self, cnp.ndarray rows) noexcept:
        """Whether an array starts in this memory: such a one ends in it too."""
        cdef const char* address = <const char*>cnp.PyArray_DATA(rows)
        return self.memory <= address < self.memory + self.n_bytes

    # Where a block begins in a layer: `block_size` rows lie there one after the other.
    cdef inline char* address(self, Py_ssize_t layer, Py_ssize_t block) noexcept nogil:
        return <char*>self.memory + layer * self.layer_bytes + block * self.block_size * self.row_bytes

    cdef const RowFormat* conversion(self, const GivenRows* src) noexcept nogil
    # The one way that rows are written: n of them in each of so many layers, of `src` layer by layer.
    cdef void write(self, Py_ssize_t layer, Py_ssize_t n_layers, const GivenRows* src, const Places* places, Py_ssize_t n,
                    int n_threads) noexcept nogil
    cdef void gather(self, float[:, ::1] dst, Py_ssize_t layer, const Places* places, Py_ssize_t n, int n_threads) noexcept nogil
    # The first n rows of a block, in all layers, to another block.
    cdef void copy_block(self, int32_t dst, int32_t src, Py_ssize_t n) noexcept nogil
    cdef void erase_block(self, int32_t block) noexcept nogil
    cdef Py_ssize_t trim(self, Py_ssize_t block, Py_ssize_t n) noexcept nogil
    cdef bint is_finite(self, Py_ssize_t block) except -1
    cdef void view_layer(self, RowView* view, Py_ssize_t layer) noexcept nogil
