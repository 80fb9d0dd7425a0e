"""Attention over K and V in blocks.

A task (see plan.pyx) runs through its positions a few rows at a time. For each of its query rows it keeps
the greatest score so far, row_max; the sum of exp(score - row_max), row_sum; and the sum of exp(score - row_max) * v,
acc: the online softmax. Whoever finishes the last task that a tile waits for merges their results, in a fixed
order, and writes the tile's.

Sources: Milakov & Gimelshein 2018 (online softmax); Dao 2023, FlashAttention-2, section 3.1 (tiles,
division at the end); Dao et al. 2023, Flash-Decoding (parts merged by log-sum-exp); Juravsky et al. 2024,
Hydragen, section 3 (a shared prefix attended once for all queries).
"""

from libc.float cimport FLT_MAX
from libc.math cimport INFINITY, expf, logf
from libc.stdint cimport int32_t, uint16_t, uintptr_t
from libc.stdlib cimport calloc, free, malloc
from libc.string cimport memset

from pagedkv._kernels.parallel cimport parallel_for
from pagedkv._kernels.plan cimport (
    MAX_STEP_POSITIONS, AttendLink, AttendMember, AttendOptions, AttendPlan, AttendShare, AttendTask, AttendTile, HeadsView,
    KvView, QuerySpan, RowView, Scratch, end_seen, first_seen, have_heads_in_common, lay_out, partial_floats, round_up,
    step_positions, stored_bytes, tile_rows)
from pagedkv._kernels.simd cimport (
    PAD, SIMD_F32, SIMD_LINE_BYTES, simd_ahead, simd_dtype, simd_in_use, simd_kernels, simd_prefetch, simd_scales)


cdef extern from "<stdatomic.h>" nogil:
    ctypedef Py_ssize_t atomic_ptrdiff_t
    Py_ssize_t atomic_fetch_add(atomic_ptrdiff_t* value, Py_ssize_t n)
    Py_ssize_t atomic_fetch_sub(atomic_ptrdiff_t* value, Py_ssize_t n)
    void atomic_init(atomic_ptrdiff_t* value, Py_ssize_t n)


cdef enum:
    # A batch that reads less than this is done before a second thread has woken up.
    SERIAL_BYTES = 128 << 10


# What one run is about. Shared by its threads, and only read, but for the counters.
cdef struct Run:
    const AttendPlan* plan
    const KvView* kv
    const AttendOptions* options
    const simd_kernels* kernels
    Py_ssize_t group                # query heads of a KV head
    const HeadsView* q
    const HeadsView* out
    float* lse
    float* parts
    float* scratch                  # plan.scratch_floats for each worker
    atomic_ptrdiff_t* unfinished    # tasks that each tile waits for
    atomic_ptrdiff_t next_task


# The running state of the online softmax of one part of a tile.
cdef struct Partial:
    float* row_max                  # [s_stride]: the greatest score
    float* row_sum                  # [s_stride]: the sum of exp(score - row_max)
    float* acc                      # [tile_rows, acc_stride]


# --- the run -----------------------------------------------------------------------------------------

