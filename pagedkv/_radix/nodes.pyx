"""Where the nodes of a radix tree are: their pools, the table that finds them, and the way down along some tokens."""

from libc.stdint cimport int32_t, int64_t, uint8_t, uint32_t, uint64_t
from libc.string cimport memcmp, memcpy

cdef enum:
    STRIDE = 64     # tokens that are compared at once

cdef RadixTree* radix_new(Py_ssize_t block_size, Py_ssize_t total, int64_t window, int32_t* counts, uint64_t seed) noexcept:
    cdef RadixTree* tree = <RadixTree*>raw_calloc(1, sizeof(RadixTree))
    if tree is NULL:
        return NULL
    tree.block_size = block_size
    tree.total = total
    tree.window = window
    tree.counts = counts
    tree.seed = seed
    tree.n_nodes = tree.n_spaces = tree.n_names = 1
    tree.n_ids = ID_RANGE  # 0 is none
    tree.places = <Place*>raw_calloc(max(total, 1), sizeof(Place))  # untouched memory costs nothing
    if tree.places is NULL:
        raw_free(tree)
        return NULL
    return tree


cdef void radix_free(RadixTree* tree) noexcept:
    if tree is NULL:
        return
    empty_pools(tree)
    raw_free(tree.places)
    raw_free(tree)


cdef void empty_pools(RadixTree* tree) noexcept nogil:
    cdef int32_t i
    for i in range(1, tree.n_nodes):
        raw_free(tree.nodes[i].key)
        raw_free(tree.nodes[i].blocks)
    for i in range(1, tree.n_spaces):
        drop_name(tree.spaces[i].name)
        raw_free(tree.spaces[i].order.items)
    raw_free(tree.nodes)
    raw_free(tree.spaces)
    raw_free(tree.names)
    raw_free(tree.table)
    raw_free(tree.by_size.items)
    raw_free(tree.terms.items)
    tree.nodes, tree.spaces, tree.names, tree.table = NULL, NULL, NULL, NULL
    tree.by_size.items, tree.terms.items = NULL, NULL
    tree.node_room = tree.space_room = tree.name_room = tree.by_size.room = tree.terms.room = 0
    tree.table_room = 0
    tree.n_nodes = tree.n_spaces = tree.n_names = 1  # place 0 is none
    tree.free_node = tree.free_space = tree.free_name = tree.n_free_names = 0


# --- finding ---------------------------------------------------------------------------------------

cdef inline uint32_t mixed(uint64_t x) noexcept nogil:
    # The finalizer of MurmurHash3: every bit of x decides over half of the result's.
    x ^= x >> 33
    x *= <uint64_t>0xff51afd7ed558ccd
    x ^= x >> 33
    x *= <uint64_t>0xc4ceb9fe1a85ec53
    x ^= x >> 33
    return <uint32_t>x


cdef uint32_t hash_of_child(const RadixTree* tree, int32_t parent, int64_t token) noexcept nogil:
    return mixed(<uint64_t>token ^ (<uint64_t>parent << 32) ^ tree.seed)


cdef uint32_t hash_of_name(const RadixTree* tree, Key key) noexcept nogil:
    cdef uint64_t x = tree.seed ^ <uint64_t>key.n_bytes
    cdef Py_ssize_t i
    for i in range(key.n_bytes):
        x = (x ^ <uint8_t>key.name[i]) * <uint64_t>0x100000001b3
        x ^= x >> 29
    return mixed(x)


cdef int32_t root_of(const RadixTree* tree, Key key) noexcept nogil:
    cdef uint32_t mask = tree.table_room - 1, hash, at
    cdef int32_t node
    cdef const Space* space
    if tree.table_room == 0:
        return 0
    hash = hash_of_name(tree, key)
    at = hash & mask
    while True:
        node = tree.table[at]
        if node == 0:
            return 0
        if tree.nodes[node].hash == hash and tree.nodes[node].parent == 0:
            space = &tree.spaces[tree.nodes[node].space]
            if space.n_bytes == key.n_bytes and (key.n_bytes <= 0 or memcmp(space.name, key.name, key.n_bytes) == 0):
                return node
        at = (at + 1) & mask


cdef int32_t child_of(const RadixTree* tree, int32_t parent, int64_t token) noexcept nogil:
    cdef uint32_t mask = tree.table_room - 1, hash = hash_of_child(tree, parent, token), at = hash & mask
    cdef int32_t node
    while True:
        node = tree.table[at]
        if node == 0:
            return 0
        if tree.nodes[node].hash == hash and tree.nodes[node].parent == parent and tree.nodes[node].key[0] == token:
            return node
        at = (at + 1) & mask


cdef Py_ssize_t common(const int64_t* a, const int64_t* b, Py_ssize_t n) noexcept nogil:
    cdef Py_ssize_t i = 0
    while i + STRIDE <= n and memcmp(&a[i], &b[i], STRIDE * sizeof(int64_t)) == 0:
        i += STRIDE
    while i < n and a[i] == b[i]:
        i += 1
    return i


