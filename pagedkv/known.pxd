from libc.stdint cimport int64_t

from pagedkv._radix.nodes cimport Key
from pagedkv.allocator cimport BlockAllocator

# What the books look for; both objects have to outlive it. And the same for a whole namespace.
cdef Key key_of(bytes name, const int64_t[::1] ids, Py_ssize_t n) noexcept
cdef Key key_of_all(bytes name) noexcept
# The names of all namespaces, None first.
cdef list names_of(BlockAllocator blocks)
# An iterator over the blocks that are known in these namespaces, each of them when it is reached.
cdef object walk(BlockAllocator blocks, object prefixes, Py_ssize_t block_size, list names)
