from libc.stdint cimport int64_t

from pagedkv._radix.nodes cimport RadixTree

# What is wrong, and with which position, block or number; NULL where nothing is. Walks over everything.
cdef const char* radix_fault(const RadixTree* tree, int64_t* place) noexcept nogil