cdef int run_attend(const AttendPlan* plan, const HeadsView* out, float* lse, const HeadsView* q, const KvView* kv,
                    const AttendOptions* options, int n_threads) noexcept nogil:
    cdef Run run
    cdef Py_ssize_t i, n_workers = min(<Py_ssize_t>n_threads, plan.n_tasks)
    cdef char* memory
    cdef size_t n_bytes
    if plan.n_tasks == 0:
        return 0
    if plan.cost < SERIAL_BYTES:
        n_workers = 1
    # All memory is taken here, so that nothing can fail once the first row is written.
    n_bytes = 64 + (plan.part_floats + n_workers * plan.scratch_floats) * sizeof(float)
    memory = <char*>malloc(n_bytes)
    run.unfinished = <atomic_ptrdiff_t*>calloc(plan.n_tiles, sizeof(atomic_ptrdiff_t))
    if memory is NULL or run.unfinished is NULL:
        free(memory)
        free(run.unfinished)
        return -1
    for i in range(plan.n_tiles):
        atomic_init(&run.unfinished[i], plan.tiles[i].n_waited_for)
    atomic_init(&run.next_task, 0)
    run.plan = plan
    run.kv = kv
    run.options = options
    run.kernels = simd_in_use()
    run.group = plan.n_q_heads // kv.n_kv_heads
    run.q = q
    run.out = out
    run.lse = lse
    run.scratch = <float*>((<uintptr_t>memory + 63) & ~<uintptr_t>63)
    run.parts = run.scratch + n_workers * plan.scratch_floats
    # One call a thread, each of which claims tasks: so a thread's memory is numbered by the call.
    parallel_for(work, &run, n_workers, <int>n_workers)
    free(memory)
    free(run.unfinished)
    return 0


cdef void work(void* context, Py_ssize_t index) noexcept nogil:
    cdef Run* run = <Run*>context
    cdef float* scratch = run.scratch + index * run.plan.scratch_floats
    cdef Py_ssize_t i
    while True:
        i = atomic_fetch_add(&run.next_task, 1)
        if i >= run.plan.n_tasks:
            return
        run_task(run, &run.plan.tasks[i], scratch)


cdef inline Partial partial_at(float* base, const AttendTile* tile) noexcept nogil:
    cdef Py_ssize_t s_stride = round_up(tile_rows(tile), PAD)
    cdef Partial partial
    partial.row_max = base
    partial.row_sum = base + s_stride
    partial.acc = base + 2 * s_stride
    return partial


cdef inline Partial part_of(Run* run, const AttendTile* tile, Py_ssize_t part) noexcept nogil:
    return partial_at(run.parts + tile.first_part + part * partial_floats(tile, run.kv), tile)


cdef void run_task(Run* run, const AttendTask* task, float* memory) noexcept nogil:
    cdef const AttendPlan* plan = run.plan
    cdef const AttendTile* tile = &plan.tiles[task.tile]
    cdef const AttendShare* share
    cdef Py_ssize_t i, own
    cdef Scratch scratch
    cdef Partial partial
    lay_out(&scratch, memory, tile, run.kv)
    if not tile.shared and tile.n_waited_for == 1:
        partial = partial_at(scratch.partial, tile)
        attend_positions(run, task, tile, &scratch, &partial)
        write_rows(run, tile, &partial)
        return
    partial = part_of(run, tile, task.part)
    attend_positions(run, task, tile, &scratch, &partial)
    if not tile.shared:
        finish_task_of(run, task.tile)
        return
    for i in range(tile.first_member, tile.first_member + tile.n_members):
        share = &plan.shares[plan.members[i].span]
        for own in range(share.own_tile, share.own_tile + share.n_own_tiles):
            if have_heads_in_common(tile, &plan.tiles[own]):
                finish_task_of(run, own)


cdef inline void finish_task_of(Run* run, Py_ssize_t tile) noexcept nogil:
    """One of the tasks that a tile waits for is done; after the last its result is merged and written."""
    if atomic_fetch_sub(&run.unfinished[tile], 1) == 1:
        merge_parts(run, &run.plan.tiles[tile])


cdef void merge_parts(Run* run, const AttendTile* tile) noexcept nogil:
    """Merge the parts of a tile, and of the shared tiles that hold some of its positions, into its first."""
    cdef Partial whole = part_of(run, tile, 0)
    cdef Partial part
    cdef const AttendTile* shared
    cdef const AttendLink* link
    cdef Py_ssize_t i, h, next_link = tile.link
    cdef Py_ssize_t first_head, end_head
    for i in range(1, tile.n_parts):
        part = part_of(run, tile, i)
        merge_rows(run, &whole, 0, &part, 0, tile_rows(tile))
    while next_link >= 0:
        link = &run.plan.links[next_link]
        shared = &run.plan.tiles[link.tile]
        first_head = max(tile.first_head, shared.first_head)
        end_head = min(tile.first_head + tile.n_heads, shared.first_head + shared.n_heads)
        for i in range(shared.n_parts if first_head < end_head else 0):
            part = part_of(run, shared, i)
            for h in range(first_head, end_head):
                merge_rows(run, &whole, (h - tile.first_head) * tile.rows_per_head, &part,
                           (h - shared.first_head) * shared.rows_per_head + link.first_row, tile.rows_per_head)
        next_link = link.next
    write_rows(run, tile, &whole)


