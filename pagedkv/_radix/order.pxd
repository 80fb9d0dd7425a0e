from libc.stdint cimport int32_t

from pagedkv._radix.nodes cimport RadixTree, Space

# Whether a block could be given up now: nobody else holds it, and no term protects it.
cdef inline bint radix_is_idle(const RadixTree* tree, int32_t block) noexcept nogil:
    return (tree.places[block].node != 0 and tree.places[block].n_protected == 0 and tree.counts[block] == 1)

# What a block is to a prefix cache.
cdef enum BlockKind:
    UNKNOWN
    UNPROTECTED             # it may be given up, once nobody else holds it
    PROTECTED               # by a term

cdef inline BlockKind radix_kind(const RadixTree* tree, int32_t block) noexcept nogil:
    if tree.places[block].node == 0:
        return UNKNOWN
    return UNPROTECTED if tree.places[block].n_protected == 0 else PROTECTED

# A known block can be given up from now on, or no longer.
cdef void radix_flip(RadixTree* tree, int32_t block, int delta) noexcept nogil

# To be told after a count was changed.
cdef inline void radix_recount(RadixTree* tree, int32_t block, int32_t before, int32_t after) noexcept nogil:
    if (before == 1) != (after == 1) and tree.places[block].node and not tree.places[block].n_protected:
        radix_flip(tree, block, 1 if after == 1 else -1)

cdef void radix_end_terms(RadixTree* tree, double now) noexcept nogil

# Of the nodes of a namespace, and of namespaces: which of two goes, or gives, first.
cdef bint goes_before(const void* owner, int32_t a, int32_t b) noexcept nogil
cdef bint gives_before(const void* owner, int32_t a, int32_t b) noexcept nogil
# Whether what a tree would give up next goes before that of another tree with the same count of uses. Both have something.
cdef bint radix_goes_before(const RadixTree* tree, const RadixTree* other) noexcept nogil
cdef int32_t rank_of(const RadixTree* tree, const Space* space) noexcept nogil
cdef void set_rank(RadixTree* tree, int32_t node, int32_t rank) noexcept nogil
# A node goes where it belongs in its order, after its blocks or what follows it have changed.
cdef void settle(RadixTree* tree, int32_t node) noexcept nogil
# A namespace goes where it belongs, after its share or what it would give next has changed.
cdef void mend_space(RadixTree* tree, int32_t space) noexcept nogil
# A node was used, or has another priority.
cdef void mend_node(RadixTree* tree, int32_t node) noexcept nogil
# A node has a term, or a later one; or no longer.
cdef void protect(RadixTree* tree, int32_t node, double expires) noexcept nogil
cdef void list_term(RadixTree* tree, int32_t node) noexcept nogil
cdef void unlist_term(RadixTree* tree, int32_t node) noexcept nogil

# A block that somebody holds has one more name, or loses one, or has another one. The caller settles the node.
cdef void add_place(RadixTree* tree, int32_t node, int32_t block) noexcept nogil
cdef void remove_place(RadixTree* tree, int32_t node, int32_t block) noexcept nogil
cdef void rename_place(RadixTree* tree, int32_t block, int32_t old, int32_t new) noexcept nogil
