"""BlockRows: the K, or the V, of all blocks of a store, in whatever dtype.

A float32 row is `n_heads * head_dim` floats. Every other row is bytes, which only the kernels and the views
that users see look into:

    float16, bfloat16    [ values, 2 bytes each ]
    int8                 [ values, 1 byte each | up to 3 bytes unused | n_heads scales, float32 ]

An int8 value stands for itself times the scale of its row and head.
"""

cimport numpy as cnp
from libc.stdint cimport int32_t, int64_t

from pagedkv._arrays cimport describe, empty_bytes, is_float32
from pagedkv._kernels.rows cimport append_rows, copy_rows, erase_rows, gather_blocks, put_step, scatter_rows
from pagedkv._kernels.simd cimport SIMD_BF16, SIMD_F16, SIMD_F32, SIMD_I8

import numpy as np

cdef extern from "pages.h" nogil:
    Py_ssize_t give_back_pages(char* start, char* end)

cdef dict KINDS = {"float32": SIMD_F32, "float16": SIMD_F16, "bfloat16": SIMD_BF16, "int8": SIMD_I8}
# What NumPy sees: it has no bfloat16, and shows the bits.
cdef dict STORED = {SIMD_F32: np.dtype(np.float32), SIMD_F16: np.dtype(np.float16), SIMD_BF16: np.dtype(np.uint16),
                    SIMD_I8: np.dtype(np.int8)}


cdef str dtype_name(dtype):
    name = None
    if type(dtype) is str and dtype in KINDS:
        return dtype
    # Not what only has a dtype: an array, a scalar.
    if isinstance(dtype, (str, type, np.dtype)):
        try:
            found = np.dtype(dtype)
            name = str(found.name) if found.isnative else None
        except (TypeError, ValueError, SyntaxError):  # from parsing it
            pass
    if name not in KINDS:
        got = repr(dtype) if isinstance(dtype, (str, type, np.dtype)) else describe(dtype)
        raise ValueError(f"dtype: expected float32, float16, bfloat16 or int8, got {got}")
    return name


cdef int dtype_kind(str name) except -1:
    return KINDS[name]


cdef object row_layout(int kind, object n_heads, object head_dim):
    values = n_heads * head_dim * STORED[kind].itemsize
    if kind != SIMD_I8:
        return values, 0
    scales = (values + 3) // 4 * 4
    return scales + 4 * n_heads, scales


