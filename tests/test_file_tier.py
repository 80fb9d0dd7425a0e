"""FileTier: records in a folder, kept within a size, whoever else uses it."""

import contextlib
import os
import random
import re
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import pytest
import tiers_support as support
from helpers import run_python

import pagedkv
from pagedkv.tiers import FileTier, KeySpace, RecordFormat, encode, fetch, room_for
from pagedkv.tiers.files import FORMAT_FILE

pytest.importorskip("fcntl")

SEGMENT = 2**16


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "tier"


def open_tier(folder, n_segments=64, **options):
    return FileTier(folder, max_bytes=n_segments * SEGMENT, segment_bytes=SEGMENT, **options)


@pytest.fixture
def tier(folder):
    with open_tier(folder) as tier:
        yield tier


@pytest.fixture
def chunks():
    return support.space(block_bytes=4096).chunks(range(4 * 40))


# --- in and out --------------------------------------------------------------------------------------------


def test_what_is_stored_is_found_and_loaded(tier, chunks):
    assert support.find(tier, chunks) == 0
    assert support.store(tier, chunks) == 40
    assert support.find(tier, chunks) == 40
    assert support.load(tier, chunks) == (40, None)
    assert support.load(tier, chunks[7:9]) == (2, None)
    stats = tier.stats()
    assert stats[:3] == (40, support.disk_use(tier_path(tier)), 64 * SEGMENT)
    assert (stats.hits, stats.misses, stats.loaded, stats.stored) == (40, 40, 42, 40)
    assert stats.stored_bytes == sum(chunk.nbytes for chunk in chunks)
    assert stats.loaded_bytes == stats.stored_bytes + 2 * chunks[0].nbytes
    assert (stats.refused, stats.corrupt, stats.evicted, stats.errors) == (0, 0, 0, 0)
    assert stats.load_seconds > 0 < stats.store_seconds


def tier_path(tier):
    return Path(tier.path)


def test_only_a_beginning_counts(tier, chunks):
    support.store(tier, chunks)
    assert tier.remove([chunks[3].key, bytes(32)]) == 1
    assert tier.remove([chunks[3].key]) == 0
    assert tier.stats().corrupt == 1
    assert support.find(tier, chunks) == 3
    assert support.load(tier, chunks) == (3, None)
    assert support.find(tier, chunks[4:]) == 36
    assert support.find(tier, []) == 0
    assert support.load(tier, []) == (0, None)


def test_what_is_of_no_use_is_refused(tier, chunks):
    """A chunk without those before it; where layers have a window, that is what is kept of a prompt."""
    assert support.store(tier, chunks[1:]) == 0
    assert support.store(tier, [chunks[0], chunks[2], chunks[1]]) == 1
    assert tier.stats().refused == 39 + 2
    with open_tier(tier.path) as other:
        assert support.store(other, chunks[1:3]) == 2
    assert support.store(tier, chunks[3:]) == 37  # looks first for what others stored
    tier.remove([chunks[20].key])
    assert support.store(tier, [chunks[39].space.chunk([1], chunks[39])]) == 0
    assert support.store(tier, chunks[20:21]) == 1
    assert support.store(tier, [chunks[39].space.chunk([1], chunks[39])]) == 1
    format = RecordFormat.of(pagedkv.PagedKvStore(4, 2, 1, 8), window=8, chunk_blocks=1)
    windowed = KeySpace(format, b"a model").chunks(range(100))
    assert support.store(tier, windowed[-3:]) == 3
    assert support.load(tier, windowed[-3:]) == (3, None)


def test_nothing_is_stored_twice(tier, chunks):
    support.store(tier, chunks)
    before = support.disk_use(tier_path(tier))
    assert support.store(tier, chunks) == 40
    assert support.disk_use(tier_path(tier)) == before
    assert tier.stats().stored == 40


def test_it_is_there_when_it_is_opened_again(folder, chunks):
    with open_tier(folder) as tier:
        support.store(tier, chunks)
        before = tier.stats()
    with open_tier(folder) as tier:
        assert tier.stats()[:3] == before[:3]
        assert support.load(tier, chunks) == (40, None)


