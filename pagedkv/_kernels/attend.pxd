# Attention over K and V in blocks. See attend.pyx.

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

# out [n_rows, n_q_heads, v_head_dim] and, unless NULL, lse [n_rows, n_q_heads] from q [n_rows, n_q_heads, head_dim].
# Nonzero: out of memory, and nothing was written.
cdef int run_attend(const AttendPlan* plan, float* out, float* lse, const float* q, const KvView* kv,
                    const AttendOptions* options, int n_threads) noexcept nogil

# Both, for a plan that is used once.
cdef int attend_batch(float* out, float* lse, const float* q, const KvView* kv, const QuerySpan* spans,
                      Py_ssize_t n_spans, Py_ssize_t n_q_heads, const AttendOptions* options,
                      int n_threads) noexcept nogil
