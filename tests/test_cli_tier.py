"""`pagedkv tier`: what a folder has, whether it is right, and how to be rid of it."""

import json
import os

import pytest
import tiers_support as support

from pagedkv.__main__ import main
from pagedkv.tiers import FileTier

pytest.importorskip("fcntl")


@pytest.fixture
def folder(tmp_path):
    folder = tmp_path / "tier"
    with FileTier(folder, max_bytes=2**22, segment_bytes=2**16) as tier:
        for space in (support.space(), support.space(b"other", b"tenant"), support.space(b"other", b"")):
            support.store(tier, space.chunks(range(40)))
    return folder


def run(capsys, *words, code=0):
    assert main(["tier", *map(str, words)]) == code
    return capsys.readouterr().out


def test_what_is_there(folder, capsys):
    lines = run(capsys, "ls", folder).splitlines()
    assert lines[0].split() == ["model", "namespace", "format", "tokens", "size", "age"]
    assert sorted(line.split()[:2] for line in lines[1:]) == [["a", "model"], ["other", "''"], ["other", "'tenant'"]]
    facts = json.loads(run(capsys, "ls", folder, "--json"))
    assert [(f["records"], f["tokens"]) for f in facts] == [(10, 40)] * 3
    assert {f["bytes"] for f in facts} == {10 * (192 + 32 + 256)}
    assert all(0 <= f["newest_seconds"] <= f["oldest_seconds"] < 60 for f in facts)


def test_what_is_wrong_is_found(folder, capsys):
    assert run(capsys, "check", folder) == "30 records in 1 segments, 0 wrong\n"
    [path] = folder.glob("*.seg")
    good, (records, _) = path.read_bytes(), support.read_segment(path)
    for at, expected in ((records[4][0] + 300, "payload checksum"), (records[4][0] + 100, "header, and 27 records")):
        data = bytearray(good)
        data[at] ^= 1
        path.write_bytes(data)
        out = run(capsys, "check", folder, code=1)
        assert f"at {records[4][0]}: {expected}" in out
        assert out.endswith(" 1 wrong\n")
    path.write_bytes(good + b"the beginning of a record")
    assert "25 bytes of a record that was never finished\n30 records" in run(capsys, "check", folder)
    assert json.loads(run(capsys, "check", folder, "--json"))[0]["left"] == 25


def test_it_is_removed_but_for_what_is_in_use(folder, capsys):
    (folder / "notes.txt").write_text("mine")
    with FileTier(folder, max_bytes=2**22, segment_bytes=2**17) as tier:
        support.store(tier, support.space(b"third").chunks(range(8)))
        assert run(capsys, "clear", folder).endswith("; 1 in use are left\n")
        assert support.load(tier, support.space(b"third").chunks(range(8))) == (2, None)
    assert json.loads(run(capsys, "clear", folder, "--json"))["removed"] == 1
    assert sorted(os.listdir(folder)) == ["notes.txt", "pagedkv-tier"]
    assert run(capsys, "ls", folder) == "nothing\n"
    assert run(capsys, "check", folder) == "0 records in 0 segments, 0 wrong\n"


def test_a_folder_that_is_none(tmp_path, capsys):
    (tmp_path / "file").write_text("x")
    for path in (tmp_path, tmp_path / "missing", tmp_path / "file"):
        for what in ("ls", "check", "clear"):
            with pytest.raises(SystemExit) as ended:
                main(["tier", what, str(path)])
            assert ended.value.code == 2
            assert "expected the folder of a tier" in capsys.readouterr().err
    assert os.listdir(tmp_path) == ["file"]