def test_another_prompt_model_or_namespace_finds_nothing(tier, chunks):
    support.store(tier, chunks)
    space = chunks[0].space
    for other in (
        space.chunks(range(1, 161)),
        KeySpace(space.format, b"another").chunks(range(160)),
        KeySpace(space.format, space.model, b"").chunks(range(160)),
    ):
        assert support.find(tier, other) == 0
        assert support.load(tier, other) == (0, None)
    half = space.chunks([*range(80), *range(80)])
    assert support.find(tier, half) == 20


def test_room_of_another_size_is_not_filled(tier, chunks):
    support.store(tier, chunks)
    for size in (0, 10, chunks[0].nbytes - 1, chunks[0].nbytes + 1):
        into = memoryview(bytearray(size))
        assert tier.load([chunks[0].key], [[into]]) == 0
        assert into == bytes(size)
    assert tier.stats().corrupt == 0


def test_more_pieces_than_one_call_of_the_system_takes(tier):
    [chunk] = support.space(block_bytes=32 * 3000).chunks(range(4))
    tier_of_one = memoryview(support.payload(chunk))
    with FileTier(tier.path, max_bytes=2**24, segment_bytes=2**18) as tier:
        assert tier.store([encode(chunk, [tier_of_one[i : i + 32] for i in range(0, len(tier_of_one), 32)])]) == 1
        loaded = bytearray(chunk.payload_bytes)
        into = room_for(chunk, [memoryview(loaded)[i : i + 32] for i in range(0, len(loaded), 32)])
        assert fetch(tier, [chunk], [into]) == (1, None)
    assert loaded == support.payload(chunk)


def test_the_files_are_those_of_the_page(tier, chunks):
    support.store(tier, chunks)
    written = []
    for path in sorted(tier_path(tier).glob("*.seg")):
        assert re.fullmatch("[0-9a-f]{16}-[0-9a-f]{16}", path.stem)
        assert path.stat().st_size <= SEGMENT
        records, entries = support.read_segment(path)
        assert records[0][1]["kind"] == 0
        assert records[0][1]["key"] == chunks[0].space.key
        assert records[0][3] == chunks[0].space.description
        assert records[0][4] + records[0][0] == records[1][0]
        assert [(at, n) for at, *_, n in records] == [(entry["offset"], entry["nbytes"]) for entry in entries]
        for (_, found, _, _, _), entry in zip(records, entries, strict=True):
            for name in ("first_position", "n_tokens", "group", "key", "parent", "root"):
                assert found[name] == entry[name]
        written += [(found["key"], payload) for _, found, _, payload, _ in records if found["kind"] == 1]
    assert written == [(chunk.key, support.payload(chunk)) for chunk in chunks]
    assert (tier_path(tier) / "pagedkv-tier").read_bytes() == b"pagedkv tier 1\n"


# --- the size ------------------------------------------------------------------------------------------------


def conversations(n, depth, block_bytes=4096):
    """Chunks of prompts that have nothing in common."""
    space = support.space(block_bytes=block_bytes)
    return [space.chunks([1000 + i, *range(1, 4 * depth)]) for i in range(n)]


def usable(tier, prompts):
    """Chunks that are there with all before them, of all that are there."""
    there = {chunk.key for prompt in prompts for chunk in prompt if tier.find([chunk.key])}
    return sum(tier.find([chunk.key for chunk in prompt]) for prompt in prompts), len(there)


def in_turn(prompts, rng):
    for prompt in prompts:
        yield from ([chunk] for chunk in prompt)


def side_by_side(prompts, rng):
    for chunks in zip(*prompts, strict=True):
        yield from ([chunk] for chunk in chunks)


def turns(prompts, rng):
    """Conversations that go on at random, two chunks at a time."""
    done = [0] * len(prompts)
    while min(done) < len(prompts[0]):
        i = rng.choice([i for i, n in enumerate(done) if n < len(prompts[0])])
        yield prompts[i][: done[i] + 2]
        done[i] += 2


