cdef class KvBlockPool:
    cdef object __weakref__
    cdef readonly Py_ssize_t block_size, total_blocks, held

    cdef int take(self, Py_ssize_t n) except -1
    cdef void give_back(self, Py_ssize_t n) noexcept


cdef class KvCache:
    cdef object __weakref__
    cdef readonly Py_ssize_t n_kv_heads, head_dim, v_head_dim, seq_len
    cdef float[:, ::1] k_rows           # [allocated positions, k_width]
    cdef float[:, ::1] v_rows
    cdef object k_array                 # the same rows as NumPy arrays, read-only
    cdef object v_array
    cdef KvBlockPool pool
    cdef Py_ssize_t pool_blocks         # held of the pool's budget
    cdef Py_ssize_t usable              # positions that memory and budget cover
    cdef Py_ssize_t planned             # positions that were planned for; -1 for none, or once exceeded

    # Room for n positions in all; seq_len is as it was. The rows written so far move along.
    cdef int make_room(self, Py_ssize_t n) except -1
    cdef int set_rows(self, object k, object v) except -1
    # seq_len becomes n; rows past the old one are not written yet.
    cdef int resize(self, Py_ssize_t n) except -1
    # ValueError, naming `out`, unless the heads are these.
    cdef int check_heads(self, Py_ssize_t n_kv_heads, Py_ssize_t head_dim, Py_ssize_t v_head_dim) except -1
