"""KvRows: K and V of all blocks of a store; each of them BlockRows, in whatever dtype (formats.py).

A float32 row is `n_heads * head_dim` floats. Every other row is bytes, which only the kernels and the views
that users see look into. Nothing here knows who holds a block.
"""

cimport cython
cimport numpy as cnp
from libc.stdint cimport INT32_MAX, int32_t, uint16_t

from pagedkv._arrays cimport (
    RowLayout, as_format, as_rows, check_apart, check_rows, describe, empty_bytes, holds_rows)
from pagedkv._kernels.rows cimport (
    NOGIL_FROM, copy_rows, erase_rows, gather_rows, in_blocks, row_at, write_row, write_rows)
from pagedkv._kernels.simd cimport SIMD_BF16, SIMD_F16, SIMD_F32
from pagedkv._tensors cimport Tensor, view_tensor

import numpy as np

cdef extern from "pages.h" nogil:
    Py_ssize_t trim_pages(char* start, char* end)

cdef dict KIND_NAMES = {SIMD_F32: "float32", SIMD_F16: "float16", SIMD_BF16: "bfloat16"}


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
        self.total_blocks = total_blocks
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
            n_bytes += trim_pages(self.address(layer, block), self.address(layer, block + n))
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


@cython.no_gc_clear  # a store with debug=True writes into what comes back, in whatever order a cycle is taken apart
cdef class KvRows:

    def __cinit__(self, BlockRows k=None, BlockRows v=None):
        self.k = BlockRows() if k is None else k
        self.v = BlockRows() if v is None else v
        self.n_layers = self.k.n_layers
        self.block_size = self.k.block_size
        self.step_bytes = self.n_layers * (self.k.row_bytes + self.v.row_bytes)

    @staticmethod
    cdef KvRows made(object format, object n_layers, object total_blocks, Py_ssize_t block_size, Py_ssize_t n_heads,
                     Py_ssize_t head_dim, Py_ssize_t v_head_dim, bint prefault):
        # Python's integers: a product of sizes that fit 64 bits need not.
        return KvRows(BlockRows(format, n_layers, total_blocks, block_size, n_heads, head_dim, prefault),
                      BlockRows(format, n_layers, total_blocks, block_size, n_heads, v_head_dim, prefault))

    @staticmethod
    cdef KvRows lent(cnp.ndarray k, cnp.ndarray v, Py_ssize_t n_heads, str dtype):
        cdef Tensor k_given, v_given
        cdef str name
        view_blocks(&k_given, k, "k", n_heads)
        view_blocks(&v_given, v, "v", k_given.shape[3])
        name = KIND_NAMES[k_given.dtype]
        if dtype is not None and name != dtype:
            raise TypeError(f"k: expected {dtype}, got {describe(k)}")
        if v_given.dtype != k_given.dtype or [v_given.shape[i] for i in range(4)] != [k_given.shape[i] for i in range(4)]:
            raise ValueError(f"v: expected the layers, blocks, rows, heads and dtype of k, {describe(k)}, got {describe(v)}")
        check_apart(v, "v", k, "k")
        return KvRows(lent_rows(&k_given, k, name), lent_rows(&v_given, v, name))

    # --- what a caller gave ---

    cdef bint holds(self, object k, object v, Py_ssize_t n_layers, Py_ssize_t n) noexcept:
        cdef BlockRows k_rows = self.k, v_rows = self.v
        return (holds_rows(k, &k_rows.layout.row, k_rows.layout.typenum, n_layers, n)
                and holds_rows(v, &v_rows.layout.row, v_rows.layout.typenum, n_layers, n)
                and not (k_rows.overlaps(<cnp.ndarray>k) or v_rows.overlaps(<cnp.ndarray>k)
                         or k_rows.overlaps(<cnp.ndarray>v) or v_rows.overlaps(<cnp.ndarray>v)))

    cdef cnp.ndarray given_k(self, object array, Py_ssize_t n_layers, Py_ssize_t n):
        return self.apart(as_rows(array, "k_step" if n < 0 else "k", self.k.layout, n_layers, n))

    cdef cnp.ndarray given_v(self, object array, Py_ssize_t n_layers, Py_ssize_t n, cnp.ndarray k):
        cdef cnp.ndarray v = as_rows(array, "v_step" if n < 0 else "v", self.v.layout, n_layers, n)
        self.check_given(k, v, n_layers, n)
        return self.apart(v)

    cdef int check_given(self, cnp.ndarray k, cnp.ndarray v, Py_ssize_t n_layers, Py_ssize_t n) except -1:
        check_rows(k, "k_step" if n < 0 else "k", self.k.layout, n_layers, n)
        check_rows(v, "v_step" if n < 0 else "v", self.v.layout, n_layers, n)
        return 0

    cdef cnp.ndarray apart(self, cnp.ndarray rows):
        """The rows, or a copy where they are a view of these."""
        return rows.copy() if self.k.overlaps(rows) or self.v.overlaps(rows) else rows

    # --- moving them ---

    cdef void write(self, Py_ssize_t layer, Py_ssize_t n_layers, cnp.ndarray k, cnp.ndarray v, const Places* places,
                    Py_ssize_t n, int n_threads) noexcept:
        cdef BlockRows k_rows = self.k, v_rows = self.v
        cdef GivenRows k_given = k_rows.given(k), v_given = v_rows.given(v)
        if n * self.step_bytes < NOGIL_FROM:
            k_rows.write(layer, n_layers, &k_given, places, n, n_threads)
            v_rows.write(layer, n_layers, &v_given, places, n, n_threads)
        else:
            with nogil:
                k_rows.write(layer, n_layers, &k_given, places, n, n_threads)
                v_rows.write(layer, n_layers, &v_given, places, n, n_threads)

    cdef void gather(self, float[:, ::1] k, float[:, ::1] v, Py_ssize_t layer, const Places* places, Py_ssize_t n,
                     int n_threads) noexcept:
        cdef BlockRows k_rows = self.k, v_rows = self.v
        with nogil:
            k_rows.gather(k, layer, places, n, n_threads)
            v_rows.gather(v, layer, places, n, n_threads)

    cdef void copy_block(self, int32_t dst, int32_t src, Py_ssize_t n) noexcept:
        cdef BlockRows k = self.k, v = self.v
        if n * self.step_bytes < NOGIL_FROM:
            k.copy_block(dst, src, n)
            v.copy_block(dst, src, n)
        else:
            with nogil:
                k.copy_block(dst, src, n)
                v.copy_block(dst, src, n)

    cdef void erase(self, const int32_t* ids, Py_ssize_t n) noexcept:
        cdef Py_ssize_t i
        for i in range(n):
            self.k.erase_block(ids[i])
            self.v.erase_block(ids[i])

    cdef Py_ssize_t trim(self, Py_ssize_t block, Py_ssize_t n) noexcept:
        return self.k.trim(block, n) + self.v.trim(block, n)

    cdef bint is_finite(self, Py_ssize_t block) except -1:
        return self.k.is_finite(block) and self.v.is_finite(block)


