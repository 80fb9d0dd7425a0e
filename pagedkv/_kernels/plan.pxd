# The shape of a batch of attention, and how it is cut into tasks. See plan.pyx.

from libc.stdint cimport int32_t

from pagedkv._kernels.simd cimport PAD

# K or V of one layer: head h of row r of block b starts at rows + b * block_bytes + r * row_bytes + h * head_bytes.
cdef struct RowView:
    const char* rows            # row 0 of block 0
    Py_ssize_t block_bytes      # from one block to the next
    Py_ssize_t row_bytes        # from one row of a block to the next
    Py_ssize_t head_bytes       # from one head to the next: a multiple of item_bytes
    Py_ssize_t head_dim         # values of a head, side by side
    Py_ssize_t item_bytes       # of a value
    int dtype                   # SIMD_F32 ...
    Py_ssize_t scales           # bytes from a row's start to its heads' float16 scales; 0: there are none
    Py_ssize_t n_scales         # of a head
    Py_ssize_t turn_width       # values of a head that were turned together; 0: they are as they came

# One layer's K and V. Contiguous K and V are one block of seq_len rows, with the table {0}.
cdef struct KvView:
    RowView k
    RowView v
    Py_ssize_t block_size       # rows
    Py_ssize_t n_kv_heads

# q or out: n_heads heads of head_dim values, side by side, in each row.
cdef struct HeadsView:
    char* data
    Py_ssize_t row_bytes        # from one row to the next
    Py_ssize_t head_bytes       # from one head to the next
    int dtype                   # SIMD_F32, SIMD_F16 or SIMD_BF16

# One sequence of the batch: its last query_len positions ask.
cdef struct QuerySpan:
    const int32_t* table        # position p is row p % block_size of block table[p // block_size]
    Py_ssize_t seq_len          # positions that can be read, the new ones included
    Py_ssize_t first_position   # the first that can still be read: the caller lets nothing ask for one before it
    Py_ssize_t query_len
    Py_ssize_t first_row        # its first row in q and out

cdef struct AttendOptions:
    float scale
    float softcap               # 0: none
    Py_ssize_t window           # positions that a query sees, itself included; 0: no limit
    bint causal
    const float* sinks          # [n_q_heads] or NULL
    const float* alibi_slopes   # [n_q_heads] or NULL

# Some queries of one sequence, as rows of a tile.
cdef struct AttendMember:
    Py_ssize_t span
    Py_ssize_t first_query      # counted in the sequence's queries
    Py_ssize_t n_queries
    Py_ssize_t first_row        # of each head's rows in the tile

# Query rows that go through the same positions together, for some KV heads. A tile of one sequence ends in its
# result; a shared one, whose sequences have those positions' blocks in common, in partial results for theirs.
cdef struct AttendTile:
    Py_ssize_t first_member
    Py_ssize_t n_members
    Py_ssize_t rows_per_head
    Py_ssize_t first_head       # KV heads
    Py_ssize_t n_heads
    bint shared
    bint by_panels              # lanes along query rows, else along head_dim
    Py_ssize_t n_parts          # its positions are split into so many tasks
    Py_ssize_t first_part       # offset of their partial results, where they are merged
    Py_ssize_t n_waited_for     # tasks whose results make up this tile's: its own, and of shared tiles
    Py_ssize_t link             # the first of those shared tiles, or -1

# A shared tile holds part of another's result.
cdef struct AttendLink:
    Py_ssize_t tile
    Py_ssize_t first_row        # of each head's rows there
    Py_ssize_t next             # or -1

# What a sequence has in common with others.
cdef struct AttendShare:
    Py_ssize_t end              # its positions before it are in shared tiles
    Py_ssize_t link             # the first of them, or -1
    Py_ssize_t own_tile         # the first of its own
    Py_ssize_t n_own_tiles

# A tile's positions [begin, end): one piece of work for one thread.
cdef struct AttendTask:
    Py_ssize_t tile
    Py_ssize_t part
    Py_ssize_t begin
    Py_ssize_t end
    double cost

# What a batch's shape asks for. Points into the spans it was made from; serves every layer of the same
# sizes, and is only read by run_attend.
cdef struct AttendPlan:
    const QuerySpan* spans
    Py_ssize_t n_q_heads
    Py_ssize_t n_kv_heads
    Py_ssize_t head_dim
    Py_ssize_t v_head_dim
    Py_ssize_t item_bytes       # of a value of K or V
    AttendMember* members
    AttendTile* tiles
    AttendLink* links
    AttendTask* tasks
    AttendShare* shares         # of each span; NULL where nothing is shared
    Py_ssize_t n_members
    Py_ssize_t n_tiles
    Py_ssize_t n_links
    Py_ssize_t n_tasks
    Py_ssize_t part_floats      # memory for partial results
    Py_ssize_t scratch_floats   # memory for each thread
    double cost

