# Arrays of any strides, in float32, float16 or bfloat16, as somebody else holds them. See _tensors.pyx.

cimport numpy as cnp
from libc.stdint cimport int32_t

cdef enum:
    MAX_AXES = 5

# An array that was looked at: where its values lie. Valid as long as the array.
cdef struct Tensor:
    char* data
    int dtype                       # SIMD_F32, SIMD_F16 or SIMD_BF16; of integers, the bytes of one: 4 or 8
    Py_ssize_t item_bytes
    int n_axes
    Py_ssize_t[MAX_AXES] shape
    Py_ssize_t[MAX_AXES] strides    # bytes

# As in _arrays, arrays are taken in two steps: as_... converts, and may run the caller's code; view_... looks, when no such
# code can run any more.

# The values of an array, a tensor, or whatever shows them by DLPack or as a buffer, never copied: an ndarray of float32,
# float16 or, for bfloat16, uint16. One of uint16 is taken for that only where `bits` says so. `writable`: it gets a result.
cdef cnp.ndarray as_tensor(object given, str name, str shape, bint bits, bint writable)
# ValueError unless it has that many axes; one that is `writable` has no two values in one place. The last axis is contiguous.
cdef int view_tensor(Tensor* tensor, cnp.ndarray array, str name, str shape, int n_axes, bint writable) except -1
# Native int32 or int64 of any strides; other integers come as int64.
cdef cnp.ndarray as_integers(object given, str name, str shape)
cdef int view_integers(Tensor* tensor, cnp.ndarray array, str name, str shape, int n_axes) except -1

# A new array for a result, of the dtype that another has.
cdef cnp.ndarray empty_like(cnp.ndarray array, tuple shape)
