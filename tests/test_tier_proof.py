"""A FileTier through everything that happens to files: flipped bits, cut ends, kills, full disks, files that vanish.

What is loaded is right, byte by byte (`tiers_support.load` sees to it), or it is not there; and the tier goes on.
PAGEDKV_PROOF_ROUNDS is how much of it is tried; with 400 that is 1600 flipped bits, 400 cut ends, 133 kills.
"""

import contextlib
import errno
import os
import random
import shutil
import signal
import subprocess
import tempfile
import time
import traceback
from pathlib import Path

import pytest
import tiers_support as support
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule
from proof_world import ROUNDS

from pagedkv.tiers import FileTier

pytest.importorskip("fcntl")

SEGMENT = 2**16
needs_fork = pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")


def open_tier(folder, n_segments=64):
    return FileTier(folder, max_bytes=n_segments * SEGMENT, segment_bytes=SEGMENT)


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "tier"


def prompts(n, depth, block_bytes=1024):
    space = support.space(block_bytes=block_bytes)
    return [space.chunks([1000 + i, *range(1, 4 * depth)]) for i in range(n)]


def written(folder, n, depth, **options):
    """A folder with records of some prompts, in two segments."""
    chunks = prompts(n, depth, **options)
    with open_tier(folder) as one, open_tier(folder) as two:
        for i, each in enumerate(chunks):
            assert support.store((one, two)[i % 2], each) == depth
    return chunks


def all_usable(folder, chunks):
    """Whatever was lost can be stored again, and then all is there."""
    with open_tier(folder) as tier:
        for each in chunks:
            n, _ = support.load(tier, each[: support.find(tier, each)])
            for _ in range(len(each)):  # one that was found and is wrong is removed
                if support.store(tier, each[n:]) == len(each) - n:
                    n, wrong = support.load(tier, each)
                    if wrong is None and n == len(each):
                        break
                else:
                    n, _ = support.load(tier, each)
            assert support.load(tier, each) == (len(each), None)


# --- what is on the disk is not what was written --------------------------------------------------------------


