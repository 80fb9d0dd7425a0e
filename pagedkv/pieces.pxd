# The bytes of whole blocks, shown to callers: BlockPieces and BlockFilling. See pieces.pyx.

from libc.stdint cimport int32_t

from pagedkv._rows cimport KvRows
from pagedkv.allocator cimport BlockAllocator


cdef class HeldBlocks:
    cdef object store               # whose blocks they are: it stays as long as its memory is shown
    cdef BlockAllocator blocks
    cdef KvRows rows
    cdef int32_t* ids
    cdef Py_ssize_t n               # references that are its own; 0 before they are taken, and after they went
    cdef Py_ssize_t n_views
    cdef bint writable, closed

    # For n blocks, whose ids are to be written, and which are to be taken or retained, before `n` is set.
    @staticmethod
    cdef HeldBlocks of(object store, BlockAllocator blocks, KvRows rows, Py_ssize_t n, bint writable)
    cdef int open_view(self) except -1
    cdef void close_view(self) noexcept
    # No more views; the blocks go back now, or with the last view.
    cdef void close(self) noexcept
    # No more views, and the first n blocks are the caller's from now on. False, and no change, where there are views.
    cdef bint keep(self, Py_ssize_t n_kept) noexcept
    cdef void release(self, Py_ssize_t start, Py_ssize_t stop) noexcept
    cdef tuple show(self)


cdef class BlockPieces:
    cdef HeldBlocks held
    cdef tuple views                # those that were asked for and are still shown
    cdef tuple shown(self)
    cdef void hide(self) noexcept

    @staticmethod
    cdef BlockPieces of(HeldBlocks held)


cdef class BlockFilling(BlockPieces):
    cdef list committed

    @staticmethod
    cdef BlockFilling fill(HeldBlocks held)
