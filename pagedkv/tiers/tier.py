"""What a tier is: somewhere beyond the process's memory where records are kept, and asked for by their keys."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from pagedkv.stats import with_field_docs
from pagedkv.tiers.arguments import as_chunk, as_list, as_rooms, check_tier, within
from pagedkv.tiers.keys import Chunk
from pagedkv.tiers.records import Record, what_is_wrong


@with_field_docs
class TierStats(NamedTuple):
    """What `Tier.stats` returns: a named tuple of counts, since the tier was opened unless it says now.

    Attributes
    ----------
    records : int
        Records that can be found now.
    nbytes : int
        Bytes that the tier takes now, with all that is kept beside the records.
    max_bytes : int
        What it may take.
    hits : int
        Keys that were asked for and found.
    misses : int
        Keys that were asked for and not found, or stood behind one that was not.
    loaded : int
        Records that were read.
    loaded_bytes : int
        Their bytes.
    load_seconds : float
        The time it took.
    stored : int
        Records that were written.
    stored_bytes : int
        Their bytes.
    store_seconds : float
        The time it took.
    refused : int
        Records that were not written: no room, a full disk, no permission, a record that is too large.
    corrupt : int
        Records that turned out not to be what they were asked for as, and were removed.
    evicted : int
        Records that this process evicted.
    errors : int
        Calls of the system that failed.

    Examples
    --------
    >>> import tempfile
    >>> from pagedkv.tiers import FileTier
    >>> with tempfile.TemporaryDirectory() as folder, FileTier(folder, max_bytes=2**30) as tier:
    ...     tier.stats().records, tier.stats().max_bytes == 2**30
    (0, True)
    """

    records: int = 0
    nbytes: int = 0
    max_bytes: int = 0
    hits: int = 0
    misses: int = 0
    loaded: int = 0
    loaded_bytes: int = 0
    load_seconds: float = 0.0
    stored: int = 0
    stored_bytes: int = 0
    store_seconds: float = 0.0
    refused: int = 0
    corrupt: int = 0
    evicted: int = 0
    errors: int = 0


class Tier(Protocol):
    """What a tier of your own has to have. It may forget whatever it likes, at any time.

    Nor need it be trusted: what comes from it is compared with what was asked for (`fetch`) before anybody uses it. A
    tier raises nothing when it cannot do something; it returns less.

    Notes
    -----
    Threads: a tier is called by several threads at once.

    Examples
    --------
    >>> from pagedkv.tiers import TierStats
    >>> class Dictionary:
    ...     def __init__(self):
    ...         self.values = {}
    ...     def find(self, keys):
    ...         return next((i for i, key in enumerate(keys) if key not in self.values), len(keys))
    ...     def load(self, keys, into):
    ...         for i, (key, buffers) in enumerate(zip(keys, into)):
    ...             value = memoryview(self.values.get(key, b""))
    ...             if value.nbytes != sum(buffer.nbytes for buffer in buffers):
    ...                 return i
    ...             for buffer in buffers:
    ...                 buffer[:], value = value[: buffer.nbytes], value[buffer.nbytes :]
    ...         return len(keys)
    ...     def store(self, records):
    ...         self.values.update((record.key, record.tobytes()) for record in records)
    ...         return len(records)
    ...     def remove(self, keys):
    ...         return sum(self.values.pop(key, None) is not None for key in keys)
    ...     def stats(self):
    ...         return TierStats(records=len(self.values))
    ...     def close(self):
    ...         self.values = {}
    """

    def find(self, keys: Sequence[bytes], /) -> int:
        """How many of these keys are there, from the first on, until one is not.

        Parameters
        ----------
        keys : sequence of bytes
            Of the chunks of a prompt, in order, 32 bytes each.

        Returns
        -------
        int

        Raises
        ------
        ValueError
            The tier is closed.
        """
        ...

    def load(self, keys: Sequence[bytes], into: Sequence[Sequence[memoryview]], /) -> int:
        """Read records, from the first key on, until one cannot be read.

        Parameters
        ----------
        keys : sequence of bytes
            What to read, 32 bytes each.
        into : sequence of sequences of memoryview
            For each key where its record's bytes go: together as long as the record. One of another length is not read.
            What could not be read may be overwritten in part.

        Returns
        -------
        int
            How many were read.

        Raises
        ------
        ValueError
            The tier is closed.
        """
        ...

    def store(self, records: Sequence[Record], /) -> int:
        """Keep records. One whose key is there already need not be written again.

        Parameters
        ----------
        records : sequence of Record
            Parents before children. Their memory is read before this returns, and not after.

        Returns
        -------
        int
            How many are there now.

        Raises
        ------
        ValueError
            The tier is closed.
        """
        ...

    def remove(self, keys: Sequence[bytes], /) -> int:
        """Forget records, which turned out to be wrong.

        Parameters
        ----------
        keys : sequence of bytes
            32 bytes each.

        Returns
        -------
        int
            How many were there.

        Raises
        ------
        ValueError
            The tier is closed.
        """
        ...

    def stats(self) -> TierStats:
        """What was done so far: a `TierStats`, of which a tier of your own fills in what it counts."""
        ...

    def close(self) -> None:
        """Give back whatever the tier has open. Does nothing the second time."""
        ...


class Fetched(NamedTuple):
    """What `fetch` returns: how many chunks are there, and why no more.

    Attributes
    ----------
    n : int
        Chunks that were loaded and are what was asked for, from the first on.
    wrong : str or None
        What was wrong with the next one, which was removed from the tier; None where it was not there.

    Examples
    --------
    >>> from pagedkv.tiers import Fetched
    >>> Fetched(3, "payload checksum").n
    3
    """

    n: int
    wrong: str | None


def fetch(tier: Tier, chunks: Sequence[Chunk], into: Sequence[Sequence[memoryview]]) -> Fetched:
    """Load chunks from a tier and compare them with what was asked for, from the first on until one is not right.

    Parameters
    ----------
    tier : Tier
        Any.
    chunks : sequence of Chunk
        What to load.
    into : sequence of sequences of memoryview
        For each chunk what `room_for` made. Behind the chunks that are returned they hold anything.

    Returns
    -------
    Fetched

    Raises
    ------
    TypeError, ValueError
        An argument of a wrong kind; ``into`` is not as long as ``chunks``; the tier is closed.

    Notes
    -----
    Threads: any number, into memory of their own.

    Examples
    --------
    >>> import tempfile, pagedkv
    >>> from pagedkv.tiers import FileTier, KeySpace, RecordFormat, encode, fetch, room_for
    >>> store = pagedkv.PagedKvStore(block_size=4, total_blocks=8, n_kv_heads=2, head_dim=4)
    >>> chunk = KeySpace(RecordFormat.of(store), b"a model").chunk([7, 8, 9])
    >>> with tempfile.TemporaryDirectory() as folder, FileTier(folder, max_bytes=2**30) as tier:
    ...     stored = tier.store([encode(chunk, [memoryview(b"K" * 256)])])
    ...     loaded = bytearray(256)
    ...     fetch(tier, [chunk], [room_for(chunk, [memoryview(loaded)])]), loaded[:3]
    (Fetched(n=1, wrong=None), bytearray(b'KKK'))
    """
    check_tier(tier)
    asked = [as_chunk(chunk, f"chunks[{i}]") for i, chunk in enumerate(as_list(chunks, "chunks", "several chunks"))]
    rooms = as_rooms(into, len(asked), "chunks")
    n = within(tier.load([chunk.key for chunk in asked], rooms), len(asked))
    for i in range(n):
        wrong = what_is_wrong(asked[i], rooms[i])
        if wrong is not None:
            tier.remove([asked[i].key])
            return Fetched(i, wrong)
    return Fetched(n, None)
