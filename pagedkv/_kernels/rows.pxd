# Moves between the store's rows and contiguous rows. See rows.pyx.

from libc.stdint cimport int32_t, int64_t

from pagedkv._kernels.plan cimport HeadsView, RowView

# Bytes; below this, releasing the GIL costs more than the copy it would let others overlap with.
cdef enum:
    NOGIL_FROM = 64 << 10

# A store's rows: floats, or bytes in a RowFormat.
ctypedef fused stored_t:
    float
    unsigned char

# How a row of a store is laid out (formats.py), and which kernels convert it.
cdef struct RowFormat:
    int dtype                   # SIMD_F32 ...
    Py_ssize_t n_heads
    Py_ssize_t head_dim
    Py_ssize_t row_bytes
    Py_ssize_t head_bytes       # of a head's values
    Py_ssize_t scales           # bytes from a row's start to the scales of its heads; 0: there are none
    Py_ssize_t scale_bytes      # of a head's
    Py_ssize_t turn_width       # values of a head that are turned together; 0: none are

# A caller's contiguous rows: floats, or values as the store holds them.
cdef struct GivenRows:
    const char* data
    Py_ssize_t row_bytes
    bint stored                 # the latter

# Where rows of a store are: a slot for each, which is its number there, or the positions of a sequence from one on.
cdef struct Places:
    const int64_t* slots        # or NULL
    const int32_t* table        # block ids
    Py_ssize_t block_size
    Py_ssize_t start


cdef inline int64_t slot_of(const int32_t* table, Py_ssize_t block_size, Py_ssize_t position) noexcept nogil:
    return <int64_t>table[position // block_size] * block_size + position % block_size


cdef inline int64_t row_at(const Places* places, Py_ssize_t i) noexcept nogil:
    if places.slots is not NULL:
        return places.slots[i]
    return slot_of(places.table, places.block_size, places.start + i)


cdef inline Places in_slots(const int64_t* slots) noexcept nogil:
    return Places(slots, NULL, 1, 0)


cdef inline Places in_blocks(const int32_t* table, Py_ssize_t block_size, Py_ssize_t start) noexcept nogil:
    return Places(NULL, table, block_size, start)


# Where a format is NULL, rows move as bytes; else they are converted from or to floats.

cdef void gather_rows(
    float[:, ::1] dst, const stored_t[:, ::1] store_rows, const RowFormat* format, const Places* places, Py_ssize_t n,
    int n_threads) noexcept nogil

cdef void write_rows(
    stored_t[:, :, ::1] store_rows, Py_ssize_t layer, Py_ssize_t n_layers, const GivenRows* src, const RowFormat* format,
    const Places* places, Py_ssize_t n, int n_threads) noexcept nogil

cdef void write_row(char* dst, const GivenRows* src, Py_ssize_t i, const RowFormat* format) noexcept nogil

cdef void copy_rows(stored_t[:, ::1] store_rows, Py_ssize_t dst_row, Py_ssize_t src_row, Py_ssize_t n) noexcept nogil

cdef void erase_rows(stored_t[:, ::1] store_rows, Py_ssize_t row, Py_ssize_t n) noexcept nogil

# Rows of n_heads heads, head by head, into blocks that lie anyhow. No slot occurs twice.
cdef void place_rows(
    const RowView* dst, Py_ssize_t block_size, const HeadsView* src, Py_ssize_t n_heads, const int64_t* slots,
    Py_ssize_t n, int n_threads) noexcept nogil
