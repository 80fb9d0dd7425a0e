# What a caller named: a store and sequences of it, or the stores of a model's KV-cache groups and sequences of these.
# See _groups.pyx.

# The stores: one, or those of an object's `stores`. They have one budget and one block size. TypeError, ValueError.
cdef tuple as_stores(object store)

# Where the layers are: None for one store, which counts them itself, else a pair for each of the model's, the number of a
# store and the layer's number there; and for each store the window of its layers, or None. Of what `as_stores` took.
cdef tuple places_of(object store)
cdef tuple windows_of(object store)

# A batch: one sequence, or any iterable of them, each of which is a PagedKvCache or has one for each of n stores, those of
# what the caller named. Their caches, store by store.
cdef tuple as_members(object caches, object store, Py_ssize_t n_stores)
# The same, each of them once.
cdef tuple as_distinct_members(object caches, object store, Py_ssize_t n_stores)
# A sequence of these stores: its caches. TypeError, ValueError.
cdef tuple as_sequence(object sequence, tuple stores)