def test_flipped_bits(folder, tmp_path):
    rng, chunks = random.Random(1), written(folder, 4, 3)
    corrupt = lost = 0
    for i in range(4 * ROUNDS):
        copy = tmp_path / f"copy{i}"
        shutil.copytree(folder, copy)
        path = rng.choice([path for path in sorted(copy.iterdir()) if path.suffix in (".seg", ".idx")])
        data = bytearray(path.read_bytes())
        bit = rng.randrange(8 * len(data))
        data[bit // 8] ^= 1 << bit % 8
        path.write_bytes(data)
        with open_tier(copy) as tier:
            good = sum(support.load(tier, each)[0] for each in chunks)
            assert good >= 6  # of 12: the other segment is whole
            corrupt += tier.stats().corrupt
            lost += good < 12
            assert tier.stats().errors == 0
        if i % 20 == 0:
            all_usable(copy, chunks)
        shutil.rmtree(copy)
    assert corrupt > ROUNDS  # the others are in an index, or in what nobody reads
    assert lost > ROUNDS


def test_truncations(folder, tmp_path):
    rng, chunks = random.Random(2), written(folder, 4, 3)
    for i in range(ROUNDS):
        copy = tmp_path / f"copy{i}"
        shutil.copytree(folder, copy)
        path = rng.choice([path for path in sorted(copy.iterdir()) if path.suffix in (".seg", ".idx")])
        size = rng.randrange(path.stat().st_size)
        os.truncate(path, size)
        with open_tier(copy) as tier:
            good = sum(support.load(tier, each)[0] for each in chunks)
            assert good >= 6
            # Without its index a segment is read by itself.
            assert good == 12 or path.suffix == ".seg"
        if i % 20 == 0:
            all_usable(copy, chunks)
        shutil.rmtree(copy)


@pytest.mark.parametrize("how", ["zeros", "noise", "swapped", "empty", "another's", "doubled"])
def test_files_of_other_content(folder, tmp_path, how):
    rng, chunks = random.Random(3), written(folder, 4, 3)
    paths = [path for path in sorted(folder.iterdir()) if path.suffix in (".seg", ".idx")]
    for path in paths[:2] if how != "swapped" else paths[:1]:
        data = path.read_bytes()
        if how == "zeros":
            path.write_bytes(data[:100] + bytes(len(data) - 100))
        elif how == "noise":
            path.write_bytes(data[:24] + rng.randbytes(len(data) - 24))
        elif how == "swapped":
            other = next(p for p in paths[1:] if p.suffix == path.suffix)
            path.write_bytes(other.read_bytes())
            other.write_bytes(data)
        elif how == "empty":
            path.write_bytes(b"")
        elif how == "another's":
            path.write_text("a diary")
        else:
            path.write_bytes(data * 2)
    with open_tier(folder) as tier:
        for each in chunks:
            support.load(tier, each)
    all_usable(folder, chunks)


# --- who writes is killed -------------------------------------------------------------------------------------


def in_child(work):
    child = os.fork()
    if child == 0:
        try:
            work()
        except BaseException:
            os.write(2, traceback.format_exc().encode())
            os._exit(1)
        os._exit(0)
    return child


def kill_after(child, seconds):
    time.sleep(seconds)
    os.kill(child, signal.SIGKILL)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


@needs_fork
@pytest.mark.parametrize(("n_segments", "what"), [(1000, "writing"), (6, "evicting")])
def test_killed_at_any_moment(folder, n_segments, what):
    rng, chunks, last = random.Random(4), prompts(200, 6), 0

    def work():
        with open_tier(folder, n_segments) as tier:
            for i in range(10**6):
                each = chunks[(last + i) % 200]
                tier.remove([each[0].key])  # so that it is written again, and again
                assert support.store(tier, each) == 6

    if what == "evicting":  # so that there is something to evict, however slow the machine is
        child = in_child(work)
        while len(list(folder.glob("*.seg"))) < n_segments:
            time.sleep(0.01)
        assert kill_after(child, 0) == -signal.SIGKILL
    for i in range(ROUNDS // (4 if what == "writing" else 12)):
        assert kill_after(in_child(work), rng.uniform(0.001, 0.08)) == -signal.SIGKILL
        if not folder.exists():
            continue
        with open_tier(folder, n_segments) as tier:
            assert support.disk_use(folder) <= (n_segments + 1) * SEGMENT
            before = tier.stats()
            good = sum(support.load(tier, each)[0] for each in chunks)
            assert tier.stats().errors == 0
            # At most the one that was being written is not what it says.
            assert tier.stats().corrupt <= 1
            assert good >= before.records - 6 * (1 + before.records // 90)
            assert support.store(tier, prompts(1, 2)[0]) == 2
        last += i
    all_usable(folder, chunks[:3])
    if what == "evicting":
        assert support.disk_use(folder) > 3 * SEGMENT


# --- the system says no -----------------------------------------------------------------------------------------


@contextlib.contextmanager
def small_disk(path, size):
    path.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(path)]
    try:
        done = subprocess.run(command, capture_output=True, check=False)
    except FileNotFoundError:
        pytest.skip("needs mount")
    if done.returncode:
        pytest.skip("needs the right to mount a tmpfs")
    try:
        yield
    finally:
        subprocess.run(["umount", str(path)], check=True)


def test_a_full_disk(tmp_path, monkeypatch):
    disk = tmp_path / "disk"
    with small_disk(disk, 5 * SEGMENT):
        chunks = prompts(40, 12)
        with open_tier(disk / "tier") as tier:
            monkeypatch.setattr("pagedkv.tiers.files._PATIENCE", 0.0)
            n = [support.store(tier, each) for each in chunks]
            assert 0 < sum(n) < 480
            stats = tier.stats()
            assert stats.refused == 480 - sum(n)
            assert stats.errors > 0 == stats.corrupt
            assert [support.load(tier, each)[0] for each in chunks] == n
            (disk / "tier" / "room").write_bytes(b"")
        with open_tier(disk / "tier") as tier:
            assert [support.load(tier, each)[0] for each in chunks] == n
            for segment in list(tier._segments.values())[:2]:  # somebody makes room
                assert segment.remove()
            assert sum(support.store(tier, each) for each in chunks) > 0
            for each in chunks:
                support.load(tier, each)


class Failing:
    """A call of the system that fails at some of its calls, as a full or a broken disk makes it."""

    def __init__(self, call, when, how):
        self.call, self.when, self.how, self.n = call, when, how, 0

    def __call__(self, fd, buffers, *rest):
        self.n += 1
        if self.n != self.when:
            return self.call(fd, buffers, *rest)
        if isinstance(self.how, int):  # a short one; the next one goes on
            return self.call(fd, [memoryview(buffers[0])[: self.how]], *rest)
        raise self.how


@pytest.mark.parametrize("name", ["pwritev", "preadv"])
@pytest.mark.parametrize("when", [1, 2, 3, 4, 5, 6])
@pytest.mark.parametrize("how", [1, 100, errno.ENOSPC, errno.EIO, KeyboardInterrupt, MemoryError], ids=str)
def test_calls_that_fail(folder, monkeypatch, name, when, how):
    monkeypatch.setattr("pagedkv.tiers.files._PATIENCE", 0.0)
    is_error = how in (errno.ENOSPC, errno.EIO)
    raised = OSError(how, "no") if is_error else how if isinstance(how, int) else how()
    chunks = prompts(3, 3)
    with open_tier(folder) as tier:
        support.store(tier, chunks[0])
        monkeypatch.setattr(os, name, Failing(getattr(os, name), when, raised))
        with contextlib.suppress(KeyboardInterrupt, MemoryError):
            support.store(tier, chunks[1])
        with contextlib.suppress(KeyboardInterrupt, MemoryError):
            support.load(tier, chunks[1])
            support.load(tier, chunks[0])
        assert tier.stats().errors <= is_error
        for each in chunks:
            support.store(tier, each)
        for each in chunks:
            n = support.find(tier, each)
            support.store(tier, each[n:])
            assert support.load(tier, each) == (3, None)
        with open_tier(folder) as other:
            for each in chunks:
                assert support.load(other, each) == (3, None)
    all_usable(folder, chunks)


@needs_fork
@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() != 0, reason="needs root, to become somebody else")
def test_without_permission_it_is_read_alone(folder, tmp_path):
    chunks = written(folder, 2, 3)
    for path in [folder, *folder.iterdir(), *list(tmp_path.parents)[:3], tmp_path]:
        if path.exists():
            os.chmod(path, path.stat().st_mode | 0o055)

    def work():
        os.setegid(65534)
        os.seteuid(65534)
        with open_tier(folder) as tier:
            assert support.load(tier, chunks[0]) == (3, None)
            assert support.find(tier, chunks[1]) == 3
            assert support.store(tier, prompts(3, 3)[2]) == 0
            assert (tier.stats().refused, tier.stats().corrupt) == (3, 0)
            assert tier.stats().errors >= 1

    assert os.waitpid(in_child(work), 0)[1] == 0
    all_usable(folder, chunks)


# --- files that vanish -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("open_before", [False, True])
@pytest.mark.parametrize("suffix", [".seg", ".idx", ""])
def test_a_file_that_vanishes_between_find_and_load(folder, open_before, suffix):
    chunks = written(folder, 2, 3)
    with open_tier(folder) as tier:
        assert [support.find(tier, each) for each in chunks] == [3, 3]
        if open_before:
            assert support.load(tier, chunks[0][:1]) == (1, None)
            assert support.load(tier, chunks[1][:1]) == (1, None)
        for path in list(folder.iterdir()):
            if path.suffix == suffix:
                path.unlink()
        if not open_before:
            tier._files.files.clear()
        for each in chunks:
            n, wrong = support.load(tier, each)
            assert wrong is None
            assert n == (0 if suffix == ".seg" and not open_before else 3)
        stored = [support.store(tier, each) for each in chunks]
        assert stored == [3, 3] or suffix == ""
        for each, n in zip(chunks, stored, strict=True):
            assert support.load(tier, each)[0] >= min(n, 3) - 3 * (not open_before)
        assert tier.stats().corrupt == 0


def test_the_folder_vanishes(folder):
    chunks = written(folder, 2, 3)
    with open_tier(folder) as tier:
        support.find(tier, chunks[0])
        shutil.rmtree(folder)
        assert support.find(tier, prompts(3, 3)[2]) == 0
        assert support.load(tier, chunks[0]) == (0, None)
        assert support.store(tier, chunks[0]) == 0
        assert tier.stats().records == 0
        assert tier.stats().refused == 3
    assert not folder.exists()


def test_the_own_segment_is_removed(folder, monkeypatch):
    monkeypatch.setattr("pagedkv.tiers.files._STALE", 0.0)
    chunks = prompts(3, 3)
    with open_tier(folder) as tier:
        support.store(tier, chunks[0])
        for path in [*folder.glob("*.seg"), *folder.glob("*.idx")]:
            path.unlink()
        assert support.store(tier, chunks[1]) == 3
        assert support.find(tier, chunks[0]) == 0
        assert support.load(tier, chunks[1]) == (3, None)
    with open_tier(folder) as tier:
        assert support.load(tier, chunks[1]) == (3, None)


# --- two processes' views against a dict ---------------------------------------------------------------------


class Tiers(RuleBasedStateMachine):
    """Two views of a folder, and a set of what was stored: found is what is in it, as long as nothing is evicted."""

    n_segments = 1000

    def __init__(self):
        super().__init__()
        self.folder = None
        self.prompts = prompts(4, 6, block_bytes=4096)
        self.stored = set()

    @initialize()
    def begin(self):
        self.folder = Path(tempfile.mkdtemp()) / "tier"
        self.tiers = [open_tier(self.folder, self.n_segments) for _ in range(2)]

    views, which = st.integers(0, 1), st.integers(0, 3)

    def expected(self, chunks):
        return next((i for i, chunk in enumerate(chunks) if chunk.key not in self.stored), len(chunks))

    @rule(view=views, which=which, start=st.integers(0, 5), n=st.integers(1, 6))
    def store(self, view, which, start, n):
        chunks = self.prompts[which][start : start + n]
        is_of_use = self.expected(self.prompts[which]) >= start
        n = support.store(self.tiers[view], chunks)
        self.counted(n, len(chunks) if is_of_use else self.there(chunks), chunks)
        self.stored.update(chunk.key for chunk in chunks[:n])

    def there(self, chunks):
        return self.expected(chunks)

    def counted(self, n, expected, chunks):
        assert n == expected

    @rule(view=views, which=which)
    def find(self, view, which):
        self.counted(support.find(self.tiers[view], self.prompts[which]), self.expected(self.prompts[which]), None)

    @rule(view=views, which=which)
    def load(self, view, which):
        chunks = self.prompts[which]
        n = support.find(self.tiers[view], chunks)
        good, wrong = support.load(self.tiers[view], chunks)
        assert wrong is None
        self.counted(good, n, None)

    @rule(view=views)
    def reopen(self, view):
        self.tiers[view].close()
        self.tiers[view] = open_tier(self.folder, self.n_segments)

    @rule(view=views)
    def stats(self, view):
        stats = self.tiers[view].stats()
        assert stats.errors == stats.corrupt == 0
        assert stats.records <= len(self.stored)

    def teardown(self):
        if self.folder:
            assert support.disk_use(self.folder) <= (self.n_segments + 2) * SEGMENT
            for tier in self.tiers:
                tier.close()
            shutil.rmtree(self.folder.parent)


class EvictingTiers(Tiers):
    """The same where there is room for a part: never more than was stored, and never wrong."""

    n_segments = 2

    def __init__(self):
        super().__init__()
        self.prompts = prompts(4, 6, block_bytes=12 * 1024)

    def counted(self, n, expected, chunks):
        assert n <= (expected if chunks is None else len(chunks))


TestTiers = Tiers.TestCase
TestEvictingTiers = EvictingTiers.TestCase
