# Beginnings of sequences, in all stores of a model at once. See _beginnings.pyx. A name is a namespace, tokens were checked.

from libc.stdint cimport int32_t, int64_t, uint64_t

from pagedkv._radix.nodes cimport Key, Mark
from pagedkv._radix.tree cimport Insertion


# What one store is told.
cdef struct Told:
    int32_t* ids            # the blocks from `start` on
    Py_ssize_t start        # positions that it has been told before
    Py_ssize_t n            # and with these; 0 for nothing
    Mark mark
    uint64_t lineage        # of the sequence's positions until there
    Insertion insertion


# The longest beginning of a key that all stores know at once.
cdef Py_ssize_t match_all(tuple stores, Key key) noexcept
# The same of all tokens but the last one; and for each store its whole blocks, and whether each could be given up now.
cdef tuple find_all(tuple stores, bytes name, const int64_t[::1] ids)
# Start an empty cache of each store on that. How many positions it is; ValueError, RuntimeError, MemoryError.
cdef Py_ssize_t start_all(tuple stores, tuple caches, bytes name, const int64_t[::1] ids) except -1
# Let each store know the whole blocks of its cache under these tokens: how many were new. What all have been told of is not
# looked at, nor converted. -2 or less where what a mark stands for is not known any more, or not what the sequence has, the
# first one's or a later one's; and nothing was changed.
cdef Py_ssize_t tell_all(tuple stores, tuple caches, object tokens, bytes name, int64_t priority, double expires,
                         Told* told) except -1
