"""How a batch is cut into tasks: from the shape of each sequence alone.

    batch --> tiles: some queries of one sequence, for some KV heads    (one softmax each)
          --> tasks: a tile's positions, in parts if they are many      (one thread each)

Neither the number of threads nor the rest of the batch plays a part, so they cannot change a result.
"""

from libc.stdint cimport uintptr_t
from libc.stdlib cimport free, malloc, qsort
from libc.string cimport memset


cdef enum:
    # Query rows of one KV head from which lanes along them pay.
    PANEL_ROWS = 24
    # Query rows of a tile of panels: its q, acc and scores stay in the second-level cache.
    TILE_ROWS = 256
    # A sequence is worth this many tasks, if each gets this much to read, and this many positions.
    TASKS_PER_SPAN = 64
    PART_BYTES = 2 << 20
    PART_POSITIONS = 256


# --- the plan ----------------------------------------------------------------------------------------

cdef int plan_attend(AttendPlan* plan, const KvView* kv, const QuerySpan* spans, Py_ssize_t n_spans,
                     Py_ssize_t n_q_heads, const AttendOptions* options) noexcept nogil:
    cdef Py_ssize_t group = n_q_heads // kv.n_kv_heads
    cdef Py_ssize_t i, n_tiles = 0, n_tasks = 0
    plan.spans = spans
    plan.n_q_heads = n_q_heads
    # Twice over the same ground: count, then fill.
    for i in range(n_spans):
        add_span(plan, kv, i, group, options, &n_tiles, &n_tasks)
    plan.tiles = <AttendTile*>malloc(max(n_tiles, 1) * sizeof(AttendTile))
    plan.tasks = <AttendTask*>malloc(max(n_tasks, 1) * sizeof(AttendTask))
    if plan.tiles is NULL or plan.tasks is NULL:
        return -1
    for i in range(n_spans):
        add_span(plan, kv, i, group, options, &plan.n_tiles, &plan.n_tasks)
    # The longest first, so that none is left to run alone at the end.
    qsort(plan.tasks, plan.n_tasks, sizeof(AttendTask), compare_tasks)
    return 0


cdef void free_plan(AttendPlan* plan) noexcept nogil:
    free(plan.tiles)
    free(plan.tasks)
    memset(plan, 0, sizeof(AttendPlan))


cdef int compare_tasks(const void* a, const void* b) noexcept nogil:
    cdef const AttendTask* x = <const AttendTask*>a
    cdef const AttendTask* y = <const AttendTask*>b
    if x.cost != y.cost:
        return -1 if x.cost > y.cost else 1
    if x.tile != y.tile:
        return -1 if x.tile < y.tile else 1
    return -1 if x.part < y.part else x.part > y.part