# --- memory that is lent -----------------------------------------------------------------------------

cdef int view_blocks(Tensor* given, cnp.ndarray array, str name, Py_ssize_t n_heads) except -1:
    """Look at K or V of all blocks; the axes are [n_layers, total_blocks, block_size, n_kv_heads, head_dim] then."""
    cdef str shape = "[n_layers, total_blocks, block_size, n_kv_heads, head_dim]"
    cdef Py_ssize_t i, step
    if array.ndim == 4:
        shape = "[n_layers, total_blocks, block_size, width]"
        view_tensor(given, array, name, shape, 4, True)
        if n_heads < 0:
            raise ValueError(f"n_kv_heads: expected the number of heads, which {describe(array)} does not say")
        if given.shape[3] % n_heads:
            raise ValueError(f"{name}: expected rows of {n_heads} heads, got {describe(array)}")
        given.shape[4] = given.shape[3] // n_heads
        given.strides[4] = given.strides[3]
        given.shape[3] = n_heads
        given.strides[3] = given.shape[4] * given.item_bytes
    else:
        view_tensor(given, array, name, shape, 5, True)
        if n_heads >= 0 and given.shape[3] != n_heads:
            raise ValueError(f"{name}: expected rows of {n_heads} heads, got {describe(array)}")
    step = given.item_bytes
    for i in range(4, -1, -1):
        if given.shape[i] == 0 or (i == 1 and given.shape[i] > INT32_MAX):
            raise ValueError(f"{name}: expected {shape} of at least one value, and at most {INT32_MAX} blocks, got "
                             f"{describe(array)}")
        if given.shape[i] > 1 and given.strides[i] != step:
            raise ValueError(f"{name}: expected {shape}, C-contiguous, got one with gaps or in another order")
        step *= given.shape[i]
    return 0


cdef BlockRows lent_rows(const Tensor* given, cnp.ndarray array, str dtype):
    return BlockRows(as_format(dtype), int(given.shape[0]), int(given.shape[1]), given.shape[2], given.shape[3],
                     given.shape[4], False, np.ravel(array).view(np.uint8))