cdef void merge_rows(Run* run, Partial* whole, Py_ssize_t whole_row, const Partial* part, Py_ssize_t part_row,
                     Py_ssize_t n) noexcept nogil:
    """Take n rows of one part into the whole."""
    cdef Py_ssize_t v_head_dim = run.kv.v.head_dim
    cdef Py_ssize_t acc_stride = round_up(v_head_dim, PAD)
    cdef Py_ssize_t r, i, j
    cdef float row_max, old, new
    cdef float* acc
    for r in range(n):
        i = whole_row + r
        j = part_row + r
        acc = whole.acc + i * acc_stride
        row_max = max(whole.row_max[i], part.row_max[j])
        old = expf(whole.row_max[i] - row_max)
        new = expf(part.row_max[j] - row_max)
        whole.row_max[i] = row_max
        whole.row_sum[i] = whole.row_sum[i] * old + part.row_sum[j] * new
        if old != 1:
            run.kernels.scale_row(acc, acc, old, v_head_dim)
        run.kernels.add_scaled_row(acc, part.acc + j * acc_stride, new, v_head_dim)


cdef void write_rows(Run* run, const AttendTile* tile, const Partial* partial) noexcept nogil:
    """Divide by the sum, sinks included, and write out and lse, for a tile of one sequence."""
    cdef const AttendMember* member = &run.plan.members[tile.first_member]
    cdef Py_ssize_t n_q_heads = run.plan.n_q_heads
    cdef Py_ssize_t v_head_dim = run.kv.v.head_dim
    cdef Py_ssize_t acc_stride = round_up(v_head_dim, PAD)
    cdef Py_ssize_t first_row = run.plan.spans[member.span].first_row + member.first_query
    cdef const HeadsView* out = run.out
    cdef Py_ssize_t h, i, g, head, r = 0
    cdef float row_max, row_sum, factor, sink
    cdef float* acc
    cdef char* dst
    for h in range(tile.n_heads):
        for i in range(member.n_queries):
            for g in range(run.group):
                head = (tile.first_head + h) * run.group + g
                acc = partial.acc + r * acc_stride
                dst = out.data + (first_row + i) * out.row_bytes + head * out.head_bytes
                row_max = partial.row_max[r]
                row_sum = partial.row_sum[r]
                factor = 1
                if run.options.sinks is not NULL:
                    sink = run.options.sinks[head]
                    row_max = max(row_max, sink)
                    factor = expf(partial.row_max[r] - row_max)
                    row_sum = row_sum * factor + expf(sink - row_max)
                factor = factor / row_sum if row_sum != 0 else 0
                if run.kv.v.turn_width:  # sums of rows that were turned: back
                    run.kernels.turn(acc, acc, v_head_dim, run.kv.v.turn_width)
                if out.dtype == SIMD_F32:
                    run.kernels.scale_row(<float*>dst, acc, factor, v_head_dim)
                else:
                    run.kernels.scale_row(acc, acc, factor, v_head_dim)
                    run.kernels.dtypes[out.dtype].narrow(dst, NULL, acc, v_head_dim)
                if run.lse is not NULL:
                    run.lse[(first_row + i) * n_q_heads + head] = row_max + logf(row_sum) if row_sum != 0 else -INFINITY
                r += 1


# --- one task ----------------------------------------------------------------------------------------

