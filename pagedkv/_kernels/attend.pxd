# Attention over K and V in blocks. See attend.pyx; the shape of a batch is in plan.pxd.

from pagedkv._kernels.plan cimport AttendOptions, AttendPlan, HeadsView, KvView

# out [n_rows, n_q_heads, v_head_dim] and, unless NULL, lse [n_rows, n_q_heads] from q [n_rows, n_q_heads, head_dim].
# Nonzero: out of memory, and nothing was written.
cdef int run_attend(const AttendPlan* plan, const HeadsView* out, float* lse, const HeadsView* q, const KvView* kv,
                    const AttendOptions* options, int n_threads) noexcept nogil