@pytest.mark.parametrize(
    ("order", "n", "depth"),
    [
        *[(in_turn, 1, 400), (in_turn, 8, 50), (in_turn, 64, 8)],
        *[(side_by_side, 8, 50), (side_by_side, 40, 10)],
        *[(turns, 8, 40), (turns, 40, 10)],
    ],
)
def test_half_evicted_nine_tenths_of_the_rest_are_usable(folder, order, n, depth):
    rng, prompts = random.Random(n), conversations(n, depth)
    total = sum(chunk.nbytes for prompt in prompts for chunk in prompt)
    n_segments = total // 2 // SEGMENT
    with open_tier(folder, n_segments) as tier:
        for chunks in order(prompts, rng):
            n_known = tier.find([chunk.key for chunk in chunks])
            support.store(tier, chunks[n_known:])
            assert support.disk_use(folder) <= (n_segments + 1) * SEGMENT
        good, there = usable(tier, prompts)
        assert 0.4 * n * depth < there < 0.7 * n * depth
        assert good >= 0.9 * there, (good, there)
        assert tier.stats().evicted == tier.stats().stored - there
        assert tier.stats().errors == tier.stats().corrupt == 0
    with open_tier(folder, n_segments) as tier:  # usage is counted from the files
        assert tier.stats().records == there
        for chunks in conversations(2 * n, depth)[n:]:
            support.store(tier, chunks)
            assert support.disk_use(folder) <= (n_segments + 1) * SEGMENT


def test_what_is_used_stays(folder):
    prompts = conversations(30, 8)
    with open_tier(folder, 8) as tier:
        for prompt in prompts:
            support.store(tier, prompt)
            support.find(tier, prompts[0])
        assert support.load(tier, prompts[0]) == (8, None)
        assert support.load(tier, prompts[-1]) == (8, None)
        assert support.find(tier, prompts[1]) < 8


def test_what_another_process_uses_stays(folder):
    prompts = conversations(30, 8)
    with open_tier(folder, 8) as tier, open_tier(folder, 8) as reader:
        support.store(tier, prompts[0])
        support.store(tier, prompts[1])
        for prompt in prompts[2:]:
            support.store(tier, prompt)
            for segment in reader._segments.values():
                segment.used = 0.0  # as after a second
            support.find(reader, prompts[0])
        assert support.load(tier, prompts[0]) == (8, None)


def test_a_record_that_no_segment_takes_is_refused(tier, chunks):
    large = support.space(block_bytes=SEGMENT).chunks(range(4))
    assert support.store(tier, large) == 0
    assert (tier.stats().refused, tier.stats().errors) == (1, 0)
    assert support.store(tier, chunks) == 40


def test_short_lives_do_not_leave_many_files(folder, chunks):
    for chunk in chunks[:20]:
        with open_tier(folder) as tier:
            support.store(tier, [chunk])
    assert len(list(folder.glob("*.seg"))) == 3  # a half full one is left alone
    with open_tier(folder) as tier:
        assert support.load(tier, chunks) == (20, None)


# --- several at once -----------------------------------------------------------------------------------------


def test_two_find_each_others(folder, chunks):
    with open_tier(folder) as one, open_tier(folder) as two:
        support.store(one, chunks[:10])
        assert support.load(two, chunks) == (0, None)  # nobody asked what there is
        assert support.find(two, chunks) == 10  # at a miss
        assert support.load(two, chunks) == (10, None)
        support.store(two, chunks[10:30])
        assert support.find(one, chunks) == 30
        assert len(list(folder.glob("*.seg"))) >= 2
        support.store(one, chunks)
        assert support.find(two, chunks) == 40
    assert len(list(folder.glob("*.seg"))) * 2 == len(list(folder.glob("*.idx"))) * 2


def test_the_same_key_twice_does_no_harm(folder, chunks):
    with open_tier(folder) as one, open_tier(folder) as two:
        for tier, number in ((one, 1), (two, 2)):  # each begins a segment
            support.store(tier, support.space().chunks([number] * 4))
        for tier in (one, two):  # neither looks for the other's
            support.store(tier, chunks[:12])
        for tier in (one, two):
            assert support.find(tier, [*chunks[:12], support.space().chunk([3])]) == 12
            assert tier.stats().records == 14
    for n_segments in (2, 1, 0):
        with open_tier(folder) as tier:
            assert len(tier._segments) == n_segments
            assert support.load(tier, chunks[:12]) == ((12 if n_segments else 0), None)
            for segment in list(tier._segments.values())[-1:]:  # the one whose copies are read
                assert segment.remove()
            support.find(tier, [support.space().chunk([3])])
            assert support.load(tier, chunks[:12]) == ((12 if n_segments == 2 else 0), None)


