"""What the caller gave, turned into checked pointers and numbers.

The one place that speaks NumPy's C API. Every function either returns something that a kernel can
trust or raises an error that names the argument, what was expected and what came. They may run the
caller's code (``__array__``, ``__index__``), so they are called before any state is looked at.
"""

cimport numpy as cnp
from libc.stdint cimport int32_t

from pagedkv._kernels.simd cimport SIMD_BF16, SIMD_F16

import operator

import numpy as np

cnp.import_array()

cdef Py_ssize_t HUGE_PAGE = 2 << 20
cdef Py_ssize_t CACHE_LINE = 64
cdef int MAX_THREADS = 256


cdef str describe(object value):
    if cnp.PyArray_Check(value):
        return f"{value.dtype} {list(value.shape)}"
    if value is None or isinstance(value, (bool, float)):
        return repr(value)
    if isinstance(value, int):
        return show(value)
    return type(value).__name__


# --- numbers ---------------------------------------------------------------------------------------

cdef object as_integer(object value, str name, str expected):
    """A Python int from anything with __index__, but for booleans."""
    if type(value) is int:
        return value
    if isinstance(value, (bool, np.bool_)) or not hasattr(value, "__index__"):
        raise TypeError(f"{name}: expected {expected}, got {describe(value)}")
    try:
        return operator.index(value)
    except TypeError:
        raise TypeError(f"{name}: expected {expected}, got {describe(value)}") from None


cdef str show(object value):
    """An integer for an error's text; Python refuses to print one of thousands of digits."""
    return str(value) if value.bit_length() <= 128 else f"one of {value.bit_length()} bits"


cpdef Py_ssize_t as_size(object value, str name, Py_ssize_t low, Py_ssize_t high) except? -1:
    value = as_integer(value, name, "an integer")
    if not low <= value <= high:
        raise ValueError(f"{name}: expected an integer from {low} to {high}, got {show(value)}")
    return value


cdef Py_ssize_t as_index(object value, str name, Py_ssize_t n) except -1:
    value = as_integer(value, name, "an integer")
    if not 0 <= value < n:
        raise IndexError(f"{name}: expected 0 to {n - 1}, got {show(value)}")
    return value


cpdef int as_thread_count(object value, str name) except -1:
    return <int>as_size(value, name, 1, MAX_THREADS)


# --- rows ------------------------------------------------------------------------------------------

cdef inline bint is_ready(object array) noexcept:
    """Native, aligned, C-contiguous float32."""
    return is_plain(array, cnp.NPY_FLOAT32)


cdef inline bint is_plain(object array, int typenum) noexcept:
    return (cnp.PyArray_CheckExact(array) and cnp.PyArray_TYPE(<cnp.ndarray>array) == typenum
            and cnp.PyArray_ISCARRAY_RO(<cnp.ndarray>array))


cdef inline bint is_own(object array, int dtype) noexcept:
    """Whether the values are, as they lie there, what a store of this dtype holds."""
    if dtype == SIMD_F16:
        return is_plain(array, cnp.NPY_FLOAT16)
    return dtype == SIMD_BF16 and is_plain(array, cnp.NPY_USHORT)


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


cdef cnp.ndarray as_ndarray(object array, str name, str expected):
    if array is None:
        raise TypeError(f"{name}: expected {expected}, got None")
    try:
        if hasattr(array, "__dlpack__") and not hasattr(array, "__array__"):
            return np.from_dlpack(array)
        return np.asarray(array)
    except ValueError as error:  # lists of unequal length, and the like
        raise ValueError(f"{name}: expected {expected}, got {describe(array)}: {error}") from None
    except (TypeError, RuntimeError, BufferError) as error:  # of other libraries: what NumPy cannot look into
        raise TypeError(f"{name}: expected {expected}, got {describe(array)}: {error}") from None


cdef cnp.ndarray as_native(object array, str name, str expected):
    """`array` as a native float32 ndarray of any strides."""
    cdef cnp.ndarray result = as_ndarray(array, name, expected)
    if cnp.PyArray_TYPE(result) != cnp.NPY_FLOAT32 or not cnp.PyArray_ISNOTSWAPPED(result):
        raise TypeError(f"{name}: expected {expected}, got {describe(result)}")
    return result


