"""A namespace of a radix tree as it is at one moment, copied, so that others may change it while the copy is looked at."""

from libc.stdint cimport int32_t, int64_t
from libc.string cimport memcpy

from pagedkv._radix.nodes cimport Key, Node, RadixTree, Space, root_of


cdef int32_t after(const RadixTree* tree, int32_t root, int32_t node) noexcept nogil:
    """The node that comes next, each before its children; 0 at the end."""
    if tree.nodes[node].child:
        return tree.nodes[node].child
    while node != root and tree.nodes[node].next == 0:
        node = tree.nodes[node].parent
    return 0 if node == root else tree.nodes[node].next


cdef bint radix_copy_space(const RadixTree* tree, Key key, Extent* extent, Piece* pieces, int64_t* tokens,
                           int32_t* blocks) noexcept nogil:
    cdef int32_t root = root_of(tree, key), node = 0 if root == 0 else after(tree, root, root), at
    cdef Extent needed = Extent(0, 0, 0)
    cdef const Node* it
    cdef Piece* piece
    at = node
    while at:
        needed.n_pieces += 1
        needed.n_tokens += tree.nodes[at].end - tree.nodes[at].start
        needed.n_blocks += tree.nodes[at].n_blocks
        at = after(tree, root, at)
    if needed.n_pieces > extent.n_pieces or needed.n_tokens > extent.n_tokens or needed.n_blocks > extent.n_blocks:
        extent[0] = needed
        return False
    extent[0] = Extent(0, 0, 0)
    while node:
        it = &tree.nodes[node]
        piece = &pieces[extent.n_pieces]
        piece.start, piece.end, piece.priority, piece.expires = it.start, it.end, it.priority, it.expires
        piece.tokens, piece.blocks, piece.first_id = extent.n_tokens, extent.n_blocks, it.first_id
        piece.parent = extent.n_pieces - 1  # the parent, or a sister or what hangs below one
        while piece.parent >= 0 and pieces[piece.parent].end != it.start:
            piece.parent = pieces[piece.parent].parent
        memcpy(&tokens[extent.n_tokens], it.key, (it.end - it.start) * sizeof(int64_t))
        memcpy(&blocks[extent.n_blocks], it.blocks, it.n_blocks * sizeof(int32_t))
        extent.n_pieces += 1
        extent.n_tokens += it.end - it.start
        extent.n_blocks += it.n_blocks
        node = after(tree, root, node)
    return True


cdef bint radix_copy_names(const RadixTree* tree, int64_t* n_names, int64_t* n_bytes, int64_t* lengths,
                           char* bytes) noexcept nogil:
    cdef int64_t room = n_names[0], room_of_bytes = n_bytes[0]
    cdef const Space* space
    cdef int32_t i
    n_names[0] = tree.n_namespaces
    n_bytes[0] = 0
    for i in range(1, tree.n_spaces):
        if tree.spaces[i].name is not NULL:
            n_bytes[0] += max(tree.spaces[i].n_bytes, 0)
    if n_names[0] > room or n_bytes[0] > room_of_bytes:
        return False
    n_names[0] = n_bytes[0] = 0
    for i in range(1, tree.n_spaces):
        space = &tree.spaces[i]
        if space.name is NULL:
            continue
        lengths[n_names[0]] = space.n_bytes
        memcpy(&bytes[n_bytes[0]], space.name, max(space.n_bytes, 0))
        n_names[0] += 1
        n_bytes[0] += max(space.n_bytes, 0)
    return True
