"""A radix tree over token ids, whose path to a block is the key of that block; the order of its use, and terms.

    block_size = 4                       a, b, ... are tokens; [7] is the block whose last token is the one before it

    root -- a b c d [7] e f -- g h [3] i j k l [9]
                            \\- x y [5]

Edges end anywhere, also inside a block: `[3]` and `[5]` both hold the K/V of `e f`, each followed by its own tokens.
So the longest common beginning is found token by token, and tokens are compared, never hashes of them. Always true:

- the multiples of the block size along a path each have one block, which belongs to the node they lie in;
- a leaf ends at such a multiple, whose block is known;
- a node was used before its parent, has no higher priority and no later term.

The last one makes the order of use an order of eviction. Each namespace, a root, keeps the nodes that could give
something up in a heap, and the namespaces lie in another one: what goes next is at the top of both, whatever else is
there. A block may have several names, in one namespace or in several; it is given up with the last of them.

A tree of layers with a window has holes, places of blocks that it does not know: what sequences had left behind before
they were inserted, and what was evicted before blocks that they hold. What follows is of use where the window does not
reach the hole. Without a window nothing is of use behind a hole, and there are none.

Integers and structures only: no Python object, no bytes of K/V, and nothing that can fail once a change has begun.
What needs memory has it before. So a change is seen as a whole or not at all, by finalizers, signal handlers and
other threads too: whoever calls has the lock of the books.
"""

from libc.stdint cimport int32_t, int64_t
from libc.string cimport memcpy, memmove, memset

from pagedkv._radix.events cimport REMOVED, STORED, tell, tell_cleared
from pagedkv._radix.nodes cimport (
    AT_END, HOLE, INSIDE, MAX_ITEMS, NOTHING, Events, Key, Mark, Name, Node, RadixTree, Space, block_end, descend, drop_name,
    empty_pools, find, find_from, first_needed, has_ids, hash_of_child, hash_of_name, link_first, list_node, new_name,
    new_node, raw_free, raw_malloc, reserve, reserve_nodes, root_of, shrink, take_ids, unlink, unlist, usable)
from pagedkv._radix.order cimport (
    add_place, list_term, mend_node, mend_space, protect, radix_is_idle, rank_of, remove_place, rename_place, set_rank,
    settle, unlist_term)


cdef Py_ssize_t radix_match(const RadixTree* tree, Key key) noexcept nogil:
    cdef int64_t n
    cdef int32_t node = find(tree, key, &n)
    return usable(tree, node, n) if n else 0


