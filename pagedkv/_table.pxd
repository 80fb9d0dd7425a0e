cimport numpy as cnp
from libc.stdint cimport int32_t

from pagedkv.store cimport PagedKvStore

cdef extern from *:
    """
    /* Positions and lengths stay below this, so that sums of a few are far from overflow. */
    #define PAGEDKV_MAX_POSITIONS (PY_SSIZE_T_MAX / 4)
    """
    const Py_ssize_t MAX_POSITIONS "PAGEDKV_MAX_POSITIONS"


cdef inline Py_ssize_t blocks_for(Py_ssize_t n_positions, Py_ssize_t block_size) noexcept:
    """Blocks that hold so many positions; 0 for none, whatever the block size."""
    return (n_positions + block_size - 1) // block_size if n_positions else 0


# ValueError or IndexError unless the first n ids are blocks of the store that someone holds.
cdef int check_adopted(PagedKvStore store, int32_t[::1] table, Py_ssize_t n, Py_ssize_t block_size) except -1


cdef class BlockTable:
    cdef object __weakref__
    # The store whose blocks the table names. None while it names none, and for adopted blocks until a store is seen.
    cdef readonly PagedKvStore store
    cdef int32_t[::1] table         # n_blocks entries in use; those before n_dropped were given back
    cdef Py_ssize_t n_blocks
    cdef Py_ssize_t n_dropped
    cdef Py_ssize_t length
    cdef Py_ssize_t block_size      # of the blocks in the table
    cdef Py_ssize_t users           # 0 idle, n readers, -1 a writer

    # The guard: RuntimeError, at once, if it cannot be had. ValueError if the blocks held are not the store's.
    cdef int begin_read(self, PagedKvStore store) except -1
    cdef void end_read(self) noexcept
    cdef int begin_write(self, PagedKvStore store) except -1
    cdef void end_write(self) noexcept

    # What the next n_new positions take: blocks past the capacity, and copies of blocks that others hold too.
    cdef Py_ssize_t n_missing(self, PagedKvStore store, Py_ssize_t n_new) noexcept
    cdef Py_ssize_t n_shared(self, PagedKvStore store, Py_ssize_t n_new) noexcept
    # Table entries for that many blocks; their contents and the length are untouched.
    cdef int make_room(self, Py_ssize_t n_entries) except -1

    # So many positions in these blocks, each reference to which is its own from now on. It is locked and holds none.
    cdef void start_at(self, PagedKvStore store, int32_t[::1] table, Py_ssize_t n_blocks, Py_ssize_t length) noexcept

    cdef int lock_write(self) except -1
    cdef int bind(self, PagedKvStore store) except -1
    # Make the next n_new positions writable: take their blocks, copy those that others hold too. All or nothing. The
    # rows that are to be written there, or None for none, are looked at again where taking may have run somebody's code.
    cdef int prepare(self, PagedKvStore store, Py_ssize_t n_new, cnp.ndarray k, cnp.ndarray v, Py_ssize_t count) except -1
    # Ends a call that wrote: a store in debug mode checks its books, and that this table is among them.
    cdef inline int after_growth(self, PagedKvStore store) except -1:
        if store.debug:
            store.check((self,))
        return 0

    cdef int copy_shared(self, Py_ssize_t n_missing, Py_ssize_t n_copies) except -1
    cdef int give_back_from(self, Py_ssize_t first) except -1
    # Make `other` a second holder of this sequence's written blocks; it gives back its own.
    cdef int share_into(self, BlockTable other) except -1
