# What the caller gave, turned into checked pointers and numbers. See _arrays.pyx.

cimport numpy as cnp
from libc.stdint cimport int32_t

# A whole number in [low, high]; TypeError or ValueError names it.
cpdef Py_ssize_t as_size(object value, str name, Py_ssize_t low, Py_ssize_t high) except? -1
# An index in [0, n); TypeError or IndexError names it.
cdef Py_ssize_t as_index(object value, str name, Py_ssize_t n) except -1
# A number of threads, 1 to 256.
cpdef int as_thread_count(object value, str name) except -1

# Rows [n_layers, count, n_heads * head_dim], C-contiguous: `array` itself where it is that, in any of the spellings
# that as_rows documents. Native float32, or what a store of this dtype (SIMD_F32 ...) holds, as uint16.
cdef cnp.ndarray as_rows(
    object array, str name, int dtype, Py_ssize_t n_layers, Py_ssize_t count, Py_ssize_t n_heads, Py_ssize_t head_dim)
# The same for one row a layer, with no count axis, in any of its shapes.
cdef cnp.ndarray as_step(
    object array, str name, int dtype, Py_ssize_t n_layers, Py_ssize_t n_heads, Py_ssize_t head_dim)
# Which of the two these rows are.
cdef bint is_float32(cnp.ndarray rows) noexcept
# Native float32 of any shape and strides.
cdef cnp.ndarray as_native(object array, str name, str expected)
# Native, C-contiguous float32 of exactly this shape (a tuple; None stands for any length).
cdef cnp.ndarray as_float32(object array, str name, tuple shape)

# What a result is written to: `out` if it is writable, native, C-contiguous float32 of this shape, or, for None, a new array.
cdef cnp.ndarray as_result(object out, str name, tuple shape)
# ValueError if a result would be written over an input; both C-contiguous.
cdef int check_apart(cnp.ndarray out, str name, cnp.ndarray array, str other) except -1

# Block ids as a C-contiguous int32 array of its own, each in [0, total).
cdef cnp.ndarray as_ids(object ids, str name, Py_ssize_t total)

cdef cnp.ndarray empty_ids(Py_ssize_t n)
cdef cnp.ndarray empty_slots(Py_ssize_t n)

# Uninitialised float32 of up to three axes.
cdef cnp.ndarray empty_floats(tuple shape)
# Aligned, uninitialised float32, or bytes; MemoryError where it can't be had. Untouched pages cost nothing.
cdef cnp.ndarray empty_rows(tuple shape)
cdef cnp.ndarray empty_bytes(object n_bytes)

# "float64 [512]", "None", "str": how an error names what came.
cdef str describe(object value)