cdef void add_span(AttendPlan* plan, const KvView* kv, Py_ssize_t index, Py_ssize_t group,
                   const AttendOptions* options, Py_ssize_t* n_tiles, Py_ssize_t* n_tasks) noexcept nogil:
    """Add one sequence's tiles and tasks to the plan, or, before it has memory, only count them."""
    cdef const QuerySpan* span = &plan.spans[index]
    cdef Py_ssize_t query_len = span.query_len
    if query_len == 0:
        return
    cdef bint by_panels = query_len * group >= PANEL_ROWS
    cdef Py_ssize_t n_query_tiles = 1, n_head_tiles = 1, queries_per_tile
    if by_panels:
        n_query_tiles = min(query_len, (query_len * group + TILE_ROWS - 1) // TILE_ROWS)
        n_head_tiles = kv.n_kv_heads
    queries_per_tile = (query_len + n_query_tiles - 1) // n_query_tiles
    n_query_tiles = (query_len + queries_per_tile - 1) // queries_per_tile
    cdef Py_ssize_t wanted_parts = (TASKS_PER_SPAN + n_query_tiles * n_head_tiles - 1) // (n_query_tiles * n_head_tiles)
    cdef AttendTile tile
    cdef Py_ssize_t i, h
    memset(&tile, 0, sizeof(tile))
    tile.span = index
    tile.by_panels = by_panels
    tile.n_heads = kv.n_kv_heads // n_head_tiles
    for i in range(n_query_tiles):
        tile.first_query = i * queries_per_tile
        tile.n_queries = min(queries_per_tile, query_len - tile.first_query)
        for h in range(n_head_tiles):
            tile.first_head = h * tile.n_heads
            add_tile(plan, kv, &tile, group, options, wanted_parts, n_tiles, n_tasks)


cdef void add_tile(AttendPlan* plan, const KvView* kv, AttendTile* tile, Py_ssize_t group,
                   const AttendOptions* options, Py_ssize_t wanted_parts,
                   Py_ssize_t* n_tiles, Py_ssize_t* n_tasks) noexcept nogil:
    cdef const QuerySpan* span = &plan.spans[tile.span]
    cdef Py_ssize_t position = span.seq_len - span.query_len + tile.first_query
    cdef Py_ssize_t begin = min(first_seen(options, position), span.seq_len)
    cdef Py_ssize_t end = max(begin, end_seen(options, position + tile.n_queries - 1, span.seq_len))
    cdef Py_ssize_t n = end - begin
    # A position costs the reading of its rows, and from about four query rows on the computing on them.
    cdef double bytes = tile.n_heads * (kv.head_dim + kv.v_head_dim) * sizeof(float)
    cdef double cost = bytes * max(1.0, tile.n_queries * group / 4.0)
    cdef Py_ssize_t least = max(<Py_ssize_t>(PART_BYTES / cost), PART_POSITIONS * (2 if tile.by_panels else 1))
    cdef Py_ssize_t size = max(least, (n + wanted_parts - 1) // wanted_parts)
    size = round_up(size, MAX_POSITIONS)
    tile.n_parts = max(1, (n + size - 1) // size)
    cdef Scratch unused
    cdef AttendTask* task
    cdef Py_ssize_t part
    if plan.tasks is not NULL:
        if tile.n_parts > 1:
            tile.first_part = plan.part_floats
            plan.part_floats += tile.n_parts * partial_floats(tile, kv, group)
        plan.scratch_floats = max(plan.scratch_floats, lay_out(&unused, NULL, tile, kv, group))
        plan.cost += n * cost
        for part in range(tile.n_parts):
            task = &plan.tasks[n_tasks[0] + part]
            task.tile = n_tiles[0]
            task.part = part
            task.begin = begin + part * size
            task.end = min(end, task.begin + size)
            task.cost = (task.end - task.begin) * cost
        plan.tiles[n_tiles[0]] = tile[0]
    n_tiles[0] += 1
    n_tasks[0] += tile.n_parts


# --- memory ------------------------------------------------------------------------------------------

cdef Py_ssize_t lay_out(Scratch* scratch, float* base, const AttendTile* tile, const KvView* kv,
                        Py_ssize_t group) noexcept nogil:
    cdef Py_ssize_t n_rows = tile_rows(tile, group)
    cdef Py_ssize_t s_stride = round_up(n_rows, PAD)
    cdef Py_ssize_t positions = step_positions(tile, kv)
    cdef Py_ssize_t copied = positions if tile.by_panels else 0
    cdef Py_ssize_t used = 0
    cdef uintptr_t start = <uintptr_t>base
    scratch.rows = <const float**>start     # first: it wants the alignment of a pointer
    used += round_up(4 * MAX_POSITIONS * sizeof(void*) // sizeof(float), PAD)
    scratch.q = <float*>(start + used * sizeof(float))
    used += s_stride * round_up(kv.head_dim, PAD)
    scratch.s = <float*>(start + used * sizeof(float))
    used += s_stride * positions
    scratch.fade = <float*>(start + used * sizeof(float))
    scratch.slopes = <float*>(start + (used + s_stride) * sizeof(float))
    scratch.places = <float*>(start + (used + 2 * s_stride) * sizeof(float))
    used += 3 * s_stride
    scratch.partial = <float*>(start + used * sizeof(float))
    used += partial_floats(tile, kv, group)
    scratch.k_copy = <float*>(start + used * sizeof(float))
    used += copied * round_up(kv.head_dim, PAD)
    scratch.v_copy = <float*>(start + used * sizeof(float))
    used += copied * round_up(kv.v_head_dim, PAD)
    return used
