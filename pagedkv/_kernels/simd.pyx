"""Which instruction set the inner kernels use: the best that this machine can run, or what `set_simd` said."""

from libc.stdlib cimport calloc, free

cdef extern from "simd_sets.h" nogil:
    const simd_kernels* simd_supported(int i)
    const char* simd_feature(int i)

cdef const simd_kernels* kernels = simd_supported(0)


cdef const simd_kernels* simd_in_use() noexcept nogil:
    return kernels


cdef int simd_dtype_number(str name) except -1:
    cdef int i
    for i in range(SIMD_DTYPES):
        if kernels.dtypes[i].name.decode() == name:
            return i
    raise KeyError(name)


def get_simd():
    """The instruction set in use."""
    return kernels.name.decode()


def list_simd():
    """The instruction sets that this build has and this machine can run, the best first."""
    cdef list names = []
    while simd_supported(<int>len(names)) is not NULL:
        names.append(simd_supported(<int>len(names)).name.decode())
    return names


def list_features():
    """What the machine has of the extensions that matter to these kernels, used or not."""
    cdef list names = []
    cdef int i = 0
    while simd_feature(i) is not NULL:
        if simd_feature(i)[0]:
            names.append(simd_feature(i).decode())
        i += 1
    return names


def set_simd(str name not None):
    """Use another instruction set, in the whole process, from the next call on."""
    global kernels
    names = list_simd()
    if name not in names:
        raise ValueError(f"PAGEDKV_SIMD: expected one of {', '.join(names)}, which this machine can run, got {name!r}")
    kernels = simd_supported(names.index(name))


def apply_exp(float[::1] x not None):
    """exp of numbers that are not positive, in place, as the kernels compute it; their count a multiple of PAD."""
    cdef float* zeros
    if x.shape[0] % PAD:
        raise ValueError(f"x: expected a multiple of {PAD} numbers, got {x.shape[0]}")
    zeros = <float*>calloc(3 * max(x.shape[0], 1), sizeof(float))
    if zeros is NULL:
        raise MemoryError
    if x.shape[0]:
        kernels.softmax_tile(&x[0], x.shape[0], 1, x.shape[0], zeros, zeros + x.shape[0], zeros + 2 * x.shape[0])
    free(zeros)
