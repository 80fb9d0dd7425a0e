"""Tensors: arrays of any strides, in float32, float16 or bfloat16, looked at where they lie.

What a store takes is copied if it is not contiguous, and rows in a store's own dtype are known by that store. Blocks and
queries of somebody else are neither: nothing is copied here, and an array says itself what it holds. NumPy has no
bfloat16; its values are uint16 here, and come from ml_dtypes, by DLPack, or as bits of which the caller says what they are.
"""

cimport cython
cimport numpy as cnp
from cpython.buffer cimport PyObject_CheckBuffer
from cpython.pycapsule cimport PyCapsule_GetPointer, PyCapsule_IsValid, PyCapsule_SetName
from libc.stdint cimport int32_t, int64_t, uint8_t, uint16_t, uint64_t

from pagedkv._arrays cimport as_ndarray, describe, is_backed, is_callers, refuse_masked
from pagedkv._kernels.simd cimport SIMD_BF16, SIMD_F16, SIMD_F32

import numpy as np

cnp.import_array()

# DLPack's C structures: https://dmlc.github.io/dlpack/latest/c_api.html
cdef enum DlDevice:
    DL_CPU = 1
    DL_CUDA_HOST = 3
    DL_ROCM_HOST = 11

cdef enum DlCode:
    DL_FLOAT = 2
    DL_BFLOAT = 4

cdef struct DlTensor:
    void* data
    int32_t device_type
    int32_t device_id
    int32_t n_axes
    uint8_t code
    uint8_t bits
    uint16_t lanes
    int64_t* shape
    int64_t* strides                # in values; NULL: C-contiguous
    uint64_t byte_offset

cdef struct DlManaged:
    DlTensor tensor
    void* context
    void (*deleter)(DlManaged*) noexcept


# --- conversion --------------------------------------------------------------------------------------

cdef cnp.ndarray as_tensor(object given, str name, str shape, bint bits, bint writable):
    cdef cnp.ndarray array
    cdef object shown
    cdef bint is_bits = bits
    cdef str expected = f"{shape} of float32, float16 or bfloat16"
    if cnp.PyArray_CheckExact(given):
        array = <cnp.ndarray>given
    elif cnp.PyArray_Check(given):
        refuse_masked(given, name)
        array = np.asarray(given)
    elif hasattr(given, "__dlpack__") and not isinstance(given, type):
        array = from_dlpack(given, name, expected)
        is_bits = True
    elif writable:
        if not PyObject_CheckBuffer(given):  # what __array__ gives may be a copy
            raise TypeError(f"{name}: expected {expected}, got {describe(given)}")
        try:
            array = np.asarray(memoryview(given))
        except (TypeError, ValueError, BufferError) as error:
            if is_callers(error):
                raise
            cause = ValueError if isinstance(error, ValueError) else TypeError
            raise cause(f"{name}: expected {expected}, got {describe(given)}: {error}") from error
    else:
        array = as_ndarray(given, name, expected)
    if not is_known(array) or (cnp.PyArray_TYPE(array) == cnp.NPY_USHORT and not is_bits):
        shown = array.dtype
        if shown.name != "bfloat16" or shown.itemsize != 2 or not shown.isnative:  # of ml_dtypes
            hint = '; uint16 is bfloat16 where dtype="bfloat16" says so' if shown == np.uint16 else ""
            raise TypeError(f"{name}: expected {expected}, got {describe(array)}{hint}")
        array = array.view(np.uint16)
    return array


cdef inline bint is_known(cnp.ndarray array) noexcept:
    cdef int kind = cnp.PyArray_TYPE(array)
    return (kind == cnp.NPY_FLOAT32 or kind == cnp.NPY_FLOAT16 or kind == cnp.NPY_USHORT) and cnp.PyArray_ISNOTSWAPPED(array)


