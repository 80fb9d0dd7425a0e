cimport numpy as cnp
from libc.stdint cimport int32_t, uint64_t

from pagedkv._kernels.rows cimport Places
from pagedkv._rows cimport BlockRows
from pagedkv.allocator cimport BlockAllocator, ByteBudget


cdef class PagedKvStore:
    cdef object __weakref__
    cdef readonly Py_ssize_t block_size, n_layers, n_kv_heads, head_dim, v_head_dim
    cdef BlockAllocator blocks
    cdef ByteBudget budget              # its own, or that of a model's stores
    cdef list peers                     # weak references to the stores that share it
    cdef readonly str dtype
    cdef BlockRows k
    cdef BlockRows v
    cdef Py_ssize_t step_bytes          # K and V of one position, all layers
    cdef bint debug
    cdef Py_ssize_t copies_on_write
    cdef uint64_t n_lineages            # that its sequences have had
    cdef object prefixes                # a weak reference to the prefix cache, as long as the blocks have a tree

    # Free blocks may have pages that exceed the budget: `after_change` gives them back.
    cdef inline bint is_over(self) noexcept:
        return self.budget.account.resident > self.budget.account.limit

    # From now on it shares the budget of another one; neither has been used yet.
    cdef int set_up(self, BlockRows k, BlockRows v, Py_ssize_t total, str name, bint checked) except -1
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
    # One holder less for each id. `drop` returns -1, or the place of an id without a holder, and has then changed
    # nothing; `give_back` raises PagedKvError instead: a table named a block that somebody else gave back.
    cdef Py_ssize_t drop(self, const int32_t* ids, Py_ssize_t n) noexcept
    cdef int give_back(self, const int32_t* ids, Py_ssize_t n) except -1
    # One holder less for each id that has one: the way out when nothing may be raised.
    cdef void drop_each(self, const int32_t* ids, Py_ssize_t n) noexcept
    # What a caller gave as K and V, n rows of each of n_layers or, for -1, one row a layer with no axis for it. Where they
    # are arrays to be read as they lie there, `holds` says so, and runs nobody's code. Otherwise first K and then V is
    # converted, by the caller's code too, and K looked at again after it. Rows that lie in the store's own memory are
    # copied, so that no move overlaps itself. TypeError or ValueError names the argument.
    cdef bint holds(self, object k, object v, Py_ssize_t n_layers, Py_ssize_t n) noexcept
    cdef cnp.ndarray given_k(self, object array, Py_ssize_t n_layers, Py_ssize_t n)
    cdef cnp.ndarray given_v(self, object array, Py_ssize_t n_layers, Py_ssize_t n, cnp.ndarray k)
    # Both again, right before they are read, where anything else has run since.
    cdef int check_given(self, cnp.ndarray k, cnp.ndarray v, Py_ssize_t n_layers, Py_ssize_t n) except -1
    cdef cnp.ndarray apart(self, cnp.ndarray rows)
    # The one way in for rows, n of them in each of these layers: of arrays that were looked at as above, to places of blocks
    # that have one holder. Releases the GIL where there is enough to copy, as the next one does.
    cdef void write(self, Py_ssize_t layer, Py_ssize_t n_layers, cnp.ndarray k, cnp.ndarray v, const Places* places,
                    Py_ssize_t n, int n_threads) noexcept
    # The first n rows of a block, in all layers, to another block.
    cdef void copy_shared_rows(self, int32_t dst, int32_t src, Py_ssize_t n) noexcept

    # The same into a block that was just taken.
    cdef void copy_prefix_rows(self, int32_t dst, int32_t src, Py_ssize_t n) noexcept

    # `prefixes` knows what blocks hold, from now on until it goes, of layers with this window; 0 without one. ValueError if
    # another one does.
    cdef int know_prefixes(self, object prefixes, Py_ssize_t window) except -1

    # ValueError unless somebody holds the block.
    cdef int check_held(self, Py_ssize_t block, str name) except -1
    cdef void erase(self, const int32_t* ids, Py_ssize_t n) noexcept

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
