"""`ModelStores` and `ModelSequence`: one budget of bytes for a model's stores, and for all what one store offers."""

import contextlib
import re
import sys

import numpy as np
import pytest
from helpers import run_python, unsanitized
from proof_starved import can_starve, testcapi

import pagedkv
from pagedkv import LayerShape, ModelSequence, ModelStores

# A Gemma in small: five layers see 32 positions, one sees everything.
WINDOWED = [LayerShape(32, 2, 16)] * 5 + [LayerShape(None, 2, 16)]
LAYER_BLOCK = 16 * 2 * 32 * 4  # bytes of a block in one layer
LEAST = 6 * LAYER_BLOCK
FLAT = [LayerShape(None, 1, 4), LayerShape(6, 1, 8)]


def grow(stores, sequence, n):
    """So many positions more; row p of a layer holds p and the layer's number."""
    new = np.arange(sequence.seq_len, sequence.seq_len + n, dtype=np.float32)
    with pagedkv.Step(stores, sequence, n) as step:
        for layer in range(stores.n_layers):
            shape = stores.group_of(layer).shape
            k = np.repeat((new + layer / 8)[:, None], shape.n_kv_heads * shape.head_dim, axis=1)
            step.write(layer, k, k[:, : shape.n_kv_heads * shape.v_head_dim])


def state(stores):
    return stores.stats(), [[store.refcount(id) for id in range(store.total_blocks)] for store in stores.stores]


def served(stores, n_positions, chunk):
    """How many sequences of so many positions there is room for, one after the other."""
    sequences = []
    while len(sequences) < 100:
        sequence = ModelSequence(stores)
        try:
            while sequence.seq_len < n_positions:
                grow(stores, sequence, min(chunk, n_positions - sequence.seq_len))
                sequence.drop_unneeded()
        except pagedkv.PagedStoreExhausted:
            sequence.release()
            break
        sequences.append(sequence)
    stores.check(sequences)
    for sequence in sequences:
        got = sequence.to_contiguous(5).k
        assert (got == np.arange(n_positions, dtype=np.float32)[:, None] + 5 / 8).all()
    return len(sequences)


# --- one budget ---


def test_a_window_strands_no_blocks():
    """1.5 MiB: 64 blocks of each store, one sequence of 1000 positions; shared, the windows' rest serves three more.

    By hand: 1000 positions are 63 blocks. A window of 32 holds 3 blocks after the last step, and in a step of 100
    positions up to 10, in five layers. In blocks of a layer: 384 there are; 63 + 5 * 3 = 78 stay for each, and each
    needs 63 + 5 * 10 = 113 on its way: 3 * 78 + 113 = 347 fits, 4 * 78 + 113 = 425 does not.
    """
    budget = 64 * LEAST
    assert budget == 1536 * 1024
    apart, together = ModelStores(WINDOWED, 64), ModelStores.from_bytes(budget, WINDOWED)
    assert apart.nbytes == together.nbytes == budget
    assert served(apart, 1000, 100) == 1
    assert served(together, 1000, 100) == 4


def test_sizes():
    stores = ModelStores.from_bytes(10 * LEAST + 5, WINDOWED, max_bytes=20 * LEAST)
    assert stores.nbytes == 10 * LEAST + 5
    assert [store.total_blocks for store in stores.stores] == [12, 60]
    assert (stores.total_blocks, stores.free_block_count, stores.n_layers, stores.block_size) == (10, 10, 6, 16)
    assert [group.block_nbytes for group in stores.groups] == [5 * LAYER_BLOCK, LAYER_BLOCK]
    assert stores.places == ((0, 0), (0, 1), (0, 2), (0, 3), (0, 4), (1, 0))
    assert stores.windows == (32, None)
    sequence = ModelSequence(stores)
    grow(stores, sequence, 40)
    assert (stores.free_block_count, stores.nbytes_in_use) == (7, 3 * LEAST)
    assert [store.free_block_count for store in stores.stores] == [8, 42]
    assert stores.stats()[:8] == (10 * LEAST + 5, 7 * LEAST + 5, 3 * LEAST, 0, 6, 0, 0, 0)


