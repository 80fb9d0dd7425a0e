# The table of inner kernels in use. See simd.pyx, and simd.h for what each kernel does.

from libc.stdint cimport uint16_t

cdef extern from "simd.h" nogil:
    enum:
        SIMD_F32 "SIMD_DTYPE_f32"
        SIMD_F16 "SIMD_DTYPE_f16"
        SIMD_BF16 "SIMD_DTYPE_bf16"
        SIMD_DTYPES
        SIMD_LINE_BYTES
        SIMD_GROUP
        SIMD_TURN_MOST
        PAD "SIMD_PAD"
    void simd_prefetch "SIMD_PREFETCH" (const void* p)

    ctypedef struct simd_ahead:
        const char** rows
        Py_ssize_t n_rows
        Py_ssize_t width
        Py_ssize_t n_heads
        Py_ssize_t head_bytes
        Py_ssize_t head
        Py_ssize_t row
        Py_ssize_t column

    ctypedef struct simd_scales:
        const float* scales
        Py_ssize_t stride
        Py_ssize_t per_head

    ctypedef struct simd_dtype:
        const char* name
        void score_dots(float* s, Py_ssize_t s_stride, const float* q, Py_ssize_t q_stride, const char** k_rows,
                        Py_ssize_t k_stride, const simd_scales* scales, bint by_head, const char** ahead,
                        Py_ssize_t ahead_stride,
                        Py_ssize_t n, Py_ssize_t n_heads, Py_ssize_t n_rows, Py_ssize_t head_dim) noexcept nogil
        void accumulate_rows(float* acc, Py_ssize_t acc_stride, const float* p, Py_ssize_t p_stride,
                             const char** v_rows, Py_ssize_t v_offset, Py_ssize_t v_stride, const simd_scales* scales,
                             simd_ahead* ahead, Py_ssize_t n, Py_ssize_t n_heads, Py_ssize_t n_rows,
                             Py_ssize_t v_head_dim) noexcept nogil
        void widen(float* dst, const void* src, const uint16_t* scales, Py_ssize_t n) noexcept nogil
        void narrow(void* dst, uint16_t* scales, const float* src, Py_ssize_t n) noexcept nogil

    ctypedef struct simd_kernels:
        const char* name
        Py_ssize_t lanes
        const simd_dtype* dtypes
        void score_panels(float* s, Py_ssize_t s_stride, const float* panels, const float* k, Py_ssize_t k_stride,
                          Py_ssize_t n, Py_ssize_t n_rows, Py_ssize_t head_dim) noexcept nogil
        void load_scales(float* dst, Py_ssize_t stride, const char** rows, Py_ssize_t offset, Py_ssize_t n,
                         Py_ssize_t width) noexcept nogil
        void turn(float* dst, const float* src, Py_ssize_t n, Py_ssize_t width) noexcept nogil
        void cap_scores(float* s, Py_ssize_t s_stride, Py_ssize_t n, Py_ssize_t width, float cap) noexcept nogil
        void slope_scores(float* s, Py_ssize_t s_stride, Py_ssize_t n, Py_ssize_t width, const float* slopes,
                          const float* places, float first) noexcept nogil
        int softmax_tile(float* s, Py_ssize_t s_stride, Py_ssize_t n, Py_ssize_t width, float* row_max, float* row_sum,
                         float* rescale) noexcept nogil
        void scale_row(float* dst, const float* src, float factor, Py_ssize_t n) noexcept nogil
        void add_scaled_row(float* dst, const float* src, float factor, Py_ssize_t n) noexcept nogil

# The number of a dtype's kernels, by the name it has in formats.py; KeyError where there are none.
cdef int simd_dtype_number(str name) except -1

# Asked for once a call: a process may change it between two.
cdef const simd_kernels* simd_in_use() noexcept nogil