PROCESS = """
    import sys, random
    sys.path.insert(0, {tests!r})
    import tiers_support as support
    from pagedkv.tiers import FileTier
    rng = random.Random({seed})
    space = support.space(block_bytes=4096)
    with FileTier({folder!r}, max_bytes={max_bytes}, segment_bytes=2**16) as tier:
        n = 0
        for round in range({rounds}):
            chunks = space.chunks([rng.randrange(12), *range(1, 4 * rng.randrange(2, 24))])
            found = tier.find([chunk.key for chunk in chunks])
            good, wrong = support.load(tier, chunks[:found])
            assert wrong is None, wrong
            n += good
            support.store(tier, chunks[good:])
        print(n, tier.stats().errors, tier.stats().corrupt)
"""


def test_four_processes_at_once(folder):
    tests = os.path.dirname(__file__)
    options = {"tests": tests, "folder": str(folder), "max_bytes": 12 * SEGMENT, "rounds": 60}
    code = [PROCESS.format(seed=i, **options) for i in range(4)]
    running = [
        subprocess.Popen([sys.executable, "-c", textwrap.dedent(text)], stdout=subprocess.PIPE, text=True)
        for text in code
    ]
    most = 0
    while any(process.poll() is None for process in running):
        if folder.exists():
            sizes = []
            for path in folder.iterdir():
                with contextlib.suppress(FileNotFoundError):
                    sizes.append(path.stat().st_size)
            most = max(most, sum(sizes))
        time.sleep(0.002)
    for process in running:
        assert process.returncode == 0
        loaded, errors, corrupt = map(int, process.stdout.read().split())
        assert loaded > 0
        assert errors == corrupt == 0
    assert 6 * SEGMENT < most <= 13 * SEGMENT + 100


def test_threads_at_once(folder):
    prompts = conversations(12, 12)
    with open_tier(folder, 12) as tier:
        failures = []

        def work(seed):
            rng = random.Random(seed)
            try:
                for _ in range(60):
                    prompt = rng.choice(prompts)
                    n = support.find(tier, prompt)
                    n, wrong = support.load(tier, prompt[:n])
                    assert wrong is None
                    support.store(tier, prompt[n:])
            except BaseException as error:
                failures.append(error)

        threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert not failures
        assert support.disk_use(folder) <= 13 * SEGMENT


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_after_a_fork_each_has_a_segment_of_its_own(folder, chunks):
    tests = os.path.dirname(__file__)
    run_python(f"""
        import os, sys, threading, warnings
        warnings.simplefilter("ignore", DeprecationWarning)
        sys.path.insert(0, {tests!r})
        import tiers_support as support
        from pagedkv.tiers import FileTier
        space = support.space(block_bytes=4096)
        mine, theirs = space.chunks([1] * 40), space.chunks([2] * 40)
        tier = FileTier({str(folder)!r}, max_bytes=2**24, segment_bytes=2**20)
        support.store(tier, mine[:5])
        tier._lock.acquire()    # as another thread of the parent may
        tier._writing.acquire()
        child = os.fork()
        if child == 0:
            try:
                assert support.store(tier, theirs) == 10
                assert support.load(tier, theirs) == (10, None)
                assert support.find(tier, mine) >= 5
                tier.close()
                os._exit(0)
            finally:
                os._exit(1)
        tier._lock.release()
        tier._writing.release()
        assert support.store(tier, mine) == 10
        assert os.waitpid(child, 0)[1] == 0
        assert support.find(tier, theirs) == 10
        assert support.load(tier, mine + theirs) == (20, None)
        tier.close()
        assert len([name for name in os.listdir({str(folder)!r}) if name.endswith(".seg")]) == 2
    """)


# --- the folder -----------------------------------------------------------------------------------------------


def test_other_programs_files_are_never_touched(folder, chunks):
    with open_tier(folder, 1) as tier:
        names = ["notes.txt", "0123.seg", "0123456789abcdef-0123456789abcdef.seg.bak", "x.idx", ".hidden"]
        for name in names:
            (folder / name).write_bytes(b"mine")
            os.utime(folder / name, (0, 0))
        (folder / "a folder").mkdir()
        support.store(tier, chunks)
        assert tier.stats().evicted > 0
    assert [(folder / name).read_bytes() for name in names] == [b"mine"] * len(names)
    assert (folder / "a folder").is_dir()


