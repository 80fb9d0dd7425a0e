# Byte moves between the store's rows and contiguous rows. See rows.pyx.

from libc.stdint cimport int32_t, int64_t

cdef void gather_blocks(
    float[:, ::1] dst, const float[:, ::1] store_rows, const int32_t[::1] table,
    Py_ssize_t block_size, Py_ssize_t n, int n_threads) noexcept nogil

cdef void append_rows(
    float[:, ::1] store_rows, const float[:, ::1] src, const int32_t[::1] table,
    Py_ssize_t block_size, Py_ssize_t start, Py_ssize_t n, int n_threads) noexcept nogil

cdef void scatter_rows(
    float[:, ::1] store_rows, const float[:, ::1] src, const int64_t[::1] slots,
    Py_ssize_t n, int n_threads) noexcept nogil

cdef void copy_rows(
    float[:, ::1] store_rows, Py_ssize_t dst_row, Py_ssize_t src_row, Py_ssize_t n) noexcept nogil

cdef void put_step(float[:, :, ::1] store_rows, Py_ssize_t row, const float* src) noexcept nogil

cdef void fill_rows(float[:, ::1] store_rows, Py_ssize_t row, Py_ssize_t n, float value) noexcept nogil
