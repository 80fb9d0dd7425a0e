# The guard of an object that belongs to one thread at a time: a writer, or any number of readers, and nobody waits.
#
# `users` is a field of the object: 0 idle, n readers, -1 a writer. It changes in a critical section of the object, so
# it is exact with the GIL and without.

cimport cython


cdef inline int enter_writer(object guarded, Py_ssize_t* users) except -1:
    """RuntimeError, at once, while anybody else is in."""
    cdef bint idle
    with cython.critical_section(guarded):
        idle = users[0] == 0
        if idle:
            users[0] = -1
    if not idle:
        raise RuntimeError("cache: in use by a running Step or call")
    return 0


cdef inline void leave_writer(object guarded, Py_ssize_t* users) noexcept:
    with cython.critical_section(guarded):
        users[0] = 0


cdef inline int enter_reader(object guarded, Py_ssize_t* users) except -1:
    """RuntimeError, at once, while somebody writes."""
    cdef bint free
    with cython.critical_section(guarded):
        free = users[0] >= 0
        if free:
            users[0] += 1
    if not free:
        raise RuntimeError("cache: in use by a running Step, or a call that changes it")
    return 0


cdef inline void leave_reader(object guarded, Py_ssize_t* users) noexcept:
    with cython.critical_section(guarded):
        users[0] -= 1
