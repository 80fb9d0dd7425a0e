"""PrefixEvents: what a prefix cache learns and forgets, in the order in which it does, for who keeps a picture of it.

The books write records into a ring of C memory within their critical section, and call nobody. Whoever reads them copies
some within it, makes values of the copies outside, and takes them off the ring when that has succeeded.
"""

cimport cython
cimport numpy as cnp
from libc.stdint cimport int64_t, uint64_t
from libc.string cimport memcpy

from pagedkv._radix.events cimport (
    ALL_NAMESPACES, REMOVED, STORED, copy_events, drop_events, first_event, free_events, make_events, mark_read)
from pagedkv._radix.nodes cimport Event, Events, RadixTree
from pagedkv.store cimport PagedKvStore

import os
import sys

import numpy as np

from pagedkv._keys import as_count
from pagedkv.stats import PrefixEvent

cdef enum:
    AT_ONCE = 256           # events that are copied while others wait for the books
    TOKENS_AT_ONCE = 65536


@cython.final
@cython.no_gc_clear  # the store is told when this goes: it must still be there
cdef class PrefixEvents:
    """PrefixEvents()\n--\n
    What a prefix cache learns and forgets, in a bounded queue that is read by `poll`. `PrefixCache.events` makes it.

    It is open until `close`, or the end of a ``with`` block, or until it is dropped. It does not keep the prefix cache: when
    that goes, what it knew is cleared, and that can still be read. Nothing of the caller's is ever called.

    Attributes
    ----------
    sequence : int
        The number that the next event will have; the first one has 0.
    n_dropped : int
        Events that went unread, since the queue was full.
    incarnation : int
        A random number of 64 bits that is in each event. A process that was forked has another one.
    capacity : int
        Events that may wait.
    ended : bool
        Whether there will be no more: it was closed, or the prefix cache has gone.

    Notes
    -----
    A picture of what is known: read ``sequence``, walk, and apply the events that have this number or a later one: one that
    is stored is there, one that is removed is not, in the order of their numbers. Where a number is missing or the
    ``incarnation`` is another one, begin anew.

    Threads: all methods may be called from any thread, and each event comes once.

    Examples
    --------
    >>> import numpy as np, pagedkv
    >>> store, cache = pagedkv.PagedKvStore(4, 8, n_kv_heads=1, head_dim=2), pagedkv.PagedKvCache()
    >>> prefixes = pagedkv.PrefixCache(store)
    >>> cache.append_contiguous(store, *np.ones((2, 8, 2), np.float32), 8)
    >>> with prefixes.events(capacity=100) as events:
    ...     blocks = prefixes.insert(range(8), cache)
    ...     forgotten = prefixes.forget(range(8), start=4)
    ...     [(event.kind, event.position) for event in events.poll()]
    [('stored', 0), ('stored', 4), ('removed', 4)]
    """

    def __init__(self):
        raise TypeError("PrefixEvents: PrefixCache.events makes it")

    @staticmethod
    cdef PrefixEvents of(PagedKvStore store, int64_t capacity):
        cdef PrefixEvents it = PrefixEvents.__new__(PrefixEvents)
        cdef RadixTree* tree
        cdef bint taken
        if make_events(&it.ring, capacity, store.block_size) < 0:
            raise MemoryError(f"cannot allocate room for {capacity} events")
        it.store = store
        with cython.critical_section(store.budget):
            tree = store.blocks.tree
            taken = tree.events is not NULL
            if not taken:
                tree.events = &it.ring
        if taken:
            raise ValueError("events: expected a prefix cache whose events nobody reads, got one with an open reader")
        return it

    def __dealloc__(self):
        if self.store is not None:
            self.end()

    cdef void end(self) noexcept:
        cdef Events ring
        with cython.critical_section(self.store.budget):
            ring = self.ring
            if ring.items is not NULL:
                if self.store.blocks.tree is not NULL and self.store.blocks.tree.events is &self.ring:
                    self.store.blocks.tree.events = NULL
                self.n_missed += first_event(&ring) - ring.n_read
                mark_read(&self.ring, ring.n_written)
                self.ring.items = NULL
                self.ring.tokens = NULL
        free_events(&ring)

    def close(self):
        """Nothing is written down any more, and what was not read is gone. Does nothing the second time."""
        if self.store is not None:
            self.end()

    def __enter__(self):
        self.check_open()
        return self

    def __exit__(self, kind, error, traceback):
        self.close()

    cdef int check_open(self) except -1:
        cdef bint is_open = False
        if self.store is not None:
            with cython.critical_section(self.store.budget):
                is_open = self.ring.items is not NULL
        if not is_open:
            raise RuntimeError("events: expected an open reader, got one that was closed")
        return 0

    def poll(self, n=None):
        """What has happened and was not read yet, the oldest first. It waits for nothing.

        Parameters
        ----------
        n : int, optional
            Events at most, 0 or more; all that are there without it.

        Returns
        -------
        list of PrefixEvent
            Empty where nothing has happened.

        Raises
        ------
        TypeError, ValueError
            ``n`` is no integer of at least 0.
        RuntimeError
            It was closed.
        """
        cdef int64_t most = sys.maxsize if n is None else as_count(n, "n")
        cdef uint64_t incarnation = self.incarnation_now(), first, at, end
        cdef unsigned char[::1] items
        cdef int64_t[::1] tokens
        cdef list found
        cdef bint done
        self.check_open()
        cdef int64_t size = self.store.block_size, at_once = max(min(AT_ONCE, TOKENS_AT_ONCE // size), 1)
        items, tokens = np.empty(at_once * sizeof(Event), np.uint8), np.empty(at_once * size, np.int64)
        while True:
            found = []
            with cython.critical_section(self.store.budget):
                first, end = self.ring.n_read, self.ring.n_written
            at = first
            while at < end and len(found) < most:
                self.read(found, &at, min(at_once, <int64_t>(end - at), most - len(found)), incarnation,
                          <Event*>&items[0], &tokens[0])
            with cython.critical_section(self.store.budget):
                done = self.ring.items is not NULL and self.ring.n_read == first  # no other thread has read the same
                if done:
                    self.n_missed += at - first - <uint64_t>len(found)
                    mark_read(&self.ring, at)
            if done:
                return found
            self.check_open()

    cdef int read(self, list found, uint64_t* at, int64_t n, uint64_t incarnation, Event* items, int64_t* tokens) except -1:
        cdef Py_ssize_t size = self.store.block_size
        cdef int64_t i
        cdef const Event* it
        cdef const char* name = NULL
        cdef object space = None
        cdef cnp.ndarray its_tokens
        with cython.critical_section(self.store.budget):
            n = copy_events(&self.ring, size, at, n, items, tokens) if self.ring.items is not NULL else 0
        try:
            for i in range(n):
                it = &items[i]
                if it.n_bytes == ALL_NAMESPACES:
                    space = ...
                elif it.n_bytes < 0:
                    space = None
                elif it.name is not name:
                    space = it.name[:it.n_bytes]
                name = it.name
                its_tokens = None
                if it.kind == STORED:
                    its_tokens = np.empty(size, np.int64)
                    memcpy(cnp.PyArray_DATA(its_tokens), &tokens[i * size], size * sizeof(int64_t))
                    its_tokens.flags.writeable = False
                kind = "stored" if it.kind == STORED else "removed" if it.kind == REMOVED else "cleared"
                found.append(PrefixEvent(kind, at[0] + <uint64_t>i, incarnation, space, it.id, it.parent, it.position,
                                         its_tokens, it.block))
        finally:
            with cython.critical_section(self.store.budget):
                drop_events(items, n)
        at[0] += <uint64_t>n
        if n == 0:  # closed meanwhile
            self.check_open()
        return 0

    cdef uint64_t incarnation_now(self) except? 0:
        cdef int64_t process = os.getpid()
        cdef uint64_t fresh = int.from_bytes(os.urandom(8), "little") if process != self.process else 0
        with cython.critical_section(self):
            if process != self.process:
                self.number = fresh
                self.process = process
            fresh = self.number
        return fresh

    @property
    def incarnation(self):
        return self.incarnation_now()

    @property
    def sequence(self):
        cdef uint64_t n = 0
        if self.store is not None:
            with cython.critical_section(self.store.budget):
                n = self.ring.n_written
        return n

    @property
    def n_dropped(self):
        cdef uint64_t n = 0
        if self.store is not None:
            with cython.critical_section(self.store.budget):
                n = self.n_missed + first_event(&self.ring) - self.ring.n_read
        return n

    @property
    def capacity(self):
        return self.ring.room

    @property
    def ended(self):
        cdef bint ended = True
        if self.store is not None:
            with cython.critical_section(self.store.budget):
                ended = self.store.blocks.tree is NULL or self.store.blocks.tree.events is not &self.ring
        return ended

    def __repr__(self):
        state = "ended, " if self.ended else ""
        return f"PrefixEvents({state}sequence={self.sequence}, n_dropped={self.n_dropped}, capacity={self.capacity})"

    def __reduce__(self):
        raise TypeError("PrefixEvents: cannot be copied or pickled, it reads what a prefix cache writes")
