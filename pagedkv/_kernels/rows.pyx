"""Moves between the rows of a store and contiguous rows, through a block table or a list of slots.

Rows of float32 stores are typed views, and move as bytes. Those of other stores are bytes in a RowFormat, and are
converted as they move, unless the caller's are in that format already. Every kernel trusts its arguments: tables
and slots lie in the store, widths are equal, source and destination do not overlap. Neighbours in the store go as
one copy. Amounts beyond what a cache keeps are split over threads and streamed past the caches.
"""

from libc.stdint cimport int64_t, uint16_t
from libc.string cimport memcpy, memset

from pagedkv._kernels.parallel cimport parallel_for
from pagedkv._kernels.plan cimport HeadsView, RowView
from pagedkv._kernels.simd cimport SIMD_F32, SIMD_GROUP, SIMD_TURN_MOST, simd_dtype, simd_in_use, simd_kernels

cdef extern from "stream.h" nogil:
    void stream_bytes(char* dst, const char* src, size_t n)
    void stream_fence()

# From this many bytes on, a move streams: well above a core's L2, where the copy would otherwise
# push out what the next kernel wants.
cdef enum:
    STREAM_FROM = 2 << 20
    TASK_BYTES = 512 << 10
    # A row that is converted and streamed is made here first, if it fits: a part of the nearest cache.
    BUFFER_FLOATS = 2048


# Some rows of the store on one side, as many contiguous rows on the other.
cdef struct Move:
    char* rows                  # of one layer of the store
    char* linear
    Places places
    Py_ssize_t row_bytes        # in the store
    Py_ssize_t linear_bytes     # of a contiguous row
    const RowFormat* format     # what to convert to or from, or NULL
    Py_ssize_t n
    Py_ssize_t rows_per_task
    bint gather                 # rows -> linear; otherwise linear -> rows
    bint stream


cdef inline void move_bytes(char* dst, const char* src, Py_ssize_t n, bint stream) noexcept nogil:
    if stream:
        stream_bytes(dst, src, n)
    else:
        memcpy(dst, src, n)


# --- rows of other dtypes ----------------------------------------------------------------------------

# Heads that are narrowed and widened alike. Whole groups follow one another across heads, as values and scales do, so
# that all heads are one.
cdef struct Heads:
    Py_ssize_t n
    Py_ssize_t head_dim
    Py_ssize_t head_bytes
    Py_ssize_t scale_bytes


cdef inline Heads heads_of(const RowFormat* format) noexcept nogil:
    if format.scales == 0 or format.head_dim % SIMD_GROUP == 0:
        return Heads(1, format.n_heads * format.head_dim, 0, 0)
    return Heads(format.n_heads, format.head_dim, format.head_bytes, format.scale_bytes)


