# The one threading seam: every kernel that splits its work goes through here.

ctypedef void (*task_fn)(void* context, Py_ssize_t index) noexcept nogil

# fn(context, i) for each i in [0, n_tasks), in no order, by the caller and idle helpers. Returns
# when all are done. Tasks are claimed one by one, so they may differ in size.
cdef void parallel_for(task_fn fn, void* context, Py_ssize_t n_tasks, int n_threads) noexcept nogil

# The number of threads for a call that asked for `requested`; 0 stands for the process's setting.
cdef int resolve_threads(int requested) noexcept nogil