cdef int32_t find(const RadixTree* tree, Key key, int64_t* n) noexcept nogil:
    cdef int32_t node = root_of(tree, key)
    n[0] = 0
    return node if node == 0 else walk(tree, node, 0, key, n)


cdef int32_t find_from(const RadixTree* tree, Key key, const Mark* mark, int64_t* n) noexcept nogil:
    cdef int32_t node = mark.node
    cdef int64_t equal, more
    if node >= tree.n_nodes or tree.nodes[node].number != mark.number:
        return -1
    while tree.nodes[node].start >= mark.n:  # it was cut since
        node = tree.nodes[node].parent
    more = min(tree.nodes[node].end - mark.n, key.n)
    equal = common(&tree.nodes[node].key[mark.n - tree.nodes[node].start], key.ids, more)
    n[0] = mark.n + equal
    if equal < more or n[0] < tree.nodes[node].end:
        return node
    return walk(tree, node, mark.n, key, n)


cdef int32_t walk(const RadixTree* tree, int32_t node, int64_t before, Key key, int64_t* n) noexcept nogil:
    """From the end of a node, n tokens deep, as far as the tokens are known; `before` of them are not in the key."""
    # What another thread writes into the tokens meanwhile may change what is found, and nothing else.
    cdef int32_t child
    cdef int64_t at = n[0] - before, length, equal
    while at < key.n:
        child = child_of(tree, node, key.ids[at])
        if child == 0:
            break
        length = tree.nodes[child].end - tree.nodes[child].start
        equal = common(tree.nodes[child].key, &key.ids[at], min(length, key.n - at))
        if equal == 0:
            break
        node = child
        at += equal
        if equal < length:
            break
    n[0] = before + at
    return node