cdef cnp.ndarray check_rows(
        object array, str name, int dtype, Py_ssize_t n_layers, Py_ssize_t count, Py_ssize_t n_heads, Py_ssize_t head_dim):
    """The slow way in: converts, copies, or says what is wrong."""
    axes = [n_layers] if n_layers > 1 else []
    if count >= 0:
        axes.append(count)
    own = {SIMD_F16: " or float16", SIMD_BF16: " or uint16 (bfloat16 bits)"}.get(dtype, "")
    expected = f"float32{own} {axes + [n_heads * head_dim]}"
    cdef cnp.ndarray rows
    cdef object given = as_ndarray(array, name, expected)
    if dtype == SIMD_BF16 and given.dtype.name == "bfloat16" and given.dtype.itemsize == 2:  # of ml_dtypes
        given = given.view(np.uint16)
    rows = given
    if not (cnp.PyArray_ISNOTSWAPPED(rows) and (
            cnp.PyArray_TYPE(rows) == cnp.NPY_FLOAT32
            or (dtype == SIMD_F16 and cnp.PyArray_TYPE(rows) == cnp.NPY_FLOAT16)
            or (dtype == SIMD_BF16 and cnp.PyArray_TYPE(rows) == cnp.NPY_USHORT))):
        raise TypeError(f"{name}: expected {expected}, got {describe(rows)}")
    if not has_shape(rows, n_layers, count, n_heads, head_dim):
        raise ValueError(f"{name}: expected {expected}, got {describe(rows)}")
    return np.require(rows, requirements="CA")


cdef cnp.ndarray as_rows(
        object array, str name, int dtype, Py_ssize_t n_layers, Py_ssize_t count, Py_ssize_t n_heads, Py_ssize_t head_dim):
    """Rows as [n_layers, count, width]; a width may be split into [n_heads, head_dim], one layer may go unsaid."""
    cdef object rows
    if (is_ready(array) or is_own(array, dtype)) and has_shape(
            <cnp.ndarray>array, n_layers, count, n_heads, head_dim):
        rows = array
    else:
        rows = check_rows(array, name, dtype, n_layers, count, n_heads, head_dim)
    if cnp.PyArray_TYPE(<cnp.ndarray>rows) == cnp.NPY_FLOAT16:
        rows = rows.view(np.uint16)
    return rows.reshape(n_layers, count, n_heads * head_dim)


cdef cnp.ndarray as_step(
        object array, str name, int dtype, Py_ssize_t n_layers, Py_ssize_t n_heads, Py_ssize_t head_dim):
    # All allowed spellings have the same bytes in the same order, so no reshape is needed.
    if (is_ready(array) or is_own(array, dtype)) and has_shape(<cnp.ndarray>array, n_layers, -1, n_heads, head_dim):
        return <cnp.ndarray>array
    return check_rows(array, name, dtype, n_layers, -1, n_heads, head_dim)


cdef bint is_float32(cnp.ndarray rows) noexcept:
    return cnp.PyArray_TYPE(rows) == cnp.NPY_FLOAT32


cdef inline bint fits(cnp.ndarray array, tuple shape):
    """Whether an array has this shape; None stands for any length."""
    cdef Py_ssize_t i, n_axes = len(shape)
    if cnp.PyArray_NDIM(array) != n_axes:
        return False
    for i in range(n_axes):
        if shape[i] is not None and cnp.PyArray_DIM(array, <int>i) != <Py_ssize_t>shape[i]:
            return False
    return True


cdef cnp.ndarray as_float32(object array, str name, tuple shape):
    if is_ready(array) and fits(<cnp.ndarray>array, shape):
        return <cnp.ndarray>array
    wanted = ", ".join("n" if n is None else str(n) for n in shape)
    expected = f"float32 [{wanted}]"
    cdef cnp.ndarray result = as_native(array, name, expected)
    if not fits(result, shape):
        raise ValueError(f"{name}: expected {expected}, got {describe(result)}")
    return np.require(result, requirements="CA")


# --- results ---------------------------------------------------------------------------------------

