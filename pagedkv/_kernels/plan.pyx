"""How a batch is cut into tasks: from the shape of each sequence, and the blocks that sequences share.

    batch --> tiles: some queries, for some KV heads           (rows that go through the same positions)
          --> tasks: a tile's positions, in parts if many      (one thread each)

Sequences whose tables start with the same blocks form a tree. Every stretch of it is a shared tile, read once for the
queries of all of its sequences; what is left of each is a tile of its own, which waits for the shared ones:

    table of A   [ 7 3 9 | 12 4 | 20 ]        tile {A, B, C} over 7 3 9
    table of B   [ 7 3 9 | 12 4 | 31 ]        tile {A, B} over 12 4
    table of C   [ 7 3 9 | 17 ]               tiles A over 20, B over 31, C over 17

The number of threads plays no part, so it cannot change a result; nor does the rest of the batch, but for what is shared.
"""

from libc.stdint cimport int32_t, uintptr_t
from libc.stdlib cimport free, malloc, qsort, realloc
from libc.string cimport memset


cdef enum:
    # Query rows of one KV head from which lanes along them pay.
    PANEL_ROWS = 40
    # Query rows of a tile of panels, and of all heads of another: its q, acc and scores stay in the second-level cache.
    TILE_ROWS = 256
    HEADS_ROWS = 128
    # A tile's positions are worth this many tasks, if each gets this much to read, and this many positions.
    TASKS_PER_SPAN = 64
    PART_BYTES = 2 << 20
    PART_POSITIONS = 256
    # Fewer shared positions, or bytes, are not worth a tile of their own.
    SHARED_POSITIONS = 64
    SHARED_BYTES = 64 << 10


# What the functions below hand each other.
cdef struct Planner:
    AttendPlan* plan
    const KvView* kv
    const AttendOptions* options
    Py_ssize_t group            # query heads of a KV head
    bint failed                 # out of memory


# A sequence that may share: its first n_blocks are full, and seen by all of its queries.
cdef struct Candidate:
    const int32_t* table
    Py_ssize_t n_blocks
    Py_ssize_t span
    Py_ssize_t n_common         # blocks in common with the one before it in order


# A stretch of the tree that is being looked at: the candidates from `first` on have n_blocks in common.
cdef struct Stretch:
    Py_ssize_t n_blocks
    Py_ssize_t first


# --- the plan ----------------------------------------------------------------------------------------

cdef int plan_attend(AttendPlan* plan, const KvView* kv, const QuerySpan* spans, Py_ssize_t n_spans,
                     Py_ssize_t n_q_heads, const AttendOptions* options) noexcept nogil:
    cdef Planner planner
    cdef Py_ssize_t i
    planner.plan = plan
    planner.kv = kv
    planner.options = options
    planner.group = n_q_heads // kv.n_kv_heads
    planner.failed = False
    plan.spans = spans
    plan.n_q_heads = n_q_heads
    plan.n_kv_heads = kv.n_kv_heads
    plan.head_dim = kv.k.head_dim
    plan.v_head_dim = kv.v.head_dim
    plan.item_bytes = kv.k.item_bytes
    if n_spans > 1:
        add_shared_tiles(&planner, n_spans)
    for i in range(n_spans):
        add_span(&planner, i)
    if planner.failed:
        return -1
    if plan.n_tasks:  # qsort may not be given NULL
        # The longest first, so that none is left to run alone at the end.
        qsort(plan.tasks, plan.n_tasks, sizeof(AttendTask), compare_tasks)
    return 0


cdef void free_plan(AttendPlan* plan) noexcept nogil:
    free(plan.members)
    free(plan.tiles)
    free(plan.links)
    free(plan.tasks)
    free(plan.shares)
    memset(plan, 0, sizeof(AttendPlan))


cdef int compare_tasks(const void* a, const void* b) noexcept nogil:
    cdef const AttendTask* x = <const AttendTask*>a
    cdef const AttendTask* y = <const AttendTask*>b
    if x.cost != y.cost:
        return -1 if x.cost > y.cost else 1
    if x.tile != y.tile:
        return -1 if x.tile < y.tile else 1
    return -1 if x.part < y.part else x.part > y.part


