"""Attention over K and V in blocks.

A task (see plan.pyx) runs through its positions a few rows at a time. For each of its query rows it keeps
the greatest score so far, most; the sum of exp(score - most), total; and the sum of exp(score - most) * v,
acc: the online softmax. Whoever finishes the last part of a tile merges all parts, in their order, and
writes the result.

Sources: Milakov & Gimelshein 2018 (online softmax); Dao 2023, FlashAttention-2, section 3.1 (tiles,
division at the end); Dao et al. 2023, Flash-Decoding (parts merged by log-sum-exp).
"""

from libc.float cimport FLT_MAX
from libc.math cimport INFINITY, expf, logf
from libc.stdint cimport int32_t, uintptr_t
from libc.stdlib cimport calloc, free, malloc
from libc.string cimport memcpy, memset

from pagedkv._kernels.parallel cimport parallel_for
from pagedkv._kernels.plan cimport (
    MAX_POSITIONS, PAD, AttendOptions, AttendPlan, AttendTask, AttendTile, KvView, QuerySpan, Scratch,
    end_seen, first_seen, free_plan, lay_out, partial_floats, plan_attend, round_up, step_positions, tile_rows)

import os


cdef extern from "simd.h" nogil:
    ctypedef struct simd_ahead:
        const float** rows
        Py_ssize_t n_rows
        Py_ssize_t width
        Py_ssize_t row
        Py_ssize_t column

    ctypedef struct simd_kernels:
        const char* name
        Py_ssize_t lanes
        void score_dots(float* s, Py_ssize_t s_stride, const float* q, Py_ssize_t q_stride, const float** k_rows,
                        const float** ahead, Py_ssize_t ahead_dim, Py_ssize_t n, Py_ssize_t n_heads,
                        Py_ssize_t n_rows, Py_ssize_t head_dim) noexcept nogil
        void score_panels(float* s, Py_ssize_t s_stride, const float* panels, const float** k_rows, Py_ssize_t n,
                          Py_ssize_t n_rows, Py_ssize_t head_dim) noexcept nogil
        void cap_scores(float* s, Py_ssize_t s_stride, Py_ssize_t n, Py_ssize_t width, float cap) noexcept nogil
        void slope_scores(float* s, Py_ssize_t s_stride, Py_ssize_t n, Py_ssize_t width, const float* slopes,
                          const float* places, float first) noexcept nogil
        int softmax_tile(float* s, Py_ssize_t s_stride, Py_ssize_t n, Py_ssize_t width, float* most, float* total,
                         float* fade) noexcept nogil
        void accumulate_rows(float* acc, Py_ssize_t acc_stride, const float* p, Py_ssize_t p_stride,
                             const float** v_rows, Py_ssize_t v_offset, simd_ahead* ahead, Py_ssize_t n,
                             Py_ssize_t n_heads, Py_ssize_t n_rows, Py_ssize_t v_head_dim) noexcept nogil
        void scale_row(float* dst, const float* src, float factor, Py_ssize_t n) noexcept nogil
        void add_scaled_row(float* dst, const float* src, float factor, Py_ssize_t n) noexcept nogil

    const simd_kernels* simd_supported(int i)


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
    const float* q
    float* out
    float* lse
    float* parts
    float* scratch              # plan.scratch_floats for each worker
    atomic_ptrdiff_t* unfinished    # parts of each tile
    atomic_ptrdiff_t next_task


# The running state of the online softmax of one part of a tile.
cdef struct Partial:
    float* most                 # [s_stride]: the greatest score
    float* total                # [s_stride]: the sum of exp(score - most)
    float* acc                  # [n_rows, acc_stride]


# --- the run -----------------------------------------------------------------------------------------