@cython.final
cdef class Taken:
    """What was in a capsule. It was taken out, so that nobody else does, and frees it."""

    cdef DlManaged* managed

    def __dealloc__(self):
        if self.managed is not NULL and self.managed.deleter is not NULL:
            self.managed.deleter(self.managed)

    cdef int take(self, object capsule) except -1:
        cdef DlManaged* managed = <DlManaged*>PyCapsule_GetPointer(capsule, "dltensor")
        PyCapsule_SetName(capsule, "used_dltensor")
        self.managed = managed
        return 0


cdef cnp.ndarray from_dlpack(object given, str name, str expected):
    """A view of what an object shows by DLPack."""
    cdef const DlTensor* tensor
    cdef cnp.npy_intp[MAX_AXES] shape
    cdef cnp.npy_intp[MAX_AXES] strides
    cdef cnp.npy_intp* steps = NULL
    cdef cnp.ndarray result
    cdef int kind = -1, i
    cdef object capsule
    cdef Taken owner = Taken()
    try:
        capsule = given.__dlpack__()
    except (TypeError, ValueError, RuntimeError, BufferError) as error:
        # A tensor says by its own code, which is not the caller's, that it cannot be looked into.
        if is_callers(error) and not hasattr(type(given), "__torch_function__"):
            raise
        cause = ValueError if isinstance(error, ValueError) else TypeError
        raise cause(f"{name}: expected {expected}, got {describe(given)}: {error}") from error
    if not PyCapsule_IsValid(capsule, "dltensor"):
        raise TypeError(f"{name}: expected {expected}, got {describe(given)}, whose __dlpack__ gives no tensor")
    tensor = &(<DlManaged*>PyCapsule_GetPointer(capsule, "dltensor")).tensor
    if tensor.device_type not in (DL_CPU, DL_CUDA_HOST, DL_ROCM_HOST):
        raise ValueError(f"{name}: expected {expected} in the memory of the CPU, got {describe(given)} on device type "
                         f"{tensor.device_type}")
    if tensor.lanes == 1:
        if tensor.code == DL_FLOAT:
            kind = cnp.NPY_FLOAT32 if tensor.bits == 32 else cnp.NPY_FLOAT16 if tensor.bits == 16 else -1
        elif tensor.code == DL_BFLOAT and tensor.bits == 16:
            kind = cnp.NPY_USHORT
    if kind < 0 or tensor.n_axes > MAX_AXES:
        raise TypeError(f"{name}: expected {expected}, got {describe(given)} of {tensor.n_axes} axes and {tensor.bits} bits a "
                        f"value, of DLPack's type code {tensor.code}")
    owner.take(capsule)
    item_bytes = tensor.bits // 8
    for i in range(tensor.n_axes):
        shape[i] = tensor.shape[i]
        if tensor.strides is not NULL:
            strides[i] = tensor.strides[i] * item_bytes
            steps = strides
    result = cnp.PyArray_New(np.ndarray, tensor.n_axes, shape, kind, steps, <char*>tensor.data + tensor.byte_offset,
                             0, cnp.NPY_ARRAY_WRITEABLE, None)
    cnp.set_array_base(result, owner)
    return result


cdef cnp.ndarray as_integers(object given, str name, str shape):
    cdef cnp.ndarray array = as_ndarray(given, name, f"integers {shape}")
    if not cnp.PyArray_ISINTEGER(array):
        raise TypeError(f"{name}: expected integers {shape}, got {describe(array)}")
    if cnp.PyArray_ISNOTSWAPPED(array) and cnp.PyArray_ISALIGNED(array) and (
            cnp.PyArray_TYPE(array) == cnp.NPY_INT32 or cnp.PyArray_TYPE(array) == cnp.NPY_INT64):
        return array
    return array.astype(np.int64)  # what is above 2**63 comes out below 0


# --- looking -----------------------------------------------------------------------------------------

cdef int take_axes(Tensor* tensor, cnp.ndarray array, int n_axes) except -1:
    cdef int i
    tensor.data = <char*>cnp.PyArray_DATA(array)
    tensor.item_bytes = cnp.PyArray_ITEMSIZE(array)
    tensor.n_axes = n_axes
    for i in range(n_axes):
        tensor.shape[i] = cnp.PyArray_DIM(array, i)
        tensor.strides[i] = cnp.PyArray_STRIDE(array, i)
    return 0


