"""Everything public of pagedkv.tiers, given what nobody should: an error names the argument, nothing is changed."""

import inspect
import re
import typing
from dataclasses import asdict

import numpy as np
import pytest
from hostile import Indexed, Unwilling, refuse
from test_saving import make, sequence
from test_tiered import MemoryTier

import pagedkv
from pagedkv import tiers
from pagedkv.tiers import (
    FileTier,
    KeySpace,
    RecordFormat,
    TieredPrefixes,
    encode,
    fetch,
    restore_prefixes,
    restore_sequence,
    room_for,
    save_prefixes,
    save_sequence,
    what_is_wrong,
)

pytest.importorskip("fcntl")

class Anything:
    def __init__(self, *rest):
        pass


VALUES = {
    "None": None,
    "True": True,
    "0": 0,
    "3": 3,
    "-1": -1,
    "2**70": 2**70,
    "1.5": 1.5,
    "nan": float("nan"),
    "text": "x",
    "bytes": b"x",
    "nothing": [],
    "numbers": [3],
    "texts": ["x"],
    "Nones": [None],
    "a dict": {1: 2},
    "an object": object(),
    "a class": Anything,
    "floats": np.ones(3),
    "2 dimensions": np.ones((2, 2), np.int64),
    "read-only": [memoryview(b"x")],
    "strided": [memoryview(bytearray(100))[::2]],
    "an unwilling one": Indexed(3, refuse),
    "unwilling ones": [Indexed(3, refuse)],
}


class World:
    def __init__(self, folder):
        self.folder = folder
        self.store = make(blocks=16)
        self.prefixes = pagedkv.PrefixCache(self.store)
        self.space = KeySpace(RecordFormat.of(self.store, chunk_blocks=1), b"m")
        self.windowed = KeySpace(RecordFormat.of(self.store, window=8), b"m")
        [self.chunk] = self.space.chunks(range(4))
        self.payload = [memoryview(bytearray(self.chunk.payload_bytes))]
        self.record = encode(self.chunk, self.payload)
        self.cache = sequence(self.store, 6)
        self.tier, self.memory = FileTier(folder / "tier", max_bytes=2**30), MemoryTier()
        self.tiered = TieredPrefixes(self.prefixes, self.memory, model=b"m")
        self.saved, self.known = folder / "saved", folder / "known"
        save_sequence(self.saved, range(6), self.cache, model=b"m")
        save_prefixes(self.known, self.prefixes, model=b"m")

    def state(self):
        files = sorted((path.name, path.stat().st_size) for path in self.folder.rglob("*"))
        counts = [count for name, count in self.tier.stats()._asdict().items() if not name.endswith("seconds")]
        memory = self.store.free_block_count, self.prefixes.stats(), bytes(self.payload[0])
        return files, counts, self.memory.calls, memory


def calls(w):
    """Each public callable, and arguments that are right, by name; positional ones as ``*name``."""
    prompt = {"tokens": range(6), "namespace": b"n"}
    files = {"model": b"m", "namespace": None, "progress": None}
    path, folder = w.folder / "new", w.folder / "new folder"
    return {
        "RecordFormat": (RecordFormat, {**asdict(w.space.format), "window": 4}),
        "RecordFormat.of": (RecordFormat.of, {"store": w.store, "window": 4, "group": 1, "chunk_blocks": 1}),
        "RecordFormat.payload_bytes": (w.space.format.payload_bytes, {"n_tokens": 5}),
        "KeySpace": (KeySpace, {"format": w.space.format, "model": b"m", "namespace": b"n"}),
        "KeySpace.chunks": (w.space.chunks, {"tokens": range(4)}),
        "KeySpace.chunk": (w.space.chunk, {"tokens": range(4), "after": w.chunk}),
        "KeySpace.left_behind": (w.windowed.left_behind, {"tokens": range(4)}),
        "KeySpace.check_same": (w.space.check_same, {"other": w.space}),
        "KeySpace.parse": (KeySpace.parse, {"description": w.space.description}),
        "encode": (encode, {"chunk": w.chunk, "payload": w.payload}),
        "room_for": (room_for, {"chunk": w.chunk, "payload": w.payload}),
        "what_is_wrong": (what_is_wrong, {"chunk": w.chunk, "buffers": w.record.buffers}),
        "fetch": (fetch, {"tier": w.tier, "chunks": [w.chunk], "into": [room_for(w.chunk, w.payload)]}),
        "FileTier": (FileTier, {"path": folder, "max_bytes": 2**30, "segment_bytes": 2**20}),
        "FileTier.find": (w.tier.find, {"*keys": [w.chunk.key]}),
        "FileTier.load": (w.tier.load, {"*keys": [w.chunk.key], "*into": [room_for(w.chunk, w.payload)]}),
        "FileTier.store": (w.tier.store, {"*records": [w.record]}),
        "FileTier.remove": (w.tier.remove, {"*keys": [w.chunk.key]}),
        "save_sequence": (
            save_sequence,
            {"path": path, "tokens": range(6), "caches": w.cache, "windows": [None], **files},
        ),
        "restore_sequence": (restore_sequence, {"path": w.saved, "stores": w.store, "windows": [None], **files}),
        "save_prefixes": (save_prefixes, {"path": path, "prefixes": w.prefixes, **files}),
        "restore_prefixes": (restore_prefixes, {"path": w.known, "prefixes": w.prefixes, **files}),
        "TieredPrefixes": (
            TieredPrefixes,
            {
                "prefixes": w.prefixes, "tier": w.memory, "model": b"m", "from_use": 1, "deadline": 1.0,
                "token_seconds": 0.1, "max_waiting": 4,
            },
        ),
        "TieredPrefixes.load": (w.tiered.load, {**prompt, "deadline": 1.0}),
        "TieredPrefixes.attach": (w.tiered.attach, {"cache": pagedkv.PagedKvCache(), **prompt, "deadline": 1.0}),
        "TieredPrefixes.insert": (w.tiered.insert, {**prompt, "cache": w.cache, "priority": 0, "ttl": 1.0}),
        "TieredPrefixes.store": (w.tiered.store, prompt),
        "TieredPrefixes.flush": (w.tiered.flush, {"timeout": 1.0}),
        "TieredPrefixes.close": (w.tiered.close, {"timeout": 1.0}),
    }  # fmt: skip


