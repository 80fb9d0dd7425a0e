"""What is wrong with a radix tree: everything that is always true of it, looked at."""

from libc.stdint cimport int32_t, int64_t, uint32_t

from pagedkv._radix.nodes cimport (
    AT_END, FOREVER, HOLE, INSIDE, NEVER, NOTHING, Node, RadixTree, Space, hash_of_child)
from pagedkv._radix.order cimport gives_before, goes_before, radix_is_idle


cdef const char* radix_fault(const RadixTree* tree, int64_t* place) noexcept nogil:
    cdef int64_t n_nodes = 0, n_placed = 0, n_named = 0, n_held = 0, n_evictable = 0, n_order = 0, n_terms = 0
    cdef int64_t n_namespaces = 0
    cdef int32_t i
    cdef const char* fault
    for i in range(1, tree.n_nodes):
        if tree.nodes[i].space == 0:
            continue
        place[0] = tree.nodes[i].start
        n_nodes += 1
        n_placed += n_known(&tree.nodes[i])
        n_order += tree.nodes[i].rank != NOTHING
        n_terms += NEVER < tree.nodes[i].expires < FOREVER
        fault = fault_of_node(tree, i) if tree.nodes[i].parent else fault_of_space(tree, tree.nodes[i].space)
        if fault is not NULL:
            return fault
    for i in range(<int32_t>tree.total):
        if tree.places[i].node == 0:
            continue
        place[0] = i
        n_held += 1
        n_evictable += radix_is_idle(tree, i)
        fault = fault_of_place(tree, i, &n_named)
        if fault is not NULL:
            return fault
    place[0] = n_nodes
    if n_nodes != tree.n_listed:
        return b"# nodes are there, another number in the table"
    place[0] = n_placed
    if n_placed != n_named:
        return b"# blocks are in the nodes, another number of names is kept"
    place[0] = n_held
    if n_held != tree.n_held:
        return b"# blocks are known, another number is counted"
    place[0] = n_evictable
    if n_evictable != tree.n_evictable:
        return b"# blocks can be evicted, another number is counted"
    place[0] = n_terms
    if n_terms != tree.terms.n:
        return b"# nodes have a term that ends, another number is in the order of terms"
    for i in range(1, tree.terms.n):
        if tree.nodes[tree.terms.items[i]].expires < tree.nodes[tree.terms.items[(i - 1) // 2]].expires:
            return b"the terms are not in order"
    for i in range(1, tree.n_spaces):
        if tree.spaces[i].name is not NULL:
            n_namespaces += 1
            n_order -= tree.spaces[i].order.n
    if n_namespaces != tree.n_namespaces:
        return b"the namespaces are miscounted"
    if n_order:
        return b"the orders of eviction have another number of nodes than can give something"
    return fault_of_shares(tree)


cdef const char* fault_of_node(const RadixTree* tree, int32_t node) noexcept nogil:
    cdef const Node* it = &tree.nodes[node]
    cdef const Node* parent = &tree.nodes[it.parent]
    cdef int64_t size = tree.block_size, n_idle = 0
    cdef int32_t rank = NOTHING, i
    if parent.space != it.space or parent.end != it.start or it.end <= it.start:
        return b"the node of position # does not continue its parent"
    if it.hash != hash_of_child(tree, it.parent, it.key[0]) or not is_listed(tree, node):
        return b"the node of position # is not where its parent looks for it"
    if (it.previous == 0) != (parent.child == node) or (it.next and tree.nodes[it.next].previous != node):
        return b"the node of position # is not among its parent's children"
    if it.n_blocks != it.end // size - it.start // size or it.n_blocks > it.block_room or it.end - it.start > it.key_room:
        return b"the node of position # has a wrong number of blocks"
    if it.child == 0 and (it.end % size or it.n_blocks == 0 or it.blocks[it.n_blocks - 1] == HOLE):
        return b"the node of position # is a leaf that does not end in a block"
    if tree.window == 0 and n_known(it) < it.n_blocks:
        return b"the node of position # has a hole, and there is no window"
    if it.parent != tree.spaces[it.space].root and (
            parent.used <= it.used or parent.priority < it.priority or parent.expires < it.expires):
        return b"the node of position # outlives its parent"
    for i in range(it.n_blocks):
        if it.blocks[i] == HOLE:
            continue
        if not 0 <= it.blocks[i] < tree.total or not has_name(tree, it.blocks[i], node):
            return b"the node of position # has a block that does not know it"
        n_idle += radix_is_idle(tree, it.blocks[i])
    if it.n_idle != n_idle:
        return b"the idle blocks of the node of position # are miscounted"
    if n_idle:
        rank = AT_END if it.child == 0 and radix_is_idle(tree, it.blocks[it.n_blocks - 1]) else INSIDE
    if it.rank != rank or (rank != NOTHING and tree.spaces[it.space].order.items[it.order_at] != node):
        return b"the node of position # is not where it should be in the order of eviction"
    if it.term_at >= 0 and tree.terms.items[it.term_at] != node:
        return b"the node of position # is not where it should be in the order of terms"
    return NULL


cdef int32_t n_known(const Node* it) noexcept nogil:
    cdef int32_t i, n = 0
    for i in range(it.n_blocks):
        n += it.blocks[i] != HOLE
    return n


cdef bint is_listed(const RadixTree* tree, int32_t node) noexcept nogil:
    cdef uint32_t at = tree.nodes[node].hash & (tree.table_room - 1)
    while tree.table[at] and tree.table[at] != node:
        at = (at + 1) & (tree.table_room - 1)
    return tree.table[at] == node


cdef bint has_name(const RadixTree* tree, int32_t block, int32_t node) noexcept nogil:
    cdef int32_t name = tree.places[block].more
    if tree.places[block].node == node:
        return True
    while name and tree.names[name].node != node:
        name = tree.names[name].next
    return name != 0


cdef const char* fault_of_space(const RadixTree* tree, int32_t space) noexcept nogil:
    cdef const Space* it = &tree.spaces[space]
    cdef const Node* nodes = tree.nodes
    cdef int32_t i
    if it.name is NULL or nodes[it.root].child == 0 or not is_listed(tree, it.root):
        return b"a namespace is empty, or cannot be found"
    for i in range(1, it.order.n):
        if goes_before(tree, it.order.items[i], it.order.items[(i - 1) // 2]):
            return b"a namespace's order of eviction is none"
    if it.order.n == 0:
        return NULL
    if it.order.n > it.order.room or tree.by_size.items[it.size_at] != space or (
            it.size_at and gives_before(tree, space, tree.by_size.items[(it.size_at - 1) // 2])):
        return b"a namespace is not where it should be in the order of namespaces"
    return NULL


cdef const char* fault_of_shares(const RadixTree* tree) noexcept nogil:
    """Counted along the paths, which lead everywhere: as much has been looked at."""
    cdef int32_t i, node, n_nodes
    cdef int64_t n_blocks
    for i in range(1, tree.n_spaces):
        if tree.spaces[i].name is NULL:
            continue
        node = tree.spaces[i].root
        n_nodes = 0
        n_blocks = 0
        while True:
            n_blocks += n_known(&tree.nodes[node])
            n_nodes += 1
            if n_nodes > tree.spaces[i].n_nodes:
                break
            if tree.nodes[node].child:
                node = tree.nodes[node].child
                continue
            while tree.nodes[node].parent and tree.nodes[node].next == 0:
                node = tree.nodes[node].parent
            if tree.nodes[node].parent == 0:
                break
            node = tree.nodes[node].next
        if n_nodes != tree.spaces[i].n_nodes or n_blocks != tree.spaces[i].n_blocks:
            return b"the blocks of a namespace are miscounted"
    return NULL


cdef const char* fault_of_place(const RadixTree* tree, int32_t block, int64_t* n_named) noexcept nogil:
    cdef int32_t node = tree.places[block].node, name = tree.places[block].more, n_protected = 0
    if tree.counts[block] <= 0:
        return b"block # is in the prefix cache and has no holder"
    while True:
        n_named[0] += 1
        if not 0 < node < tree.n_nodes or tree.nodes[node].space == 0:
            return b"block # is known in a node that is none"
        n_protected += tree.nodes[node].expires > NEVER
        if name == 0:
            break
        node = tree.names[name].node
        name = tree.names[name].next
    if n_protected != tree.places[block].n_protected:
        return b"the terms of block # are miscounted"
    return NULL
