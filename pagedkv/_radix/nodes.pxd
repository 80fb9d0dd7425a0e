from libc.stdint cimport int32_t, int64_t, uint32_t, uint64_t

from pagedkv._radix.heap cimport Heap

cdef extern from *:
    """
    #define PAGEDKV_NEVER (-Py_HUGE_VAL)
    #define PAGEDKV_FOREVER Py_HUGE_VAL
    """
    const double NEVER "PAGEDKV_NEVER"          # the end of a term that is none
    const double FOREVER "PAGEDKV_FOREVER"


cdef enum:
    MAX_ITEMS = 0x7fffffff          # a place in a pool, or a block's holders, are counted to there
    HOLE = -1                       # as in a sequence's table: the tokens are known, and their block is not
    ID_RANGE = 0x10000              # a node has ids for so many places, or for a multiple of them


# What of a node could be given up now; what comes first goes first.
cdef enum Rank:
    AT_END              # its last block, and nothing continues it
    INSIDE              # others, before some that could not be found without them
    NOTHING


# An edge and what follows: the tokens [start, end) of every sequence that passes here. Nodes are named by their
# place in a pool; 0 is none.
cdef struct Node:
    int64_t* key            # the tokens; NULL in a root
    int32_t* blocks         # one for each multiple of the block size in (start, end]; HOLE where it is not known
    int64_t start
    int64_t end
    int64_t key_room        # of the two arrays, in items
    int64_t block_room
    int64_t priority
    double expires          # its blocks must stay until then; NEVER without a term
    uint64_t used           # when it was; a parent later than its children
    uint64_t number         # no other node ever has the same; another one once tokens were cut off its end
    uint64_t first_id       # the id of place 0 of every path that passes here, if its places were this node's; modulo 2**64
    int32_t is_cut          # other tokens than its own may have followed it: what does from now on has ids of its own
    int32_t n_blocks        # holes too
    int32_t n_idle          # of its blocks, those that could be given up now
    int32_t parent          # of a free node, the next free one
    int32_t child           # the one that was used last; the others follow it
    int32_t next
    int32_t previous
    int32_t space
    int32_t rank
    int32_t order_at        # where it is in its namespace's order, unless its rank is NOTHING
    int32_t term_at         # where it is among the terms; -1 if it is not
    uint32_t hash


cdef struct Space:
    char* name              # counted: events may outlive the namespace
    Py_ssize_t n_bytes      # of the name; -1 for None
    uint64_t number         # later ones have greater ones
    int64_t n_blocks        # its share: a block counts once for each name that it has here
    int32_t root            # of a free one, the next free one
    int32_t n_nodes
    int32_t size_at         # where it is in `by_size`, as long as its order is not empty
    Heap order              # of its nodes that could give something up


# Where a block is known: in a node, and under more names in more of them.
cdef struct Place:
    int32_t node            # 0 where it is not known at all
    int32_t more            # in the pool of names; of a block that was given up, the next one of these, + 1
    int32_t n_protected     # of these nodes, those with a term


cdef struct Name:
    int32_t node
    int32_t next            # also of a free one


# What is asked for: tokens in a namespace.
cdef struct Key:
    const char* name
    Py_ssize_t n_bytes      # -1 for None
    const int64_t* ids
    Py_ssize_t n


# Where a sequence that grows was last seen to end: its first n tokens are those of the path to here.
cdef struct Mark:
    int32_t node
    uint64_t number         # 0 for nowhere yet
    int64_t n


# What was learned or forgotten.
cdef struct Event:
    char* name              # of the namespace, counted; NULL for all of them
    Py_ssize_t n_bytes      # of the name; -1 for None
    uint64_t id
    uint64_t parent
    int64_t position
    int32_t block
    int32_t kind


# The last of these, in a ring that belongs to who reads it: event n is at n % room, and so are its tokens.
cdef struct Events:
    Event* items
    int64_t* tokens         # of a block each
    int64_t room
    uint64_t n_written
    uint64_t n_read         # of these, or gone before they could be


cdef struct RadixTree:
    Py_ssize_t block_size
    Py_ssize_t total
    int64_t window          # positions that a query sees, itself included; 0 for all: then there are no holes
    int32_t* counts         # the holders of each block: the allocator's
    Place* places           # of each block
    Node* nodes
    int64_t node_room, space_room, name_room
    int32_t n_nodes, n_spaces, n_names          # ever used, place 0 included
    int32_t free_node, free_space, free_name    # the first free one
    Space* spaces
    Name* names
    int32_t n_free_names
    int32_t* table          # nodes by parent and first token, roots by name: open addressing
    uint32_t table_room     # a power of two, or 0
    uint32_t n_listed       # nodes in it: all there are
    uint64_t seed
    Heap by_size            # namespaces that could give something up
    Heap terms              # nodes whose term ends
    uint64_t* n_uses        # of this tree and of others that are in one order with it
    uint64_t n_numbers      # that nodes have had
    uint64_t n_named        # namespaces
    uint64_t n_ids          # of places for blocks: each belongs to the tokens that lead there, and never to others
    uint64_t n_changes      # of what is known, and of its order
    Events* events          # who is told; NULL for nobody
    int32_t gone_first, gone_last               # blocks without a place, whose reference waits to be given back; + 1
    int64_t n_held, n_evictable, n_namespaces   # blocks, of them those that could be given up, namespaces
    int64_t inserted, evicted, hit_tokens, missed_tokens