# Fills a zeroed plan from the sizes in kv, and window and causal in options. Nonzero: out of memory; free it all the same.
cdef int plan_attend(AttendPlan* plan, const KvView* kv, const QuerySpan* spans, Py_ssize_t n_spans,
                     Py_ssize_t n_q_heads, const AttendOptions* options) noexcept nogil
cdef void free_plan(AttendPlan* plan) noexcept nogil

# The plans of one batch, made when first asked for: layers differ in their windows and sizes, but for that of a block.
# Starts zeroed.
cdef enum:
    PLAN_KINDS = 4

cdef struct PlanKind:
    Py_ssize_t window
    bint causal
    AttendPlan plan

cdef struct PlanShelf:
    PlanKind kinds[PLAN_KINDS]
    Py_ssize_t n_made           # over time; the newest PLAN_KINDS are there

# The batch's plan for these sizes and options; NULL: out of memory. Valid until the next call.
cdef const AttendPlan* find_plan(PlanShelf* shelf, const KvView* kv, const QuerySpan* spans, Py_ssize_t n_spans,
                                 Py_ssize_t n_q_heads, const AttendOptions* options) noexcept nogil
cdef void free_plans(PlanShelf* shelf) noexcept nogil

# --- memory ------------------------------------------------------------------------------------------

cdef enum:
    # Positions at a time: of panels, and at least and at most for all heads together.
    PANEL_POSITIONS = 48
    MIN_STEP_POSITIONS = 8
    MAX_STEP_POSITIONS = 64
    # And as many bytes of K as may lie in the second-level cache beside as many of V, and the next of K.
    STEP_BYTES = 96 << 10

# One thread's memory, cut up for a task.
cdef struct Scratch:
    float* q                    # [rows, q_stride], or panels
    float* s                    # [positions, s_stride]
    float* rescale              # [s_stride] each
    float* slopes
    float* places
    float* partial              # row_max, row_sum and acc, where they are not a part's
    float* k_copy               # rows of one head, side by side, as floats
    float* v_copy
    float* k_scales             # [positions, n_heads * n_scales] each
    float* v_scales
    const char** rows           # K, V, and the next K, V: MAX_STEP_POSITIONS each


# Cuts a thread's memory up for a tile; returns the floats used. With a NULL base it only counts.
cdef Py_ssize_t lay_out(Scratch* scratch, float* base, const AttendTile* tile, const KvView* kv) noexcept nogil

# --- sizes -------------------------------------------------------------------------------------------

cdef inline Py_ssize_t round_up(Py_ssize_t n, Py_ssize_t multiple) noexcept nogil:
    return (n + multiple - 1) // multiple * multiple


cdef inline Py_ssize_t stored_bytes(const RowView* view) noexcept nogil:
    """Of a head's values in one row."""
    return view.head_dim * view.item_bytes


cdef inline Py_ssize_t tile_rows(const AttendTile* tile) noexcept nogil:
    return tile.n_heads * tile.rows_per_head


cdef inline bint have_heads_in_common(const AttendTile* a, const AttendTile* b) noexcept nogil:
    return a.first_head < b.first_head + b.n_heads and b.first_head < a.first_head + a.n_heads


cdef inline Py_ssize_t step_positions(const AttendTile* tile, const KvView* kv) noexcept nogil:
    """How many positions a task takes at a time."""
    cdef Py_ssize_t n
    if tile.by_panels:
        return PANEL_POSITIONS
    n = STEP_BYTES // (tile.n_heads * stored_bytes(&kv.k)) // 4 * 4
    return min(max(n, MIN_STEP_POSITIONS), MAX_STEP_POSITIONS)


cdef inline Py_ssize_t partial_floats(const AttendTile* tile, const KvView* kv) noexcept nogil:
    cdef Py_ssize_t n_rows = tile_rows(tile)
    return 2 * round_up(n_rows, PAD) + n_rows * round_up(kv.v.head_dim, PAD)


# --- who sees what -----------------------------------------------------------------------------------

cdef inline Py_ssize_t first_seen(const AttendOptions* options, Py_ssize_t position) noexcept nogil:
    """The first position that the query at `position` sees. Never falls as position grows."""
    return max(0, position - options.window + 1) if options.window else 0


cdef inline Py_ssize_t end_seen(
        const AttendOptions* options, Py_ssize_t position, Py_ssize_t seq_len) noexcept nogil:
    """One past the last that it sees; at most `first_seen` if that is none. Never falls as position grows."""
    cdef Py_ssize_t end = seq_len
    if options.causal:
        end = position + 1
    elif options.window and position + options.window < seq_len:
        end = position + options.window
    return max(0, end)