@pytest.mark.parametrize("chunk", [None, 1, 7, 100])
@pytest.mark.parametrize("n", [1, 40, 333])
def test_what_fits(n, chunk):
    """The bytes that are said to be enough are enough, and one less is not."""
    n_bytes = ModelStores(WINDOWED, 40).bytes_for(n, chunk=chunk)
    stores, less = (ModelStores.from_bytes(each, WINDOWED) for each in (max(n_bytes, LEAST), max(n_bytes - 1, LEAST)))
    assert stores.can_ever_fit(n, chunk=chunk)
    assert less.can_ever_fit(n, chunk=chunk) == (n_bytes <= LEAST)
    sequence = ModelSequence(stores)
    while sequence.seq_len < n:
        grow(stores, sequence, min(chunk or n, n - sequence.seq_len))
        sequence.drop_unneeded()
    assert stores.blocks_for(n, chunk=chunk) == -(-n // 16)


def test_stores_of_blocks_of_their_own_lend_none():
    stores = ModelStores(FLAT, 4, block_size=4)
    sequence, other = ModelSequence(stores), ModelSequence(stores)
    grow(stores, sequence, 16)
    sequence.drop_unneeded()
    assert [store.free_block_count for store in stores.stores] == [0, 2]
    assert not stores.can_ever_fit(17)
    with pytest.raises(pagedkv.PagedStoreExhausted):
        grow(stores, other, 1)
    assert other.caches[1].capacity == 0


def test_resize_up_and_down():
    stores = ModelStores.from_bytes(3 * LEAST, WINDOWED, max_bytes=9 * LEAST)
    sequence = ModelSequence(stores)
    grow(stores, sequence, 48)
    with pytest.raises(pagedkv.PagedStoreExhausted) as full:
        grow(stores, sequence, 1)
    assert not full.value.can_ever_fit
    stores.resize(4 * LEAST)
    grow(stores, sequence, 1)
    before = state(stores)
    for budget, low in ((4 * LEAST - 1, 4 * LEAST), (LEAST, 4 * LEAST)):
        with pytest.raises(ValueError, match=f"^budget_bytes: expected at least {low}, what sequences hold, got "):
            stores.resize(budget)
    for budget in (0, -1, LEAST - 1, 9 * LEAST + 1, 2**63, 10**40):
        with pytest.raises(ValueError, match=f"^budget_bytes: expected an integer from {LEAST} to {9 * LEAST}, got "):
            stores.resize(budget)
    for budget in (None, "1", 2.0, True):
        with pytest.raises(TypeError, match="^budget_bytes: expected"):
            stores.resize(budget)
    with pytest.raises(ValueError, match="^store: expected one with a budget of its own, got one of a model's"):
        stores.stores[0].resize(LEAST)
    assert state(stores) == before
    sequence.truncate(16)
    stores.resize(LEAST)
    assert (stores.free_block_count, stores.nbytes) == (0, LEAST)
    stores.check([sequence])


def test_resize_evicts_what_was_used_longest_ago():
    stores = ModelStores.from_bytes(8 * LEAST, WINDOWED)
    tokens = np.arange(64)
    for namespace in (b"old", b"new"):
        sequence = ModelSequence(stores)
        grow(stores, sequence, 64)
        stores.prefixes.insert(tokens, sequence, namespace=namespace)
        sequence.release()
    assert stores.prefixes.match(tokens, namespace=b"old") == 63
    stores.resize(6 * LEAST)
    assert stores.stats().held_bytes <= 6 * LEAST
    known = [stores.prefixes.match(tokens, namespace=namespace) for namespace in (b"old", b"new")]
    assert known[0] <= 32
    assert known[1] >= 32
    stores.resize(LEAST)
    assert stores.stats().held_bytes <= LEAST
    stores.prefixes.check()


@unsanitized
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="only Linux is asked for pages back")
def test_memory_goes_from_one_store_to_another():
    """96 MiB for a windowed layer and a full one. What the window leaves free is given back when the other needs it."""
    # In a process of its own: what others have freed would be taken for what is there.
    run_python(
        """
        import numpy as np
        import pagedkv
        from pagedkv import LayerShape, ModelSequence, ModelStores
        from test_trim import resident

        shapes = [LayerShape(64, 8, 128), LayerShape(None, 8, 128)]
        stores = ModelStores.from_bytes(96 << 20, shapes)
        rows, before = np.ones((512, 1024), np.float32), resident()

        def grow_to(n):
            while sequence.seq_len < n:
                with pagedkv.Step(stores, sequence, 512) as step:
                    for layer in (0, 1):
                        step.write(layer, rows, rows)
                assert resident() - before < (96 + 6) << 20

        sequence = ModelSequence(stores)
        grow_to(12 * 512)  # 48 MiB in each
        assert resident() - before > 90 << 20
        sequence.drop_unneeded()
        while sequence.seq_len < 22 * 512:
            grow_to(sequence.seq_len + 512)
            sequence.drop_unneeded()
        held = [store.held_blocks for store in stores.stats().stores]
        assert held == [4, 704]  # 88 MiB are the full layer's now
        assert (sequence.to_contiguous(1).k == 1).all()
        sequence.release()
        assert stores.trim() > 80 << 20
        assert resident() - before < 8 << 20
        """
    )


# --- what one store offers ---


