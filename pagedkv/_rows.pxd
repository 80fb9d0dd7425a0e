# KvRows, K and V of all blocks of a store; each of them BlockRows, in whatever dtype. See _rows.pyx.

cimport numpy as cnp
from libc.stdint cimport int32_t

from pagedkv._arrays cimport RowLayout, is_float32
from pagedkv._kernels.plan cimport RowView
from pagedkv._kernels.rows cimport GivenRows, Places, RowFormat


cdef class BlockRows:
    cdef RowLayout layout
    cdef bint is_float32
    cdef Py_ssize_t n_layers, total_blocks, block_size, n_heads, head_dim, row_bytes
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


cdef class KvRows:
    cdef BlockRows k, v
    cdef Py_ssize_t n_layers, block_size
    cdef Py_ssize_t step_bytes              # K and V of one position, all layers

    # In memory of its own; n_layers and total_blocks are Python's integers. MemoryError.
    @staticmethod
    cdef KvRows made(object format, object n_layers, object total_blocks, Py_ssize_t block_size, Py_ssize_t n_heads,
                     Py_ssize_t head_dim, Py_ssize_t v_head_dim, bint prefault)

    # In these arrays of `as_tensor`, which say the dtype, as a caller said it too or None. n_heads is -1 where they say it.
    @staticmethod
    cdef KvRows lent(cnp.ndarray k, cnp.ndarray v, Py_ssize_t n_heads, str dtype)

    # What a caller gave as K and V, n rows of each of n_layers or, for -1, one row a layer with no axis for it. Where they
    # are arrays to be read as they lie there, `holds` says so, and runs nobody's code. Otherwise first K and then V is
    # converted, by the caller's code too, and K looked at again after it. Rows that lie in this memory are copied, so that
    # no move overlaps itself. TypeError or ValueError names the argument.
    cdef bint holds(self, object k, object v, Py_ssize_t n_layers, Py_ssize_t n) noexcept
    cdef cnp.ndarray given_k(self, object array, Py_ssize_t n_layers, Py_ssize_t n)
    cdef cnp.ndarray given_v(self, object array, Py_ssize_t n_layers, Py_ssize_t n, cnp.ndarray k)
    # Both again, right before they are read, where anything else has run since.
    cdef int check_given(self, cnp.ndarray k, cnp.ndarray v, Py_ssize_t n_layers, Py_ssize_t n) except -1
    cdef cnp.ndarray apart(self, cnp.ndarray rows)

    # The one way in for rows, n of them in each of these layers: of arrays that were looked at as above, to places of blocks
    # that have one holder. Releases the GIL where there is enough to copy, as `copy_block` does.
    cdef void write(self, Py_ssize_t layer, Py_ssize_t n_layers, cnp.ndarray k, cnp.ndarray v, const Places* places,
                    Py_ssize_t n, int n_threads) noexcept
    # And the way out, of one layer.
    cdef void gather(self, float[:, ::1] k, float[:, ::1] v, Py_ssize_t layer, const Places* places, Py_ssize_t n,
                     int n_threads) noexcept
    # The first n rows of a block, in all layers, to another block.
    cdef void copy_block(self, int32_t dst, int32_t src, Py_ssize_t n) noexcept
    # Fill blocks that are not written yet, or not held any more, with NaN.
    cdef void erase(self, const int32_t* ids, Py_ssize_t n) noexcept
    # As BlockRows do, of K and V.
    cdef Py_ssize_t trim(self, Py_ssize_t block, Py_ssize_t n) noexcept
    cdef bint is_finite(self, Py_ssize_t block) except -1
