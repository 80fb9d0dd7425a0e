from libc.stdint cimport int32_t, int64_t, uint64_t

from pagedkv._radix.nodes cimport Key, RadixTree


# A node as it was; in what order they come, parents come before children.
cdef struct Piece:
    int64_t start
    int64_t end
    int64_t tokens          # where those of [start, end) are
    int64_t blocks          # where those of its places are
    int64_t priority
    double expires
    uint64_t first_id
    int64_t parent          # the number of a piece; -1 for none


# How much of each there is, or room for.
cdef struct Extent:
    int64_t n_pieces, n_tokens, n_blocks


# A namespace as it is, into room that is as large; what room is needed where it is not, and nothing else is changed.
cdef bint radix_copy_space(const RadixTree* tree, Key key, Extent* extent, Piece* pieces, int64_t* tokens,
                           int32_t* blocks) noexcept nogil
# The names of all namespaces: lengths, -1 for None, and all bytes one after the other. The same rule.
cdef bint radix_copy_names(const RadixTree* tree, int64_t* n_names, int64_t* n_bytes, int64_t* lengths,
                           char* bytes) noexcept nogil
