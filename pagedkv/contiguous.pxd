cimport numpy as cnp

from pagedkv._arrays cimport RowLayout


cdef class KvBlockPool:
    cdef object __weakref__
    cdef readonly Py_ssize_t block_size, total_blocks, held

    cdef int take(self, Py_ssize_t n) except -1
    cdef void release(self, Py_ssize_t n) noexcept


cdef class KvCache:
    cdef object __weakref__
    cdef readonly Py_ssize_t n_kv_heads, head_dim, v_head_dim, seq_len
    cdef float[:, ::1] k_rows           # [allocated positions, k_width]
    cdef float[:, ::1] v_rows
    cdef RowLayout k_layout, v_layout
    cdef object k_array                 # the same rows as NumPy arrays, read-only
    cdef object v_array
    cdef KvBlockPool pool
    cdef Py_ssize_t pool_blocks         # held of the pool's budget
    cdef Py_ssize_t usable              # positions that memory and budget cover
    cdef Py_ssize_t planned             # positions that were planned for; -1 for none, or once exceeded
    cdef Py_ssize_t users               # 0 idle, -1 a call that changes it

    # For whoever overwrites all rows, n of them: takes the guard, or RuntimeError; then everything that can fail. Between
    # the two k_rows and v_rows have room for them.
    cdef int begin_overwriting(self, Py_ssize_t n) except -1
    cdef void end_overwriting(self, Py_ssize_t n) noexcept
    # ValueError, naming `out`, unless the heads are these; RuntimeError if it has none yet.
    cdef int check_heads(self, Py_ssize_t n_kv_heads, Py_ssize_t head_dim, Py_ssize_t v_head_dim) except -1

    cdef int check_made(self) except -1
    cdef int check_given(self, cnp.ndarray k, cnp.ndarray v, Py_ssize_t n) except -1
    # Room for n positions in all, for a caller with the guard; seq_len is as it was, and the rows written so far move
    # along. Rows that are to be written there, or None, are looked at again: making room may have run somebody's code.
    cdef int make_room(self, Py_ssize_t n, cnp.ndarray k, cnp.ndarray v, Py_ssize_t n_new) except -1
    cdef int write(self, cnp.ndarray k, cnp.ndarray v, Py_ssize_t n) except -1
    cdef int set_empty(self, Py_ssize_t k_width, Py_ssize_t v_width) except -1
    cdef void set_len(self, Py_ssize_t n) noexcept
    cdef void set_rows(self, object k, object v, float[:, ::1] k_rows, float[:, ::1] v_rows) noexcept


# What rows of such heads are copied into: what the caller gave, or a new one for None. TypeError and ValueError name it.
cdef KvCache as_target(object out, str name, Py_ssize_t n_kv_heads, Py_ssize_t head_dim, Py_ssize_t v_head_dim)