# A walk through a sequence's positions: no division for each row.
cdef struct Cursor:
    const int32_t* entry        # of the table
    Py_ssize_t offset           # rows into that block


cdef inline void take_rows(const char** k_rows, const char** v_rows, Cursor* cursor, const KvView* kv,
                           Py_ssize_t first_head, Py_ssize_t n) noexcept nogil:
    """Pointers to the next n positions' rows, from the first head on."""
    cdef Py_ssize_t i = 0, end
    cdef const char* k
    cdef const char* v
    while i < n:
        if cursor.offset == kv.block_size:
            cursor.offset = 0
            cursor.entry += 1
        k = row_at(&kv.k, cursor, first_head)
        v = row_at(&kv.v, cursor, first_head)
        end = min(n, i + kv.block_size - cursor.offset)
        cursor.offset += end - i
        while i < end:
            k_rows[i] = k
            v_rows[i] = v
            k += kv.k.row_bytes
            v += kv.v.row_bytes
            i += 1


cdef void deal_rows(const char** rows, Py_ssize_t n) noexcept nogil:
    """Rows of four parts in turn: row 0, n / 4, n / 2, 3 n / 4, row 1, ... The order of positions that all see is nobody's.

    Kernels read four rows side by side. Where these adjoin, as rows of one head do, the hardware sees them jump about in one
    page, and prefetches nothing; in four pages it follows four streams.
    """
    cdef const char* given[MAX_STEP_POSITIONS]
    cdef Py_ssize_t i
    if n % 4:
        return
    for i in range(n):
        given[i] = rows[i]
    for i in range(n):
        rows[i] = given[i % 4 * (n // 4) + i // 4]


cdef inline const char* row_at(const RowView* view, const Cursor* cursor, Py_ssize_t head) noexcept nogil:
    return (view.rows + cursor.entry[0] * view.block_bytes + cursor.offset * view.row_bytes
            + head * view.head_bytes)


cdef inline bint lie_by_head(const RowView* view) noexcept nogil:
    """Whether a block has all its rows of one head before those of the next."""
    return view.head_bytes > view.row_bytes


cdef inline Py_ssize_t scale_offset(const RowView* view, Py_ssize_t first_head) noexcept nogil:
    """Bytes from where a head's values start in a row to its scales."""
    return view.scales + first_head * (view.n_scales * <Py_ssize_t>sizeof(uint16_t) - view.head_bytes)


cdef void copy_head(float* dst, Py_ssize_t stride, const char** rows, const RowView* view, const simd_dtype* dtype,
                    Py_ssize_t scale_at, Py_ssize_t n) noexcept nogil:
    """Rows of one head side by side, as floats; `rows` then point to them."""
    cdef Py_ssize_t i
    for i in range(n):
        dtype.widen(dst + i * stride, rows[i], <const uint16_t*>(rows[i] + scale_at), view.head_dim)
        rows[i] = <const char*>(dst + i * stride)


cdef inline void call_rows(const char** rows, Py_ssize_t n_bytes, Py_ssize_t n) noexcept nogil:
    """Prefetch so many bytes of n rows."""
    cdef Py_ssize_t i, j
    for i in range(n):
        for j in range((n_bytes + SIMD_LINE_BYTES - 1) // SIMD_LINE_BYTES):
            simd_prefetch(rows[i] + j * SIMD_LINE_BYTES)


cdef void load_queries(Run* run, const AttendTile* tile, Scratch* scratch) noexcept nogil:
    """The tile's queries, turned as K is, times the scale: rows padded with zeros, or panels [head_dim][2 * lanes] of rows.

    Rows go head by head, member by member, query by query, and then by the head's place in its group.
    """
    cdef Py_ssize_t head_dim = run.kv.k.head_dim
    cdef Py_ssize_t q_stride = round_up(head_dim, PAD)
    cdef Py_ssize_t panel = 2 * run.kernels.lanes
    cdef const simd_dtype* dtype = &run.kernels.dtypes[run.q.dtype]
    cdef bint widened = run.q.dtype != SIMD_F32
    cdef const AttendMember* member
    cdef Py_ssize_t h, m, i, g, d, row, r = 0
    cdef const char* given
    cdef const float* src
    cdef float* dst
    cdef float* made
    if tile.by_panels or head_dim < q_stride:
        memset(scratch.q, 0, round_up(tile_rows(tile), PAD) * q_stride * sizeof(float))
    for h in range(tile.first_head, tile.first_head + tile.n_heads):
        for m in range(tile.n_members):
            member = &run.plan.members[tile.first_member + m]
            for i in range(member.n_queries):
                row = run.plan.spans[member.span].first_row + member.first_query + i
                for g in range(run.group):
                    given = run.q.data + row * run.q.row_bytes + (h * run.group + g) * run.q.head_bytes
                    src = <const float*>given
                    made = scratch.k_copy if tile.by_panels else scratch.q + r * q_stride
                    if widened:
                        dtype.widen(made, given, NULL, head_dim)
                        src = made
                    if run.kv.k.turn_width:
                        run.kernels.turn(made, src, head_dim, run.kv.k.turn_width)
                        src = made
                    if tile.by_panels:
                        dst = scratch.q + r // panel * panel * head_dim + r % panel
                        for d in range(head_dim):
                            dst[d * panel] = src[d] * run.options.scale
                    else:
                        run.kernels.scale_row(scratch.q + r * q_stride, src, run.options.scale, head_dim)
                    r += 1


cdef void load_slopes(Run* run, const AttendTile* tile, Py_ssize_t begin, Scratch* scratch) noexcept nogil:
    """The ALiBi slope of each row, and its position, counted from the task's first: so floats hold it exactly."""
    cdef const AttendMember* member
    cdef const QuerySpan* span
    cdef Py_ssize_t h, m, i, g, r = 0
    for h in range(tile.first_head, tile.first_head + tile.n_heads):
        for m in range(tile.n_members):
            member = &run.plan.members[tile.first_member + m]
            span = &run.plan.spans[member.span]
            for i in range(member.n_queries):
                for g in range(run.group):
                    scratch.slopes[r] = run.options.alibi_slopes[h * run.group + g]
                    scratch.places[r] = <float>(span.seq_len - span.query_len + member.first_query + i - begin)
                    r += 1


cdef void hide_scores(float* s, Py_ssize_t s_stride, Py_ssize_t n, const AttendTile* tile, Py_ssize_t group,
                      Py_ssize_t query, Py_ssize_t first, Py_ssize_t end) noexcept nogil:
    """Minus infinity for one query's scores outside [first, end)."""
    cdef Py_ssize_t h, g, t
    for t in range(n):
        if first <= t < end:
            continue
        for h in range(tile.n_heads):
            for g in range(group):
                s[t * s_stride + h * tile.rows_per_head + query * group + g] = -INFINITY


cdef inline bint see_all(const AttendTile* tile, const AttendMember* member, const QuerySpan* span, const AttendOptions* options,
                         Py_ssize_t place, Py_ssize_t n) noexcept nogil:
    """Whether all queries of a tile see n positions from `place` on."""
    cdef Py_ssize_t query = span.seq_len - span.query_len + member.first_query  # the first one's position
    return tile.shared or (first_seen(options, query + member.n_queries - 1) <= place
                           and end_seen(options, query, span.seq_len) >= place + n)


cdef void attend_positions(Run* run, const AttendTask* task, const AttendTile* tile, Scratch* scratch,
                           Partial* partial) noexcept nogil:
    """The online softmax over a task's positions, into its partial result."""
    cdef const KvView* kv = run.kv
    cdef const AttendOptions* options = run.options
    cdef const simd_kernels* simd = run.kernels
    cdef const simd_dtype* k_stored = &simd.dtypes[kv.k.dtype]
    cdef const simd_dtype* v_stored = &simd.dtypes[kv.v.dtype]
    cdef const simd_dtype* v_read = &simd.dtypes[SIMD_F32] if tile.by_panels else v_stored  # those are copied first
    cdef const AttendMember* member = &run.plan.members[tile.first_member]  # the only one, unless shared
    cdef const QuerySpan* span = &run.plan.spans[member.span]
    cdef Py_ssize_t group = run.group, head_dim = kv.k.head_dim, v_head_dim = kv.v.head_dim
    cdef Py_ssize_t k_stride = kv.k.head_bytes // kv.k.item_bytes, v_stride = kv.v.head_bytes // kv.v.item_bytes
    cdef Py_ssize_t q_stride = round_up(head_dim, PAD), acc_stride = round_up(v_head_dim, PAD)
    cdef Py_ssize_t n_rows = tile_rows(tile)
    cdef Py_ssize_t s_stride = round_up(n_rows, PAD)
    cdef Py_ssize_t width = round_up(n_rows, (2 if tile.by_panels else 1) * simd.lanes)
    cdef Py_ssize_t positions = step_positions(tile, kv)
    cdef Py_ssize_t query = span.seq_len - span.query_len + member.first_query  # the first one's position
    cdef Py_ssize_t k_scale_at = 0, v_scale_at = 0
    cdef Py_ssize_t r, i, h, first, end, n, n_next, place
    cdef bint moved, all_seen, all_seen_next, by_head = lie_by_head(&kv.k)
    # ALiBi counts positions in their order.
    cdef bint dealt = by_head and not tile.by_panels and options.alibi_slopes is NULL
    cdef const char** k_rows = scratch.rows
    cdef const char** v_rows = scratch.rows + MAX_STEP_POSITIONS
    cdef const char** next_k_rows = scratch.rows + 2 * MAX_STEP_POSITIONS
    cdef const char** next_v_rows = scratch.rows + 3 * MAX_STEP_POSITIONS
    cdef Cursor cursor
    cdef simd_ahead ahead
    cdef simd_scales k_scales = simd_scales(scratch.k_scales, tile.n_heads * kv.k.n_scales, kv.k.n_scales)
    cdef simd_scales v_scales = simd_scales(scratch.v_scales, tile.n_heads * kv.v.n_scales, kv.v.n_scales)
    cdef simd_scales own_scales = v_scales
    cdef float* s = scratch.s

    for r in range(s_stride):
        partial.row_max[r] = -FLT_MAX
    memset(partial.row_sum, 0, s_stride * sizeof(float))
    memset(partial.acc, 0, n_rows * acc_stride * sizeof(float))
    if task.begin == task.end:
        return
    load_queries(run, tile, scratch)
    if n_rows < width:  # columns past the last row: any finite number
        memset(s, 0, positions * s_stride * sizeof(float))
    if options.alibi_slopes is not NULL:
        memset(scratch.slopes, 0, 2 * s_stride * sizeof(float))
        load_slopes(run, tile, task.begin, scratch)
    if kv.k.scales:
        k_scale_at = scale_offset(&kv.k, tile.first_head)
    if kv.v.scales:
        v_scale_at = scale_offset(&kv.v, tile.first_head)

    cursor.entry = span.table + task.begin // kv.block_size
    cursor.offset = task.begin % kv.block_size
    place = task.begin
    n = min(positions, task.end - place)
    take_rows(k_rows, v_rows, &cursor, kv, tile.first_head, n)
    all_seen = see_all(tile, member, span, options, place, n)
    if dealt and all_seen:
        deal_rows(k_rows, n)
        deal_rows(v_rows, n)
    while n:
        n_next = min(positions, task.end - place - n)
        take_rows(next_k_rows, next_v_rows, &cursor, kv, tile.first_head, n_next)
        all_seen_next = see_all(tile, member, span, options, place + n, n_next)
        if dealt and all_seen_next:
            deal_rows(next_k_rows, n_next)
            deal_rows(next_v_rows, n_next)
        ahead.rows = next_k_rows
        ahead.n_rows = n_next
        ahead.width = stored_bytes(&kv.k) if by_head else tile.n_heads * kv.k.head_bytes
        ahead.n_heads = tile.n_heads if by_head else 1
        ahead.head_bytes = kv.k.head_bytes
        ahead.row = ahead.column = ahead.head = 0

        if tile.by_panels:
            copy_head(scratch.k_copy, q_stride, k_rows, &kv.k, k_stored, k_scale_at, n)
            call_rows(v_rows, stored_bytes(&kv.v), n)
            simd.score_panels(s, s_stride, scratch.q, scratch.k_copy, q_stride, n, n_rows, head_dim)
        else:
            if kv.k.scales:
                simd.load_scales(scratch.k_scales, k_scales.stride, k_rows, k_scale_at, n, k_scales.stride)
            if kv.v.scales:
                simd.load_scales(scratch.v_scales, v_scales.stride, v_rows, v_scale_at, n, v_scales.stride)
            k_stored.score_dots(s, s_stride, scratch.q, q_stride, k_rows, k_stride, &k_scales, by_head, v_rows, v_stride, n,
                                tile.n_heads, tile.rows_per_head, head_dim)
        if options.softcap != 0:
            simd.cap_scores(s, s_stride, n, width, options.softcap)
        if options.alibi_slopes is not NULL:
            simd.slope_scores(s, s_stride, n, width, scratch.slopes, scratch.places, <float>(place - task.begin))

        if not all_seen:
            for i in range(member.n_queries):
                first = first_seen(options, query + i) - place
                end = end_seen(options, query + i, span.seq_len) - place
                hide_scores(s, s_stride, n, tile, group, i, first, end)
        moved = simd.softmax_tile(s, s_stride, n, width, partial.row_max, partial.row_sum, scratch.rescale)
        if moved and place > task.begin:
            rescale_rows(run, partial, scratch.rescale, n_rows, acc_stride)
        if tile.by_panels:
            copy_head(scratch.v_copy, acc_stride, v_rows, &kv.v, v_stored, v_scale_at, n)
        if all_seen:
            v_read.accumulate_rows(partial.acc, acc_stride, s, s_stride, v_rows, 0, v_stride, &v_scales, &ahead, n,
                                   tile.n_heads, tile.rows_per_head, v_head_dim)
        else:
            # What a query does not see must not reach it even as 0 * v, since v may be NaN; so each takes its own
            # range of rows.
            for i in range(member.n_queries):
                first = max(0, first_seen(options, query + i) - place)
                end = min(n, end_seen(options, query + i, span.seq_len) - place)
                if first >= end:
                    continue
                for h in range(tile.n_heads):
                    r = h * tile.rows_per_head + i * group
                    own_scales.scales = v_scales.scales + first * v_scales.stride + h * v_scales.per_head
                    v_read.accumulate_rows(
                        partial.acc + r * acc_stride, acc_stride, s + first * s_stride + r, s_stride,
                        v_rows + first, h * v_stride, v_stride, &own_scales, &ahead, end - first, 1, group, v_head_dim)
        place += n
        n = n_next
        all_seen = all_seen_next
        k_rows, next_k_rows = next_k_rows, k_rows
        v_rows, next_v_rows = next_v_rows, v_rows


cdef inline void rescale_rows(Run* run, Partial* partial, const float* rescale, Py_ssize_t n_rows,
                              Py_ssize_t acc_stride) noexcept nogil:
    """Shrink what was accumulated before a greater score came."""
    cdef Py_ssize_t r
    cdef float* acc
    for r in range(n_rows):
        if rescale[r] != 1:
            acc = partial.acc + r * acc_stride
            run.kernels.scale_row(acc, acc, rescale[r], run.kv.v.head_dim)
