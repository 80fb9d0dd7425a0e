"""The threading seam: a pool of helper threads that callers of any thread share."""

cdef extern from "pool.h" nogil:
    ctypedef int atomic_int
    atomic_int pool_limit
    int atomic_load(atomic_int* value)
    void atomic_store(atomic_int* value, int desired)
    void pool_run(task_fn task, void* context, Py_ssize_t n_tasks, int n_threads)
    void pool_start()
    void pool_use_team(Py_ssize_t address)
    bint pool_has_team()


cdef void parallel_for(task_fn fn, void* context, Py_ssize_t n_tasks, int n_threads) noexcept nogil:
    cdef Py_ssize_t i
    if n_threads <= 1 or n_tasks <= 1:
        for i in range(n_tasks):
            fn(context, i)
    else:
        pool_run(fn, context, n_tasks, n_threads)


cdef int resolve_threads(int requested) noexcept nogil:
    return requested if requested > 0 else atomic_load(&pool_limit)


def get_limit():
    """Threads that a call uses when it names no number."""
    return atomic_load(&pool_limit)


def set_limit(int n):
    """Set that number; the caller has checked it."""
    atomic_store(&pool_limit, n)


def use_team(Py_ssize_t address):
    """Compute on the threads of another runtime, whose GOMP_parallel is at this address; 0: on the pool's own."""
    pool_use_team(address)


def has_team():
    """Whether it does."""
    return bool(pool_has_team())


pool_start()