cdef cnp.ndarray as_result(object out, str name, tuple shape):
    if out is None:
        return empty_floats(shape)
    if is_ready(out) and cnp.PyArray_ISWRITEABLE(<cnp.ndarray>out) and fits(<cnp.ndarray>out, shape):
        return <cnp.ndarray>out
    expected = f"a writable, C-contiguous float32 array {list(shape)}"
    if not cnp.PyArray_Check(out) or out.dtype != np.float32 or not out.dtype.isnative:
        raise TypeError(f"{name}: expected {expected}, got {describe(out)}")
    if not fits(<cnp.ndarray>out, shape):
        raise ValueError(f"{name}: expected {expected}, got {describe(out)}")
    if not cnp.PyArray_ISCARRAY(<cnp.ndarray>out):
        raise ValueError(f"{name}: expected {expected}, got one that is strided, read-only or not aligned")
    return out  # of a subclass


cdef int check_apart(cnp.ndarray out, str name, cnp.ndarray array, str other) except -1:
    cdef char* a = <char*>cnp.PyArray_DATA(out)
    cdef char* b = <char*>cnp.PyArray_DATA(array)
    if a < b + cnp.PyArray_NBYTES(array) and b < a + cnp.PyArray_NBYTES(out):
        raise ValueError(f"{name}: expected an array that does not overlap {other}")
    return 0


# --- block ids -------------------------------------------------------------------------------------

cdef cnp.ndarray as_ids(object ids, str name, Py_ssize_t total):
    cdef cnp.ndarray result
    cdef int32_t* out
    cdef Py_ssize_t i
    if cnp.PyArray_Check(ids):
        ids = np.asarray(ids)  # a subclass may have a min and max of its own
        if ids.dtype.kind not in "iu" or ids.ndim != 1:
            raise TypeError(f"{name}: expected a one-dimensional array of integers, got {describe(ids)}")
        # Compared before the cast: an id beyond 32 bits must not wrap into a valid one.
        if len(ids) and not (0 <= ids.min() and ids.max() < total):
            bad = ids[(ids < 0) | (ids >= total)][0]
            raise IndexError(f"{name}: expected ids from 0 to {total - 1}, got {bad}")
        return ids.astype(np.int32, order="C", copy=True)
    if not isinstance(ids, (list, tuple, range)):
        raise TypeError(f"{name}: expected a list, tuple or array of block ids, got {describe(ids)}")
    ids = list(ids)  # __index__ of an element must not change it under us
    result = empty_ids(len(ids))
    out = <int32_t*>cnp.PyArray_DATA(result)
    for i, item in enumerate(ids):
        value = as_integer(item, name, "integer block ids")
        if not 0 <= value < total:
            raise IndexError(f"{name}: expected ids from 0 to {total - 1}, got {show(value)}")
        out[i] = value
    return result


# --- new arrays ------------------------------------------------------------------------------------

cdef cnp.ndarray empty_ids(Py_ssize_t n):
    cdef cnp.npy_intp size = n
    return cnp.PyArray_EMPTY(1, &size, cnp.NPY_INT32, 0)


cdef cnp.ndarray empty_slots(Py_ssize_t n):
    cdef cnp.npy_intp size = n
    return cnp.PyArray_EMPTY(1, &size, cnp.NPY_INT64, 0)


cdef cnp.ndarray empty_floats(tuple shape):
    cdef cnp.npy_intp sizes[3]
    cdef Py_ssize_t i, n_axes = len(shape)
    for i in range(n_axes):
        sizes[i] = shape[i]
    return cnp.PyArray_EMPTY(<int>n_axes, sizes, cnp.NPY_FLOAT32, 0)


cdef cnp.ndarray empty_rows(tuple shape):
    n_bytes = 4
    for n in shape:
        n_bytes *= n
    return empty_bytes(n_bytes).view(np.float32).reshape(shape)


cdef cnp.ndarray empty_bytes(object n_bytes):
    # Large memory starts on a huge page: NumPy asks the system for such pages where it grants them.
    alignment = HUGE_PAGE if n_bytes >= 2 * HUGE_PAGE else CACHE_LINE
    if n_bytes > PY_SSIZE_T_MAX - HUGE_PAGE:
        raise MemoryError(f"{n_bytes} bytes for rows of K or V are more than can be addressed")
    try:
        raw = np.empty(n_bytes + alignment, np.uint8)
    except MemoryError:
        raise MemoryError(f"cannot allocate {n_bytes} bytes for rows of K or V") from None
    start = -raw.ctypes.data % alignment
    return raw[start:start + n_bytes]


cdef extern from "Python.h":
    const Py_ssize_t PY_SSIZE_T_MAX