CALLS = [
    "RecordFormat", "RecordFormat.of", "RecordFormat.payload_bytes", "KeySpace", "KeySpace.chunks", "KeySpace.chunk",
    "KeySpace.left_behind", "KeySpace.check_same", "KeySpace.parse", "encode", "room_for", "what_is_wrong", "fetch",
    "FileTier", "FileTier.find", "FileTier.load", "FileTier.store", "FileTier.remove", "save_sequence",
    "restore_sequence", "save_prefixes", "restore_prefixes", "TieredPrefixes", "TieredPrefixes.load",
    "TieredPrefixes.attach", "TieredPrefixes.insert", "TieredPrefixes.store", "TieredPrefixes.flush",
    "TieredPrefixes.close",
]  # fmt: skip
INTEGERS = {"3"}
# What some of these arguments may be, of the above.
FINE = {
    "tokens": {"nothing", "numbers"},
    "namespace": {"None", "bytes"},
    "model": {"bytes"},
    "window": {"None", *INTEGERS},
    "windows": {"None", "Nones", "numbers"},
    "chunk_blocks": {"None", *INTEGERS},  # of RecordFormat.of
    "group": {"0", *INTEGERS},
    "n_tokens": {"0", *INTEGERS},
    "progress": {"None", "a class"},
    "deadline": {"None", "3", "1.5", "2**70"},
    "token_seconds": {"None", "3", "1.5", "2**70"},
    "timeout": {"3", "1.5", "2**70"},
    "ttl": {"None", "3", "1.5", "2**70"},
    "priority": {"0", "3", "-1", "True"},
    "from_use": INTEGERS,
    "max_waiting": INTEGERS,
    "segment_bytes": {"None"},
    "after": {"None"},
    "keys": {"nothing"},
    "records": {"nothing"},
    "buffers": {"nothing", "read-only", "floats", "2 dimensions"},
    "path": {"text"},
    **dict.fromkeys(("block_size", "n_layers", "n_kv_heads", "head_dim", "v_head_dim", "block_bytes"), INTEGERS),
}
# Of what is not as another argument is.
OTHER_NAMES = {"chunks": "(chunks|into)", "keys": "(keys|into)", "tokens": "(tokens|caches)", "windows": "windows?"}


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    return World(tmp_path_factory.mktemp("hostile"))


def test_all_that_is_public_is_here(world):
    listed = set(CALLS)
    assert listed == set(calls(world))
    for name in tiers.__all__:
        public = getattr(tiers, name)
        if issubclass(type(public), type) and (issubclass(public, tuple) or typing.Protocol in public.__mro__):
            continue  # what is returned, and what somebody else writes
        if name == "Loading":  # its methods take nothing, and TieredPrefixes makes it
            continue
        assert name in listed
        if not isinstance(public, type):
            continue
        for method, found in inspect.getmembers(public, callable):
            if not method.startswith("_") and len(inspect.signature(found).parameters) > (
                0 if inspect.ismethod(found) else 1
            ):
                assert f"{name}.{method}" in listed


def raised_by(call, *args, **kwargs):
    try:
        call(*args, **kwargs)
    except Exception as error:
        return error


@pytest.mark.parametrize("name", CALLS)
def test_what_is_wrong_is_named_and_nothing_changed(world, monkeypatch, tmp_path, name):
    monkeypatch.chdir(tmp_path)
    for argument in calls(world)[name][1]:
        plain = argument.removeprefix("*")
        expected = re.compile(rf"^{OTHER_NAMES.get(plain, plain)}(\[\d+\])?(\.\w+)?: expected .*, got ")
        for described, value in VALUES.items():
            call, good = calls(world)[name]
            given = {**good, argument: value}
            positional = [given.pop(key) for key in list(given) if key.startswith("*")]
            before = world.state()
            raised = raised_by(call, *positional, **given)
            if raised is None:
                assert described in FINE.get(plain, ()), (plain, described)
                continue
            assert world.state() == before, (plain, described)
            if isinstance(raised, Unwilling):
                assert "unwilling" in described
            elif isinstance(raised, FileNotFoundError):
                assert (plain, described) == ("path", "text")
            else:
                assert isinstance(raised, (TypeError, ValueError)), (plain, described, raised)
                assert expected.match(str(raised)), (plain, described, raised)
