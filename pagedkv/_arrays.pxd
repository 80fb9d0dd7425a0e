# What the caller gave, turned into checked pointers and numbers. See _arrays.pyx.

cimport numpy as cnp
from libc.stdint cimport int32_t

from pagedkv._kernels.rows cimport RowFormat

cdef extern from *:
    """
    /* Positions, lengths and widths stay below the first, so that sums of a few are far from overflow; rows of a batch,
     * and lengths of sequences that somebody else counts, below the second, so that their bytes are. */
    #define PAGEDKV_MAX_POSITIONS (PY_SSIZE_T_MAX / 4)
    #define PAGEDKV_MAX_ROWS ((Py_ssize_t)1 << 40)
    """
    const Py_ssize_t MAX_POSITIONS "PAGEDKV_MAX_POSITIONS"
    const Py_ssize_t MAX_ROWS "PAGEDKV_MAX_ROWS"

# A whole number in [low, high]; TypeError or ValueError names it.
cpdef Py_ssize_t as_size(object value, str name, Py_ssize_t low, Py_ssize_t high) except? -1
# An index in [0, n); TypeError or IndexError names it.
cdef Py_ssize_t as_index(object value, str name, Py_ssize_t n) except -1
# A number of threads, 1 to 256.
cpdef int as_thread_count(object value, str name) except -1
# True or False; nothing else is taken for one of them.
cpdef bint as_flag(object value, str name) except? -1
# A finite number; one of at least the smallest normal float32, if it has to be positive.
cdef float as_real(object value, str name, bint positive) except? -1
# What an iterable gives, in a tuple of its own; TypeError for what is none.
cdef tuple as_items(object items, str name, str expected)

# --- arrays ---
#
# They are taken in two steps. First every argument of a call is converted, by the as_... functions: this may run the
# caller's code, which may change an array that was converted before. Then, when no such code can run any more, each is
# looked at again, by the check_... functions, and its address is taken. They run nobody's code unless they raise.

cdef inline bint is_plain(object array, int typenum) noexcept:
    """An ndarray and no subclass, of this type; native, aligned, C-contiguous."""
    return (cnp.PyArray_CheckExact(array) and cnp.PyArray_TYPE(<cnp.ndarray>array) == typenum
            and cnp.PyArray_ISCARRAY_RO(<cnp.ndarray>array))


cdef inline bint has_prefix(cnp.ndarray array, int n_axes, Py_ssize_t n_layers, Py_ssize_t count) noexcept:
    """Whether the first n_axes axes are [n_layers, count], where one layer may go unsaid; a count of -1 is no axis."""
    cdef int axis = n_axes - 1
    if count >= 0:
        if axis < 0 or cnp.PyArray_DIM(array, axis) != count:
            return False
        axis -= 1
    if axis < 0:
        return n_layers == 1
    return axis == 0 and cnp.PyArray_DIM(array, 0) == n_layers


cdef inline bint has_shape(
        cnp.ndarray array, Py_ssize_t n_layers, Py_ssize_t count, Py_ssize_t n_heads, Py_ssize_t head_dim) noexcept:
    cdef int ndim = cnp.PyArray_NDIM(array)
    if ndim >= 1 and cnp.PyArray_DIM(array, ndim - 1) == n_heads * head_dim:
        if has_prefix(array, ndim - 1, n_layers, count):
            return True
    return (ndim >= 2 and cnp.PyArray_DIM(array, ndim - 1) == head_dim
            and cnp.PyArray_DIM(array, ndim - 2) == n_heads and has_prefix(array, ndim - 2, n_layers, count))


# How the rows of K, or of V, of one store are stored: an entry of formats.py, for heads of one width.
cdef class RowLayout:
    cdef object format                      # the entry
    cdef RowFormat row                      # the same for the kernels
    cdef int typenum                        # NumPy's type of values that are taken as they are, as float32 is

    # Of so many heads; MemoryError where a row has more bytes than can be counted.
    @staticmethod
    cdef RowLayout of(object format, object n_heads, object head_dim)
    # What may be given as so many rows, for an error's text.
    cdef str wanted(self, Py_ssize_t n_layers, Py_ssize_t count)
    cdef list scales_shape(self)
    # Rows that are given as stored values and their scales, as the bytes of whole rows.
    cdef cnp.ndarray pack(self, tuple parts, str name, Py_ssize_t n_layers, Py_ssize_t count)


