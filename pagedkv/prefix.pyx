"""PrefixCache: which block holds the K/V of which tokens, so that a request starts on what was computed before.

What it knows is in the books of the store's blocks (`BlockAllocator`), as a tree; here is what a caller gives and gets.
Whatever may run the caller's code, or fail, comes first: the clock, the arrays, the numbers. Then the books change at once.

A model's layers may be spread over several stores of one block size, each with its books: `_beginnings` asks and tells all
of them.
"""

cimport cython
from libc.math cimport isnan
from libc.stdint cimport int32_t, int64_t, uint64_t
from libc.stdlib cimport calloc, free

from pagedkv._arrays cimport as_index, as_size, describe
from pagedkv._beginnings cimport Told, find_all, match_all, start_all, tell_all
from pagedkv._groups cimport as_sequence, as_stores, windows_of
from pagedkv._radix.nodes cimport NEVER, Key, Mark, RadixTree, common
from pagedkv._radix.order cimport UNPROTECTED, radix_kind
from pagedkv._tables cimport has_first
from pagedkv.events cimport PrefixEvents
from pagedkv.known cimport key_of, key_of_all, names_of, walk
from pagedkv.sequence cimport PagedKvCache
from pagedkv.store cimport PagedKvStore

import sys
import time
import weakref

import numpy as np

from pagedkv._keys import as_count, as_namespace, as_token_ids, as_ttl
from pagedkv.stats import PrefixStats


# What a handle knows in one store.
cdef struct Seen:
    Mark mark
    uint64_t lineage


@cython.final
cdef class PrefixHandle:
    """PrefixHandle()\n--\n
    How far the tokens of one sequence have been inserted into a `PrefixCache`: for ``insert(..., handle=)``.

    It holds nothing: what was inserted may be evicted at any time, and is then inserted anew. All tokens are looked at once
    more where the sequence was truncated to less than what was inserted, or is another one.

    Notes
    -----
    Threads: belongs to one sequence, and to one thread at a time, as that does.

    Examples
    --------
    >>> import numpy as np, pagedkv
    >>> store = pagedkv.PagedKvStore(block_size=2, total_blocks=8, n_kv_heads=1, head_dim=2)
    >>> prefixes, cache, tokens = pagedkv.PrefixCache(store), pagedkv.PagedKvCache(), []
    >>> handle = pagedkv.PrefixHandle()
    >>> for token in range(6):
    ...     tokens.append(token)
    ...     cache.push(store, *np.ones((2, 2), np.float32))
    ...     n_new = prefixes.insert(tokens, cache, handle=handle)       # looks at two tokens, at most
    >>> prefixes.match([*tokens, 6])
    6
    """

    cdef Seen* seen                 # in each store; NULL until it is used
    cdef Py_ssize_t n_seen
    cdef object prefixes            # weak references to the one cache that it is used with,
    cdef object store               # and to the first of the stores that it has told
    cdef bytes namespace

    def __dealloc__(self):
        free(self.seen)

    cdef int check_whose(self, PrefixCache prefixes, bytes namespace) except -1:
        """One that tells nothing may be used with another cache."""
        if self.count() and (self.prefixes() is not prefixes.whole() or self.store() is not prefixes.homes[0]
                             or self.n_seen != len(prefixes.homes) or self.namespace != namespace):
            raise ValueError("handle: expected one of this prefix cache and namespace, got another's")
        return 0

    cdef Py_ssize_t count(self) noexcept:
        """The most tokens that one of the stores has been told of."""
        cdef Py_ssize_t n = 0, i
        with cython.critical_section(self):
            for i in range(self.n_seen):
                if self.seen[i].mark.number:
                    n = max(n, self.seen[i].mark.n)
        return n

    def __repr__(self):
        return f"PrefixHandle({self.count()} tokens)"

    def __reduce__(self):
        raise TypeError("PrefixHandle: cannot be copied or pickled, it belongs to one sequence")


