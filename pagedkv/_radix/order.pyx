"""What goes when: the orders of use, of shares and of terms, and the names under which a block is known."""

from libc.stdint cimport int32_t

from pagedkv._radix.heap cimport heap_mend, heap_push, heap_remove
from pagedkv._radix.nodes cimport AT_END, FOREVER, HOLE, INSIDE, NEVER, NOTHING, Node, Place, RadixTree, Space

# --- the orders ------------------------------------------------------------------------------------

cdef inline bint is_first(const Node* a, const Node* b) noexcept nogil:
    if a.rank != b.rank:
        return a.rank < b.rank
    if a.priority != b.priority:
        return a.priority < b.priority
    return a.used < b.used


cdef bint goes_before(const void* owner, int32_t a, int32_t b) noexcept nogil:
    """Of a namespace's nodes."""
    cdef const Node* nodes = (<const RadixTree*>owner).nodes
    return is_first(&nodes[a], &nodes[b])


cdef inline const Node* next_to_go(const RadixTree* tree) noexcept nogil:
    return &tree.nodes[tree.spaces[tree.by_size.items[0]].order.items[0]]


cdef bint radix_goes_before(const RadixTree* tree, const RadixTree* other) noexcept nogil:
    return is_first(next_to_go(tree), next_to_go(other))


cdef void goes_at(void* owner, int32_t node, int32_t at) noexcept nogil:
    (<RadixTree*>owner).nodes[node].order_at = at


cdef int32_t rank_of(const RadixTree* tree, const Space* space) noexcept nogil:
    return tree.nodes[space.order.items[0]].rank


cdef bint gives_before(const void* owner, int32_t a, int32_t b) noexcept nogil:
    """Of namespaces: the one that holds the most, as long as it can give an end; the elder of equal ones."""
    cdef const RadixTree* tree = <const RadixTree*>owner
    cdef const Space* one = &tree.spaces[a]
    cdef const Space* other = &tree.spaces[b]
    if rank_of(tree, one) != rank_of(tree, other):
        return rank_of(tree, one) < rank_of(tree, other)
    if one.n_blocks != other.n_blocks:
        return one.n_blocks > other.n_blocks
    return one.number < other.number


cdef void gives_at(void* owner, int32_t space, int32_t at) noexcept nogil:
    (<RadixTree*>owner).spaces[space].size_at = at


cdef bint ends_before(const void* owner, int32_t a, int32_t b) noexcept nogil:
    return (<const RadixTree*>owner).nodes[a].expires < (<const RadixTree*>owner).nodes[b].expires


cdef void ends_at(void* owner, int32_t node, int32_t at) noexcept nogil:
    (<RadixTree*>owner).nodes[node].term_at = at


cdef void mend_space(RadixTree* tree, int32_t space) noexcept nogil:
    if tree.spaces[space].order.n:
        heap_mend(&tree.by_size, tree.spaces[space].size_at, tree, gives_before, gives_at)


cdef void mend_node(RadixTree* tree, int32_t node) noexcept nogil:
    cdef Node* it = &tree.nodes[node]
    if it.rank != NOTHING:
        heap_mend(&tree.spaces[it.space].order, it.order_at, tree, goes_before, goes_at)
        mend_space(tree, it.space)


cdef void set_rank(RadixTree* tree, int32_t node, int32_t rank) noexcept nogil:
    cdef Node* it = &tree.nodes[node]
    cdef Space* space = &tree.spaces[it.space]
    cdef int32_t old = it.rank
    if rank == old:
        return
    it.rank = rank
    if rank == NOTHING:
        heap_remove(&space.order, it.order_at, tree, goes_before, goes_at)
        if space.order.n == 0:
            heap_remove(&tree.by_size, space.size_at, tree, gives_before, gives_at)
            return
    elif old == NOTHING:
        heap_push(&space.order, node, tree, goes_before, goes_at)
        if space.order.n == 1:
            heap_push(&tree.by_size, it.space, tree, gives_before, gives_at)
            return
    else:
        heap_mend(&space.order, it.order_at, tree, goes_before, goes_at)
    mend_space(tree, it.space)


cdef inline bint can_give(const RadixTree* tree, int32_t block) noexcept nogil:
    return block != HOLE and radix_is_idle(tree, block)


cdef void settle(RadixTree* tree, int32_t node) noexcept nogil:
    cdef Node* it = &tree.nodes[node]
    if it.n_idle == 0:
        set_rank(tree, node, NOTHING)
    elif it.child == 0 and can_give(tree, it.blocks[it.n_blocks - 1]):
        set_rank(tree, node, AT_END)
    else:
        set_rank(tree, node, INSIDE)


