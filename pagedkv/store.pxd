from libc.stdint cimport int32_t, uint64_t

from pagedkv._rows cimport KvRows
from pagedkv.allocator cimport BlockAllocator, ByteBudget


cdef class PagedKvStore:
    cdef object __weakref__
    cdef readonly Py_ssize_t block_size, n_layers, n_kv_heads, head_dim, v_head_dim
    cdef BlockAllocator blocks
    cdef ByteBudget budget              # its own, or that of a model's stores
    cdef list peers                     # weak references to the stores that share it
    cdef readonly str dtype
    cdef KvRows rows
    cdef bint debug
    cdef Py_ssize_t copies_on_write
    cdef uint64_t n_lineages            # that its sequences have had
    cdef object prefixes                # a weak reference to the prefix cache, as long as the blocks have a tree

    # Free blocks may have pages that exceed the budget: `after_change` gives them back.
    cdef inline bint is_over(self) noexcept:
        return self.budget.account.resident > self.budget.account.limit

    # From now on it shares the budget of another one; neither has been used yet.
    cdef int set_up(self, KvRows rows, Py_ssize_t total, bint checked) except -1
    cdef int join(self, PagedKvStore other) except -1
    cdef list with_peers(self)
    cdef int end_terms_of_all(self) except -1
    cdef int resize_all(self, Py_ssize_t limit) except -1
    # n blocks into ids, also by eviction, or False with nothing changed.
    cdef bint take(self, int32_t* ids, Py_ssize_t n) noexcept
    # Terms of the prefix cache that are over end. Asks its clock, which may be the caller's code, and raise: called before
    # anything is changed, with nothing locked.
    cdef int end_terms(self) except -1
    # The same where so many new positions of a sequence could need more blocks than are free.
    cdef int end_terms_if_short(self, Py_ssize_t n_new) except -1
    # The error tells what was asked in vain. `held`: what the asking sequences hold already; `elsewhere`: bytes that they
    # need in other stores of the budget beside it, and those that they hold there with these.
    cdef object exhausted(self, Py_ssize_t needed, Py_ssize_t held, Py_ssize_t elsewhere=*, Py_ssize_t most_elsewhere=*)
    # `prefixes` knows what blocks hold, from now on until it goes, of layers with this window; 0 without one. ValueError if
    # another one does.
    cdef int know_prefixes(self, object prefixes, Py_ssize_t window) except -1

    # ValueError unless somebody holds the block.
    cdef int check_held(self, Py_ssize_t block, str name) except -1
    # Ends every call that changed something: a store in debug mode checks its books.
    cdef int after_change(self) except -1
    cdef int check_books(self) except -1
    cdef str turned(self)
    cdef object view(self, object blocks, object id, object layer, object offset)
    cdef list tables_of(self, object caches)


# RuntimeError or TypeError that says why it is no store to work with.
cdef object not_a_store(object store)


cdef inline PagedKvStore as_store(object store):
    """The store that a caller named. One whose __init__ has run stays as it is: it runs once."""
    if isinstance(store, PagedKvStore) and (<PagedKvStore>store).blocks.total:
        return <PagedKvStore>store
    raise not_a_store(store)
