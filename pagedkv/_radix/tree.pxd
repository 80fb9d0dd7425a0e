from libc.stdint cimport int32_t, int64_t, uint64_t

from pagedkv._radix.nodes cimport Key, Mark, RadixTree

# Memory for a cut, had before anything is changed.
cdef struct Cut:
    int32_t node
    int64_t at
    int64_t* key
    int32_t* blocks


# What is about to be inserted, and the memory for all that is new.
cdef struct Insertion:
    uint64_t n_changes      # of the tree until then: others make it void
    int32_t node            # where the known tokens end; 0 where nothing is known in the namespace
    bint in_place           # what follows them goes to the same node
    int64_t before          # tokens before the key's
    int64_t n               # and with those that are known
    int64_t n_new           # places for blocks behind these, holes too
    int64_t n_added         # blocks, with those that take the place of a hole
    bint is_something
    Cut cut
    char* name              # of a namespace, and its order
    int32_t* order
    int64_t* key            # of a node
    int32_t* blocks


# How many of the tokens are known, from the first on; with a window, how many of these are of use.
cdef Py_ssize_t radix_match(const RadixTree* tree, Key key) noexcept nogil
# The same; the blocks that hold them go to `table`, the last of which may hold others behind them. HOLE for those that the
# window has left behind.
cdef Py_ssize_t radix_blocks(const RadixTree* tree, Key key, int32_t* table) noexcept nogil
# A path is used up to the end of the block that has its last token.
cdef void radix_use(RadixTree* tree, Key key) noexcept nogil
# Inserting: first what can fail, then what cannot. How many blocks are new under these tokens; each that is under none has
# one more holder afterwards. With a mark, the tokens and the table are what follows it, as many as lead to a block's end,
# and it is moved there. -2: a block is held by nobody; -3: what the mark stands for is not known any more.
cdef Py_ssize_t radix_prepare_insert(RadixTree* tree, Key key, const int32_t* table, int64_t priority, double expires,
                                     const Mark* mark, Insertion* it) noexcept nogil
# Whether nothing has come in between.
cdef bint radix_is_prepared(RadixTree* tree, const int32_t* table, const Insertion* it) noexcept nogil
cdef void radix_insert(RadixTree* tree, Key key, const int32_t* table, int64_t priority, double expires, Mark* mark,
                       Insertion* it) noexcept nogil
# What was prepared, and is not to be inserted.
cdef void radix_discard(Insertion* it) noexcept nogil
# How many blocks leave for good. They wait in `gone` for the allocator, which takes back the tree's reference.
cdef Py_ssize_t radix_evict(RadixTree* tree, Py_ssize_t n) noexcept nogil
cdef Py_ssize_t radix_forget(RadixTree* tree, Key key, Py_ssize_t start) noexcept nogil
cdef Py_ssize_t radix_clear(RadixTree* tree, const Key* key) noexcept nogil