cdef inline bint holds_rows(
        object array, const RowFormat* row, int typenum, Py_ssize_t n_layers, Py_ssize_t count) noexcept:
    """Whether as_rows would give it back as it is. With the fields of a RowLayout: no reference to it is counted."""
    if not cnp.PyArray_CheckExact(array):
        return False
    cdef int kind = cnp.PyArray_TYPE(<cnp.ndarray>array)
    return ((kind == cnp.NPY_FLOAT32 or kind == typenum) and cnp.PyArray_ISCARRAY_RO(<cnp.ndarray>array)
            and has_shape(<cnp.ndarray>array, n_layers, count, row.n_heads, row.head_dim))


# Whether the memory of a view still is that of the arrays it is a view of.
cdef bint is_backed(cnp.ndarray array) except -1
# Whether the caller's own code has raised an error: then it comes out as it is.
cdef bint is_callers(object error) except -1
# ValueError for an array of which a mask hides values.
cdef int refuse_masked(object array, str name) except -1
# Any array as a plain ndarray, of whatever dtype, shape and strides.
cpdef cnp.ndarray as_ndarray(object array, str name, str expected)
# The entry of formats.py that anything names; ValueError for the rest.
cdef object as_format(object dtype)
# Rows [n_layers, count, n_heads * head_dim], C-contiguous: `array` itself where it is that, in any spelling: a width
# may be split into [n_heads, head_dim], one layer may go unsaid, and a count of -1 is no axis. Native float32, or what
# such a store holds: values where they have no scales, values and scales, or the bytes of whole rows. Nothing was run if
# `array` itself comes back.
cdef cnp.ndarray as_rows(object array, str name, RowLayout layout, Py_ssize_t n_layers, Py_ssize_t count)
cdef int check_rows(cnp.ndarray rows, str name, RowLayout layout, Py_ssize_t n_layers, Py_ssize_t count) except -1
# Whether they are float32, which a store of another dtype converts.
cdef inline bint is_float32(cnp.ndarray rows) noexcept:
    return cnp.PyArray_TYPE(rows) == cnp.NPY_FLOAT32


# Native float32 of any shape and strides.
cdef cnp.ndarray as_native(object array, str name, str expected)
# Native, C-contiguous float32 of exactly this shape (a tuple; None stands for any length, and for a whole shape).
cdef cnp.ndarray as_float32(object array, str name, tuple shape)
cdef int check_float32(cnp.ndarray array, str name, tuple shape) except -1

# What a result can be written to at all, or None: an ndarray, or one of a subclass.
cdef int check_out(object out, str name) except -1
# What a result is written to: `out` if it is writable, native, C-contiguous float32 of this shape, or, for None, a new
# array. As the check_... functions are, for when nothing else runs.
cdef cnp.ndarray as_result(object out, str name, tuple shape)
# ValueError if a result would be written over an input; of any strides. None overlaps nothing.
cdef int check_apart(cnp.ndarray out, str name, cnp.ndarray array, str other) except -1

# Block ids as a C-contiguous int32 array of its own, each in [0, total): copied before they are looked at.
cdef cnp.ndarray as_ids(object ids, str name, Py_ssize_t total)
# The ids of a table after those of blocks that are not there, -1 each. ValueError.
cdef object after_dropped(object block_table, Py_ssize_t n_dropped)
# Any array of whole numbers from 0 to 2**63 - 1, [n], as a C-contiguous int64 array of its own; ValueError for others.
cpdef cnp.ndarray as_naturals(object array, str name)
# Whole numbers from 0 to `high`, n of them, from an iterable or an array, or, for a number, n times it: C-contiguous int64
# of its own. A negative n takes as many as come, which then is no number.
cdef cnp.ndarray as_counts(object counts, str name, Py_ssize_t n, Py_ssize_t high)

cdef cnp.ndarray empty_ids(Py_ssize_t n)
cdef cnp.ndarray empty_slots(Py_ssize_t n)

# Uninitialised float32 of up to three axes.
cdef cnp.ndarray empty_floats(tuple shape)
# Aligned, uninitialised float32, or bytes; MemoryError where it can't be had. Untouched pages cost nothing.
cdef cnp.ndarray empty_rows(tuple shape)
cdef cnp.ndarray empty_bytes(object n_bytes)

# "float64 [512]", "None", "str": how an error names what came.
cdef str describe(object value)
