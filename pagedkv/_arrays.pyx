"""What the caller gave, turned into checked pointers and numbers.

The one place that speaks NumPy's C API. Every function either returns something that a kernel can
trust or raises an error that names the argument, what was expected and what came. Those that convert may run the
caller's code (``__array__``, ``__index__``), so they are called before any state is looked at; what that code raises
comes out as it is.
"""

cimport numpy as cnp
from cpython.buffer cimport PyObject_CheckBuffer
from cpython.object cimport PyObject
from libc.float cimport FLT_MIN
from libc.math cimport isfinite
from libc.stdint cimport int32_t, int64_t
from libc.string cimport memcpy

from pagedkv._kernels.rows cimport RowFormat
from pagedkv._kernels.simd cimport simd_dtype_number

import operator
import sys
from functools import lru_cache
from numbers import Rational, Real

import numpy as np

from pagedkv.formats import DTYPES, FORMATS

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


cdef bint is_callers(object error) except -1:
    """Whether the caller's own code has raised it, and not NumPy or Python for want of such code: it has a frame."""
    return error.__traceback__.tb_next is not None


# --- numbers ---------------------------------------------------------------------------------------

cdef object as_integer(object value, str name, str expected):
    """A Python int from anything with __index__, but for booleans."""
    if type(value) is int:
        return value
    if isinstance(value, (bool, np.bool_)) or not hasattr(value, "__index__"):
        raise TypeError(f"{name}: expected {expected}, got {describe(value)}")
    try:
        return operator.index(value)
    except TypeError as error:
        if is_callers(error):
            raise
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


cpdef bint as_flag(object value, str name) except? -1:
    if not isinstance(value, (bool, np.bool_)):
        raise TypeError(f"{name}: expected True or False, got {describe(value)}")
    return bool(value)


cdef float as_real(object value, str name, bint positive) except? -1:
    cdef str expected = "a positive number" if positive else "a finite number"
    cdef float number
    if isinstance(value, (bool, np.bool_)) or not isinstance(value, Real):
        raise TypeError(f"{name}: expected {expected}, got {describe(value)}")
    try:
        number = <double>float(value)
    except OverflowError as error:
        if is_callers(error) and not isinstance(value, Rational):  # a Fraction divides in Python
            raise
        number = float("inf")
    if not isfinite(number) or (positive and number < FLT_MIN):
        raise ValueError(f"{name}: expected {expected} in the range of float32, got {describe(value)}")
    return number


cdef tuple as_items(object items, str name, str expected):
    try:
        iterator = iter(items)
    except TypeError as error:
        if is_callers(error):
            raise
        raise TypeError(f"{name}: expected {expected}, got {describe(items)}") from None
    return tuple(iterator)


# --- any array -------------------------------------------------------------------------------------

cdef object exported(object array, str name, str expected):
    """The ndarray that an object shows of itself, by the first of NumPy's protocols that it knows."""
    cdef object export, result = None
    cdef bint is_instance = array is not None and not isinstance(array, type)
    if is_instance:
        export = getattr(array, "__array__", None)
        try:
            if export is not None:
                result = export()
            elif hasattr(array, "__dlpack__"):
                result = np.from_dlpack(array)
            elif PyObject_CheckBuffer(array):
                result = np.asarray(memoryview(array))
            elif hasattr(array, "__array_interface__") or hasattr(array, "__array_struct__"):
                result = np.asarray(array)
        except (TypeError, ValueError, RuntimeError, BufferError) as error:
            # A tensor says by its own code, which is not the caller's, that NumPy cannot look into it.
            if is_callers(error) and not hasattr(type(array), "__torch_function__"):
                raise
            kind = ValueError if isinstance(error, ValueError) else TypeError
            raise kind(f"{name}: expected {expected}, got {describe(array)}: {error}") from error
    if not cnp.PyArray_Check(result):
        raise TypeError(f"{name}: expected {expected}, got {describe(array)}")
    return result


cdef int refuse_masked(object array, str name) except -1:
    """A mask says that values are not to be used, and rows have no place for one."""
    ma = sys.modules.get("numpy.ma")
    if ma is not None and isinstance(array, ma.MaskedArray) and ma.is_masked(array):
        raise ValueError(f"{name}: expected an array without masked values, got one with a mask: {describe(array)}")
    return 0


cpdef cnp.ndarray as_ndarray(object array, str name, str expected):
    """Any array as a plain ndarray, of whatever dtype, shape and strides."""
    cdef object result = array if cnp.PyArray_Check(array) else exported(array, name, expected)
    if cnp.PyArray_CheckExact(result):
        return result
    refuse_masked(result, name)
    return np.asarray(result)  # a subclass may have a shape, and a min and max, of its own