cdef void* room_for(Planner* planner, void* items, Py_ssize_t n, Py_ssize_t n_more, size_t size) noexcept nogil:
    """The array with room for n_more items after its n; its memory doubles as it grows."""
    cdef Py_ssize_t capacity = 16
    cdef void* larger
    if n > 0:
        while capacity < n:
            capacity *= 2
    if items is not NULL and n + n_more <= capacity:
        return items
    while capacity < n + n_more:
        capacity *= 2
    larger = realloc(items, capacity * size)
    if larger is NULL:
        planner.failed = True
        return items
    return larger


cdef void add_span(Planner* planner, Py_ssize_t index) noexcept nogil:
    """The tiles of one sequence over the positions that are not in shared ones."""
    cdef const QuerySpan* span = &planner.plan.spans[index]
    cdef Py_ssize_t query_len = span.query_len, group = planner.group
    cdef Py_ssize_t begin = planner.plan.shares[index].end if planner.plan.shares is not NULL else 0
    cdef Py_ssize_t n_query_tiles = 1, queries_per_tile, position, first, end, i
    cdef AttendMember member
    if query_len == 0:
        return
    if query_len * group >= PANEL_ROWS:
        n_query_tiles = min(query_len, (query_len * group + TILE_ROWS - 1) // TILE_ROWS)
    queries_per_tile = (query_len + n_query_tiles - 1) // n_query_tiles
    n_query_tiles = (query_len + queries_per_tile - 1) // queries_per_tile
    member.span = index
    member.first_row = 0
    for i in range(n_query_tiles):
        member.first_query = i * queries_per_tile
        member.n_queries = min(queries_per_tile, query_len - member.first_query)
        position = span.seq_len - query_len + member.first_query
        first = max(begin, min(first_seen(planner.options, position), span.seq_len))
        end = max(first, end_seen(planner.options, position + member.n_queries - 1, span.seq_len))
        add_tiles(planner, &member, 1, False, query_len * group >= PANEL_ROWS, first, end, n_query_tiles)


cdef void add_tiles(Planner* planner, const AttendMember* members, Py_ssize_t n_members, bint shared, bint by_panels,
                    Py_ssize_t begin, Py_ssize_t end, Py_ssize_t n_siblings) noexcept nogil:
    """The members' tiles over the positions [begin, end): each for as many KV heads as fit, in panels for one."""
    cdef AttendPlan* plan = planner.plan
    cdef const AttendMember* last = &members[n_members - 1]
    cdef Py_ssize_t n_kv_heads = planner.kv.n_kv_heads
    cdef Py_ssize_t n_head_tiles, most_heads, i
    cdef AttendTile tile
    memset(&tile, 0, sizeof(tile))
    tile.first_member = plan.n_members
    tile.n_members = n_members
    tile.rows_per_head = last.first_row + last.n_queries * planner.group
    most_heads = 1 if by_panels else max(1, HEADS_ROWS // tile.rows_per_head)
    n_head_tiles = (n_kv_heads + most_heads - 1) // most_heads
    tile.shared = shared
    tile.by_panels = by_panels
    plan.members = <AttendMember*>room_for(planner, plan.members, plan.n_members, n_members, sizeof(AttendMember))
    plan.tiles = <AttendTile*>room_for(planner, plan.tiles, plan.n_tiles, n_head_tiles, sizeof(AttendTile))
    if planner.failed:
        return
    for i in range(n_members):
        plan.members[plan.n_members] = members[i]
        plan.n_members += 1
    for i in range(n_head_tiles):
        tile.first_head = i * n_kv_heads // n_head_tiles
        tile.n_heads = (i + 1) * n_kv_heads // n_head_tiles - tile.first_head
        add_tasks(planner, &tile, begin, end, n_siblings * n_head_tiles)
        if planner.failed:
            return
        if shared:
            link_members(planner, &tile)
        elif plan.shares is not NULL:
            if i == 0:
                plan.shares[members.span].own_tile = plan.n_tiles
            plan.shares[members.span].n_own_tiles = i + 1
        plan.tiles[plan.n_tiles] = tile
        plan.n_tiles += 1


cdef void add_tasks(Planner* planner, AttendTile* tile, Py_ssize_t begin, Py_ssize_t end,
                    Py_ssize_t n_siblings) noexcept nogil:
    """Split the positions of a tile, which has so many others at its side, into tasks."""
    cdef AttendPlan* plan = planner.plan
    cdef const KvView* kv = planner.kv
    cdef Py_ssize_t n = end - begin
    cdef Py_ssize_t wanted_parts = (TASKS_PER_SPAN + n_siblings - 1) // n_siblings
    # A position costs the reading of its rows, and from about four query rows on the computing on them.
    cdef double bytes = tile.n_heads * (stored_bytes(&kv.k) + stored_bytes(&kv.v))
    cdef double floats = tile.n_heads * (kv.k.head_dim + kv.v.head_dim)
    cdef double cost = max(bytes, floats * tile.rows_per_head)
    cdef Py_ssize_t least = max(<Py_ssize_t>(PART_BYTES / cost), PART_POSITIONS * (2 if tile.by_panels else 1))
    cdef Py_ssize_t size = round_up(max(least, (n + wanted_parts - 1) // wanted_parts), MAX_STEP_POSITIONS)
    cdef Py_ssize_t link, part
    cdef Scratch unused
    cdef AttendTask* task
    tile.n_parts = max(1, (n + size - 1) // size)
    tile.n_waited_for = tile.n_parts
    tile.link = -1
    if not tile.shared and plan.shares is not NULL:
        link = tile.link = plan.shares[plan.members[tile.first_member].span].link
        while link >= 0:
            if have_heads_in_common(tile, &plan.tiles[plan.links[link].tile]):
                tile.n_waited_for += plan.tiles[plan.links[link].tile].n_parts
            link = plan.links[link].next
    plan.tasks = <AttendTask*>room_for(planner, plan.tasks, plan.n_tasks, tile.n_parts, sizeof(AttendTask))
    if planner.failed:
        return
    if tile.shared or tile.n_waited_for > 1:
        tile.first_part = plan.part_floats
        plan.part_floats += tile.n_parts * partial_floats(tile, kv)
    plan.scratch_floats = max(plan.scratch_floats, lay_out(&unused, NULL, tile, kv))
    plan.cost += n * cost
    for part in range(tile.n_parts):
        task = &plan.tasks[plan.n_tasks + part]
        task.tile = plan.n_tiles
        task.part = part
        task.begin = begin + part * size
        task.end = min(end, task.begin + size)
        task.cost = (task.end - task.begin) * cost
    plan.n_tasks += tile.n_parts


# --- what sequences share ----------------------------------------------------------------------------

cdef void add_shared_tiles(Planner* planner, Py_ssize_t n_spans) noexcept nogil:
    """Find the tree of leading blocks that sequences have in common, and add a shared tile for each stretch of it."""
    cdef Candidate* candidates = <Candidate*>malloc(n_spans * sizeof(Candidate))
    cdef AttendMember* members = <AttendMember*>malloc(n_spans * sizeof(AttendMember))
    cdef Stretch* stack = <Stretch*>malloc((n_spans + 1) * sizeof(Stretch))
    cdef Py_ssize_t block_size = planner.kv.block_size
    cdef Py_ssize_t n, i, first, n_common, n_outer, n_open = 1
    if candidates is NULL or members is NULL or stack is NULL:
        planner.failed = True
        n = 0
    else:
        n = find_candidates(planner, candidates, n_spans)
    if n:
        planner.plan.shares = <AttendShare*>malloc(n_spans * sizeof(AttendShare))
        if planner.plan.shares is NULL:
            planner.failed = True
            n = 0
        for i in range(n_spans if n else 0):
            planner.plan.shares[i].end = 0
            planner.plan.shares[i].link = planner.plan.shares[i].own_tile = -1
            planner.plan.shares[i].n_own_tiles = 0
    # Stretches close from the inside out, as the walk passes the last of their sequences. The lowest on the stack is
    # what all have in common: nothing.
    if n:
        stack[0].n_blocks = stack[0].first = 0
    for i in range(1, n + 1 if n else 0):
        n_common = candidates[i].n_common if i < n else 0
        first = i - 1
        while stack[n_open - 1].n_blocks > n_common:
            n_open -= 1
            first = stack[n_open].first
            n_outer = max(n_common, stack[n_open - 1].n_blocks)
            share_stretch(planner, &candidates[first], i - first, members,
                          n_outer * block_size, stack[n_open].n_blocks * block_size)
        if n_common > stack[n_open - 1].n_blocks:
            stack[n_open].n_blocks = n_common
            stack[n_open].first = first
            n_open += 1
    free(candidates)
    free(members)
    free(stack)


cdef Py_ssize_t find_candidates(Planner* planner, Candidate* candidates, Py_ssize_t n_spans) noexcept nogil:
    """The sequences that could share, in the order of their tables; 0 if no two of them do."""
    cdef const KvView* kv = planner.kv
    cdef const QuerySpan* span
    cdef Py_ssize_t position_bytes = kv.n_kv_heads * (stored_bytes(&kv.k) + stored_bytes(&kv.v))
    cdef Py_ssize_t least = max(SHARED_POSITIONS, (SHARED_BYTES + position_bytes - 1) // position_bytes)
    cdef Py_ssize_t unit = (least + kv.block_size - 1) // kv.block_size     # blocks
    cdef Py_ssize_t n = 0, i, n_blocks
    cdef bint found = False
    for i in range(n_spans):
        span = &planner.plan.spans[i]
        n_blocks = (span.seq_len - span.query_len) // kv.block_size // unit * unit
        # A prefill of its own fills panels: it is bound by computing, not by reading.
        if (n_blocks and span.query_len and span.query_len * planner.group < PANEL_ROWS
                and first_seen(planner.options, span.seq_len - 1) == 0):
            candidates[n].table = span.table
            candidates[n].n_blocks = n_blocks
            candidates[n].span = i
            n += 1
    qsort(candidates, n, sizeof(Candidate), compare_candidates)
    for i in range(1, n):
        candidates[i].n_common = n_common_blocks(&candidates[i - 1], &candidates[i]) // unit * unit
        found = found or candidates[i].n_common > 0
    return n if found else 0


cdef Py_ssize_t n_common_blocks(const Candidate* a, const Candidate* b) noexcept nogil:
    cdef Py_ssize_t i = 0, n = min(a.n_blocks, b.n_blocks)
    while i < n and a.table[i] == b.table[i]:
        i += 1
    return i


cdef int compare_candidates(const void* a, const void* b) noexcept nogil:
    """By their tables' entries, then by length, then by their place in the batch."""
    cdef const Candidate* x = <const Candidate*>a
    cdef const Candidate* y = <const Candidate*>b
    cdef Py_ssize_t i = n_common_blocks(x, y)
    if i < x.n_blocks and i < y.n_blocks:
        return -1 if x.table[i] < y.table[i] else 1
    if x.n_blocks != y.n_blocks:
        return -1 if x.n_blocks < y.n_blocks else 1
    return -1 if x.span < y.span else x.span > y.span


cdef void share_stretch(Planner* planner, const Candidate* candidates, Py_ssize_t n, AttendMember* members,
                        Py_ssize_t begin, Py_ssize_t end) noexcept nogil:
    """Shared tiles for n sequences over the positions [begin, end), of so many query rows each as panels take."""
    cdef Py_ssize_t n_rows = 0, n_members = 0, n_tiles, i
    cdef const QuerySpan* span
    for i in range(n):
        n_rows += planner.plan.spans[candidates[i].span].query_len * planner.group
    n_tiles = (n_rows + TILE_ROWS - 1) // TILE_ROWS
    n_rows = 0
    for i in range(n):
        span = &planner.plan.spans[candidates[i].span]
        if n_rows + span.query_len * planner.group > TILE_ROWS:
            add_tiles(planner, members, n_members, True, n_rows >= PANEL_ROWS, begin, end, n_tiles)
            n_rows = n_members = 0
        members[n_members].span = candidates[i].span
        members[n_members].first_query = 0
        members[n_members].n_queries = span.query_len
        members[n_members].first_row = n_rows
        n_members += 1
        n_rows += span.query_len * planner.group
        planner.plan.shares[candidates[i].span].end = max(planner.plan.shares[candidates[i].span].end, end)
    add_tiles(planner, members, n_members, True, n_rows >= PANEL_ROWS, begin, end, n_tiles)


cdef void link_members(Planner* planner, const AttendTile* tile) noexcept nogil:
    """Tell each sequence of a new shared tile of it."""
    cdef AttendPlan* plan = planner.plan
    cdef const AttendMember* member
    cdef Py_ssize_t i
    plan.links = <AttendLink*>room_for(planner, plan.links, plan.n_links, tile.n_members, sizeof(AttendLink))
    if planner.failed:
        return
    for i in range(tile.first_member, tile.first_member + tile.n_members):
        member = &plan.members[i]
        plan.links[plan.n_links].tile = plan.n_tiles
        plan.links[plan.n_links].first_row = member.first_row
        plan.links[plan.n_links].next = plan.shares[member.span].link
        plan.shares[member.span].link = plan.n_links
        plan.n_links += 1


# --- plans of a batch --------------------------------------------------------------------------------

cdef const AttendPlan* find_plan(PlanShelf* shelf, const KvView* kv, const QuerySpan* spans, Py_ssize_t n_spans,
                                 Py_ssize_t n_q_heads, const AttendOptions* options) noexcept nogil:
    cdef PlanKind* kind
    cdef Py_ssize_t i
    for i in range(min(shelf.n_made, PLAN_KINDS)):
        kind = &shelf.kinds[i]
        if (kind.window == options.window and kind.causal == options.causal and kind.plan.n_q_heads == n_q_heads
                and kind.plan.n_kv_heads == kv.n_kv_heads and kind.plan.head_dim == kv.k.head_dim
                and kind.plan.v_head_dim == kv.v.head_dim and kind.plan.item_bytes == kv.k.item_bytes):
            return &kind.plan
    kind = &shelf.kinds[shelf.n_made % PLAN_KINDS]
    free_plan(&kind.plan)
    if plan_attend(&kind.plan, kv, spans, n_spans, n_q_heads, options):
        free_plan(&kind.plan)  # and its n_q_heads is 0: found by nobody
        return NULL
    kind.window = options.window
    kind.causal = options.causal
    shelf.n_made += 1
    return &kind.plan


cdef void free_plans(PlanShelf* shelf) noexcept nogil:
    cdef Py_ssize_t i
    for i in range(PLAN_KINDS):
        free_plan(&shelf.kinds[i].plan)
    shelf.n_made = 0


# --- memory ------------------------------------------------------------------------------------------

cdef Py_ssize_t lay_out(Scratch* scratch, float* base, const AttendTile* tile, const KvView* kv) noexcept nogil:
    cdef Py_ssize_t n_rows = tile_rows(tile)
    cdef Py_ssize_t s_stride = round_up(n_rows, PAD)
    cdef Py_ssize_t positions = step_positions(tile, kv)
    cdef Py_ssize_t copied = positions if tile.by_panels else 0
    cdef Py_ssize_t used = 0
    cdef uintptr_t start = <uintptr_t>base
    scratch.rows = <const char**>start     # first: it wants the alignment of a pointer
    used += round_up(4 * MAX_STEP_POSITIONS * sizeof(void*) // sizeof(float), PAD)
    scratch.q = <float*>(start + used * sizeof(float))
    used += s_stride * round_up(kv.k.head_dim, PAD)
    scratch.s = <float*>(start + used * sizeof(float))
    used += s_stride * positions
    scratch.rescale = <float*>(start + used * sizeof(float))
    scratch.slopes = <float*>(start + (used + s_stride) * sizeof(float))
    scratch.places = <float*>(start + (used + 2 * s_stride) * sizeof(float))
    used += 3 * s_stride
    scratch.partial = <float*>(start + used * sizeof(float))
    used += partial_floats(tile, kv)
    scratch.k_copy = <float*>(start + used * sizeof(float))
    used += copied * round_up(kv.k.head_dim, PAD)
    scratch.v_copy = <float*>(start + used * sizeof(float))
    used += copied * round_up(kv.v.head_dim, PAD)
    scratch.k_scales = <float*>(start + used * sizeof(float))
    used += round_up(positions * tile.n_heads * kv.k.n_scales, PAD)
    scratch.v_scales = <float*>(start + used * sizeof(float))
    used += round_up(positions * tile.n_heads * kv.v.n_scales, PAD)
    return used