cdef uint64_t take_ids(RadixTree* tree, int64_t place, int64_t n) noexcept nogil:
    cdef uint64_t first = tree.n_ids
    tree.n_ids += <uint64_t>((n + ID_RANGE - 1) // ID_RANGE * ID_RANGE)
    return first - <uint64_t>place


cdef bint has_ids(const RadixTree* tree, const Node* it, int64_t n) noexcept nogil:
    cdef int64_t used = <int64_t>((it.first_id + <uint64_t>(it.end // tree.block_size)) % ID_RANGE)
    return not it.is_cut and used and used + n <= ID_RANGE


cdef int64_t block_end(const RadixTree* tree, int64_t n) noexcept nogil:
    return (n + tree.block_size - 1) // tree.block_size * tree.block_size


cdef int32_t descend(const RadixTree* tree, int32_t node, int64_t end) noexcept nogil:
    while tree.nodes[node].end < end:
        node = tree.nodes[node].child
    return node


cdef int64_t first_needed(const RadixTree* tree, int64_t n) noexcept nogil:
    return max(n + 1 - tree.window, 0) if tree.window else 0


cdef int64_t usable(const RadixTree* tree, int32_t node, int64_t n) noexcept nogil:
    cdef int64_t size = tree.block_size, i = block_end(tree, n) // size
    if tree.window == 0:
        return n
    node = descend(tree, node, i * size)
    while i > first_needed(tree, n) // size:
        i -= 1
        while tree.nodes[node].start >= (i + 1) * size:
            node = tree.nodes[node].parent
        if tree.nodes[node].blocks[i - tree.nodes[node].start // size] == HOLE:
            n = i * size  # whatever is longer would need it too
    return n


# --- room ------------------------------------------------------------------------------------------

cdef int reserve(void** items, int64_t* room, int64_t n, size_t item_bytes) noexcept nogil:
    cdef int64_t larger
    cdef void* memory
    if n <= room[0]:
        return 0
    larger = max(n, room[0] + room[0] // 4, 8)
    if larger > MAX_ITEMS:
        return -1
    memory = raw_realloc(items[0], <size_t>larger * item_bytes)
    if memory is NULL:
        return -1
    items[0] = memory
    room[0] = larger
    return 0


cdef void list_node(RadixTree* tree, int32_t node) noexcept nogil:
    cdef uint32_t mask = tree.table_room - 1, at = tree.nodes[node].hash & mask
    while tree.table[at]:
        at = (at + 1) & mask
    tree.table[at] = node


cdef int reserve_table(RadixTree* tree, uint32_t n) noexcept nogil:
    """Room for n nodes more, with as much left empty."""
    cdef uint32_t i, room = max(tree.table_room, 16), old_room = tree.table_room
    cdef int32_t* old = tree.table
    cdef int32_t* table
    if tree.n_listed + n > MAX_ITEMS // 2:
        return -1
    while room < 2 * (tree.n_listed + n):
        room *= 2
    if room == old_room:
        return 0
    table = <int32_t*>raw_calloc(room, sizeof(int32_t))
    if table is NULL:
        return -1
    tree.table = table
    tree.table_room = room
    for i in range(old_room):
        if old[i]:
            list_node(tree, old[i])
    raw_free(old)
    return 0


cdef int reserve_nodes(RadixTree* tree, int32_t space, int32_t n) noexcept nogil:
    cdef Heap* order
    if reserve(<void**>&tree.nodes, &tree.node_room, <int64_t>tree.n_nodes + n, sizeof(Node)) < 0:
        return -1
    if reserve(<void**>&tree.terms.items, &tree.terms.room, <int64_t>tree.n_nodes + n, sizeof(int32_t)) < 0:
        return -1
    if reserve_table(tree, n) < 0:
        return -1
    if space == 0:
        return 0
    order = &tree.spaces[space].order
    return reserve(<void**>&order.items, &order.room, <int64_t>tree.spaces[space].n_nodes + n, sizeof(int32_t))


cdef int32_t new_node(RadixTree* tree, int32_t space, int32_t parent, int64_t start, int64_t end,
                      int64_t* key, int32_t* blocks, uint32_t hash) noexcept nogil:
    cdef int32_t node = tree.free_node
    cdef Node* it
    if node:
        tree.free_node = tree.nodes[node].parent
    else:
        node = tree.n_nodes
        tree.n_nodes += 1
    it = &tree.nodes[node]
    it.key = key
    it.blocks = blocks
    it.start = start
    it.end = end
    it.key_room = end - start
    it.block_room = end // tree.block_size - start // tree.block_size
    it.priority = 0
    it.expires = NEVER
    it.used = 0
    tree.n_numbers += 1
    it.number = tree.n_numbers
    it.first_id = 0
    it.is_cut = it.n_blocks = it.n_idle = 0
    it.parent = parent
    it.child = it.next = it.previous = 0
    it.space = space
    it.rank = NOTHING
    it.order_at = 0
    it.term_at = -1
    it.hash = hash
    tree.spaces[space].n_nodes += 1
    tree.n_listed += 1
    list_node(tree, node)
    return node


cdef void link_first(RadixTree* tree, int32_t node) noexcept nogil:
    """Make a node that hangs nowhere the first of its parent's children."""
    cdef Node* parent = &tree.nodes[tree.nodes[node].parent]
    tree.nodes[node].previous = 0
    tree.nodes[node].next = parent.child
    if parent.child:
        tree.nodes[parent.child].previous = node
    parent.child = node


cdef void unlink(RadixTree* tree, int32_t node) noexcept nogil:
    cdef Node* it = &tree.nodes[node]
    if it.previous:
        tree.nodes[it.previous].next = it.next
    else:
        tree.nodes[it.parent].child = it.next
    if it.next:
        tree.nodes[it.next].previous = it.previous


cdef void unlist(RadixTree* tree, int32_t node) noexcept nogil:
    """Out of the table; those that come after its place move up, so that they are found."""
    cdef uint32_t mask = tree.table_room - 1, at = tree.nodes[node].hash & mask, after, home
    while tree.table[at] != node:
        at = (at + 1) & mask
    after = (at + 1) & mask
    while tree.table[after]:
        home = tree.nodes[tree.table[after]].hash & mask
        if ((after - home) & mask) >= ((after - at) & mask):
            tree.table[at] = tree.table[after]
            at = after
        after = (after + 1) & mask
    tree.table[at] = 0
    tree.n_listed -= 1


cdef void shrink(Node* it) noexcept nogil:
    """Memory that is far more than needed goes back; if it cannot, it stays."""
    cdef int64_t n = it.end - it.start
    cdef void* memory
    if n < it.key_room // 2:
        memory = raw_realloc(it.key, max(n, 1) * sizeof(int64_t))
        if memory is not NULL:
            it.key = <int64_t*>memory
            it.key_room = max(n, 1)
    if it.n_blocks < it.block_room // 2:
        memory = raw_realloc(it.blocks, max(it.n_blocks, 1) * sizeof(int32_t))
        if memory is not NULL:
            it.blocks = <int32_t*>memory
            it.block_room = max(it.n_blocks, 1)


# --- names -----------------------------------------------------------------------------------------

cdef inline int64_t* holders_of(char* name) noexcept nogil:
    return <int64_t*>(name - sizeof(int64_t))  # it lies behind them


cdef char* new_name(const char* name, Py_ssize_t n_bytes) noexcept nogil:
    cdef char* made = <char*>raw_malloc(sizeof(int64_t) + max(n_bytes, 0))
    if made is NULL:
        return NULL
    made += sizeof(int64_t)
    holders_of(made)[0] = 1
    if n_bytes > 0:
        memcpy(made, name, n_bytes)
    return made


cdef char* hold_name(char* name) noexcept nogil:
    if name is not NULL:
        holders_of(name)[0] += 1
    return name


cdef void drop_name(char* name) noexcept nogil:
    if name is NULL:
        return
    holders_of(name)[0] -= 1
    if holders_of(name)[0] == 0:
        raw_free(holders_of(name))