cdef void find_extent(cnp.ndarray array, const char** low, const char** high) noexcept:
    """The bytes between which all values of an array lie, whatever its strides; none for an empty one."""
    cdef Py_ssize_t reach
    cdef int axis
    low[0] = high[0] = <const char*>cnp.PyArray_DATA(array)
    if cnp.PyArray_SIZE(array) == 0:
        return
    for axis in range(cnp.PyArray_NDIM(array)):
        reach = (cnp.PyArray_DIM(array, axis) - 1) * cnp.PyArray_STRIDE(array, axis)
        if reach < 0:
            low[0] += reach
        else:
            high[0] += reach
    high[0] += cnp.PyArray_ITEMSIZE(array)


cdef bint covers(cnp.ndarray owner, const char* start, const char* end) noexcept:
    """Whether these bytes are among those of an array."""
    cdef const char* low = <const char*>cnp.PyArray_DATA(owner)
    cdef const char* high = low + cnp.PyArray_NBYTES(owner)
    if not cnp.PyArray_CHKFLAGS(owner, cnp.NPY_ARRAY_OWNDATA):
        find_extent(owner, &low, &high)
    return low <= start and end <= high


cdef bint is_backed(cnp.ndarray array) except -1:
    """Whether the memory of a view still is that of the arrays it is a view of: they may have been resized since."""
    cdef const char* start
    cdef const char* end
    cdef object owner = array
    cdef PyObject* base
    find_extent(array, &start, &end)
    while start != end:
        base = <PyObject*>cnp.PyArray_BASE(<cnp.ndarray>owner)
        if base == NULL:
            break
        owner = <object>base
        if type(owner) is memoryview:
            owner = owner.obj
        if not cnp.PyArray_Check(owner):
            break
        if not covers(<cnp.ndarray>owner, start, end):
            return False
    return True


# --- rows ------------------------------------------------------------------------------------------

cdef object as_format(dtype):
    name = None
    if type(dtype) is str and dtype in FORMATS:
        return FORMATS[dtype]
    # Not what only has a dtype: an array, a scalar.
    if isinstance(dtype, (str, type, np.dtype)):
        try:
            found = np.dtype(dtype)
            name = str(found.name) if found.isnative else None
        except (TypeError, ValueError, SyntaxError):  # from parsing it
            pass
    if name not in FORMATS:
        got = repr(dtype) if isinstance(dtype, (str, type, np.dtype)) else describe(dtype)
        *names, last = DTYPES
        raise ValueError(f"dtype: expected {', '.join(names)} or {last}, got {got}")
    return FORMATS[name]