cdef int view_tensor(Tensor* tensor, cnp.ndarray array, str name, str shape, int n_axes, bint writable) except -1:
    cdef int kind = cnp.PyArray_TYPE(array)
    if not is_known(array) or cnp.PyArray_NDIM(array) != n_axes or not is_backed(array):
        raise ValueError(f"{name}: expected {shape}, got "
                         f"{describe(array) if is_backed(array) else 'a view of memory that is gone'}")
    take_axes(tensor, array, n_axes)
    tensor.dtype = SIMD_F32 if kind == cnp.NPY_FLOAT32 else SIMD_F16 if kind == cnp.NPY_FLOAT16 else SIMD_BF16
    if cnp.PyArray_SIZE(array) and not cnp.PyArray_ISALIGNED(array):
        raise ValueError(f"{name}: expected {shape} of aligned values")
    if cnp.PyArray_SIZE(array) and tensor.shape[n_axes - 1] > 1 and tensor.strides[n_axes - 1] != tensor.item_bytes:
        raise ValueError(f"{name}: expected {shape} whose last axis is contiguous, got strides of "
                         f"{[tensor.strides[i] for i in range(n_axes)]} bytes")
    if writable and not cnp.PyArray_ISWRITEABLE(array):
        raise ValueError(f"{name}: expected {shape} that can be written, got a read-only one")
    if writable and not lie_apart(tensor):
        raise ValueError(f"{name}: expected {shape} whose values lie apart, got strides of "
                         f"{[tensor.strides[i] for i in range(n_axes)]} bytes")
    return 0


cdef bint lie_apart(const Tensor* tensor) noexcept:
    """Whether each value has a place of its own: every stride steps over all that the smaller ones reach."""
    cdef Py_ssize_t stride, next_stride, reach = tensor.item_bytes
    cdef unsigned int taken = 0
    cdef int axis, next_axis
    for _ in range(tensor.n_axes):
        next_axis = -1
        next_stride = 0
        for axis in range(tensor.n_axes):
            if tensor.shape[axis] == 0:
                return True
            stride = abs(tensor.strides[axis])
            if not taken >> axis & 1 and tensor.shape[axis] > 1 and (next_axis < 0 or stride < next_stride):
                next_axis = axis
                next_stride = stride
        if next_axis < 0:
            return True
        if next_stride < reach:
            return False
        taken |= 1 << next_axis
        reach += (tensor.shape[next_axis] - 1) * next_stride
    return True


cdef int view_integers(Tensor* tensor, cnp.ndarray array, str name, str shape, int n_axes) except -1:
    cdef int kind = cnp.PyArray_TYPE(array)
    if (kind != cnp.NPY_INT32 and kind != cnp.NPY_INT64) or not cnp.PyArray_ISNOTSWAPPED(array) or not is_backed(array):
        raise ValueError(f"{name}: expected integers {shape}, got "
                         f"{describe(array) if is_backed(array) else 'a view of memory that is gone'}")
    if cnp.PyArray_NDIM(array) != n_axes or not cnp.PyArray_ISALIGNED(array):
        raise ValueError(f"{name}: expected integers {shape}, got {describe(array)}")
    take_axes(tensor, array, n_axes)
    tensor.dtype = <int>tensor.item_bytes
    return 0


# --- results -----------------------------------------------------------------------------------------

cdef cnp.ndarray empty_like(cnp.ndarray array, tuple shape):
    cdef cnp.npy_intp[MAX_AXES] sizes
    cdef Py_ssize_t i, n_axes = len(shape)
    for i in range(n_axes):
        sizes[i] = shape[i]
    return cnp.PyArray_EMPTY(<int>n_axes, sizes, cnp.PyArray_TYPE(array), 0)
