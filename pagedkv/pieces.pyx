"""BlockPieces and BlockFilling: the bytes of whole blocks as they are stored, to be written elsewhere or to be read in.

    pieces -> views    memoryviews, which a caller may slice and hand on
                 |
              Piece    what they look at: address and length of one block in one layer, of K or of V
                 |
          HeldBlocks   one reference to each block, which goes when nobody looks any more

Whoever still has a view, also a slice or an array made of one, keeps the blocks held: nothing that could be written
through it ever gets into a table, and nothing that is shown is written.
"""

cimport cython
from cpython.buffer cimport PyBuffer_FillInfo
from libc.stdint cimport int32_t
from libc.stdlib cimport free, malloc

from pagedkv._arrays cimport as_size
from pagedkv._rows cimport BlockRows, KvRows
from pagedkv.allocator cimport BlockAllocator


@cython.final
@cython.no_gc_clear  # the blocks go back when it goes: the store must still be there
cdef class HeldBlocks:

    @staticmethod
    cdef HeldBlocks of(object store, BlockAllocator blocks, KvRows rows, Py_ssize_t n, bint writable):
        cdef HeldBlocks held = HeldBlocks.__new__(HeldBlocks)
        held.store = store
        held.blocks = blocks
        held.rows = rows
        held.writable = writable
        held.ids = <int32_t*>malloc(max(n, 1) * sizeof(int32_t))
        if held.ids is NULL:
            raise MemoryError(f"cannot allocate the ids of {n} blocks")
        return held

    def __dealloc__(self):
        self.release(0, self.n)
        free(self.ids)

    cdef int open_view(self) except -1:
        cdef bint is_open
        with cython.critical_section(self):
            is_open = not self.closed
            self.n_views += is_open
        if not is_open:
            raise BufferError("pieces: expected blocks that are still shown, these were given back or committed")
        return 0

    cdef void close_view(self) noexcept:
        cdef Py_ssize_t n = 0
        with cython.critical_section(self):
            self.n_views -= 1
            if self.closed and self.n_views == 0:
                n = self.n
                self.n = 0
        self.release(0, n)

    cdef void close(self) noexcept:
        cdef Py_ssize_t n = 0
        with cython.critical_section(self):
            self.closed = True
            if self.n_views == 0:
                n = self.n
                self.n = 0
        self.release(0, n)

    cdef bint keep(self, Py_ssize_t n_kept) noexcept:
        cdef Py_ssize_t n = 0
        cdef bint unseen
        with cython.critical_section(self):
            unseen = self.n_views == 0 and not self.closed
            if unseen:
                self.closed = True
                n = self.n
                self.n = 0
        self.release(n_kept, n)
        return unseen

    cdef void release(self, Py_ssize_t start, Py_ssize_t stop) noexcept:
        """What the caller has taken out of `n`, so that nobody else releases it too."""
        if stop > start:  # an object that nobody has made has no allocator
            self.blocks.release_each(&self.ids[start], stop - start)

    cdef tuple show(self):
        cdef Py_ssize_t i, layer
        cdef list views = []
        for i in range(self.n):
            for layer in range(self.rows.n_layers):
                views.append(memoryview(Piece.of(self, self.rows.k, layer, self.ids[i])))
                views.append(memoryview(Piece.of(self, self.rows.v, layer, self.ids[i])))
        return tuple(views)


@cython.final
@cython.no_gc_clear  # its views end after it
cdef class Piece:
    """One block in one layer, K or V: what a memoryview of it looks at."""

    cdef HeldBlocks held
    cdef char* address
    cdef Py_ssize_t n_bytes

    @staticmethod
    cdef Piece of(HeldBlocks held, BlockRows rows, Py_ssize_t layer, Py_ssize_t block):
        cdef Piece piece = Piece.__new__(Piece)
        piece.held = held
        piece.address = rows.address(layer, block)
        piece.n_bytes = rows.block_size * rows.row_bytes
        return piece

    def __getbuffer__(self, Py_buffer* view, int flags):
        if self.held is None:
            raise BufferError("pieces: there are none without a store")
        self.held.open_view()
        try:
            PyBuffer_FillInfo(view, self, self.address, self.n_bytes, not self.held.writable, flags)
        except BaseException:
            self.held.close_view()
            raise

    def __releasebuffer__(self, Py_buffer* view):
        self.held.close_view()