# A tree that knows nothing; NULL for want of memory. `counts` are the holders of each block.
cdef RadixTree* radix_new(Py_ssize_t block_size, Py_ssize_t total, int64_t window, int32_t* counts, uint64_t seed) noexcept
cdef void radix_free(RadixTree* tree) noexcept
# The memory of a tree that has no nodes any more.
cdef void empty_pools(RadixTree* tree) noexcept nogil

# For all that follows, here and in the modules above, the caller has the tree to itself. What returns -1 had no memory,
# and has changed nothing.
cdef uint32_t hash_of_child(const RadixTree* tree, int32_t parent, int64_t token) noexcept nogil
cdef uint32_t hash_of_name(const RadixTree* tree, Key key) noexcept nogil
# The root of a namespace; 0 where nothing is known in it.
cdef int32_t root_of(const RadixTree* tree, Key key) noexcept nogil
# The node in which the longest known beginning ends, and its length; 0 where nothing is known in the namespace.
cdef int32_t find(const RadixTree* tree, Key key, int64_t* n) noexcept nogil
# The same for a key that begins where a mark is; -1 where what was known there is no longer.
cdef int32_t find_from(const RadixTree* tree, Key key, const Mark* mark, int64_t* n) noexcept nogil
# How many of n tokens at the beginning are equal.
cdef Py_ssize_t common(const int64_t* a, const int64_t* b, Py_ssize_t n) noexcept nogil
# Ids for so many places that begin at one.
cdef uint64_t take_ids(RadixTree* tree, int64_t place, int64_t n) noexcept nogil
# Whether a node has ids for n more places behind its end.
cdef bint has_ids(const RadixTree* tree, const Node* it, int64_t n) noexcept nogil
# Where the block ends that has the last of n tokens.
cdef int64_t block_end(const RadixTree* tree, int64_t n) noexcept nogil
# The first position that a query after n others sees.
cdef int64_t first_needed(const RadixTree* tree, int64_t n) noexcept nogil
# Of n known tokens that end in a node, on how many a sequence can start: all that its next query sees has its block.
cdef int64_t usable(const RadixTree* tree, int32_t node, int64_t n) noexcept nogil
# A node below that has the token before `end`: of all that go on from here, the one that was used last.
cdef int32_t descend(const RadixTree* tree, int32_t node, int64_t end) noexcept nogil

# Room for n items in all.
cdef int reserve(void** items, int64_t* room, int64_t n, size_t item_bytes) noexcept nogil
# Room for n more nodes in a namespace, wherever nodes are. No pointer to one outlives it.
cdef int reserve_nodes(RadixTree* tree, int32_t space, int32_t n) noexcept nogil
# A node that can be found, in room that was reserved; its arrays become its own. It hangs nowhere and has no blocks yet.
cdef int32_t new_node(RadixTree* tree, int32_t space, int32_t parent, int64_t start, int64_t end,
                      int64_t* key, int32_t* blocks, uint32_t hash) noexcept nogil
cdef void list_node(RadixTree* tree, int32_t node) noexcept nogil
cdef void unlist(RadixTree* tree, int32_t node) noexcept nogil
cdef void link_first(RadixTree* tree, int32_t node) noexcept nogil
cdef void unlink(RadixTree* tree, int32_t node) noexcept nogil
cdef void shrink(Node* it) noexcept nogil

# A namespace's name, with one holder; NULL for want of memory. It goes with the last of them, and NULL has none.
cdef char* new_name(const char* name, Py_ssize_t n_bytes) noexcept nogil
cdef char* hold_name(char* name) noexcept nogil
cdef void drop_name(char* name) noexcept nogil

cdef extern from "Python.h":
    # Without a GIL, which Cython's own declarations of them ask for.
    void* raw_calloc "PyMem_RawCalloc"(size_t n, size_t size) noexcept nogil
    void* raw_malloc "PyMem_RawMalloc"(size_t size) noexcept nogil
    void* raw_realloc "PyMem_RawRealloc"(void* memory, size_t size) noexcept nogil
    void raw_free "PyMem_RawFree"(void* memory) noexcept nogil
