from libc.stdint cimport int32_t, int64_t

from pagedkv._radix.nodes cimport Key, Mark, RadixTree

# Memory for a cut, had before anything is changed.
cdef struct Cut:
    int32_t node
    int64_t at
    int64_t* key
    int32_t* blocks


# How many of the tokens are known, from the first on.
cdef Py_ssize_t radix_match(const RadixTree* tree, Key key) noexcept nogil
# The same; the blocks that hold them go to `table`, the last of which may hold others behind them.
cdef Py_ssize_t radix_blocks(const RadixTree* tree, Key key, int32_t* table) noexcept nogil
# A path is used up to the end of the block that has its last token: first what can fail, then what cannot.
cdef int radix_prepare_use(RadixTree* tree, Key key, Cut* cut) noexcept nogil
cdef void radix_use(RadixTree* tree, Cut* cut) noexcept nogil
cdef void radix_drop(Cut* cut) noexcept nogil
# How many blocks were new under these tokens; each that was under none has one more holder now. With a mark, the tokens
# are those that follow it, of which as many lead to a block's end, and it is moved there. -2: a block is held by nobody;
# -3: what the mark stands for is not known any more.
cdef Py_ssize_t radix_insert(RadixTree* tree, Key key, const int32_t* table, int64_t priority, double expires,
                             Mark* mark) noexcept nogil
# How many blocks leave for good. They wait in `gone` for the allocator, which takes back the tree's reference.
cdef Py_ssize_t radix_evict(RadixTree* tree, Py_ssize_t n) noexcept nogil
cdef Py_ssize_t radix_forget(RadixTree* tree, Key key, Py_ssize_t start) noexcept nogil
cdef Py_ssize_t radix_clear(RadixTree* tree, const Key* key) noexcept nogil