cdef int attend_batch(float* out, float* lse, const float* q, const KvView* kv, const QuerySpan* spans,
                      Py_ssize_t n_spans, Py_ssize_t n_q_heads, const AttendOptions* options,
                      int n_threads) noexcept nogil:
    cdef AttendPlan plan
    memset(&plan, 0, sizeof(plan))
    cdef int failed = plan_attend(&plan, kv, spans, n_spans, n_q_heads, options)
    if not failed:
        failed = run_attend(&plan, out, lse, q, kv, options, n_threads)
    free_plan(&plan)
    return failed


cdef int run_attend(const AttendPlan* plan, float* out, float* lse, const float* q, const KvView* kv,
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
        atomic_init(&run.unfinished[i], plan.tiles[i].n_parts)
    atomic_init(&run.next_task, 0)
    run.plan = plan
    run.kv = kv
    run.options = options
    run.kernels = kernels
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


cdef inline Partial partial_at(float* base, const AttendTile* tile, Py_ssize_t group) noexcept nogil:
    cdef Py_ssize_t s_stride = round_up(tile_rows(tile, group), PAD)
    cdef Partial partial
    partial.most = base
    partial.total = base + s_stride
    partial.acc = base + 2 * s_stride
    return partial


cdef void run_task(Run* run, const AttendTask* task, float* memory) noexcept nogil:
    cdef const AttendTile* tile = &run.plan.tiles[task.tile]
    cdef const KvView* kv = run.kv
    cdef Py_ssize_t group = run.plan.n_q_heads // kv.n_kv_heads
    cdef Scratch scratch
    cdef Partial partial
    lay_out(&scratch, memory, tile, kv, group)
    if tile.n_parts == 1:
        partial = partial_at(scratch.partial, tile, group)
        attend_positions(run, task, tile, group, &scratch, &partial)
        write_rows(run, tile, group, &partial)
        return
    partial = partial_at(
        run.parts + tile.first_part + task.part * partial_floats(tile, kv, group), tile, group)
    attend_positions(run, task, tile, group, &scratch, &partial)
    if atomic_fetch_sub(&run.unfinished[task.tile], 1) == 1:
        merge_parts(run, tile, group)


cdef void merge_parts(Run* run, const AttendTile* tile, Py_ssize_t group) noexcept nogil:
    """Merge the parts of a tile into its first, in their order, and write the result."""
    cdef Py_ssize_t size = partial_floats(tile, run.kv, group)
    cdef Py_ssize_t acc_stride = round_up(run.kv.v_head_dim, PAD)
    cdef float* base = run.parts + tile.first_part
    cdef Partial whole = partial_at(base, tile, group)
    cdef Partial part
    cdef Py_ssize_t i, r
    cdef float most, old, new
    for i in range(1, tile.n_parts):
        part = partial_at(base + i * size, tile, group)
        for r in range(tile_rows(tile, group)):
            most = max(whole.most[r], part.most[r])
            old = expf(whole.most[r] - most)
            new = expf(part.most[r] - most)
            whole.most[r] = most
            whole.total[r] = whole.total[r] * old + part.total[r] * new
            if old != 1:
                run.kernels.scale_row(
                    whole.acc + r * acc_stride, whole.acc + r * acc_stride, old, run.kv.v_head_dim)
            run.kernels.add_scaled_row(
                whole.acc + r * acc_stride, part.acc + r * acc_stride, new, run.kv.v_head_dim)
    write_rows(run, tile, group, &whole)


cdef void write_rows(Run* run, const AttendTile* tile, Py_ssize_t group, const Partial* partial) noexcept nogil:
    """Divide by the sum, sinks included, and write out and lse."""
    cdef Py_ssize_t n_q_heads = run.plan.n_q_heads
    cdef Py_ssize_t v_head_dim = run.kv.v_head_dim
    cdef Py_ssize_t acc_stride = round_up(v_head_dim, PAD)
    cdef Py_ssize_t first_row = run.plan.spans[tile.span].first_row + tile.first_query
    cdef Py_ssize_t h, i, g, head, place, r = 0
    cdef float most, total, factor, sink
    for h in range(tile.n_heads):
        for i in range(tile.n_queries):
            for g in range(group):
                head = (tile.first_head + h) * group + g
                place = (first_row + i) * n_q_heads + head
                most = partial.most[r]
                total = partial.total[r]
                factor = 1
                if run.options.sinks is not NULL:
                    sink = run.options.sinks[head]
                    most = max(most, sink)
                    factor = expf(partial.most[r] - most)
                    total = total * factor + expf(sink - most)
                factor = factor / total if total != 0 else 0
                run.kernels.scale_row(run.out + place * v_head_dim, partial.acc + r * acc_stride, factor, v_head_dim)
                if run.lse is not NULL:
                    run.lse[place] = most + logf(total) if total != 0 else -INFINITY
                r += 1


# --- one task ----------------------------------------------------------------------------------------

# A walk through a sequence's positions: no division for each row.
cdef struct Cursor:
    const int32_t* entry        # of the table
    Py_ssize_t offset           # rows into that block


cdef inline void take_rows(const float** k_rows, const float** v_rows, Cursor* cursor, const KvView* kv,
                           Py_ssize_t first_head, Py_ssize_t n) noexcept nogil:
    """Pointers to the next n positions' rows, from the first head on."""
    cdef Py_ssize_t i, row
    for i in range(n):
        if cursor.offset == kv.block_size:
            cursor.offset = 0
            cursor.entry += 1
        row = cursor.entry[0] * kv.block_size + cursor.offset
        k_rows[i] = kv.k + row * kv.k_width + first_head * kv.head_dim
        v_rows[i] = kv.v + row * kv.v_width + first_head * kv.v_head_dim
        cursor.offset += 1


cdef inline void copy_rows(float* dst, Py_ssize_t stride, const float** rows, Py_ssize_t n,
                           Py_ssize_t width) noexcept nogil:
    """Rows of one head side by side, and `rows` to point at them."""
    cdef Py_ssize_t i
    for i in range(n):
        memcpy(dst + i * stride, rows[i], width * sizeof(float))
        rows[i] = dst + i * stride


cdef void load_queries(Run* run, const AttendTile* tile, Py_ssize_t group, Scratch* scratch) noexcept nogil:
    """The tile's queries, times the scale: rows padded with zeros, or panels [head_dim][2 * lanes] of rows.

    Rows go head by head, query by query, and then by the head's place in its group.
    """
    cdef Py_ssize_t head_dim = run.kv.head_dim
    cdef Py_ssize_t q_stride = round_up(head_dim, PAD)
    cdef Py_ssize_t panel = 2 * run.kernels.lanes
    cdef Py_ssize_t n_rows = tile_rows(tile, group)
    cdef Py_ssize_t first_row = run.plan.spans[tile.span].first_row + tile.first_query
    cdef Py_ssize_t h, i, g, d, r = 0
    cdef const float* src
    cdef float* dst
    if tile.by_panels or head_dim < q_stride:
        memset(scratch.q, 0, round_up(n_rows, PAD) * q_stride * sizeof(float))
    for h in range(tile.n_heads):
        for i in range(tile.n_queries):
            for g in range(group):
                src = run.q + ((first_row + i) * run.plan.n_q_heads + (tile.first_head + h) * group + g) * head_dim
                if tile.by_panels:
                    dst = scratch.q + r // panel * panel * head_dim + r % panel
                    for d in range(head_dim):
                        dst[d * panel] = src[d] * run.options.scale
                else:
                    run.kernels.scale_row(scratch.q + r * q_stride, src, run.options.scale, head_dim)
                r += 1


cdef void load_slopes(Run* run, const AttendTile* tile, Py_ssize_t group, Py_ssize_t begin,
                      Scratch* scratch) noexcept nogil:
    """The ALiBi slope of each row, and its position, counted from the task's first: so floats hold it exactly."""
    cdef const QuerySpan* span = &run.plan.spans[tile.span]
    cdef Py_ssize_t position = span.seq_len - span.query_len + tile.first_query
    cdef Py_ssize_t h, i, g, r = 0
    for h in range(tile.n_heads):
        for i in range(tile.n_queries):
            for g in range(group):
                scratch.slopes[r] = run.options.alibi_slopes[(tile.first_head + h) * group + g]
                scratch.places[r] = <float>(position + i - begin)
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
                s[t * s_stride + (h * tile.n_queries + query) * group + g] = -INFINITY


cdef void attend_positions(Run* run, const AttendTask* task, const AttendTile* tile, Py_ssize_t group,
                           Scratch* scratch, Partial* partial) noexcept nogil:
    """The online softmax over a task's positions, into its partial result."""
    cdef const KvView* kv = run.kv
    cdef const AttendOptions* options = run.options
    cdef const simd_kernels* simd = run.kernels
    cdef const QuerySpan* span = &run.plan.spans[tile.span]
    cdef Py_ssize_t head_dim = kv.head_dim, v_head_dim = kv.v_head_dim
    cdef Py_ssize_t q_stride = round_up(head_dim, PAD), acc_stride = round_up(v_head_dim, PAD)
    cdef Py_ssize_t n_rows = tile_rows(tile, group)
    cdef Py_ssize_t s_stride = round_up(n_rows, PAD)
    cdef Py_ssize_t width = round_up(n_rows, (2 if tile.by_panels else 1) * simd.lanes)
    cdef Py_ssize_t rows_per_head = tile.n_queries * group
    cdef Py_ssize_t positions = step_positions(tile, kv)
    cdef Py_ssize_t query = span.seq_len - span.query_len + tile.first_query   # the first one's position
    cdef Py_ssize_t r, i, h, first, end, n, n_next, place
    cdef bint moved
    cdef const float** k_rows = scratch.rows
    cdef const float** v_rows = scratch.rows + MAX_POSITIONS
    cdef const float** next_k_rows = scratch.rows + 2 * MAX_POSITIONS
    cdef const float** next_v_rows = scratch.rows + 3 * MAX_POSITIONS
    cdef Cursor cursor
    cdef simd_ahead ahead
    cdef float* s = scratch.s

    for r in range(s_stride):
        partial.most[r] = -FLT_MAX
    memset(partial.total, 0, s_stride * sizeof(float))
    memset(partial.acc, 0, n_rows * acc_stride * sizeof(float))
    if task.begin == task.end:
        return
    load_queries(run, tile, group, scratch)
    if n_rows < width:  # columns past the last row: any finite number
        memset(s, 0, positions * s_stride * sizeof(float))
    if options.alibi_slopes is not NULL:
        memset(scratch.slopes, 0, 2 * s_stride * sizeof(float))
        load_slopes(run, tile, group, task.begin, scratch)

    cursor.entry = span.table + task.begin // kv.block_size
    cursor.offset = task.begin % kv.block_size
    place = task.begin
    n = min(positions, task.end - place)
    take_rows(k_rows, v_rows, &cursor, kv, tile.first_head, n)
    while n:
        n_next = min(positions, task.end - place - n)
        take_rows(next_k_rows, next_v_rows, &cursor, kv, tile.first_head, n_next)
        ahead.rows = next_k_rows
        ahead.n_rows = n_next
        ahead.width = tile.n_heads * head_dim
        ahead.row = ahead.column = 0

        if tile.by_panels:
            copy_rows(scratch.k_copy, q_stride, k_rows, n, head_dim)
            copy_rows(scratch.v_copy, acc_stride, v_rows, n, v_head_dim)
            simd.score_panels(s, s_stride, scratch.q, k_rows, n, n_rows, head_dim)
        else:
            simd.score_dots(s, s_stride, scratch.q, q_stride, k_rows, v_rows, v_head_dim, n, tile.n_heads,
                            rows_per_head, head_dim)
        if options.softcap != 0:
            simd.cap_scores(s, s_stride, n, width, options.softcap)
        if options.alibi_slopes is not NULL:
            simd.slope_scores(s, s_stride, n, width, scratch.slopes, scratch.places, <float>(place - task.begin))

        if (first_seen(options, query + tile.n_queries - 1) <= place
                and end_seen(options, query, span.seq_len) >= place + n):
            moved = simd.softmax_tile(s, s_stride, n, width, partial.most, partial.total, scratch.fade)
            if moved and place > task.begin:
                fade_rows(run, partial, scratch.fade, n_rows, acc_stride)
            simd.accumulate_rows(partial.acc, acc_stride, s, s_stride, v_rows, 0, &ahead, n, tile.n_heads,
                                 rows_per_head, v_head_dim)
        else:
            # Some query does not see all of these. What it does not see must not reach it even as 0 * v,
            # since v may be NaN; so each query takes its own range of rows.
            for i in range(tile.n_queries):
                first = first_seen(options, query + i) - place
                end = end_seen(options, query + i, span.seq_len) - place
                hide_scores(s, s_stride, n, tile, group, i, first, end)
            moved = simd.softmax_tile(s, s_stride, n, width, partial.most, partial.total, scratch.fade)
            if moved and place > task.begin:
                fade_rows(run, partial, scratch.fade, n_rows, acc_stride)
            for i in range(tile.n_queries):
                first = max(0, first_seen(options, query + i) - place)
                end = min(n, end_seen(options, query + i, span.seq_len) - place)
                if first >= end:
                    continue
                for h in range(tile.n_heads):
                    r = h * rows_per_head + i * group
                    simd.accumulate_rows(
                        partial.acc + r * acc_stride, acc_stride, s + first * s_stride + r, s_stride,
                        v_rows + first, h * v_head_dim, &ahead, end - first, 1, group, v_head_dim)
        place += n
        n = n_next
        k_rows, next_k_rows = next_k_rows, k_rows
        v_rows, next_v_rows = next_v_rows, v_rows


cdef inline void fade_rows(Run* run, Partial* partial, const float* fade, Py_ssize_t n_rows,
                           Py_ssize_t acc_stride) noexcept nogil:
    """Shrink what was accumulated before a greater score came."""
    cdef Py_ssize_t r
    cdef float* acc
    for r in range(n_rows):
        if fade[r] != 1:
            acc = partial.acc + r * acc_stride
            run.kernels.scale_row(acc, acc, fade[r], run.kv.v_head_dim)


# --- which instruction set ---------------------------------------------------------------------------

cdef const simd_kernels* kernels = simd_supported(0)


def get_simd():
    """The instruction set in use."""
    return kernels.name.decode()


def list_simd():
    """The instruction sets that this build has and this machine can run, the best first."""
    cdef list names = []
    while simd_supported(<int>len(names)) is not NULL:
        names.append(simd_supported(<int>len(names)).name.decode())
    return names


def set_simd(name):
    """Use another instruction set, in the whole process, from the next call on."""
    global kernels
    names = list_simd()
    if name not in names:
        raise ValueError(f"PAGEDKV_SIMD: expected one of {', '.join(names)}, which this machine can run, got {name!r}")
    kernels = simd_supported(names.index(name))


def apply_exp(float[::1] x not None):
    """exp of numbers that are not positive, in place, as the kernels compute it; their count a multiple of 32."""
    cdef float* zeros
    if x.shape[0] % PAD:
        raise ValueError(f"x: expected a multiple of {PAD} numbers, got {x.shape[0]}")
    zeros = <float*>calloc(3 * max(x.shape[0], 1), sizeof(float))
    if zeros is NULL:
        raise MemoryError
    if x.shape[0]:
        kernels.softmax_tile(&x[0], x.shape[0], 1, x.shape[0], zeros, zeros + x.shape[0], zeros + 2 * x.shape[0])
    free(zeros)


if os.environ.get("PAGEDKV_SIMD"):
    set_simd(os.environ["PAGEDKV_SIMD"])