cdef class BlockRows:

    def __cinit__(self, int kind=SIMD_F32, n_layers=0, total_blocks=0, Py_ssize_t block_size=1, Py_ssize_t n_heads=0,
                  Py_ssize_t head_dim=0, bint prefault=False):
        cdef object row_bytes, scales_at, rows
        cdef cnp.ndarray memory
        row_bytes, scales_at = row_layout(kind, int(n_heads), int(head_dim))
        memory = empty_bytes(n_layers * total_blocks * block_size * row_bytes)
        if prefault:
            (<object>memory).fill(0)
        self.kind = kind
        self.n_layers = n_layers
        self.block_size = block_size
        self.n_heads = n_heads
        self.head_dim = head_dim
        self.item_bytes = STORED[kind].itemsize
        self.row_bytes = row_bytes
        self.format.dtype = kind
        self.format.n_heads = n_heads
        self.format.head_dim = head_dim
        self.format.row_bytes = row_bytes
        self.format.scales = scales_at
        self.memory = <const char*>cnp.PyArray_DATA(memory)
        self.n_bytes = (<object>memory).nbytes
        rows = (<object>memory).reshape(n_layers, total_blocks * block_size, row_bytes)
        if kind == SIMD_F32:
            self.floats = rows.view(np.float32)
        else:
            self.packed = rows
        # Views that are handed out must not be made writable again: NumPy asks the owner.
        (<object>memory).base.flags.writeable = False
        rows = (<object>memory).reshape(n_layers, total_blocks, block_size, row_bytes)
        rows.flags.writeable = False
        self.blocks = rows[..., :n_heads * head_dim * self.item_bytes].view(STORED[kind])
        self.scales = rows[..., scales_at:].view(np.float32) if kind == SIMD_I8 else None

    # --- what callers give ---

    cdef GivenRows given(self, cnp.ndarray rows) noexcept:
        cdef GivenRows given
        given.data = <const char*>cnp.PyArray_DATA(rows)
        given.stored = self.kind == SIMD_F32 or not is_float32(rows)
        given.row_bytes = self.row_bytes if given.stored else self.n_heads * self.head_dim * <Py_ssize_t>sizeof(float)
        return given

    # --- moving them ---

    cdef inline const RowFormat* conversion(self, GivenRows src) noexcept nogil:
        """What floats are converted to; NULL for rows that are as they are stored."""
        return NULL if src.stored else &self.format

    cdef void put(self, Py_ssize_t row, GivenRows src) noexcept nogil:
        if self.kind == SIMD_F32:
            put_step(self.floats, row, src, NULL)
        else:
            put_step(self.packed, row, src, self.conversion(src))

    cdef void append(self, GivenRows src, const int32_t* table, Py_ssize_t start, Py_ssize_t n,
                     int n_threads) noexcept nogil:
        cdef const RowFormat* format = self.conversion(src)
        cdef Py_ssize_t layer
        for layer in range(self.n_layers):
            if self.kind == SIMD_F32:
                append_rows(self.floats[layer], src, NULL, table, self.block_size, start, n, n_threads)
            else:
                append_rows(self.packed[layer], src, format, table, self.block_size, start, n, n_threads)
            src.data += n * src.row_bytes

    cdef void scatter(self, Py_ssize_t layer, GivenRows src, const int64_t[::1] slots, Py_ssize_t n,
                      int n_threads) noexcept nogil:
        if self.kind == SIMD_F32:
            scatter_rows(self.floats[layer], src, NULL, slots, n, n_threads)
        else:
            scatter_rows(self.packed[layer], src, self.conversion(src), slots, n, n_threads)

    cdef void gather(self, float[:, ::1] dst, Py_ssize_t layer, const int32_t* table, Py_ssize_t start,
                     Py_ssize_t n, int n_threads) noexcept nogil:
        if self.kind == SIMD_F32:
            gather_blocks(dst, self.floats[layer], NULL, table, self.block_size, start, n, n_threads)
        else:
            gather_blocks(dst, self.packed[layer], &self.format, table, self.block_size, start, n, n_threads)

    cdef void copy_block(self, int32_t dst, int32_t src, Py_ssize_t n) noexcept nogil:
        cdef Py_ssize_t layer, size = self.block_size
        for layer in range(self.n_layers):
            if self.kind == SIMD_F32:
                copy_rows(self.floats[layer], dst * size, src * size, n)
            else:
                copy_rows(self.packed[layer], dst * size, src * size, n)

    cdef void erase_block(self, int32_t block) noexcept nogil:
        cdef Py_ssize_t layer, size = self.block_size
        for layer in range(self.n_layers):
            if self.kind == SIMD_F32:
                erase_rows(self.floats[layer], block * size, size)
            else:
                erase_rows(self.packed[layer], block * size, size)

    cdef Py_ssize_t trim(self, Py_ssize_t block, Py_ssize_t n) noexcept nogil:
        """Give the memory of n neighbouring blocks back to the system, as far as they have whole pages; returns bytes."""
        cdef Py_ssize_t layer, n_bytes = 0
        for layer in range(self.n_layers):
            n_bytes += give_back_pages(self.address(layer, block), self.address(layer, block + n))
        return n_bytes

    cdef bint is_finite(self, Py_ssize_t block) except -1:
        """Whether all values of a block are, in all layers."""
        if self.kind == SIMD_I8:  # a head that has others has such a scale
            return np.isfinite(self.scales[:, block]).all()
        if self.kind == SIMD_BF16:
            return ((self.blocks[:, block] & 0x7f80) != 0x7f80).all()
        return np.isfinite(self.blocks[:, block]).all()

    # --- reading them ---

    cdef void view_layer(self, RowView* view, Py_ssize_t layer) noexcept nogil:
        if self.kind == SIMD_F32:
            view.rows = <const char*>&self.floats[layer, 0, 0]
        else:
            view.rows = <const char*>&self.packed[layer, 0, 0]
        view.block_bytes = self.block_size * self.row_bytes
        view.row_bytes = self.row_bytes
        view.head_bytes = self.head_dim * self.item_bytes
        view.head_dim = self.head_dim
        view.item_bytes = self.item_bytes
        view.scales = self.format.scales
