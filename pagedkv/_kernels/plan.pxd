# The shape of a batch of attention, and how it is cut into tasks. See plan.pyx.

from libc.stdint cimport int32_t

# One layer's K and V. Contiguous K and V are one block of seq_len rows, with the table {0}.
cdef struct KvView:
    const float* k              # row 0 of block 0
    const float* v
    Py_ssize_t k_width          # floats from one row to the next
    Py_ssize_t v_width
    Py_ssize_t block_size       # rows
    Py_ssize_t n_kv_heads
    Py_ssize_t head_dim
    Py_ssize_t v_head_dim

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

# Some queries of one sequence, for some KV heads: what has one softmax.
cdef struct AttendTile:
    Py_ssize_t span
    Py_ssize_t first_query      # counted in the sequence's queries
    Py_ssize_t n_queries
    Py_ssize_t first_head       # KV heads
    Py_ssize_t n_heads
    bint by_panels              # lanes along query rows, else along head_dim
    Py_ssize_t n_parts          # its positions are split into so many tasks, whose results are merged
    Py_ssize_t first_part       # offset of its partial results, where n_parts > 1

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
    AttendTile* tiles
    AttendTask* tasks
    Py_ssize_t n_tiles
    Py_ssize_t n_tasks
    Py_ssize_t part_floats      # memory for partial results
    Py_ssize_t scratch_floats   # memory for each thread
    double cost

# Fills a zeroed plan from the sizes in kv, and window and causal in options. Nonzero: out of memory; free it all the same.
cdef int plan_attend(AttendPlan* plan, const KvView* kv, const QuerySpan* spans, Py_ssize_t n_spans,
                     Py_ssize_t n_q_heads, const AttendOptions* options) noexcept nogil
cdef void free_plan(AttendPlan* plan) noexcept nogil

# --- memory ------------------------------------------------------------------------------------------

cdef enum:
    # Rows of scores, of q and of acc start on multiples of this many floats: two vectors of any set.
    PAD = 32
    # Positions at a time: of panels, and at least and at most for all heads together.
    PANEL_POSITIONS = 48
    MIN_POSITIONS = 8
    MAX_POSITIONS = 64
    # And as many bytes of K as may lie in the second-level cache beside as many of V, and the next of K.
    STEP_BYTES = 96 << 10

# One thread's memory, cut up for a task.
cdef struct Scratch:
    float* q                    # [n_rows, q_stride], or panels
    float* s                    # [positions, s_stride]
    float* fade                 # [s_stride] each
    float* slopes
    float* places
    float* partial              # m, l and acc, where they are not a part's
    float* k_copy               # rows of one head, side by side
    float* v_copy
    const float** rows          # K, V, and the next K, V: MAX_POSITIONS each


# Cuts a thread's memory up for a tile; returns the floats used. With a NULL base it only counts.
cdef Py_ssize_t lay_out(Scratch* scratch, float* base, const AttendTile* tile, const KvView* kv,
                        Py_ssize_t group) noexcept nogil

# --- sizes -------------------------------------------------------------------------------------------

cdef inline Py_ssize_t round_up(Py_ssize_t n, Py_ssize_t multiple) noexcept nogil:
    return (n + multiple - 1) // multiple * multiple


cdef inline Py_ssize_t tile_rows(const AttendTile* tile, Py_ssize_t group) noexcept nogil:
    return tile.n_heads * tile.n_queries * group


cdef inline Py_ssize_t step_positions(const AttendTile* tile, const KvView* kv) noexcept nogil:
    """How many positions a task takes at a time."""
    cdef Py_ssize_t n
    if tile.by_panels:
        return PANEL_POSITIONS
    n = STEP_BYTES // <Py_ssize_t>(tile.n_heads * kv.head_dim * sizeof(float)) // 4 * 4
    return min(max(n, MIN_POSITIONS), MAX_POSITIONS)


cdef inline Py_ssize_t partial_floats(const AttendTile* tile, const KvView* kv, Py_ssize_t group) noexcept nogil:
    cdef Py_ssize_t n_rows = tile_rows(tile, group)
    return 2 * round_up(n_rows, PAD) + n_rows * round_up(kv.v_head_dim, PAD)


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
