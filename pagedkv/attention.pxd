# Attention for whoever has a batch ready. See attention.pyx.

cimport numpy as cnp

from pagedkv._kernels.plan cimport AttendOptions, HeadsView, KvView, PlanShelf, QuerySpan
from pagedkv.store cimport PagedKvStore

# One layer of a store, as the kernels see it.
cdef void view_layer(KvView* kv, PagedKvStore store, Py_ssize_t layer) noexcept

# What a call asks: its arguments beside K and V, converted. The caller's code has done what it does; the arrays are
# looked at once more before they are read.
cdef class Asked:
    cdef cnp.ndarray q, sinks, alibi_slopes     # or None
    cdef object out
    cdef AttendOptions options                  # without the addresses
    cdef bint return_lse

cdef Asked as_asked(
    object q, Py_ssize_t head_dim, object scale, object window, object softcap, object sinks, object alibi_slopes,
    object causal, object out, object return_lse)

# The options alone, for who takes q and out by himself; `read_heads` gives the addresses of the arrays among them.
cdef Asked as_options(
    Py_ssize_t n_q_heads, Py_ssize_t head_dim, object scale, object window, object softcap, object sinks,
    object alibi_slopes, object causal, object return_lse)
# A number for each query head, [n_q_heads], that the result does not overlap; NULL for None.
cdef const float* read_heads(cnp.ndarray values, str name, Py_ssize_t n_q_heads, cnp.ndarray result) except? NULL

# Refuses what would read dropped positions, makes the result (and lse), and computes without the GIL. The caller keeps the
# tables, spans and K/V alive and unchanged until it returns; its shelf keeps the plan for the next layer of the same batch.
cdef object attend(Asked asked, const KvView* kv, PlanShelf* shelf, const QuerySpan* spans, Py_ssize_t n_spans,
                   Py_ssize_t n_rows, int n_threads)

# The computation alone, of what was checked. Without the GIL; MemoryError. `lse` may be NULL.
cdef int run(PlanShelf* shelf, const HeadsView* out, float* lse, const HeadsView* q, Py_ssize_t n_q_heads, const KvView* kv,
             const QuerySpan* spans, Py_ssize_t n_spans, const AttendOptions* options, int n_threads) except -1

# One query length, 0 or more, for each of n sequences; an integer stands for all. Their sum is far from overflow.
cdef tuple as_query_lens(object query_lens, Py_ssize_t n)