def test_only_an_empty_folder_becomes_a_tier(tmp_path):
    mine = tmp_path / "mine"
    mine.mkdir()
    (mine / "photo.jpg").write_bytes(b"x")
    with pytest.raises(ValueError, match="^path: expected a tier or an empty folder, got one with other files"):
        open_tier(mine)
    assert [path.name for path in mine.iterdir()] == ["photo.jpg"]
    (mine / "photo.jpg").unlink()
    open_tier(mine).close()
    assert FORMAT_FILE in os.listdir(mine)
    open_tier(tmp_path / "a" / "b" / "c").close()


def test_what_is_no_tier_is_refused(tmp_path, folder):
    file = tmp_path / "file"
    file.write_bytes(b"x")
    with pytest.raises(ValueError, match="^path: expected a folder"):
        open_tier(file)
    assert file.read_bytes() == b"x"
    os.symlink(tmp_path / "nowhere", tmp_path / "link")
    with pytest.raises(ValueError, match="^path: expected a folder"):
        open_tier(tmp_path / "link")
    open_tier(folder).close()
    for content, shown in ((b"pagedkv tier 2\n", "pagedkv tier 2"), (b"", ""), (b"\xff" * 1000, "")):
        (folder / FORMAT_FILE).write_bytes(content)
        with pytest.raises(ValueError, match=f"^path: expected a pagedkv tier 1, got '{shown}"):
            open_tier(folder)
    (folder / FORMAT_FILE).unlink()
    (folder / FORMAT_FILE).mkdir()
    with pytest.raises(ValueError, match="^path: expected a pagedkv tier 1"):
        open_tier(folder)


def test_bad_arguments_are_named(folder):
    for error, name, arguments in (
        (TypeError, "path", {"path": 3}),
        (TypeError, "path", {"path": b"bytes"}),
        (TypeError, "max_bytes", {"max_bytes": "1G"}),
        (TypeError, "max_bytes", {"max_bytes": 1e9}),
        (ValueError, "max_bytes", {"max_bytes": 0}),
        (ValueError, "max_bytes", {"max_bytes": -1}),
        (ValueError, "max_bytes", {"max_bytes": 2**63}),
        (ValueError, "max_bytes", {"max_bytes": 2**20}),
        (ValueError, "max_bytes", {"max_bytes": 2**20, "segment_bytes": 2**20 + 1}),
        (ValueError, "segment_bytes", {"segment_bytes": 1}),
        (TypeError, "segment_bytes", {"segment_bytes": "1M"}),
    ):
        arguments = {"path": folder, "max_bytes": 2**30, **arguments}
        with pytest.raises(error, match=f"^{name}: expected"):
            FileTier(arguments.pop("path"), **arguments)
    assert not folder.exists()


def test_a_closed_tier_says_so(folder, chunks):
    tier = open_tier(folder)
    support.store(tier, chunks[:1])
    tier.close()
    tier.close()
    for call in (
        lambda: tier.find([chunks[0].key]),
        lambda: support.load(tier, chunks[:1]),
        lambda: support.store(tier, chunks[:1]),
        lambda: tier.remove([chunks[0].key]),
    ):
        with pytest.raises(ValueError, match="closed"):
            call()
    assert tier.stats().stored == 1


def test_files_are_closed(folder, chunks):
    def n_open():
        return len(os.listdir("/proc/self/fd"))

    if not os.path.exists("/proc/self/fd"):
        pytest.skip("needs /proc")
    before = n_open()
    prompts = conversations(80, 14)
    with FileTier(folder, max_bytes=2**30, segment_bytes=SEGMENT) as tier:
        for prompt in prompts:
            support.store(tier, prompt)
        for prompt in prompts:
            assert support.load(tier, prompt) == (14, None)
        assert len(list(folder.glob("*.seg"))) >= 80
        assert n_open() - before <= 70
    del tier
    assert n_open() == before


def test_ten_thousand_records_are_found_at_once(folder):
    """Their places, without reading them: 300 ms cold is what a process may wait for."""
    space = support.space(block_bytes=64)
    chunks = space.chunks(range(4 * 10_000))
    records = [encode(chunk, [memoryview(bytes(64))]) for chunk in chunks]
    with FileTier(folder, max_bytes=2**26) as tier:
        assert tier.store(records) == 10_000
    times = []
    for _ in range(3):
        start = time.perf_counter()
        with FileTier(folder, max_bytes=2**26) as tier:
            times.append(time.perf_counter() - start)
            assert support.find(tier, chunks) == 10_000
    assert min(times) < 0.3