@cython.no_gc_clear  # the blocks go back to the store when the cache goes: it must still be there
cdef class PrefixCache:
    """PrefixCache(store, *, clock=None, window=None)\n--\n
    Shares the blocks of equal beginnings between sequences that need not live at the same time.

    It holds one reference to every block that was inserted. A store that runs short asks it before it
    raises: the blocks that were not used for longest go first, from the ends of the known beginnings, and
    only those that no sequence holds. If all of them are too few, none goes and the store raises
    `PagedStoreExhausted`.

    Parameters
    ----------
    store : PagedKvStore or ModelStores
        Has one prefix cache at a time, and knows it weakly: dropping this object gives its blocks back. `ModelStores` make
        their own, ``prefixes``.
    clock : callable, optional
        Seconds as a float, never decreasing; what ``ttl`` is measured with; `time.monotonic` without it. It may use the
        prefix cache and the store.
    window : int, optional
        Positions that a query of the store's layers sees, itself included, as a `LayerShape` has it. Then a
        beginning is known as far as all that the next query sees is there; blocks before it may be missing. Without it a
        query sees all. A model's stores have theirs.

    Raises
    ------
    TypeError, ValueError
        No store, a clock that cannot be called, or a window below 1; a store that has a prefix cache already.
    RuntimeError
        The store's ``__init__`` has not run.

    Notes
    -----
    Tokens: a list, tuple or one-dimensional integer array of ids from 0 to 2**63 - 1, compared one by one. How the
    ids are spelled makes no difference. A ValueError names ``tokens`` where one is negative, a boolean or no integer.

    Namespaces: ``bytes``, or None, which is a namespace of its own and not the same as ``b""``. Tenants, adapters or
    salts that use different ones never share a block. Eviction takes from the namespace that holds the most blocks,
    which is the one furthest above an equal share; a burst in one cannot push another below its share as long as
    the first has blocks to give. Shares are an order, no reservation: nothing lies idle while a request is refused.

    Windows: sequences may be inserted after `PagedKvCache.drop_before`, and start with what the window has left behind dropped
    (`PagedKvCache.first_position`). Where only blocks can be evicted that come before some which sequences hold, these
    stay known. The ids of tokens stay, 8 bytes each, as long as a block behind them is known.

    Names: a block may be inserted under several keys and in several namespaces. It is one block in all counts, is evictable
    as soon as nobody but the prefix cache holds it, and is free when its last name has gone.

    Threads: all methods may be called from any thread, from a finalizer and from a signal handler: each change happens at
    once, and nobody waits. A sequence that is handed over belongs to the caller.

    Method: Zheng et al., "SGLang: Efficient Execution of Structured Language Model Programs", NeurIPS 2024,
    section 3 (RadixAttention).

    Examples
    --------
    >>> import numpy as np, pagedkv
    >>> store = pagedkv.PagedKvStore(block_size=4, total_blocks=8, n_kv_heads=1, head_dim=2)
    >>> prefixes = pagedkv.PrefixCache(store)
    >>> prompt, cache = [5, 6, 7, 8, 9, 10], pagedkv.PagedKvCache()
    >>> cache.append_contiguous(store, *np.ones((2, 6, 2), np.float32), 6)
    >>> prefixes.insert(prompt, cache)           # one whole block
    1
    >>> cache.release(store)
    >>> second = pagedkv.PagedKvCache()
    >>> prefixes.attach(second, [5, 6, 7, 8, 1, 2, 3])
    4
    >>> second
    PagedKvCache(seq_len=4, capacity=4, blocks=[0])
    """

    cdef object __weakref__
    cdef tuple homes                # the stores; None until __init__ has run
    cdef PrefixCache owner          # of the books, of one that looks at a model's
    cdef object clock

    def __init__(self, store, *, clock=None, window=None):
        cdef tuple homes = as_stores(store), windows = windows_of(store)
        cdef PagedKvStore home
        cdef Py_ssize_t n_known = 0, i
        if window is not None:
            if not isinstance(store, PagedKvStore):
                raise ValueError("window: expected none, a model's stores have theirs")
            windows = (window,)
        windows = tuple([0 if seen is None else as_size(seen, "window", 1, sys.maxsize) for seen in windows])
        if clock is None:
            clock = time.monotonic
        if not callable(clock):
            raise TypeError(f"clock: expected a callable, got {describe(clock)}")
        if self.homes is not None:
            raise RuntimeError("PrefixCache: __init__ runs once")
        try:
            for home, seen in zip(homes, windows, strict=True):
                home.know_prefixes(self, seen)
                n_known += 1
        except BaseException:
            for i in range(n_known):
                (<PagedKvStore>homes[i]).blocks.know_nothing()
            raise
        self.homes = homes
        self.clock = clock

    def __dealloc__(self):
        cdef Py_ssize_t i
        if self.homes is not None and self.owner is None:
            for i in range(len(self.homes)):
                self.at(i).blocks.know_nothing()

    cdef inline PagedKvStore at(self, Py_ssize_t i):
        return <PagedKvStore>self.homes[i]

    def __repr__(self):
        self.check_made()
        held = sum([(<PagedKvStore>store).blocks.tree.n_held for store in self.homes])
        whose = f"store={self.homes[0]!r}" if len(self.homes) == 1 else f"stores={self.homes!r}"
        return f"{type(self).__name__}(blocks={held}, evictable={self.evictable_block_count}, {whose})"

    def __reduce__(self):
        raise TypeError("PrefixCache: cannot be copied or pickled, it holds blocks of a store by id")

    @property
    def store(self):
        """The store whose blocks these are; of a model's `stores` the first, and `groups` has one for each."""
        return None if self.homes is None else self.homes[0]

    @property
    def stores(self):
        """The stores whose blocks these are: a tuple of `PagedKvStore`."""
        return self.homes

    @property
    def groups(self):
        """One for each of a model's `stores`, which looks at what that store knows, and changes it alone."""
        self.check_made()
        return tuple([self.look_at(store) for store in self.homes])

    cdef inline PrefixCache whole(self):
        return self if self.owner is None else self.owner

    cdef PrefixCache look_at(self, PagedKvStore store):
        cdef PrefixCache other = PrefixCache.__new__(PrefixCache)
        other.owner = self.whole()
        other.clock = self.clock
        other.homes = (store,)
        return other

    @property
    def window(self):
        """Positions that a query of the `store`'s layers sees, itself included; None for all."""
        self.check_made()
        return self.at(0).blocks.tree.window or None

    @property
    def evictable_block_count(self):
        """Blocks that could be given up now: nobody else holds them, and no ``ttl`` protects them. O(1)."""
        self._end_terms()
        return sum([(<PagedKvStore>store).blocks.count_evictable() for store in self.homes])

    def is_evictable(self, block):
        """Whether a block of the `store` is one of those that could be given up now.

        Parameters
        ----------
        block : int
            The id of a block of the store.

        Returns
        -------
        bool

        Raises
        ------
        TypeError, IndexError
            ``block`` is no integer, or out of range.
        """
        self._end_terms()
        cdef PagedKvStore store = self.at(0)
        cdef Py_ssize_t id = as_index(block, "block", store.blocks.total)
        return store.blocks.is_idle(<int32_t>id)

    def _is_evictable_without_one(self, block):
        """Whether a block could be given up if one more of its holders let go."""
        self._end_terms()
        cdef PagedKvStore store = self.at(0)
        cdef Py_ssize_t id = as_index(block, "block", store.blocks.total)
        cdef bint idle
        with cython.critical_section(store.budget):
            idle = store.blocks.counts[id] == 2 and radix_kind(store.blocks.tree, <int32_t>id) == UNPROTECTED
        return idle

    # --- reading ---

    def match(self, tokens, *, namespace=None):
        """How many of these tokens' positions `attach` would reuse. Changes nothing, and is no use of them.

        Parameters
        ----------
        tokens : list, tuple, range or integer array ``[n]``
            A prompt's token ids, 0 to 2**63 - 1.
        namespace : bytes, optional
            Where to look. None is one of its own.

        Returns
        -------
        int
            0 to ``n - 1``: one token at least is left to compute, for its logits.

        Raises
        ------
        TypeError, ValueError
            ``tokens`` or ``namespace`` of a wrong kind.
        """
        self.check_made()
        cdef const int64_t[::1] ids = as_token_ids(tokens)
        cdef bytes name = as_namespace(namespace)
        return match_all(self.homes, key_of(name, ids, ids.shape[0] - 1))

    def match_blocks(self, tokens, *, namespace=None):
        """The ids of the whole blocks that `attach` would share: int32 ``[match(tokens) // block_size]``.

        Those of the `store`, where a model has several. -1 stands for those that a ``window`` has left behind. They are
        not retained: another thread may evict them as soon as this returns.

        Arguments and errors as for `match`.
        """
        self.check_made()
        cdef const int64_t[::1] ids = as_token_ids(tokens)
        cdef bytes name = as_namespace(namespace)
        return find_all(self.homes, name, ids)[1][0][0]

    def attach(self, cache, tokens, *, namespace=None):
        """Start an empty sequence on the longest beginning of ``tokens`` that is known.

        Whole blocks are shared, and with a ``window`` only those that the next query sees: ``first_position`` says from
        where. Where the tokens part inside a block, the sequence gets a block of its own and a copy of the rows that match,
        in all layers; if that block cannot be had, reuse ends before it.

        Parameters
        ----------
        cache : PagedKvCache or ModelSequence
            Holds no blocks. It will have ``seq_len`` positions: what is returned.
        tokens : list, tuple, range or integer array ``[n]``
            A prompt's token ids, 0 to 2**63 - 1.
        namespace : bytes, optional
            Where to look. None is one of its own.

        Returns
        -------
        int
            Positions reused, 0 to ``n - 1``.

        Raises
        ------
        TypeError, ValueError
            An argument of a wrong kind; a cache that holds blocks.
        RuntimeError
            The cache is in use by a running call.
        """
        self.check_made()
        ids, name = as_token_ids(tokens), as_namespace(namespace)
        caches = as_sequence(cache, self.homes)
        self._end_terms()
        return self.gone(start_all(self.homes, caches, name, ids))

    def namespaces(self):
        """The names of the namespaces in which something is known now: a list of bytes, with None first if it is one.

        Of a model's `stores` it looks at the first, and ``groups`` has one for each.
        """
        self.check_made()
        return names_of(self.at(0).blocks)

    def walk(self, *, namespace=...):
        """What is known, block by block: an iterator of `KnownBlock`.

        Of a namespace it shows what is known in it at one moment, when its first block is asked for, whatever changes while
        the iterator is read; every block comes after those before it in its sequence. The namespaces are those of now: what
        comes later is not seen, what has gone until its turn is left out. One of them at a time is copied, 8 bytes for each
        of its tokens. It is no use of the blocks, and they are not retained: those that were seen may be evicted at once.
        Of a model's `stores` it looks at the first, and ``groups`` has one for each.

        Parameters
        ----------
        namespace : bytes or None, optional
            All of them without it; None is one of its own.

        Returns
        -------
        iterator of KnownBlock
            A block comes once for each of its names.

        Raises
        ------
        TypeError
            ``namespace`` is no bytes and not None.
        """
        self.check_made()
        cdef PagedKvStore store = self.at(0)
        names = names_of(store.blocks) if namespace is ... else [as_namespace(namespace)]
        return walk(store.blocks, self, store.block_size, names)

    def events(self, capacity=16384):
        """Begin to write down what is learned and forgotten from now on, to be read by `PrefixEvents.poll`.

        Of a model's `stores` it looks at the first, and ``groups`` has one for each.

        Parameters
        ----------
        capacity : int, optional
            Events that wait to be read, at most: 1 to 2**24. Each takes the bytes of its tokens, 8 for each, and 56. Where
            they are as many, the oldest goes.

        Returns
        -------
        PrefixEvents

        Raises
        ------
        TypeError, ValueError
            ``capacity`` is no integer, or out of range; somebody reads the events already.
        MemoryError
            There is no room for them.
        """
        self.check_made()
        return PrefixEvents.of(self.at(0), as_size(capacity, "capacity", 1, 1 << 24))

    # --- reading, of tokens that are checked ---

    def _match(self, const int64_t[::1] ids not None, bytes name):
        """`match`."""
        self.check_made()
        return match_all(self.homes, key_of(name, ids, ids.shape[0] - 1))

    def _look_up(self, const int64_t[::1] ids not None, bytes name):
        """`match`, and for each store `match_blocks` and for each of these blocks whether it could be given up now."""
        self._end_terms()
        return find_all(self.homes, name, ids)

    # --- changing ---

    def insert(self, tokens, cache, *, namespace=None, priority=0, ttl=None, handle=None):
        """Remember the whole blocks of a sequence whose tokens these are. The sequence may be running, and go on.

        Parameters
        ----------
        tokens : list, tuple, range or integer array ``[n]``
            What the sequence's positions were computed from. Only blocks that lie wholly within both ``n`` and
            ``seq_len`` are taken; what is known already stays as it is.
        cache : PagedKvCache or ModelSequence
            A sequence of the store. Blocks that `PagedKvCache.drop_before` gave back cannot be inserted any more: without
            a ``window``, such a sequence can only continue what is known up to there, or else nothing is inserted.
        namespace : bytes, optional
            Where they can be found again. None is one of its own.
        priority : int, optional
            Within a namespace, blocks of a higher priority are evicted after all those of a lower one. A block
            has the highest that it was inserted with.
        ttl : float, optional
            Seconds for which the blocks of these tokens are not evicted at all; ``math.inf`` is for good.
            `clear` takes them nevertheless.
        handle : PrefixHandle, optional
            Of a sequence that grows, and is inserted again and again: what went in by it before is not looked at again, so
            that only new tokens cost time. ``tokens`` are nevertheless all of them, and something that can be sliced.

        Returns
        -------
        int
            Blocks that were new under these tokens, or had been missing; of a model, in all stores together.

        Raises
        ------
        TypeError, ValueError
            An argument of a wrong kind or value; a sequence of another store; with ``debug=True`` in the store, K or V
            that are not finite.
        """
        self.check_made()
        cdef bytes name = as_namespace(namespace)
        cdef tuple caches = as_sequence(cache, self.homes)
        cdef int64_t rank = as_size(priority, "priority", -sys.maxsize, sys.maxsize)
        cdef object seconds = as_ttl(ttl)
        if handle is not None and not isinstance(handle, PrefixHandle):
            raise TypeError(f"handle: expected a PrefixHandle or None, got {describe(handle)}")
        return self.insert_all(caches, tokens, name, rank, seconds, handle)

    def evict(self, n):
        """Give up to ``n`` blocks back to the store, in the order of eviction.

        Parameters
        ----------
        n : int
            Blocks, 0 or more.

        Returns
        -------
        int
            How many went: fewer than ``n`` where sequences hold the rest, or a ``ttl`` protects it.

        Raises
        ------
        TypeError, ValueError
            ``n`` is no integer of at least 0.
        """
        cdef Py_ssize_t n_wanted = as_count(n, "n")
        self._end_terms()
        return self.gone(self.at(0).blocks.evict(n_wanted) if len(self.homes) == 1 else self.at(0).budget.evict(n_wanted))

    def forget(self, tokens, *, namespace=None, start=0):
        """Forget the blocks of these tokens, and all that continues them, protected or not: K/V that turned out to be wrong.

        What sequences hold stays theirs. Others that begin with the same tokens are no longer known either from there on,
        since they read the same blocks; ``start`` says how far these are right.

        Parameters
        ----------
        tokens : list, tuple, range or integer array ``[n]``
            A prompt's token ids, 0 to 2**63 - 1, of which whole blocks are known.
        namespace : bytes, optional
            Where they are known. None is one of its own.
        start : int, optional
            The first position that is to be forgotten: with it the whole block that holds it.

        Returns
        -------
        int
            How many blocks have left the prefix cache: those that had no other name.

        Raises
        ------
        TypeError, ValueError
            An argument of a wrong kind; ``start`` is below 0.
        """
        self.check_made()
        cdef const int64_t[::1] ids = as_token_ids(tokens)
        cdef bytes name = as_namespace(namespace)
        cdef Py_ssize_t first = as_count(start, "start")
        cdef Key key = key_of(name, ids, ids.shape[0])
        cdef Py_ssize_t n = 0, i
        with cython.critical_section(self.at(0).budget):  # all stores at once
            for i in range(len(self.homes)):
                n += self.at(i).blocks.forget_locked(key, first)
        return self.gone(n)

    def clear(self, *, namespace=...):
        """Forget one namespace, or all of them, protected or not. What sequences hold stays theirs.

        Parameters
        ----------
        namespace : bytes or None, optional
            All of them without it; None is one of its own.

        Returns
        -------
        int
            How many blocks have left the prefix cache: those that had no other name.

        Raises
        ------
        TypeError
            ``namespace`` is no bytes and not None.
        """
        self.check_made()
        cdef bytes name = None if namespace is ... else as_namespace(namespace)
        cdef Key key = key_of_all(name)
        cdef Key* which = NULL if namespace is ... else &key
        cdef Py_ssize_t n = 0, i
        with cython.critical_section(self.at(0).budget):  # as `forget`
            for i in range(len(self.homes)):
                n += self.at(i).blocks.clear_locked(which)
        return self.gone(n)

    cdef Py_ssize_t gone(self, Py_ssize_t n) except -1:
        for store in self.homes:
            (<PagedKvStore>store).after_change()
        return n

    # --- looking after it ---

    def stats(self):
        """Counters as a `PrefixStats`. O(1). Blocks are those of all stores; tokens and namespaces are counted once."""
        self._end_terms()
        cdef RadixTree tree
        cdef PagedKvStore store
        cdef Py_ssize_t held = 0, evictable = 0, names = 0, hit = 0, missed = 0, inserted = 0, evicted = 0
        for store in self.homes:
            with cython.critical_section(store.budget):
                tree = store.blocks.tree[0]
            held += tree.n_held
            evictable += tree.n_evictable
            names, hit, missed = max(names, tree.n_namespaces), max(hit, tree.hit_tokens), max(missed, tree.missed_tokens)
            inserted += tree.inserted
            evicted += tree.evicted
        return PrefixStats(held, evictable, names, hit, missed, inserted, evicted)

    def check(self):
        """Raise `PagedKvError` if the books do not balance, the store's included. Walks over everything."""
        self.check_made()
        for store in self.homes:
            store.check()

    # --- what may run the caller's code, before anything is changed ---

    cdef int check_made(self) except -1:
        if self.homes is None:
            raise RuntimeError("PrefixCache: __init__ has not run")
        return 0

    cpdef double _now(self) except? -1:
        self.check_made()
        given = self.clock()
        if not isinstance(given, (int, float, np.integer, np.floating)):
            raise TypeError(f"clock: expected seconds as a float, got {describe(given)}")
        cdef double seconds = float(given)
        if isnan(seconds):
            raise ValueError("clock: expected seconds as a float, got nan")
        for store in self.homes:
            (<PagedKvStore>store).blocks.end_terms(seconds)
        return seconds

    cdef double end_of(self, object seconds) except? -1:
        """When a term that begins now is over; without one, what was protected until now is let go of."""
        if seconds is None:
            self._end_terms()
            return NEVER
        return self._now() + <double>seconds

    cpdef double _end_terms(self) except? -1:
        """Let go of what was protected until now."""
        self.check_made()
        for store in self.homes:
            if (<PagedKvStore>store).blocks.has_terms():
                return self._now()
        return 0

    # --- remembering ---

    cdef Py_ssize_t insert_all(self, tuple caches, object tokens, bytes name, int64_t priority, object seconds,
                               PrefixHandle handle) except -1:
        """Let each store know the whole blocks of its cache under these tokens; how many were new in all of them."""
        cdef Py_ssize_t n_stores = len(self.homes), n_new = -2, i
        cdef Told* told = <Told*>calloc(n_stores, sizeof(Told))
        cdef Seen* seen = <Seen*>calloc(n_stores, sizeof(Seen))
        cdef double expires
        try:
            if told is NULL or seen is NULL:
                raise MemoryError("cannot allocate what is inserted")
            prefixes, store = weakref.ref(self.whole()), weakref.ref(self.homes[0])
            if handle is not None:
                handle.check_whose(self, name)
                with cython.critical_section(handle):
                    for i in range(min(n_stores, handle.n_seen)):
                        told[i].mark, told[i].lineage = handle.seen[i].mark, handle.seen[i].lineage
            expires = self.end_of(seconds)  # the clock may use the handle for something else, too
            for i in range(n_stores):
                if not has_first(&(<PagedKvCache>caches[i]).table, told[i].mark.n, told[i].lineage):
                    told[i].mark.number = 0
            while n_new < 0:
                for i in range(n_stores):
                    told[i].start = told[i].mark.n if told[i].mark.number else 0
                n_new = tell_all(self.homes, caches, tokens, name, priority, expires, told)
                if n_new < 0:  # evicted since, cleared, or taken back: the tokens are looked at once more
                    told[-2 - n_new].mark.number = 0
            if handle is not None:
                # At once: tokens and clocks run the caller's code, which may use the same handle for something else.
                for i in range(n_stores):
                    seen[i] = Seen(told[i].mark, told[i].lineage)
                with cython.critical_section(handle):
                    handle.seen, seen = seen, handle.seen
                    handle.n_seen = n_stores
                handle.prefixes = prefixes
                handle.store = store
                handle.namespace = name
        finally:
            free(told)
            free(seen)
        return self.gone(n_new)


def common_length(const int64_t[::1] a not None, const int64_t[::1] b not None):
    """How many tokens at the beginning are equal."""
    cdef Py_ssize_t n = min(a.shape[0], b.shape[0])
    return common(&a[0], &b[0], n) if n else 0