cdef class BlockPieces:
    """BlockPieces()\n--\n
    The bytes of some blocks of a store as they lie there, not copied. `PagedKvStore.pieces` makes it.

    It holds the blocks as long as it is open: a sequence that writes into one of them meanwhile writes into a copy, and so
    what is shown stays as it is. In the end, of a ``with`` block or by `release`, its memoryviews are released too. A slice
    of one, or an array made of one, that outlives them keeps the blocks held until it goes as well.

    Attributes
    ----------
    views : tuple of memoryview
        Read-only, of bytes. RuntimeError when they were released.
    nbytes : int
        Bytes of all of them together; 0 when they were released.

    Notes
    -----
    Order: block after block, as they were asked for; of a block layer after layer; of a layer K, then V. Each view is
    ``block_size`` rows, and a row ``n_kv_heads * head_dim`` values in the store's dtype; in an int8 store a zero follows
    where they are odd in number, and then the float16 scales of its heads. What was not written yet holds anything.

    Threads: any number may read. It may be released by any thread, and at any time.

    Examples
    --------
    >>> import zlib, pagedkv
    >>> store = pagedkv.PagedKvStore(block_size=16, total_blocks=8, n_kv_heads=2, head_dim=4, n_layers=3)
    >>> ids = store.acquire(2)
    >>> with store.pieces(ids) as pieces:
    ...     len(pieces.views), pieces.nbytes, len([zlib.crc32(view) for view in pieces.views])
    (12, 6144, 12)
    >>> store.release(ids)
    """

    def __init__(self):
        raise TypeError(f"{type(self).__name__}: a PagedKvStore makes it")

    @staticmethod
    cdef BlockPieces of(HeldBlocks held):
        cdef BlockPieces pieces = BlockPieces.__new__(BlockPieces)
        pieces.held = held
        return pieces

    cdef tuple shown(self):
        """The views, which are made when they are asked for first."""
        cdef tuple views
        cdef HeldBlocks held = self.held
        if held is None or held.closed:
            raise RuntimeError("pieces: expected open ones, got some that were released or committed")
        with cython.critical_section(self):
            views = self.views
        if views is None:
            views = held.show()
            with cython.critical_section(self):
                if self.views is None:
                    self.views = views
                views = self.views
        return views

    cdef void hide(self) noexcept:
        cdef tuple views
        with cython.critical_section(self):
            views = self.views
            self.views = None
        for view in views or ():
            try:
                (<object>view).release()
            except BaseException:  # something was made of it, which is a view of its own
                pass

    @property
    def views(self):
        return self.shown()

    @property
    def nbytes(self):
        if self.held is None or self.held.closed:
            return 0
        return self.held.n * self.held.blocks.block_bytes

    def release(self):
        """Let go of the blocks, and release the memoryviews. Does nothing the second time."""
        self.hide()
        if self.held is not None:
            self.held.close()

    def __enter__(self):
        self.shown()
        return self

    def __exit__(self, kind, error, traceback):
        self.release()

    def __reduce__(self):
        raise TypeError(f"{type(self).__name__}: cannot be copied or pickled, it holds blocks")


@cython.final
cdef class BlockFilling(BlockPieces):
    """BlockFilling()\n--\n
    Fresh blocks that nobody else sees, and their bytes to be written. `PagedKvStore.fill` makes it.

    Committed, by `commit` or at the end of a ``with``
    block, the blocks are the caller's, as those of `PagedKvStore.acquire` are: to be adopted by a sequence, or released. Left
    by an exception, or dropped, they are free again.

    Attributes
    ----------
    views : tuple of memoryview
        Writable, of bytes, in the order of `BlockPieces`. RuntimeError when they were released.
    nbytes : int
        Bytes of all of them together; 0 when they were released.
    ids : list of int
        The blocks, once they are committed; RuntimeError before.

    Notes
    -----
    What is not written holds anything, in debug mode NaN. Nothing can be written any more when it is committed: its memoryviews
    are released, and while a slice or an array that was made of one is in use, it cannot be.

    Threads: any number may write, each into views of its own. Any thread may commit or release it, and one of them does.

    Examples
    --------
    >>> import pagedkv
    >>> store = pagedkv.PagedKvStore(block_size=16, total_blocks=8, n_kv_heads=2, head_dim=4)
    >>> ids = store.acquire(2)
    >>> with store.pieces(ids) as pieces, store.fill(2) as filling:      # a copy of both
    ...     for view, empty in zip(pieces.views, filling.views):
    ...         empty[:] = view
    >>> filling.ids
    [2, 3]
    >>> cache = pagedkv.PagedKvCache()
    >>> cache.adopt_blocks(filling.ids, 32, 16, store=store)
    """

    @staticmethod
    cdef BlockFilling fill(HeldBlocks held):
        cdef BlockFilling filling = BlockFilling.__new__(BlockFilling)
        filling.held = held
        return filling

    @property
    def ids(self):
        if self.committed is None:
            raise RuntimeError("filling: expected one that is committed, this one is not")
        return list(self.committed)

    def commit(self, n=None):
        """Take over the blocks: from now on the caller holds them.

        Parameters
        ----------
        n : int, optional
            Only the first n of them, 0 to all; the others are free again.

        Returns
        -------
        list of int
            Their ids, in order.

        Raises
        ------
        RuntimeError
            It was committed or released before.
        BufferError
            Something that was made of a memoryview is still in use and could write: a slice, an array. The blocks stay as they
            were, out of sight; `views` has new memoryviews of them.
        TypeError, ValueError
            ``n`` is no such number. Nothing was changed.
        """
        cdef HeldBlocks held = self.held
        cdef Py_ssize_t i, n_kept
        cdef list ids = None
        self.shown()
        n_kept = held.n if n is None else as_size(n, "n", 0, held.n)
        ids = [held.ids[i] for i in range(n_kept)]
        self.hide()
        kept = list(ids)  # while it can still fail for want of memory
        if not held.keep(n_kept):
            if held.closed:  # by another thread, or by the caller's own __index__
                raise RuntimeError("filling: expected an open one, got one that was released or committed")
            raise BufferError("filling: expected no slice of its views, and no array of one, still in use: "
                              f"there are {held.n_views}")
        self.committed = kept
        if held.blocks.erase is not NULL:  # a store with debug=True
            held.store.check()
        return ids

    def __exit__(self, kind, error, traceback):
        if kind is None and self.held is not None and not self.held.closed:
            try:
                self.commit()
            finally:
                self.release()
        else:
            self.release()