cdef void encode_row(char* dst, const float* src, const RowFormat* format, const simd_kernels* kernels) noexcept nogil:
    cdef const simd_dtype* dtype = &kernels.dtypes[format.dtype]
    cdef float[SIMD_TURN_MOST] turned
    cdef Heads heads = heads_of(format)
    cdef Py_ssize_t h, d, n, n_bytes = format.n_heads * format.head_bytes
    cdef char* values = dst
    cdef uint16_t* scales
    # Between the values and the scales: nothing that came from elsewhere, so that equal rows are equal bytes.
    if format.scales:
        memset(dst + n_bytes, 0, format.scales - n_bytes)
    for h in range(heads.n):
        values = dst + h * heads.head_bytes
        scales = <uint16_t*>(dst + format.scales + h * heads.scale_bytes)
        if format.turn_width == 0:
            dtype.narrow(values, scales, src, heads.head_dim)
        else:
            d = 0
            while d < heads.head_dim:
                n = min(<Py_ssize_t>SIMD_TURN_MOST, heads.head_dim - d)
                kernels.turn(turned, src + d, n, format.turn_width)
                dtype.narrow(values + d, scales + d // SIMD_GROUP, turned, n)
                d += n
        src += heads.head_dim


cdef void decode_row(float* dst, const char* src, const RowFormat* format, const simd_kernels* kernels) noexcept nogil:
    cdef Heads heads = heads_of(format)
    cdef Py_ssize_t h
    for h in range(heads.n):
        kernels.dtypes[format.dtype].widen(
            dst, src + h * heads.head_bytes, <const uint16_t*>(src + format.scales + h * heads.scale_bytes), heads.head_dim)
        if format.turn_width:
            kernels.turn(dst, dst, heads.head_dim, format.turn_width)
        dst += heads.head_dim


cdef void convert_rows(char* dst, const char* src, Py_ssize_t n, const RowFormat* format, bint encode,
                       bint stream) noexcept nogil:
    """n rows of floats into the format, or back."""
    cdef const simd_kernels* kernels = simd_in_use()
    cdef Py_ssize_t float_bytes = format.n_heads * format.head_dim * sizeof(float)
    cdef Py_ssize_t dst_bytes = format.row_bytes if encode else float_bytes
    cdef Py_ssize_t src_bytes = float_bytes if encode else format.row_bytes
    cdef float[BUFFER_FLOATS] buffer
    cdef char* made
    cdef Py_ssize_t i
    stream = stream and dst_bytes <= <Py_ssize_t>sizeof(buffer)
    for i in range(n):
        made = <char*>buffer if stream else dst + i * dst_bytes
        if encode:
            encode_row(made, <const float*>(src + i * src_bytes), format, kernels)
        else:
            decode_row(<float*>made, src + i * src_bytes, format, kernels)
        if stream:
            stream_bytes(dst + i * dst_bytes, made, dst_bytes)


# --- some rows, wherever they are --------------------------------------------------------------------

cdef inline Py_ssize_t run_at(const Places* places, Py_ssize_t i, Py_ssize_t end, Py_ssize_t* row) noexcept nogil:
    """Where the i-th row is, and how far those up to the end follow it there as neighbours."""
    cdef Py_ssize_t block, run_end
    row[0] = row_at(places, i)
    if places.slots is not NULL:
        run_end = i + 1
        while run_end < end and places.slots[run_end] == places.slots[run_end - 1] + 1:
            run_end += 1
        return run_end
    block = (places.start + i) // places.block_size
    run_end = (block + 1) * places.block_size - places.start
    while run_end < end and places.table[block + 1] == places.table[block] + 1:
        block += 1
        run_end += places.block_size
    return min(run_end, end)


cdef inline void move_run(const Move* move, Py_ssize_t i, Py_ssize_t n, Py_ssize_t row) noexcept nogil:
    cdef char* rows = move.rows + row * move.row_bytes
    cdef char* linear = move.linear + i * move.linear_bytes
    if move.format is not NULL:
        if move.gather:
            convert_rows(linear, rows, n, move.format, False, move.stream)
        else:
            convert_rows(rows, linear, n, move.format, True, move.stream)
    elif move.gather:
        move_bytes(linear, rows, n * move.row_bytes, move.stream)
    else:
        move_bytes(rows, linear, n * move.row_bytes, move.stream)


cdef void move_rows(void* context, Py_ssize_t index) noexcept nogil:
    """Task `index` of a Move: its rows_per_task rows, a run of neighbours at a time."""
    cdef const Move* move = <const Move*>context
    cdef Py_ssize_t i = index * move.rows_per_task, end = min(i + move.rows_per_task, move.n), run_end, row
    while i < end:
        run_end = run_at(&move.places, i, end, &row)
        move_run(move, i, run_end - i, row)
        i = run_end
    if move.stream:
        stream_fence()


cdef inline void run_move(Move* move, int n_threads) noexcept nogil:
    cdef Py_ssize_t unit
    move.stream = move.n * move.row_bytes >= STREAM_FROM
    move.rows_per_task = move.n
    if not move.stream or n_threads == 1:
        move_rows(move, 0)
        return
    # Whole blocks a task, so that no two tasks write into one cache line of the store.
    unit = 1 if move.places.slots is not NULL else move.places.block_size
    move.rows_per_task = max(1, TASK_BYTES // (move.row_bytes * unit)) * unit
    parallel_for(move_rows, move, (move.n + move.rows_per_task - 1) // move.rows_per_task, n_threads)


cdef void gather_rows(
        float[:, ::1] dst, const stored_t[:, ::1] store_rows, const RowFormat* format, const Places* places,
        Py_ssize_t n, int n_threads) noexcept nogil:
    """dst[i] = the i-th of those rows, for i in [0, n)."""
    cdef Move move
    if n == 0:
        return
    move.rows = <char*>&store_rows[0, 0]
    move.linear = <char*>&dst[0, 0]
    move.places = places[0]
    move.row_bytes = store_rows.shape[1] * sizeof(stored_t)
    move.linear_bytes = dst.shape[1] * sizeof(float)
    move.format = format
    move.n = n
    move.gather = True
    run_move(&move, n_threads)


cdef void write_rows(
        stored_t[:, :, ::1] store_rows, Py_ssize_t layer, Py_ssize_t n_layers, const GivenRows* src, const RowFormat* format,
        const Places* places, Py_ssize_t n, int n_threads) noexcept nogil:
    """The i-th of those rows of layer `layer + j` = row j * n + i of src, for i in [0, n) and j in [0, n_layers)."""
    cdef Py_ssize_t j
    cdef Move move
    if n == 0:
        return
    move.places = places[0]
    move.linear = <char*>src.data
    move.row_bytes = store_rows.shape[2] * sizeof(stored_t)
    move.linear_bytes = src.row_bytes
    move.format = format
    move.n = n
    move.gather = False
    for j in range(n_layers):
        move.rows = <char*>&store_rows[layer + j, 0, 0]
        run_move(&move, n_threads)
        move.linear += n * src.row_bytes


cdef void write_row(char* dst, const GivenRows* src, Py_ssize_t i, const RowFormat* format) noexcept nogil:
    """One row of the store = row i of src."""
    if format is NULL:
        memcpy(dst, src.data + i * src.row_bytes, src.row_bytes)
    else:
        convert_rows(dst, src.data + i * src.row_bytes, 1, format, True, False)


# --- heads -------------------------------------------------------------------------------------------

# A row of heads for each slot, where the blocks are somebody else's and their heads may lie apart.
cdef struct Placing:
    const RowView* dst
    Py_ssize_t block_size
    const HeadsView* src
    Py_ssize_t n_heads
    const int64_t* slots
    Py_ssize_t n
    Py_ssize_t rows_per_task


cdef void place_head(char* dst, int dst_dtype, const char* src, int src_dtype, Py_ssize_t n, Py_ssize_t item_bytes,
                     const simd_dtype* dtypes) noexcept nogil:
    """n values from one dtype into another."""
    cdef float[BUFFER_FLOATS] buffer
    cdef Py_ssize_t src_bytes = sizeof(float) if src_dtype == SIMD_F32 else 2
    cdef const float* floats = <const float*>src
    cdef Py_ssize_t i = 0, size
    if dst_dtype == src_dtype:
        memcpy(dst, src, n * item_bytes)
        return
    while i < n:
        size = min(n - i, <Py_ssize_t>BUFFER_FLOATS)
        floats = <const float*>(src + i * src_bytes)
        if src_dtype != SIMD_F32:
            dtypes[src_dtype].widen(buffer, src + i * src_bytes, NULL, size)
            floats = buffer
        if dst_dtype == SIMD_F32:
            memcpy(dst + i * item_bytes, floats, size * sizeof(float))
        else:
            dtypes[dst_dtype].narrow(dst + i * item_bytes, NULL, floats, size)
        i += size


cdef void place_slots(void* context, Py_ssize_t index) noexcept nogil:
    """Task `index` of a Placing: its rows_per_task slots."""
    cdef Placing* placing = <Placing*>context
    cdef const RowView* to = placing.dst
    cdef const HeadsView* src = placing.src
    cdef const simd_dtype* dtypes = simd_in_use().dtypes
    cdef Py_ssize_t n_heads = placing.n_heads, width = to.head_dim, h
    cdef Py_ssize_t i = index * placing.rows_per_task
    cdef Py_ssize_t end = min(i + placing.rows_per_task, placing.n)
    cdef Py_ssize_t src_bytes = sizeof(float) if src.dtype == SIMD_F32 else 2
    cdef char* row
    if to.head_bytes == width * to.item_bytes and src.head_bytes == width * src_bytes:  # side by side: one long head
        width *= n_heads
        n_heads = 1
    while i < end:
        row = (<char*>to.rows + placing.slots[i] // placing.block_size * to.block_bytes
               + placing.slots[i] % placing.block_size * to.row_bytes)
        for h in range(n_heads):
            place_head(row + h * to.head_bytes, to.dtype, src.data + i * src.row_bytes + h * src.head_bytes,
                       src.dtype, width, to.item_bytes, dtypes)
        i += 1


cdef void place_rows(
        const RowView* dst, Py_ssize_t block_size, const HeadsView* src, Py_ssize_t n_heads, const int64_t* slots,
        Py_ssize_t n, int n_threads) noexcept nogil:
    cdef Placing placing
    cdef Py_ssize_t row_bytes = n_heads * dst.head_dim * dst.item_bytes
    if n == 0:
        return
    placing.dst = dst
    placing.block_size = block_size
    placing.src = src
    placing.n_heads = n_heads
    placing.slots = slots
    placing.n = n
    placing.rows_per_task = max(1, TASK_BYTES // row_bytes)
    parallel_for(place_slots, &placing, (n + placing.rows_per_task - 1) // placing.rows_per_task, n_threads)


# --- whole blocks ------------------------------------------------------------------------------------

cdef void copy_rows(stored_t[:, ::1] store_rows, Py_ssize_t dst_row, Py_ssize_t src_row, Py_ssize_t n) noexcept nogil:
    """store_rows[dst_row + i] = store_rows[src_row + i], for i in [0, n)."""
    if n > 0:
        memcpy(&store_rows[dst_row, 0], &store_rows[src_row, 0], n * store_rows.shape[1] * sizeof(stored_t))


cdef void erase_rows(stored_t[:, ::1] store_rows, Py_ssize_t row, Py_ssize_t n) noexcept nogil:
    """NaN for the rows [row, row + n): all bits set, which says so in each dtype's values or scales."""
    if n > 0:
        memset(&store_rows[row, 0], 0xff, n * store_rows.shape[1] * sizeof(stored_t))
