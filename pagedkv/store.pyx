"""PagedKvStore: blocks of K and V for all layers, and who holds them.

What is counted about blocks is a `BlockAllocator`'s, their bytes are `KvRows`; a store brings them together. At C level it
trusts its arguments, but for ids that have no holder left.
"""

cimport cython
from libc.stdint cimport INT32_MAX, int32_t
from libc.string cimport memcpy

from pagedkv._arrays cimport as_flag, as_format, as_ids, as_index, as_items, as_size, describe
from pagedkv._rows cimport KvRows
from pagedkv._tensors cimport as_tensor
from pagedkv.allocator cimport BlockAllocator, ByteBudget
from pagedkv.pieces cimport BlockFilling, BlockPieces, HeldBlocks

import os
import sys
import weakref

import numpy as np

from pagedkv.errors import PagedKvError, PagedStoreExhausted
from pagedkv.stats import StoreStats
from pagedkv.viz import BlockMap

cdef Py_ssize_t MAX_SIZE = sys.maxsize


@cython.no_gc_clear  # its caches give their blocks back when they go, in whatever order a cycle is taken apart
cdef class PagedKvStore:
    """PagedKvStore(block_size, total_blocks, n_kv_heads, head_dim, *, n_layers=1, v_head_dim=None, dtype='float32', \
prefault=False, debug=False)\n--\n
    Fixed-size blocks of keys and values that many sequences share.

    A sequence (`PagedKvCache`) takes blocks as it grows, and several may hold the same block. Its own methods are
    for looking at blocks and for callers that hold some without a sequence.

    Parameters
    ----------
    block_size : int
        Rows (positions) a block holds; 16 or 32 suit most models.
    total_blocks : int
        Number of blocks, at most 2**31 - 1.
    n_kv_heads, head_dim : int
        Heads of K and V in a layer, and values of a K head: a K row of one layer is ``n_kv_heads * head_dim`` values.
    n_layers : int, optional
        Layers that share one block table: block ``i`` has rows in each of them. 1 without it.
    v_head_dim : int, optional
        Values of a V head where they are not ``head_dim``.
    dtype : str or dtype-like, optional
        What a value is stored as: "float32"; "float16" or "bfloat16", half the bytes; or "int8", 1.0625 bytes: heads are
        turned, and have a float16 scale for each 32 values. Rows go in and come out as float32 all the same.
        float16 ends at 65504: a value that is rounded beyond it, such as 65520, becomes infinite.
    prefault : bool, optional
        Touch all memory now. Without it a block costs memory from its first write on.
    debug : bool, optional
        Fill blocks with NaN when they are taken and when they are given back, and run `check`
        after every change. Slow; for tests. Such a check comes when the change is done: where it raises `PagedKvError`
        for books that do not balance, the change stays. It needs no memory.

    Attributes
    ----------
    block_size, n_kv_heads, head_dim, v_head_dim, n_layers : int
        As given; ``v_head_dim`` is ``head_dim`` where it was not.
    dtype : str
        "float32", "float16", "bfloat16" or "int8".

    Raises
    ------
    TypeError, ValueError
        A size that is no integer of at least 1, or a dtype that is not supported.
    MemoryError
        The memory, ``nbytes``, cannot be had.

    Notes
    -----
    Memory: K and V are one buffer each, ``[n_layers, total_blocks, block_size, width]``. Garbage collection frees it.

    Rounding: to nearest, ties to even. An int8 group is scaled by its greatest magnitude / 127, rounded to float16; one
    with a value that is not finite, or beyond 127 * 65504, reads as NaN, and no other does. One with none beyond 8e-6 is
    coarse, and with none beyond 4e-6 zero.

    Turned: the width of an int8 head is cut into the largest powers of two that divide it, of 16 to 1024 values, and each of
    these is multiplied by the orthonormal Hadamard matrix. Queries are turned alike, and the output is turned back; so is
    what `PagedKvCache.to_contiguous` gives. Heads whose width 16 does not divide stay as they come.

    Threads: any number of threads may use a store at once. Counts change atomically; bytes are
    moved without the GIL.

    Method: Kwon et al., "Efficient Memory Management for Large Language Model Serving with
    PagedAttention", SOSP 2023, section 4.

    Examples
    --------
    >>> import pagedkv
    >>> store = pagedkv.PagedKvStore(block_size=16, total_blocks=8, n_kv_heads=2, head_dim=4)
    >>> store.free_block_count, store.k_width, store.nbytes
    (8, 8, 8192)
    """

    def __cinit__(self):
        # Until __init__ has run, a store of no blocks, on which every request is refused.
        self.blocks = BlockAllocator(0, 1)
        self.budget = ByteBudget()
        self.budget.join(self.blocks)
        self.rows = KvRows()
        self.block_size = 1
        self.dtype = "float32"

    def __dealloc__(self):
        if self.budget is not None:  # there was memory to make one
            self.budget.leave(self.blocks)

    def __init__(self, block_size, total_blocks, n_kv_heads, head_dim, *,
                 n_layers=1, v_head_dim=None, dtype="float32", prefault=False, debug=False):
        cdef Py_ssize_t size = as_size(block_size, "block_size", 1, MAX_SIZE)
        cdef Py_ssize_t total = as_size(total_blocks, "total_blocks", 1, INT32_MAX)
        cdef Py_ssize_t heads = as_size(n_kv_heads, "n_kv_heads", 1, MAX_SIZE)
        cdef Py_ssize_t k_dim = as_size(head_dim, "head_dim", 1, MAX_SIZE)
        cdef Py_ssize_t v_dim = k_dim if v_head_dim is None else as_size(v_head_dim, "v_head_dim", 1, MAX_SIZE)
        cdef Py_ssize_t layers = as_size(n_layers, "n_layers", 1, MAX_SIZE)
        cdef bint touch = as_flag(prefault, "prefault"), checked = as_flag(debug, "debug")
        cdef object format = as_format(dtype)
        self.set_up(KvRows.made(format, int(layers), int(total), size, heads, k_dim, v_dim, touch), total, checked)

    cdef int set_up(self, KvRows rows, Py_ssize_t total, bint checked) except -1:
        """Become a store of these rows."""
        cdef BlockAllocator blocks = BlockAllocator(total, rows.block_size * rows.step_bytes)
        cdef ByteBudget budget = ByteBudget()
        budget.join(blocks)
        budget.account.limit = total * blocks.block_bytes
        cdef list peers = [weakref.ref(self)]
        # Asked last, and all at once: what came before may have run the caller's code.
        with cython.critical_section(self):
            if self.blocks.total:
                raise RuntimeError("PagedKvStore: __init__ runs once")
            self.block_size = rows.block_size
            self.n_kv_heads = rows.k.n_heads
            self.head_dim = rows.k.head_dim
            self.v_head_dim = rows.v.head_dim
            self.n_layers = rows.n_layers
            self.dtype = rows.k.layout.format.name
            self.rows = rows
            self.debug = checked
            if checked:
                blocks.erase = erase_freed
                blocks.owner = <void*>self
            self.blocks = blocks
            self.budget = budget
            self.peers = peers
        return 0

    @classmethod
    def from_bytes(cls, budget_bytes, block_size, n_kv_heads, head_dim, *,
                   n_layers=1, v_head_dim=None, dtype="float32", prefault=False, debug=False, max_bytes=None):
        """A store of as many blocks as fit into ``budget_bytes``.

        Parameters
        ----------
        budget_bytes : int
            Bytes for K and V of all layers together; ``nbytes`` is at most that.
        max_bytes : int, optional
            The most that `resize` may make of it: address space, which costs no memory. ``budget_bytes`` without it.
        block_size, n_kv_heads, head_dim, n_layers, v_head_dim, dtype, prefault, debug
            As for the class.

        Returns
        -------
        PagedKvStore

        Raises
        ------
        TypeError, ValueError, MemoryError
            Not even one block fits; and as the class.

        Examples
        --------
        >>> import pagedkv
        >>> store = pagedkv.PagedKvStore.from_bytes(1 << 20, 16, n_kv_heads=2, head_dim=64, n_layers=4)
        >>> store.total_blocks, store.nbytes
        (16, 1048576)
        """
        sizes = {"block_size": block_size, "n_layers": n_layers, "n_kv_heads": n_kv_heads, "head_dim": head_dim,
                 "v_head_dim": head_dim if v_head_dim is None else v_head_dim}
        # Python's integers: a product of sizes that fit 64 bits need not.
        cdef list n = [int(as_size(size, name, 1, MAX_SIZE)) for name, size in sizes.items()]
        cdef object budget = as_size(budget_bytes, "budget_bytes", 1, MAX_SIZE)
        cdef object format = as_format(dtype)
        k_bytes, v_bytes = (format.layout(n[2], dim).row_bytes for dim in n[3:])
        cdef object block_bytes = n[0] * n[1] * (k_bytes + v_bytes)
        if block_bytes > budget:
            raise ValueError(f"budget_bytes: expected at least {block_bytes}, the bytes of one block, got {budget}")
        cdef object most = budget if max_bytes is None else as_size(max_bytes, "max_bytes", budget, MAX_SIZE)
        cdef object total = min(budget // block_bytes, INT32_MAX)
        cdef PagedKvStore store = cls(n[0], min(most // block_bytes, INT32_MAX), n[2], n[3], n_layers=n[1],
                                      v_head_dim=n[4], dtype=format.name, prefault=prefault, debug=debug)
        store.budget.account.limit = total * store.blocks.block_bytes
        return store

    @classmethod
    def from_arrays(cls, k, v, n_kv_heads=None, *, dtype=None, debug=False):
        """A store that lives in memory of somebody else: a file that is mapped, memory that processes share, tensors.

        Parameters
        ----------
        k, v : array, float32, float16 or bfloat16 ``[n_layers, total_blocks, block_size, n_kv_heads, head_dim]``
            Where the blocks are: writable, C-contiguous, and apart. Or ``[n_layers, total_blocks, block_size, width]``, with
            ``n_kv_heads``. Their values stay as they are until a block is written.
        n_kv_heads : int, optional
            Heads of a row, where the arrays do not say it.
        dtype : "float32", "float16" or "bfloat16", optional
            That of the arrays. "bfloat16" takes uint16 for its bits, which come from ml_dtypes or by DLPack without it.
        debug : bool, optional
            As for the class.

        Returns
        -------
        PagedKvStore
            It keeps the memory alive. Of a subclass, ``__init__`` is not run.

        Raises
        ------
        TypeError, ValueError
            Arrays of another dtype or shape; read-only ones, ones that are not contiguous, or that overlap.

        Notes
        -----
        The memory is the store's as long as it lives: nobody else writes into it, nor resizes it. `trim` gives nothing of it
        back.

        Examples
        --------
        >>> import numpy as np, pagedkv
        >>> k, v = np.zeros((2, 4, 8, 16, 2, 64), np.float16)            # 4 layers, 8 blocks of 16 positions
        >>> store = pagedkv.PagedKvStore.from_arrays(k, v)
        >>> store.total_blocks, store.n_layers, store.dtype
        (8, 4, 'float16')
        """
        cdef str shape = "[n_layers, total_blocks, block_size, n_kv_heads, head_dim]"
        cdef str wanted = None if dtype is None else as_format(dtype).name
        cdef bint bits = wanted == "bfloat16", checked = as_flag(debug, "debug")
        k, v = as_tensor(k, "k", shape, bits, True), as_tensor(v, "v", shape, bits, True)
        cdef Py_ssize_t n_heads = -1 if n_kv_heads is None else as_size(n_kv_heads, "n_kv_heads", 1, MAX_SIZE)
        cdef KvRows rows = KvRows.lent(k, v, n_heads, wanted)
        cdef PagedKvStore store = cls.__new__(cls)
        store.set_up(rows, rows.k.total_blocks, checked)
        return store

    # --- sizes ---

    @property
    def total_blocks(self):
        """Blocks of the store, free and held."""
        return self.blocks.n_most()

    @property
    def free_block_count(self):
        """Blocks that nobody holds. What a prefix cache could give up is not among them.

        Where a model's stores share a budget, what another one holds is not free here.
        """
        return self.blocks.n_free()

    @property
    def evictable_block_count(self):
        """Held blocks that the store's `PrefixCache` could give up now; 0 without one. O(1)."""
        self.end_terms()
        return self.blocks.count_evictable()

    @property
    def k_width(self):
        """Values of a K row of one layer: ``n_kv_heads * head_dim``."""
        return self.rows.k.n_heads * self.rows.k.head_dim

    @property
    def v_width(self):
        """Values of a V row of one layer: ``n_kv_heads * v_head_dim``."""
        return self.rows.v.n_heads * self.rows.v.head_dim

    @property
    def nbytes(self):
        """Bytes of K and V of all blocks and layers, an int8 store's scales included."""
        return self.blocks.n_most() * self.blocks.block_bytes

    def __repr__(self):
        return (f"{type(self).__name__}(block_size={self.block_size}, total_blocks={self.total_blocks}, "
                f"n_kv_heads={self.n_kv_heads}, head_dim={self.head_dim}, n_layers={self.n_layers}, dtype={self.dtype!r}, "
                f"{self.turned()}free_block_count={self.blocks.n_free()})")

    cdef str turned(self):
        """How many values of a K and of a V head are turned together, where the dtype turns any."""
        if not self.rows.k.layout.format.turned:
            return ""
        return f"turned={(self.rows.k.layout.row.turn_width, self.rows.v.layout.row.turn_width)}, "

    def __reduce__(self):
        raise TypeError("PagedKvStore: cannot be copied or pickled, sequences hold its blocks by id")

    # --- reading ---

    def k_row(self, id, offset, layer=0):
        """The K row of one position, as a read-only view ``[k_width]`` of what is stored: of an int8 store, turned.

        Parameters
        ----------
        id : int
            A block that someone holds.
        offset : int
            Row in the block, 0 to ``block_size - 1``. A row that was not written yet holds anything.
        layer : int, optional
            0 to ``n_layers - 1``.

        Returns
        -------
        array ``[k_width]``, float32, float16 or int8, or the bits of bfloat16 as uint16
            Read-only. It shows what is written there later, also by another holder once the block was given back. The
            int8 value ``d`` of head ``h`` stands for itself times ``k_scales(id, layer)[offset, h, d // 32]``.

        Raises
        ------
        TypeError, IndexError
            ``id``, ``offset`` or ``layer`` is no integer, or out of range.
        ValueError
            Nobody holds the block.
        """
        return self.view(self.rows.k.blocks, id, layer, as_index(offset, "offset", self.block_size))

    def v_row(self, id, offset, layer=0):
        """The V row of one position, as a read-only view ``[v_width]``. Arguments and errors as for `k_row`."""
        return self.view(self.rows.v.blocks, id, layer, as_index(offset, "offset", self.block_size))

    def k_block(self, id, layer=0):
        """The K rows of a block, as a read-only view ``[block_size, k_width]``. Arguments and errors as for `k_row`."""
        return self.view(self.rows.k.blocks, id, layer, ...)

    def v_block(self, id, layer=0):
        """The V rows of a block, as a read-only view ``[block_size, v_width]``. Arguments and errors as for `k_row`."""
        return self.view(self.rows.v.blocks, id, layer, ...)

    def k_scales(self, id, layer=0):
        """The scales of a block's K rows in an int8 store: a read-only float16 view ``[block_size, n_kv_heads, groups]``.

        A group is 32 values of a head, as they are stored; the last one may be fewer.
        Arguments and errors as for `k_row`, and a ValueError where the store is not int8.
        """
        return self.view(self.rows.k.scales, id, layer, ...)

    def v_scales(self, id, layer=0):
        """The scales of a block's V rows, as for `k_scales`. Arguments and errors as for `k_scales`."""
        return self.view(self.rows.v.scales, id, layer, ...)

    cdef object view(self, object blocks, object id, object layer, object offset):
        cdef Py_ssize_t block = as_index(id, "id", self.blocks.total)
        cdef Py_ssize_t index = as_index(layer, "layer", self.n_layers)
        self.check_held(block, "id")
        if blocks is None:
            raise ValueError(f"dtype: expected one that has scales, as int8, got {self.dtype}")
        return blocks[index, block, offset]

    # --- holding ---

    def acquire(self, n=1):
        """Take ``n`` free blocks, each with one holder: the caller.

        Parameters
        ----------
        n : int, optional
            Number of blocks, 0 or more.

        Returns
        -------
        list of int
            Their ids: those given back last first, then those never used, ascending.

        Raises
        ------
        PagedStoreExhausted
            Fewer are free, and the store's `PrefixCache` could not give up as many. Nothing was changed.
        TypeError, ValueError
            ``n`` is no integer of at least 0.
        MemoryError
            No block was taken; the prefix cache may have given up what was missing.
        """
        cdef Py_ssize_t i, count = as_size(n, "n", 0, MAX_SIZE)
        if count > self.blocks.n_free():
            self.end_terms()
        if count > self.blocks.n_most():  # not worth an array of that size
            raise self.exhausted(count, 0)
        cdef int32_t[::1] out = np.empty(count, np.int32)
        cdef list ids = [0] * count
        cdef bint taken = count == 0
        while not taken:  # others may come in between
            if not self.blocks.peek(&out[0], count):
                raise self.exhausted(count, 0)
            for i in range(count):
                ids[i] = out[i]
            taken = self.blocks.take_peeked(&out[0], count)
        if count == 0:
            return ids
        if self.debug:
            self.rows.erase(&out[0], count)
        try:
            self.after_change()
        except BaseException:  # nobody would know whose they are
            self.blocks.release_each(&out[0], count)
            raise
        return ids

    def retain(self, ids):
        """Add one holder to each block of ``ids``: the caller, who has to `release` them.

        Parameters
        ----------
        ids : list, tuple, range or integer array ``[n]``
            Blocks that someone holds; one that occurs twice is retained twice.

        Raises
        ------
        TypeError, IndexError, ValueError
            No integers; an id out of range, or of a block that nobody holds. Nothing was changed.
        """
        cdef int32_t[::1] held = as_ids(ids, "ids", self.blocks.total)
        if held.shape[0] == 0:
            return
        cdef Py_ssize_t bad = self.blocks.retain(&held[0], held.shape[0])
        if bad >= 0:
            raise ValueError(f"ids: expected blocks that someone holds, got {held[bad]}, which is free")
        self.after_change()

    def release(self, ids):
        """Take one holder from each block of ``ids``; a block without holders is free.

        Parameters
        ----------
        ids : list, tuple, range or integer array ``[n]``
            Blocks that the caller holds; one that occurs twice is given back twice.

        Raises
        ------
        TypeError, IndexError, ValueError
            No integers; an id out of range, or of a block that has no holder left but a prefix cache, whose reference is
            not the caller's. Nothing was changed.
        """
        cdef int32_t[::1] held = as_ids(ids, "ids", self.blocks.total)
        if held.shape[0] == 0:
            return
        cdef Py_ssize_t bad = self.blocks.release(&held[0], held.shape[0])
        if bad >= 0:
            if self.blocks.find_unused(&held[bad], 1) < 0:
                raise ValueError(f"ids: expected no block more often than it has holders, got {held[bad]} again")
            raise ValueError(f"ids: expected blocks that the caller holds, got {held[bad]}, "
                             f"which {self.blocks.why_unused(held[bad])}")
        self.after_change()

    def refcount(self, id):
        """How many hold a block: sequences, a prefix cache, open steps and callers of `acquire` and `retain`.

        Parameters
        ----------
        id : int

        Returns
        -------
        int
            0 for a free block.

        Raises
        ------
        TypeError, IndexError
            ``id`` is no integer, or out of range.
        """
        return self.blocks.counts[as_index(id, "id", self.blocks.total)]

    def copy_block(self, src, dst):
        """Copy all rows of block ``src`` to block ``dst``, in all layers.

        Parameters
        ----------
        src, dst : int
            Blocks that someone holds; ``dst`` by one holder only, since a shared block is never written.

        Raises
        ------
        TypeError, IndexError, ValueError
            No integer; an id out of range; a free block, or a ``dst`` with more holders.
        """
        cdef Py_ssize_t source = as_index(src, "src", self.blocks.total)
        cdef Py_ssize_t target = as_index(dst, "dst", self.blocks.total)
        cdef int32_t unshared = <int32_t>target
        self.check_held(source, "src")
        self.check_held(target, "dst")
        if source == target:
            return
        if self.blocks.find_unused(&unshared, 1) == 0:
            raise ValueError(f"dst: expected a block that the caller holds, got {target}, which the prefix cache alone holds")
        if self.blocks.counts[target] > 1:
            raise ValueError(f"dst: expected a block with one holder, got {target}, "
                             f"which has {self.blocks.counts[target]}")
        self.rows.copy_block(<int32_t>target, <int32_t>source, self.block_size)

    # --- blocks as they are stored ---

    def pieces(self, ids):
        """The bytes of blocks as they lie in memory, all layers, not copied: to be written to a file or a socket.

        Parameters
        ----------
        ids : list, tuple, range or integer array ``[n]``
            Blocks that someone holds.

        Returns
        -------
        BlockPieces
            Read-only memoryviews, in an order that is described there. It holds the blocks until the end of its ``with``
            block, or `BlockPieces.release`.

        Raises
        ------
        TypeError, IndexError, ValueError
            No integers; an id out of range, or of a block that nobody holds. Nothing was changed.

        Examples
        --------
        >>> import io, pagedkv
        >>> store = pagedkv.PagedKvStore(block_size=16, total_blocks=8, n_kv_heads=2, head_dim=4)
        >>> ids = store.acquire(2)
        >>> file = io.BytesIO()
        >>> with store.pieces(ids) as pieces:
        ...     file.writelines(pieces.views)
        >>> file.tell() == 2 * store.nbytes // store.total_blocks
        True
        """
        cdef int32_t[::1] given = as_ids(ids, "ids", self.blocks.total)
        cdef Py_ssize_t bad, n = given.shape[0]
        cdef HeldBlocks held = HeldBlocks.of(self, self.blocks, self.rows, n, False)
        cdef BlockPieces pieces = BlockPieces.of(held)
        if n:
            memcpy(held.ids, &given[0], n * sizeof(int32_t))
            bad = self.blocks.retain(held.ids, n)
            if bad >= 0:
                raise ValueError(f"ids: expected blocks that someone holds, got {held.ids[bad]}, which is free")
            held.n = n
        self.after_change()
        return pieces

    def fill(self, n):
        """Take ``n`` free blocks to be filled with stored bytes, out of sight.

        Parameters
        ----------
        n : int
            Number of blocks, 0 or more.

        Returns
        -------
        BlockFilling
            Writable memoryviews, in the order of `BlockPieces`. At the end of its ``with`` block, or by
            `BlockFilling.commit`, the blocks are the caller's; left by an exception, they are free again.

        Raises
        ------
        PagedStoreExhausted
            Fewer are free, and the store's `PrefixCache` could not give up as many. Nothing was changed.
        TypeError, ValueError
            ``n`` is no integer of at least 0.

        Examples
        --------
        >>> import io, pagedkv
        >>> store = pagedkv.PagedKvStore(block_size=16, total_blocks=8, n_kv_heads=2, head_dim=4)
        >>> file = io.BytesIO(bytes(2 * store.nbytes // store.total_blocks))
        >>> with store.fill(2) as filling:
        ...     for view in filling.views:
        ...         if file.readinto(view) != len(view):
        ...             raise EOFError
        >>> filling.ids
        [0, 1]
        """
        cdef Py_ssize_t count = as_size(n, "n", 0, MAX_SIZE)
        if count > self.blocks.n_free():
            self.end_terms()
        if count > self.blocks.n_most():  # not worth an array of that size
            raise self.exhausted(count, 0)
        cdef HeldBlocks held = HeldBlocks.of(self, self.blocks, self.rows, count, True)
        cdef BlockFilling filling = BlockFilling.fill(held)
        if count and not self.take(held.ids, count):
            raise self.exhausted(count, 0)
        held.n = count
        self.after_change()
        return filling

    # --- looking after it ---

    def trim(self):
        """Give the memory of free blocks back to the system. They stay blocks of the store, and take memory again when used.

        What a prefix cache holds stays: `PrefixCache.evict` frees it first. Blocks that are smaller than a page go as far as
        neighbours are free too. Others may use the store meanwhile.

        Returns
        -------
        int
            Bytes that were given back, of memory that had been written or not; 0 where the system is not Linux.
        """
        cdef const int32_t[::1] ids = self.blocks.begin_trim()
        cdef Py_ssize_t i = 0, first, n_bytes = 0
        while i < ids.shape[0]:
            with cython.critical_section(self.budget):
                # A run of neighbours that are still free: nobody takes one of them before this is done.
                first = i
                while i < ids.shape[0] and ids[i] == ids[first] + i - first and self.blocks.counts[ids[i]] == 0:
                    i += 1
                n_bytes += self.rows.trim(ids[first], i - first)
            i += i == first  # somebody has taken it
        return n_bytes

    def resize(self, budget_bytes):
        """Let the store have more memory from now on, or less.

        Less evicts what has to go of what a prefix cache holds, and gives the memory of free blocks back, as `trim` does.

        Parameters
        ----------
        budget_bytes : int
            Bytes for K and V of all layers together: at least one block, at most what the store was made for (see
            ``max_bytes`` of `from_bytes`).

        Raises
        ------
        TypeError, ValueError
            No such number; or less than the blocks that sequences hold. Nothing was changed.
        """
        cdef Py_ssize_t n_bytes = self.blocks.block_bytes
        cdef Py_ssize_t limit = as_size(budget_bytes, "budget_bytes", n_bytes, self.blocks.total * n_bytes)
        if self.budget.n_members > 1:
            raise ValueError("store: expected one with a budget of its own, got one of a model's: resize its ModelStores")
        self.resize_all(limit // n_bytes * n_bytes)

    cdef int resize_all(self, Py_ssize_t limit) except -1:
        cdef Py_ssize_t n_needed
        self.end_terms_of_all()
        n_needed = self.budget.resize(limit)
        if n_needed >= 0:
            raise ValueError(f"budget_bytes: expected at least {n_needed}, what sequences hold, got {limit}")
        self.after_change()
        return 0

    cdef int end_terms_of_all(self) except -1:
        for store in self.with_peers():
            (<PagedKvStore>store).end_terms()
        return 0

    cdef list with_peers(self):
        """The stores that share the budget, this one among them."""
        cdef list stores = [peer() for peer in self.peers]
        return [store for store in stores if store is not None]

    cdef int join(self, PagedKvStore other) except -1:
        other.budget.join(self.blocks)
        self.budget = other.budget
        other.peers.append(weakref.ref(self))
        self.peers = other.peers
        return 0

    def stats(self):
        """Counters of the store as a `StoreStats`; costs no walk over the blocks."""
        cdef BlockAllocator blocks = self.blocks
        cdef Py_ssize_t free = blocks.n_free()
        return StoreStats(
            total_blocks=blocks.n_most(), free_blocks=free, held_blocks=blocks.n_held(),
            peak_held_blocks=blocks.peak_held, blocks_acquired=blocks.acquired,
            blocks_released=blocks.released, copies_on_write=self.copies_on_write,
            exhaustions=blocks.exhaustions, nbytes=self.nbytes)

    def block_map(self, caches=(), *, width=64):
        """Draw who holds which block: a frozen `BlockMap`, which prints as text, and shows as SVG in a notebook.

        Parameters
        ----------
        caches : iterable of PagedKvCache, or a mapping of names to them, optional
            Sequences of this store to draw beside the map, block by block.
        width : int, optional
            Marks in a line, at most 1024. There are up to 32 lines: in a larger store a mark stands for several blocks.

        Returns
        -------
        BlockMap

        Raises
        ------
        TypeError, ValueError
            No caches; sequences of another store; a width out of range.
        """
        cdef Py_ssize_t n_marks = as_size(width, "width", 1, 1024)
        tables = self.tables_of(caches)
        self.end_terms()
        return BlockMap._draw(*self.blocks.snapshot(), tables, n_marks)

    def check(self, caches=()):
        """Raise `PagedKvError` if the books do not balance. Walks over every block, and needs no memory for that.

        Parameters
        ----------
        caches : iterable of PagedKvCache, optional
            Sequences of this store: each of their blocks must be held, and by at least as many
            as name it among them.

        Raises
        ------
        PagedKvError
            Says which block is wrong, and how.
        TypeError, ValueError
            No caches; sequences of another store.
        """
        cdef list tables = [table for _, table in self.tables_of(caches)]
        self.check_books()
        fault = self.blocks.fault_in(tables)
        if fault is not None:
            raise PagedKvError(fault)

    cdef int check_books(self) except -1:
        """Needs no memory where nothing is wrong."""
        cdef str fault = self.blocks.fault()
        if fault is not None:
            raise PagedKvError(fault)
        return 0

    cdef list tables_of(self, object caches):
        """Name and block table, a list of ids and -1, of each of `caches`; empty where it holds nothing of this store."""
        cdef list tables = []
        named = caches.items() if hasattr(caches, "items") else enumerate(as_items(caches, "caches", "PagedKvCache objects"))
        for name, cache in named:
            table = getattr(cache, "block_table", None)
            if not isinstance(table, np.ndarray):
                raise TypeError(f"caches: expected PagedKvCache objects, got {describe(cache)}")
            holder = cache.store
            if holder is not None and holder is not self:
                raise ValueError("caches: expected sequences of this store, got one of another")
            ids = table.tolist() if holder is self else []
            tables.append((str(name), [id if id == -1 else as_index(id, "block_table", self.blocks.total) for id in ids]))
        return tables

    cdef int check_held(self, Py_ssize_t block, str name) except -1:
        if self.blocks.counts[block] == 0:
            raise ValueError(f"{name}: expected a block that someone holds, got {block}, which is free")
        return 0

    # --- at C level: holders ---

    cdef bint take(self, int32_t* ids, Py_ssize_t n) noexcept:
        cdef bint enough = self.blocks.take(ids, n)
        if enough and self.debug:
            self.rows.erase(ids, n)
        return enough

    cdef int end_terms_if_short(self, Py_ssize_t n_new) except -1:
        # Twice: blocks for the positions, and copies of those that are there and shared.
        if 2 * (n_new // self.block_size + 2) > self.blocks.n_free():
            self.end_terms()
        return 0

    cdef int end_terms(self) except -1:
        if self.blocks.has_terms():
            prefixes = self.prefixes()
            if prefixes is not None:
                prefixes._end_terms()
        return 0

    cdef object exhausted(self, Py_ssize_t needed, Py_ssize_t held, Py_ssize_t elsewhere=0, Py_ssize_t most_elsewhere=0):
        cdef BlockAllocator blocks = self.blocks
        cdef Py_ssize_t room = self.budget.account.limit - self.budget.account.used - elsewhere
        cdef Py_ssize_t most = self.budget.account.limit - most_elsewhere
        return PagedStoreExhausted(
            needed, min(blocks.n_unheld(), max(room, 0) // blocks.block_bytes),
            min(blocks.total, max(most, 0) // blocks.block_bytes), held, self.budget.count_evictable() // blocks.block_bytes)

    cdef int know_prefixes(self, object prefixes, Py_ssize_t window) except -1:
        reference = weakref.ref(prefixes)
        self.blocks.know(self.block_size, window, int.from_bytes(os.urandom(8), "little"))
        self.prefixes = reference
        return 0

    cdef int after_change(self) except -1:
        cdef PagedKvStore store
        if self.is_over():  # free blocks keep memory that others of the budget need
            for store in self.with_peers():
                store.trim()
        if self.debug:
            self.check_books()
        return 0


cdef object not_a_store(object store):
    if isinstance(store, PagedKvStore):
        return RuntimeError("store: its __init__ has not run")
    return TypeError(f"store: expected a PagedKvStore, got {describe(store)}")


cdef void erase_freed(void* owner, int32_t id) noexcept:
    """For the allocator of a store with debug=True."""
    (<PagedKvStore>owner).rows.erase(&id, 1)