cdef class RowLayout:

    @staticmethod
    cdef RowLayout of(object format, object n_heads, object head_dim):
        return make_layout(format.name, n_heads, head_dim)

    cdef str wanted(self, Py_ssize_t n_layers, Py_ssize_t count):
        cdef list axes = ([n_layers] if n_layers > 1 else []) + ([count] if count >= 0 else [])
        cdef list width = axes + [self.row.n_heads * self.row.head_dim]
        stored, scale = self.format.stored, self.format.scale
        if scale is not None:
            return f"float32 {width}, or {stored} {width} and {scale} {axes + self.scales_shape()}"
        if stored.num == cnp.NPY_FLOAT32:
            return f"float32 {width}"
        bits = "" if stored.name == self.format.name else f" ({self.format.name} bits)"
        return f"float32 or {stored}{bits} {width}"

    cdef list scales_shape(self):
        """Of a row."""
        return [self.row.n_heads, self.row.scale_bytes // self.format.scale.itemsize]

    cdef cnp.ndarray pack(self, tuple parts, str name, Py_ssize_t n_layers, Py_ssize_t count):
        cdef str expected = self.wanted(n_layers, count)
        cdef Py_ssize_t n_rows = n_layers * (1 if count < 0 else count), n_scales
        cdef cnp.ndarray values, scales
        if self.format.scale is None or len(parts) != 2:
            raise TypeError(f"{name}: expected {expected}, got a tuple of {len(parts)}")
        values = as_ndarray(parts[0], name, expected)
        scales = as_ndarray(parts[1], name, expected)  # may run code that changes the first
        got = f"{describe(values)} and {describe(scales)}"
        if values.dtype != self.format.stored or scales.dtype != self.format.scale:
            raise TypeError(f"{name}: expected {expected}, got {got}")
        n_scales = self.row.scale_bytes // self.format.scale.itemsize
        if not (has_shape(values, n_layers, count, self.row.n_heads, self.row.head_dim)
                and has_shape(scales, n_layers, count, self.row.n_heads, n_scales)):
            raise ValueError(f"{name}: expected {expected}, got {got}")
        if not (is_backed(values) and is_backed(scales)):
            raise changed(values, name, expected)
        packed = np.zeros((n_rows, self.row.row_bytes), np.uint8)
        packed[:, :self.row.n_heads * self.row.head_bytes] = as_bytes(values, n_rows)
        packed[:, self.row.scales:] = as_bytes(scales, n_rows)
        return packed if count < 0 else packed.reshape(n_layers, count, self.row.row_bytes)


@lru_cache(maxsize=64)  # they do not change, and a program has few
def make_layout(name, n_heads, head_dim):
    cdef RowLayout layout = RowLayout.__new__(RowLayout)
    cdef RowFormat* row = &layout.row
    layout.format = format = FORMATS[name]
    sizes = format.layout(n_heads, head_dim)
    if sizes.row_bytes > PY_SSIZE_T_MAX:
        raise MemoryError(f"{sizes.row_bytes} bytes for a row of K or V are more than can be addressed")
    layout.typenum = cnp.NPY_FLOAT32 if format.scale is not None else format.stored.num
    row.dtype = simd_dtype_number(name)
    row.n_heads = n_heads
    row.head_dim = head_dim
    row.row_bytes, row.head_bytes, row.scales, row.scale_bytes = sizes
    row.turn_width = format.turn_width(head_dim)
    return layout


cdef object as_bytes(cnp.ndarray array, Py_ssize_t n_rows):
    """The bytes of its rows, ``[n_rows, ...]``."""
    return contiguous(array).reshape(n_rows, -1).view(np.uint8)


cdef cnp.ndarray contiguous(cnp.ndarray array):
    """The array itself, or a copy, C-contiguous and aligned."""
    return cnp.PyArray_FROM_OF(array, cnp.NPY_ARRAY_C_CONTIGUOUS | cnp.NPY_ARRAY_ALIGNED)


cdef cnp.ndarray as_native(object array, str name, str expected):
    """`array` as a native float32 ndarray of any strides."""
    cdef cnp.ndarray result = as_ndarray(array, name, expected)
    if cnp.PyArray_TYPE(result) != cnp.NPY_FLOAT32 or not cnp.PyArray_ISNOTSWAPPED(result):
        raise TypeError(f"{name}: expected {expected}, got {describe(result)}")
    return result


cdef cnp.ndarray convert_rows(object array, str name, RowLayout layout, Py_ssize_t n_layers, Py_ssize_t count):
    """The slow way in: converts, copies, or says what is wrong."""
    if type(array) is tuple:
        return layout.pack(array, name, n_layers, count)
    cdef str expected = layout.wanted(n_layers, count)
    cdef object given = as_ndarray(array, name, expected)
    stored = layout.format.stored
    # What NumPy has no dtype for, another package may have given it one: ml_dtypes.
    if layout.format.name == given.dtype.name != stored.name and given.dtype.itemsize == stored.itemsize:
        given = given.view(stored)
    cdef cnp.ndarray rows = given
    cdef int kind = cnp.PyArray_TYPE(rows)
    if kind == cnp.NPY_UBYTE and cnp.PyArray_Check(array) and has_shape(rows, n_layers, count, 1, layout.row.row_bytes):
        return contiguous(rows)
    if not (cnp.PyArray_ISNOTSWAPPED(rows) and kind in (cnp.NPY_FLOAT32, layout.typenum)):
        raise TypeError(f"{name}: expected {expected}, got {describe(rows)}")
    if not has_shape(rows, n_layers, count, layout.row.n_heads, layout.row.head_dim):
        raise ValueError(f"{name}: expected {expected}, got {describe(rows)}")
    return contiguous(rows)


cdef cnp.ndarray as_rows(object array, str name, RowLayout layout, Py_ssize_t n_layers, Py_ssize_t count):
    # All allowed spellings have the same bytes in the same order, so no reshape is needed.
    if holds_rows(array, &layout.row, layout.typenum, n_layers, count):
        return <cnp.ndarray>array
    return convert_rows(array, name, layout, n_layers, count)


cdef int check_rows(cnp.ndarray rows, str name, RowLayout layout, Py_ssize_t n_layers, Py_ssize_t count) except -1:
    cdef bint fine = holds_rows(rows, &layout.row, layout.typenum, n_layers, count)
    if not fine and is_plain(rows, cnp.NPY_UBYTE):
        fine = has_shape(rows, n_layers, count, 1, layout.row.row_bytes)
    if not fine or not is_backed(rows):
        raise changed(rows, name, layout.wanted(n_layers, count))
    return 0


cdef object changed(cnp.ndarray array, str name, str expected):
    got = describe(array) if is_backed(array) else "a view of memory that is gone"
    return ValueError(f"{name}: expected {expected}, got {got} after another argument was read")


cdef inline bint fits(cnp.ndarray array, tuple shape):
    """Whether an array has this shape; None stands for any length, or any shape."""
    cdef Py_ssize_t i
    if shape is None:
        return True
    if cnp.PyArray_NDIM(array) != len(shape):
        return False
    for i in range(len(shape)):
        if shape[i] is not None and cnp.PyArray_DIM(array, <int>i) != <Py_ssize_t>shape[i]:
            return False
    return True


cdef str floats_wanted(tuple shape):
    wanted = "..." if shape is None else ", ".join("n" if n is None else str(n) for n in shape)
    return f"float32 [{wanted}]"


cdef cnp.ndarray as_float32(object array, str name, tuple shape):
    if is_plain(array, cnp.NPY_FLOAT32) and fits(<cnp.ndarray>array, shape):
        return <cnp.ndarray>array
    cdef str expected = floats_wanted(shape)
    cdef cnp.ndarray result = as_native(array, name, expected)
    if not fits(result, shape):
        raise ValueError(f"{name}: expected {expected}, got {describe(result)}")
    return contiguous(result)


cdef int check_float32(cnp.ndarray array, str name, tuple shape) except -1:
    if not (is_plain(array, cnp.NPY_FLOAT32) and fits(array, shape)):
        raise ValueError(f"{name}: expected {floats_wanted(shape)}, got {describe(array)}")
    if not is_backed(array):
        raise changed(array, name, floats_wanted(shape))
    return 0


# --- results ---------------------------------------------------------------------------------------

cdef int check_out(object out, str name) except -1:
    if out is not None and not cnp.PyArray_Check(out):
        raise TypeError(f"{name}: expected a writable, C-contiguous float32 array, got {describe(out)}")
    return refuse_masked(out, name)


cdef cnp.ndarray as_result(object out, str name, tuple shape):
    if out is None:
        return empty_floats(shape)
    cdef str expected = f"a writable, C-contiguous float32 array {list(shape)}"
    cdef cnp.ndarray result = <cnp.ndarray>out  # or of a subclass
    if cnp.PyArray_TYPE(result) != cnp.NPY_FLOAT32 or not cnp.PyArray_ISNOTSWAPPED(result):
        raise TypeError(f"{name}: expected {expected}, got {describe(out)}")
    if not fits(result, shape):
        raise ValueError(f"{name}: expected {expected}, got {describe(out)}")
    if not cnp.PyArray_ISCARRAY(result):
        raise ValueError(f"{name}: expected {expected}, got one that is strided, read-only or not aligned")
    if not is_backed(result):
        raise changed(result, name, expected)
    return result


cdef int check_apart(cnp.ndarray out, str name, cnp.ndarray array, str other) except -1:
    if array is None:
        return 0
    cdef const char* low
    cdef const char* high
    cdef const char* other_low
    cdef const char* other_high
    find_extent(out, &low, &high)
    find_extent(array, &other_low, &other_high)
    if low < other_high and other_low < high and low != high and other_low != other_high:
        raise ValueError(f"{name}: expected an array that does not overlap {other}")
    return 0


# --- integers --------------------------------------------------------------------------------------

cdef bint copy_naturals(int64_t* dst, const int64_t* src, Py_ssize_t n) noexcept:
    """Whether none of n numbers is below 0. The copy is looked at, a piece at a time, while it is in the cache."""
    cdef Py_ssize_t i, start, end
    cdef int64_t bits = 0
    for start in range(0, n, 512):
        end = min(n, start + 512)
        memcpy(dst + start, src + start, (end - start) * sizeof(int64_t))
        for i in range(start, end):
            bits |= dst[i]
    return bits >= 0


cdef cnp.ndarray own_integers(cnp.ndarray array, bint* natural):
    """A copy as int64, which no other thread writes into, and whether no number in it is below 0 (or above 2**63 - 1)."""
    cdef Py_ssize_t n = cnp.PyArray_DIM(array, 0)
    cdef cnp.ndarray result = empty_slots(n)
    cdef int64_t* out = <int64_t*>cnp.PyArray_DATA(result)
    if is_plain(array, cnp.NPY_INT64):
        natural[0] = copy_naturals(out, <const int64_t*>cnp.PyArray_DATA(array), n)
    else:
        cnp.PyArray_CopyInto(result, array)
        natural[0] = copy_naturals(out, out, n)
    return result


cdef object integer_at(cnp.ndarray copied, Py_ssize_t i, cnp.ndarray array):
    """What a number was before it was taken for an int64."""
    cdef object value = (<int64_t*>cnp.PyArray_DATA(copied))[i]
    return value + 2**64 if value < 0 and cnp.PyArray_ISUNSIGNED(array) else value


cpdef cnp.ndarray as_naturals(object array, str name):
    cdef bint natural = False
    cdef cnp.ndarray result = own_integers(array, &natural)
    if not natural:
        bad = integer_at(result, np.argmax(np.less(result, 0)), array)
        raise ValueError(f"{name}: expected ids from 0 to 2**63 - 1, got {bad}")
    return result


cdef cnp.ndarray as_counts(object counts, str name, Py_ssize_t n, Py_ssize_t high):
    cdef cnp.ndarray result, given
    cdef int64_t* numbers
    cdef Py_ssize_t i
    cdef bint natural = True
    if isinstance(counts, (str, bytes, dict, set)):
        raise TypeError(f"{name}: expected integers, got {describe(counts)}")
    if n >= 0 and hasattr(counts, "__index__") and not getattr(counts, "ndim", 0):
        result = empty_slots(n)
        (<object>result).fill(as_size(counts, name, 0, high))
        return result
    if isinstance(counts, (list, tuple, range)):
        counts = list(counts)  # __index__ of an element must not change it under us
        result = empty_slots(len(counts))
        numbers = <int64_t*>cnp.PyArray_DATA(result)
        for i, item in enumerate(counts):
            numbers[i] = as_size(item, f"{name}[{i}]", 0, high)
    else:
        given = as_ndarray(counts, name, "integers")
        if not cnp.PyArray_ISINTEGER(given) or cnp.PyArray_NDIM(given) != 1:
            raise TypeError(f"{name}: expected a one-dimensional array of integers, got {describe(given)}")
        result = own_integers(given, &natural)
        numbers = <int64_t*>cnp.PyArray_DATA(result)
        for i in range(cnp.PyArray_DIM(result, 0)):
            if not 0 <= numbers[i] <= high:
                raise ValueError(f"{name}[{i}]: expected an integer from 0 to {high}, got {integer_at(result, i, given)}")
    if n >= 0 and cnp.PyArray_DIM(result, 0) != n:
        raise ValueError(f"{name}: expected {n} integers, got {cnp.PyArray_DIM(result, 0)}")
    return result


cdef cnp.ndarray as_ids(object ids, str name, Py_ssize_t total):
    cdef cnp.ndarray result, given, wide
    cdef const int64_t* numbers
    cdef int32_t* out
    cdef Py_ssize_t i
    cdef bint natural = False
    if cnp.PyArray_Check(ids):
        given = np.asarray(ids)  # a subclass may have a min and max of its own
        if not cnp.PyArray_ISINTEGER(given) or cnp.PyArray_NDIM(given) != 1:
            raise TypeError(f"{name}: expected a one-dimensional array of integers, got {describe(given)}")
        wide = own_integers(given, &natural)
        numbers = <const int64_t*>cnp.PyArray_DATA(wide)
        result = empty_ids(cnp.PyArray_DIM(wide, 0))
        out = <int32_t*>cnp.PyArray_DATA(result)
        # Compared before the cast: an id beyond 32 bits must not wrap into a valid one.
        for i in range(cnp.PyArray_DIM(wide, 0)):
            if not 0 <= numbers[i] < total:
                raise IndexError(f"{name}: expected ids from 0 to {total - 1}, got {integer_at(wide, i, given)}")
            out[i] = <int32_t>numbers[i]
        return result
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


cdef object after_dropped(object block_table, Py_ssize_t n_dropped):
    """The ids after those of blocks that are not there."""
    if n_dropped == 0 or not isinstance(block_table, (list, tuple, range, np.ndarray)):
        return block_table  # to be looked at as it is, or refused
    given = as_items(block_table, "block_table", "block ids")
    if len(given) < n_dropped or any([id != -1 for id in given[:n_dropped]]):
        raise ValueError(f"block_table: expected -1 for each of {n_dropped} blocks before first_position")
    return given[n_dropped:]


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
    start = -<Py_ssize_t>cnp.PyArray_DATA(<cnp.ndarray>raw) & (alignment - 1)
    return raw[start:start + n_bytes]


cdef extern from "Python.h":
    const Py_ssize_t PY_SSIZE_T_MAX