cdef void radix_flip(RadixTree* tree, int32_t block, int delta) noexcept nogil:
    """A known block can be given up from now on, or no longer."""
    cdef int32_t node = tree.places[block].node, more = tree.places[block].more
    tree.n_evictable += delta
    while True:
        tree.nodes[node].n_idle += delta
        settle(tree, node)
        if more == 0:
            break
        node = tree.names[more].node
        more = tree.names[more].next


# --- places ----------------------------------------------------------------------------------------

cdef void protect_block(RadixTree* tree, int32_t block) noexcept nogil:
    cdef bint was_idle = radix_is_idle(tree, block)
    tree.places[block].n_protected += 1
    if was_idle:
        radix_flip(tree, block, -1)


cdef void add_place(RadixTree* tree, int32_t node, int32_t block) noexcept nogil:
    """A block that somebody holds has one more name. The node is settled afterwards, by the caller."""
    cdef Place* place = &tree.places[block]
    cdef int32_t name
    if place.node == 0:
        place.node = node
        place.more = 0
        tree.counts[block] += 1
        tree.n_held += 1
        tree.inserted += 1
    else:
        name = tree.free_name
        if name:
            tree.free_name = tree.names[name].next
            tree.n_free_names -= 1
        else:
            name = tree.n_names
            tree.n_names += 1
        tree.names[name].node = node
        tree.names[name].next = place.more
        place.more = name
        tree.nodes[node].n_idle += radix_is_idle(tree, block)
    if tree.nodes[node].expires > NEVER:
        protect_block(tree, block)


cdef void remove_place(RadixTree* tree, int32_t node, int32_t block) noexcept nogil:
    """A block loses the name that a node is. The node is settled afterwards, by the caller."""
    cdef Place* place = &tree.places[block]
    cdef bint was_idle = radix_is_idle(tree, block)
    cdef int32_t* link = &place.more
    cdef int32_t name = place.more
    tree.nodes[node].n_idle -= was_idle
    if place.node == node:
        place.node = tree.names[name].node if name else 0
    else:
        while tree.names[name].node != node:
            link = &tree.names[name].next
            name = link[0]
    if name:
        link[0] = tree.names[name].next
        tree.names[name].next = tree.free_name
        tree.free_name = name
        tree.n_free_names += 1
    place.n_protected -= tree.nodes[node].expires > NEVER
    if place.node == 0:
        tree.n_held -= 1
        tree.n_evictable -= was_idle
        if tree.gone_last:
            tree.places[tree.gone_last - 1].more = block + 1
        else:
            tree.gone_first = block + 1
        tree.gone_last = block + 1
        place.more = 0
    elif not was_idle and radix_is_idle(tree, block):
        radix_flip(tree, block, 1)


cdef void rename_place(RadixTree* tree, int32_t block, int32_t old, int32_t new) noexcept nogil:
    """A block that lies in one node lies in the other one instead, which is alike but for its idle blocks."""
    cdef int32_t name = tree.places[block].more
    tree.nodes[new].n_idle += radix_is_idle(tree, block)
    if tree.places[block].node == old:
        tree.places[block].node = new
        return
    while tree.names[name].node != old:
        name = tree.names[name].next
    tree.names[name].node = new


# --- terms -----------------------------------------------------------------------------------------

cdef void list_term(RadixTree* tree, int32_t node) noexcept nogil:
    if NEVER < tree.nodes[node].expires < FOREVER:
        heap_push(&tree.terms, node, tree, ends_before, ends_at)


cdef void unlist_term(RadixTree* tree, int32_t node) noexcept nogil:
    if tree.nodes[node].term_at >= 0:
        heap_remove(&tree.terms, tree.nodes[node].term_at, tree, ends_before, ends_at)
        tree.nodes[node].term_at = -1


cdef void protect(RadixTree* tree, int32_t node, double expires) noexcept nogil:
    cdef Node* it = &tree.nodes[node]
    cdef bint had_none = it.expires == NEVER
    cdef int32_t i
    unlist_term(tree, node)
    it.expires = expires
    list_term(tree, node)
    if had_none:
        for i in range(it.n_blocks):
            if it.blocks[i] != HOLE:
                protect_block(tree, it.blocks[i])


cdef void radix_end_terms(RadixTree* tree, double now) noexcept nogil:
    cdef int32_t node, i, block
    while tree.terms.n and tree.nodes[tree.terms.items[0]].expires <= now:
        node = tree.terms.items[0]
        unlist_term(tree, node)
        tree.nodes[node].expires = NEVER
        for i in range(tree.nodes[node].n_blocks):
            block = tree.nodes[node].blocks[i]
            if block == HOLE:
                continue
            tree.places[block].n_protected -= 1
            if radix_is_idle(tree, block):
                radix_flip(tree, block, 1)