def test_pictures_and_checks():
    stores, others = ModelStores(FLAT, 8, block_size=4), ModelStores(FLAT, 8, block_size=4)
    sequence = ModelSequence(stores)
    grow(stores, sequence, 14)
    sequence.drop_unneeded()
    maps = stores.block_map({"a": sequence}, width=8)
    assert [str(each) for each in maps] == [
        str(store.block_map({"a": cache}, width=8)) for store, cache in zip(stores.stores, sequence.caches, strict=True)
    ]
    stores.check([sequence])
    foreign = ModelSequence(others)
    grow(others, foreign, 3)
    for call in (stores.check, stores.block_map):
        with pytest.raises(ValueError, match="expected sequences of this store"):
            call([foreign])
        with pytest.raises(TypeError, match="^sequences: expected several ModelSequence, got int"):
            call(3)
        with pytest.raises(TypeError, match=r"^sequences\[1\]: expected a ModelSequence, got PagedKvCache"):
            call([sequence, sequence.caches[0]])
        with pytest.raises(ValueError, match=r"^sequences\[0\]: expected one of"):
            call([ModelSequence(ModelStores(FLAT[:1], 4))])
    stores.stores[1].release([sequence.caches[1].block_table[-1]])
    with pytest.raises(pagedkv.PagedKvError, match="1 tables and has 0 holders"):
        stores.check([sequence])


@pytest.mark.parametrize(
    ("make", "error", "match"),
    [
        (lambda: ModelStores.from_bytes(LEAST - 1, WINDOWED), ValueError, f"expected at least {LEAST}, the bytes of "),
        (lambda: ModelStores.from_bytes(5, WINDOWED), ValueError, "budget_bytes: expected at least"),
        (lambda: ModelStores.from_bytes(0, WINDOWED), ValueError, "budget_bytes: expected an integer from 1"),
        (lambda: ModelStores.from_bytes("1", WINDOWED), TypeError, "budget_bytes: expected"),
        (lambda: ModelStores.from_bytes(LEAST, WINDOWED, max_bytes=LEAST - 1), ValueError, "max_bytes: expected"),
        (lambda: ModelStores.from_bytes(LEAST, []), ValueError, "shapes: expected one for each layer"),
        (lambda: ModelStores.from_bytes(LEAST, [LayerShape(None, 0, 4)]), ValueError, "n_kv_heads: expected"),
        (lambda: ModelStores([LayerShape(None, 0, 4)], 4), ValueError, "n_kv_heads: expected"),
        (lambda: ModelStores(FLAT, 0), ValueError, "total_blocks: expected"),
        (lambda: ModelStores(FLAT, 4, block_size=True), TypeError, "block_size: expected"),
        (lambda: ModelStores(FLAT, 4, dtype="int4"), ValueError, "dtype"),
    ],
)
def test_refused(make, error, match):
    with pytest.raises(error, match=match):
        make()


def test_a_sequence_of_other_stores():
    """Also one that holds nothing yet: it would be told of blocks that its own stores never had."""
    stores, others = ModelStores(FLAT, 8, block_size=4), ModelStores(FLAT, 8, block_size=4)
    ours, theirs = ModelSequence(stores), ModelSequence(others)
    for call in (lambda: pagedkv.Step(stores, [ours, theirs]), lambda: pagedkv.reorder(stores, [ours, theirs], [0, 0])):
        with pytest.raises(ValueError, match=re.escape("caches[1]: expected a sequence of ModelStores(")):
            call()
    with pytest.raises(ValueError, match="^caches: expected a sequence of"):
        pagedkv.Step(stores, theirs)
    with pytest.raises(ValueError, match="^caches: expected a sequence of PagedKvStore"):
        pagedkv.Step(ModelStores(FLAT[:1], 8).stores[0], ModelSequence(ModelStores(FLAT[:1], 8)))
    with pytest.raises(ValueError, match="^store: expected stores that share a budget"):
        pagedkv.Step(Mixed(stores.stores[0], others.stores[1]), [])


class Mixed:
    places, windows = ((0, 0), (1, 0)), (None, None)

    def __init__(self, *stores):
        self.stores = stores


def test_whatever_has_stores_places_and_windows():
    """A step and `reorder` take what looks like a model's stores, and sequences that know no stores."""

    class Sequence:
        def __init__(self, n):
            self.caches = tuple(pagedkv.PagedKvCache() for _ in range(n))

    stores = ModelStores(FLAT, 8, block_size=4)
    mine, sequences = Mixed(*stores.stores), [Sequence(2), Sequence(2)]
    with pagedkv.Step(mine, sequences, [3, 5]) as step:
        step.write(0, *np.ones((2, 8, 4), np.float32))
        step.write(1, *np.ones((2, 8, 8), np.float32))
    pagedkv.reorder(mine, sequences, [1, 1])
    assert [[cache.seq_len for cache in each.caches] for each in sequences] == [[5, 5], [5, 5]]
    with pytest.raises(TypeError, match=r"^caches\[0\]: expected a ModelSequence"):
        pagedkv.Step(mine, [Sequence(1)])


