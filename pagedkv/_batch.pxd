# Several sequences change together: all of them or, raising, none. Each is there once.

# Each becomes a fork of what its source is now, one of the batch. All are locked by the caller.
cdef int fork_all(tuple caches, tuple sources) except -1