cdef Py_ssize_t radix_blocks(const RadixTree* tree, Key key, int32_t* table) noexcept nogil:
    cdef int64_t n, end, first, size = tree.block_size
    cdef int32_t node = find(tree, key, &n)
    cdef const Node* it
    if n == 0:
        return 0
    node = descend(tree, node, block_end(tree, n))
    n = usable(tree, node, n)
    end = block_end(tree, n)
    while tree.nodes[node].parent:
        it = &tree.nodes[node]
        first = it.start // size
        if min(end, it.end) // size > first:
            memcpy(&table[first], it.blocks, (min(end, it.end) // size - first) * sizeof(int32_t))
        node = it.parent
    for first in range(first_needed(tree, n) // size):
        table[first] = HOLE
    return n


# --- using a path ----------------------------------------------------------------------------------

cdef int prepare_cut(RadixTree* tree, int32_t node, int64_t at, Cut* cut) noexcept nogil:
    """The memory for a node that ends at `at`, a position in this one or at its ends, and one more for what follows."""
    cdef const Node* it
    cdef int64_t n_blocks
    cut.node = node
    cut.at = at
    cut.key = NULL
    cut.blocks = NULL
    if reserve_nodes(tree, tree.nodes[node].space, 2) < 0:
        return -1
    it = &tree.nodes[node]
    if not it.start < at < it.end:
        return 0
    n_blocks = at // tree.block_size - it.start // tree.block_size
    cut.key = <int64_t*>raw_malloc((at - it.start) * sizeof(int64_t))
    if cut.key is NULL:
        return -1
    cut.blocks = <int32_t*>raw_malloc(max(n_blocks, 1) * sizeof(int32_t))
    if cut.blocks is NULL:
        raw_free(cut.key)
        cut.key = NULL
        return -1
    return 0


cdef int32_t do_cut(RadixTree* tree, Cut* cut) noexcept nogil:
    """The node that ends there: a new one above the other, which keeps what follows."""
    cdef int32_t node = cut.node, upper, i
    cdef Node* it = &tree.nodes[node]
    cdef Node* above
    cdef int64_t n, n_blocks
    if cut.key is NULL:
        return node if cut.at > it.start or it.parent == 0 else it.parent
    n = cut.at - it.start
    n_blocks = cut.at // tree.block_size - it.start // tree.block_size
    memcpy(cut.key, it.key, n * sizeof(int64_t))
    memcpy(cut.blocks, it.blocks, n_blocks * sizeof(int32_t))
    unlist(tree, node)
    upper = new_node(tree, it.space, it.parent, it.start, cut.at, cut.key, cut.blocks, it.hash)
    above = &tree.nodes[upper]
    above.priority = it.priority
    above.first_id = it.first_id
    above.is_cut = True
    above.used = it.used  # it is used at once, and then later than what is below
    above.n_blocks = <int32_t>n_blocks
    above.expires = it.expires
    list_term(tree, upper)
    for i in range(above.n_blocks):
        if above.blocks[i] != HOLE:
            rename_place(tree, above.blocks[i], node, upper)
    it.n_idle -= above.n_idle
    # In the place of the other one among its sisters.
    above.next, above.previous, above.child = it.next, it.previous, node
    if it.previous:
        tree.nodes[it.previous].next = upper
    else:
        tree.nodes[it.parent].child = upper
    if it.next:
        tree.nodes[it.next].previous = upper
    it.next = it.previous = 0
    it.parent = upper
    it.start = cut.at
    it.n_blocks -= above.n_blocks
    memmove(it.key, &it.key[n], (it.end - it.start) * sizeof(int64_t))
    memmove(it.blocks, &it.blocks[n_blocks], it.n_blocks * sizeof(int32_t))
    shrink(it)
    it.hash = hash_of_child(tree, upper, it.key[0])
    tree.n_listed += 1
    list_node(tree, node)
    settle(tree, upper)
    settle(tree, node)
    return upper


cdef void use_path(RadixTree* tree, int32_t node) noexcept nogil:
    """Note that a path was used just now: from the leaf up, so that a parent is younger than its children."""
    cdef Node* it = &tree.nodes[node]
    while it.parent:
        tree.n_uses[0] += 1
        it.used = tree.n_uses[0]
        mend_node(tree, node)
        if it.previous:
            unlink(tree, node)
            link_first(tree, node)
        node = it.parent
        it = &tree.nodes[node]


cdef void raise_path(RadixTree* tree, int32_t node, int64_t priority, double expires) noexcept nogil:
    """A path has at least this priority and this term."""
    cdef Node* it = &tree.nodes[node]
    while it.parent:
        if it.priority < priority:
            it.priority = priority
            mend_node(tree, node)
        if it.expires < expires:
            protect(tree, node, expires)
        node = it.parent
        it = &tree.nodes[node]


cdef void radix_use(RadixTree* tree, Key key) noexcept nogil:
    cdef int64_t n, end
    cdef int32_t node = find(tree, key, &n)
    cdef Cut cut
    if n == 0:
        return
    end = block_end(tree, n)
    node = descend(tree, node, end)
    tree.n_changes += 1
    # Without memory for a cut, what follows in the same node counts as used too: an order is no reason to fail.
    if prepare_cut(tree, node, end, &cut) == 0:
        node = do_cut(tree, &cut)
    use_path(tree, node)


# --- inserting -------------------------------------------------------------------------------------

cdef int32_t new_root(RadixTree* tree, Key key, const Insertion* fresh) noexcept nogil:
    cdef int32_t space = tree.free_space
    cdef Space* it
    if space:
        tree.free_space = tree.spaces[space].root
    else:
        space = tree.n_spaces
        tree.n_spaces += 1
    it = &tree.spaces[space]
    it.name = fresh.name
    it.n_bytes = key.n_bytes
    tree.n_named += 1
    it.number = tree.n_named
    it.n_blocks = 0
    it.n_nodes = 0
    it.order.items = fresh.order
    it.order.n = 0
    it.order.room = 2
    tree.n_namespaces += 1
    it.root = new_node(tree, space, 0, 0, 0, NULL, NULL, hash_of_name(tree, key))
    return it.root


cdef int prepare_growth(RadixTree* tree, Key key, Insertion* fresh) noexcept nogil:
    """All the memory that inserting takes."""
    cdef int64_t end = fresh.before + key.n, n_new = fresh.n_new, n_names = max(fresh.n_added - tree.n_free_names, 0)
    cdef Node* it
    if reserve(<void**>&tree.names, &tree.name_room, tree.n_names + n_names, sizeof(Name)) < 0:
        return -1
    if fresh.node:
        if prepare_cut(tree, fresh.node, fresh.n, &fresh.cut) < 0:
            return -1
    else:
        if (reserve(<void**>&tree.spaces, &tree.space_room, tree.n_spaces + 1, sizeof(Space)) < 0
                or reserve(<void**>&tree.by_size.items, &tree.by_size.room, tree.n_spaces + 1, sizeof(int32_t)) < 0
                or reserve_nodes(tree, 0, 2) < 0):
            return -1
        fresh.name = new_name(key.name, key.n_bytes)
        fresh.order = <int32_t*>raw_malloc(2 * sizeof(int32_t))
        if fresh.name is NULL or fresh.order is NULL:
            return -1
    if fresh.in_place:
        it = &tree.nodes[fresh.node]
        return (reserve(<void**>&it.key, &it.key_room, end - it.start, sizeof(int64_t))
                or reserve(<void**>&it.blocks, &it.block_room, it.n_blocks + n_new, sizeof(int32_t)))
    if n_new:
        fresh.key = <int64_t*>raw_malloc((end - fresh.n) * sizeof(int64_t))
        fresh.blocks = <int32_t*>raw_malloc(n_new * sizeof(int32_t))
        if fresh.key is NULL or fresh.blocks is NULL:
            return -1
    return 0


cdef bint is_held(const RadixTree* tree, int32_t block) noexcept nogil:
    """Whether a block has a holder, and can have one more."""
    return 0 < tree.counts[block] < MAX_ITEMS


cdef const int32_t* new_blocks(const RadixTree* tree, const int32_t* table, const Insertion* it) noexcept nogil:
    return &table[it.n // tree.block_size - it.before // tree.block_size]


cdef int64_t fill(RadixTree* tree, const int32_t* table, const Insertion* it, bint count_only) noexcept nogil:
    """Blocks of the table that are not known, in places that are: where they lie in a path that ends at `it.n`, they go.

    How many they are; -2 if one has no holder, or as many as can be counted.
    """
    cdef int64_t i, n = 0, size = tree.block_size, first
    cdef int32_t node = it.node, block
    cdef Node* at
    if tree.window == 0:
        return 0
    while node and tree.nodes[node].end > it.before:
        at = &tree.nodes[node]
        first = at.start // size
        for i in range(max(first, it.before // size), min(at.end, it.n) // size):
            block = table[i - it.before // size]
            if block == HOLE or at.blocks[i - first] != HOLE:
                continue
            if not is_held(tree, block):
                return -2
            n += 1
            if not count_only:
                at.blocks[i - first] = block
                tree.spaces[at.space].n_blocks += 1
                mend_space(tree, at.space)
                add_place(tree, node, block)
                tell(tree, STORED, node, i - first, i - first + 1)
                settle(tree, node)
        node = at.parent
    return n


cdef int64_t count_added(RadixTree* tree, const int32_t* table, const Insertion* it) noexcept nogil:
    """How many blocks of a table are not known yet; -2 if one has no holder, or as many as can be counted."""
    cdef const int32_t* blocks = new_blocks(tree, table, it)
    cdef int64_t i, n = fill(tree, table, it, True)
    for i in range(it.n_new):
        if blocks[i] != HOLE:
            if n < 0 or not is_held(tree, blocks[i]):
                return -2
            n += 1
    return n


cdef Py_ssize_t radix_prepare_insert(RadixTree* tree, Key key, const int32_t* table, int64_t priority, double expires,
                                     const Mark* mark, Insertion* it) noexcept nogil:
    cdef int64_t n_blocks
    cdef const Node* node
    memset(it, 0, sizeof(Insertion))
    it.n_changes = tree.n_changes
    if mark.number:
        it.before = mark.n
        it.node = find_from(tree, key, mark, &it.n)
        if it.node < 0:
            return -3
    else:
        it.node = find(tree, key, &it.n)
    n_blocks = (it.before + key.n) // tree.block_size
    it.n_new = n_blocks - it.n // tree.block_size
    # What was dropped, and is not known, is a hole. Only a window makes use of what follows one, if anything does.
    it.is_something = n_blocks > 0 and (
        it.n_new == 0 or new_blocks(tree, table, it)[it.n_new - 1 if tree.window else 0] != HOLE)
    if not it.is_something:
        it.n_new = 0
        return 0
    it.n_added = count_added(tree, table, it)
    if it.n_added < 0:
        return -2
    node = &tree.nodes[it.node]
    # One node for a sequence that grows: looking it up stays one comparison.
    it.in_place = (it.n_new and it.node and node.parent and node.child == 0 and it.n == node.end
                   and node.priority <= priority and node.expires <= expires and has_ids(tree, node, it.n_new))
    if prepare_growth(tree, key, it) < 0:
        radix_discard(it)
        return -1
    return it.n_added


cdef bint radix_is_prepared(RadixTree* tree, const int32_t* table, const Insertion* it) noexcept nogil:
    return it.n_changes == tree.n_changes and (not it.is_something or count_added(tree, table, it) == it.n_added)


cdef void radix_discard(Insertion* it) noexcept nogil:
    raw_free(it.cut.key)
    raw_free(it.cut.blocks)
    drop_name(it.name)
    raw_free(it.order)
    raw_free(it.key)
    raw_free(it.blocks)
    memset(it, 0, sizeof(Insertion))


cdef void radix_insert(RadixTree* tree, Key key, const int32_t* table, int64_t priority, double expires, Mark* mark,
                       Insertion* fresh) noexcept nogil:
    cdef int64_t i, n = fresh.n, n_new = fresh.n_new, end = fresh.before + key.n
    cdef const int32_t* blocks = new_blocks(tree, table, fresh)
    cdef int32_t node
    cdef Node* it
    if not fresh.is_something:
        return
    tree.n_changes += 1
    node = do_cut(tree, &fresh.cut) if fresh.node else new_root(tree, key, fresh)
    fresh.node = node
    fill(tree, table, fresh, False)
    if n_new:
        if not fresh.in_place:
            node = new_node(tree, tree.nodes[node].space, node, n, end, fresh.key, fresh.blocks,
                            hash_of_child(tree, node, key.ids[n - fresh.before]))
            tree.nodes[node].priority = priority
            tree.nodes[node].first_id = take_ids(tree, n // tree.block_size, n_new)
            link_first(tree, node)
            settle(tree, tree.nodes[node].parent)
        it = &tree.nodes[node]
        memcpy(&it.key[n - it.start], &key.ids[n - fresh.before], (end - n) * sizeof(int64_t))
        it.end = end
        memcpy(&it.blocks[it.n_blocks], blocks, n_new * sizeof(int32_t))
        it.n_blocks += <int32_t>n_new
        for i in range(n_new):
            if blocks[i] != HOLE:
                tree.spaces[it.space].n_blocks += 1
                add_place(tree, node, blocks[i])
        tell(tree, STORED, node, it.n_blocks - n_new, it.n_blocks)
        mend_space(tree, it.space)
        settle(tree, node)
    use_path(tree, node)
    raise_path(tree, node, priority, expires)
    mark.node = node
    mark.number = tree.nodes[node].number
    mark.n = end
    memset(fresh, 0, sizeof(Insertion))  # the memory is the tree's now


# --- giving up -------------------------------------------------------------------------------------

cdef void free_node(RadixTree* tree, int32_t node) noexcept nogil:
    """A node without blocks, and without children, is no more."""
    cdef Node* it = &tree.nodes[node]
    set_rank(tree, node, NOTHING)
    unlist_term(tree, node)
    unlist(tree, node)
    if it.parent:
        unlink(tree, node)
    raw_free(it.key)
    raw_free(it.blocks)
    it.key = NULL
    it.blocks = NULL
    tree.spaces[it.space].n_nodes -= 1
    it.space = 0
    it.number = 0
    it.parent = tree.free_node
    tree.free_node = node


cdef void free_space(RadixTree* tree, int32_t space) noexcept nogil:
    """A namespace in which nothing is known any more."""
    cdef Space* it = &tree.spaces[space]
    free_node(tree, it.root)
    drop_name(it.name)
    raw_free(it.order.items)
    it.name = NULL
    it.order.items = NULL
    it.root = tree.free_space
    tree.free_space = space
    tree.n_namespaces -= 1


cdef void remove_block(RadixTree* tree, int32_t node, int64_t i) noexcept nogil:
    """A hole where a block is, or a hole already. The caller has told who reads."""
    cdef Node* it = &tree.nodes[node]
    cdef int32_t block = it.blocks[i]
    if block != HOLE:
        it.blocks[i] = HOLE
        tree.spaces[it.space].n_blocks -= 1
        mend_space(tree, it.space)  # at once: a block that loses its term here may move other namespaces
        remove_place(tree, node, block)


cdef void remove_blocks(RadixTree* tree, int32_t node, int64_t keep) noexcept nogil:
    """All but the first `keep` blocks of a node without children. It may be too long for them then."""
    cdef Node* it = &tree.nodes[node]
    tell(tree, REMOVED, node, keep, it.n_blocks)
    while it.n_blocks > keep:
        it.n_blocks -= 1
        remove_block(tree, node, it.n_blocks)


cdef void cut_below(RadixTree* tree, int32_t node, int64_t keep) noexcept nogil:
    """Everything that comes after the first `keep` blocks of a node, which may be too long for them then."""
    cdef int32_t leaf = node, parent
    while True:
        while tree.nodes[leaf].child:
            leaf = tree.nodes[leaf].child
        if leaf == node:
            break
        parent = tree.nodes[leaf].parent
        remove_blocks(tree, leaf, 0)
        free_node(tree, leaf)
        leaf = parent
    remove_blocks(tree, node, keep)


cdef void finish(RadixTree* tree, int32_t node) noexcept nogil:
    """After blocks were removed from the end of a node without children: holes and tokens that lead nowhere go too."""
    cdef Node* it = &tree.nodes[node]
    cdef int32_t space = it.space, parent
    cdef int64_t end
    while it.parent and it.child == 0:
        while it.n_blocks and it.blocks[it.n_blocks - 1] == HOLE:
            it.n_blocks -= 1
        end = (it.start // tree.block_size + it.n_blocks) * tree.block_size
        if end > it.start:
            if end < it.end:  # others may follow in place of the tokens that go: no mark is to take them for its own
                tree.n_numbers += 1
                it.number = tree.n_numbers
                it.is_cut = True
            it.end = end
            shrink(it)
            settle(tree, node)
            break
        parent = it.parent
        free_node(tree, node)
        node = parent
        it = &tree.nodes[node]
    if it.parent == 0 and it.child == 0:
        free_space(tree, space)


cdef int64_t lead_of(const RadixTree* tree) noexcept nogil:
    """How many blocks the namespace that gives first can give before another one holds more."""
    cdef const Space* first = &tree.spaces[tree.by_size.items[0]]
    cdef const Space* other
    cdef int64_t lead = first.n_blocks
    cdef int32_t at
    for at in range(1, min(tree.by_size.n, 3)):
        other = &tree.spaces[tree.by_size.items[at]]
        if rank_of(tree, other) == rank_of(tree, first):
            lead = min(lead, first.n_blocks - other.n_blocks)
    return max(lead, 1)


cdef Py_ssize_t radix_evict(RadixTree* tree, Py_ssize_t n) noexcept nogil:
    cdef int64_t n_held = tree.n_held, n_before = tree.n_evictable, n_names, i
    cdef int32_t node
    cdef Node* it
    tree.n_changes += 1
    while n_before - tree.n_evictable < n and tree.by_size.n:
        node = tree.spaces[tree.by_size.items[0]].order.items[0]
        it = &tree.nodes[node]
        i = it.n_blocks
        if it.rank == INSIDE and tree.window == 0:
            # What follows is held by sequences, as windows leave it: it stays theirs, and cannot be found any more.
            while i and not radix_is_idle(tree, it.blocks[i - 1]):
                i -= 1
            cut_below(tree, node, i)
            finish(tree, node)
            continue
        n_names = lead_of(tree)
        while i and n_names and n_before - tree.n_evictable < n:
            i -= 1
            if it.blocks[i] != HOLE and radix_is_idle(tree, it.blocks[i]):
                tell(tree, REMOVED, node, i, i + 1)
                remove_block(tree, node, i)
                n_names -= 1
            elif it.rank == AT_END:
                break
        if it.child:
            settle(tree, node)
        else:
            finish(tree, node)
    tree.evicted += n_held - tree.n_held
    return n_before - tree.n_evictable


cdef Py_ssize_t radix_forget(RadixTree* tree, Key key, Py_ssize_t start) noexcept nogil:
    """What is known of the tokens from the block on that has `start`, and all that continues it."""
    cdef int64_t n, first = start // tree.block_size, n_held = tree.n_held
    cdef int32_t node = find(tree, key, &n)
    if first >= n // tree.block_size:
        return 0
    tree.n_changes += 1
    while tree.nodes[node].start // tree.block_size > first:
        node = tree.nodes[node].parent
    cut_below(tree, node, first - tree.nodes[node].start // tree.block_size)
    finish(tree, node)
    return n_held - tree.n_held


cdef Py_ssize_t radix_clear(RadixTree* tree, const Key* key) noexcept nogil:
    """A namespace, or all of them where there is no key."""
    cdef int64_t n_held = tree.n_held
    cdef int32_t space, root = 0 if key is NULL else root_of(tree, key[0])
    cdef Events* events = tree.events
    tree.n_changes += 1
    if root or (key is NULL and tree.n_namespaces):
        tell_cleared(tree, tree.nodes[root].space if root else 0)
    tree.events = NULL  # what goes now has been told in one
    if root:
        cut_below(tree, root, 0)
        finish(tree, root)
    if key is NULL:
        for space in range(1, tree.n_spaces):
            if tree.spaces[space].name is not NULL:
                root = tree.spaces[space].root
                cut_below(tree, root, 0)
                finish(tree, root)
        empty_pools(tree)
    tree.events = events
    return n_held - tree.n_held