def test_no_copies():
    import copy
    import pickle

    stores = ModelStores(FLAT, 8)
    for call in (copy.copy, copy.deepcopy, pickle.dumps):
        with pytest.raises(TypeError, match="ModelStores: cannot be copied or pickled"):
            call(stores)


def test_nothing_is_left_when_stores_and_sequences_go():
    """Without the collector: a model's stores are in no circle."""
    import gc
    import weakref

    gc.disable()
    try:
        stores = ModelStores(FLAT, 8, block_size=4)
        sequence = ModelSequence(stores)
        grow(stores, sequence, 9)
        stores.prefixes.insert(range(9), sequence)
        gone = [weakref.ref(each) for each in (stores, stores.prefixes, *stores.stores)]
        del stores, sequence
        assert [reference() for reference in gone] == [None] * len(gone)
    finally:
        gc.enable()


@pytest.mark.parametrize("what", ["truncate", "release", "reserve", "drop_unneeded", "release_reserved"])
def test_a_sequence_in_use_changes_in_no_store(what):
    stores = ModelStores(FLAT, 8, block_size=4)
    sequence = ModelSequence(stores)
    grow(stores, sequence, 14)
    before = state(stores)
    arguments = {"truncate": [12], "reserve": [5]}.get(what, [])
    with pagedkv.Step(stores.stores[1], sequence.caches[1], 0), pytest.raises(RuntimeError, match="in use"):
        getattr(sequence, what)(*arguments)
    assert state(stores) == before
    getattr(sequence, what)(*arguments)
    assert state(stores) != before or what == "release_reserved"


@pytest.mark.parametrize("seed", range(10))
def test_room_for_a_sequence_is_what_can_be_reserved(seed):
    """In all stores at once, of its own blocks and of the bytes that all share: one position more is refused."""
    draw = np.random.default_rng(seed)
    budget = int(draw.integers(6, 20)) * LEAST
    stores = ModelStores.from_bytes(budget, WINDOWED) if seed % 2 else ModelStores(WINDOWED, 12)
    others = [ModelSequence(stores) for _ in range(2)]
    for other in others:
        with contextlib.suppress(pagedkv.PagedStoreExhausted):
            grow(stores, other, int(draw.integers(1, 60)))
            other.drop_unneeded()
    tokens = range(others[0].seq_len)
    stores.prefixes.insert(tokens, others[0])
    others[0].release()
    for sequence in (ModelSequence(stores), others[1], others[1].clone()):
        room = pagedkv.room_for(stores, sequence, prefix=stores.prefixes)
        assert room.now <= room.with_eviction <= room.ever
        assert pagedkv.room_for(stores, sequence).with_eviction == room.now
        known = stores.stats().evictable_bytes
        sequence.reserve(room.now)
        assert stores.stats().evictable_bytes == known  # nothing had to go
        sequence.release_reserved()
        with pytest.raises(pagedkv.PagedStoreExhausted):
            sequence.reserve(room.with_eviction + 1)
        sequence.reserve(room.with_eviction)
        sequence.release_reserved()
    for other in (*others, sequence):
        other.release()
    stores.prefixes.clear()
    assert pagedkv.room_for(stores).now == pagedkv.room_for(stores).ever
    for wrong in (3, None, stores.groups):
        with pytest.raises(TypeError, match="^store: expected a PagedKvStore or ModelStores, got"):
            pagedkv.room_for(wrong)
    with pytest.raises(TypeError, match="^cache: expected a ModelSequence or None, got PagedKvCache"):
        pagedkv.room_for(stores, pagedkv.PagedKvCache())


@can_starve
@unsanitized
@pytest.mark.parametrize("chunk", [None, 4])
def test_a_sequence_that_has_no_memory_to_reserve_is_not_held_by_anybody(chunk):
    stores = ModelStores([LayerShape(None, 1, 2), LayerShape(8, 1, 2)], 16, block_size=4)
    refused = 0
    for n in range(60):
        sequence = ModelSequence(stores)
        sequence.reserve(4)
        testcapi.set_nomemory(n, n + 1)
        try:
            sequence.reserve(8, chunk=chunk)
        except MemoryError:
            refused += 1
        finally:
            testcapi.remove_mem_hooks()
        del sequence
        assert [store.free_block_count for store in stores.stores] == [16, 16]
    assert 3 < refused < 60
