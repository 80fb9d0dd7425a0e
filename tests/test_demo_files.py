"""The demo's readers: the GGUF file, the tokenizer, the shape of a model. Files are made here, good ones and broken."""

import os
import random

import numpy as np
import pytest

pytest.importorskip("gguf", reason="needs the extra: pip install pagedkv[demo]")

import gguf
from demo_support import CONTROL, SHAPE, SPACE, SPECIAL, metadata, tensors, write_model
from gguf import GGMLQuantizationType as Kind
from hypothesis import assume, given
from hypothesis import strategies as st

from pagedkv.demo.config import Config
from pagedkv.demo.errors import ModelFileError
from pagedkv.demo.gguf_file import GgufFile
from pagedkv.demo.model import Gemma3
from pagedkv.demo.tokenizer import TextStream, Tokenizer


@pytest.fixture
def path(tmp_path):
    return tmp_path / "model.gguf"


@pytest.fixture(scope="module")
def model_bytes(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("model") / "model.gguf").read_bytes()


@pytest.fixture(scope="module")
def tokenizer():
    return Tokenizer(metadata())


def pieces(tokenizer, text):
    """The pieces of `text` as the vocabulary writes them, without begin-of-sequence."""
    names = metadata()["tokenizer.ggml.tokens"]
    tokens = tokenizer.encode(text)
    assert tokens[0] == 2
    return [names[token] for token in tokens[1:]]


def decode(tokenizer, tokens):
    stream = TextStream(tokenizer)
    return "".join(map(stream.feed, tokens)) + stream.finish()


# --- the file ---


def test_metadata_and_tensors_are_read(path):
    file = GgufFile.open(write_model(path))
    assert file.metadata["general.architecture"] == "gemma3"
    assert file.metadata["gemma3.attention.layer_norm_rms_epsilon"] == pytest.approx(1e-6)
    assert file.metadata["tokenizer.ggml.tokens"] == metadata()["tokenizer.ggml.tokens"]
    np.testing.assert_array_equal(file.metadata["tokenizer.ggml.scores"], metadata()["tokenizer.ggml.scores"])
    for name, array in tensors().items():
        out = np.empty(array.shape, np.float32)
        file.read_into(name, out)
        np.testing.assert_array_equal(out, array)


@pytest.mark.parametrize("kind", [Kind.F16, Kind.BF16, Kind.Q4_0, Kind.Q5_0, Kind.Q5_1, Kind.Q8_0, Kind.TQ2_0])
def test_quantised_tensors_are_read_in_parts_into_any_layout(path, kind, monkeypatch):
    monkeypatch.setattr("pagedkv.demo.gguf_file._ELEMENTS_AT_ONCE", 3 * 256)
    weight = np.random.default_rng(0).standard_normal((10, 256)).astype(np.float32)
    file = GgufFile.open(write_model(path, weights={"w": weight}, kinds={"w": kind}))
    expected = gguf.quants.dequantize(gguf.quants.quantize(weight, kind), kind)
    seen = []
    transposed = np.empty((256, 12), np.float32)
    file.read_into("w", transposed[:, :10].T, seen.append)
    np.testing.assert_array_equal(transposed[:, :10].T, expected)
    assert len(seen) == 4
    assert sum(seen) == file.tensors["w"].n_bytes
    some = np.empty((3, 256), np.float32)
    file.read_into("w", some, rows=slice(4, 7))
    np.testing.assert_array_equal(some, expected[4:7])


@pytest.mark.parametrize(
    ("start", "message"),
    [
        (b"", "not a GGUF file"),
        (b"PK\x03\x04 something else", "not a GGUF file"),
        (b"GGUF", "truncated or damaged"),
        (b"GGUF\x01\x00\x00\x00", "version 1"),
        (b"GGUF\x63\x00\x00\x00", "version 99"),
        (b"GGUF\x00\x00\x00\x03", "big-endian"),
    ],
)
def test_other_files_are_named(path, start, message):
    path.write_bytes(start)
    with pytest.raises(ModelFileError, match=message):
        GgufFile.open(path)


def test_paths_that_are_no_file(tmp_path):
    with pytest.raises(ModelFileError, match="no such file"):
        GgufFile.open(tmp_path / "missing.gguf")
    with pytest.raises(ModelFileError, match="not a regular file"):
        GgufFile.open(tmp_path)
    with pytest.raises(ModelFileError, match=r"name too long|no such file"):
        GgufFile.open(tmp_path / ("x" * 5000))


def test_a_file_cut_anywhere_is_named(model_bytes):
    header_end = model_bytes.index(b"blk.2.post_ffw_norm.weight") + 200
    for length in [*range(4, header_end, 7), *range(header_end, len(model_bytes), 997), len(model_bytes) - 64]:
        with pytest.raises(ModelFileError, match="truncated"):
            GgufFile(model_bytes[:length])


def test_damage_anywhere_in_the_header_is_a_clear_error_or_harmless(model_bytes):
    header_end = model_bytes.index(b"blk.2.post_ffw_norm.weight") + 200
    chance = random.Random(1)
    for _ in range(500):
        damaged = bytearray(model_bytes)
        for _ in range(chance.choice([1, 1, 4])):
            damaged[chance.randrange(header_end)] = chance.choice([0, 1, 0x7F, 0x80, 0xFF, chance.randrange(256)])
        try:
            file = GgufFile(bytes(damaged))
            Tokenizer(file.metadata)
            Config.from_file(file)
        except ModelFileError as error:
            assert "\n" not in str(error)  # noqa: PT017


# --- the tokenizer ---


def test_the_best_score_merges_first(tokenizer):
    assert pieces(tokenizer, "hello world") == ["hello", f"{SPACE}world"]
    assert pieces(tokenizer, "helloo") == ["hello", "o"]
    # "he" and "ll" are there, but nothing joins them to "hell".
    assert pieces(tokenizer, "hell") == ["he", "ll"]


def test_equal_neighbours_merge_from_the_left(tokenizer):
    assert pieces(tokenizer, "lll") == ["ll", "l"]
    assert pieces(tokenizer, "lllll") == ["ll", "ll", "l"]


def test_user_defined_pieces_come_whole_and_longest_first(tokenizer):
    assert pieces(tokenizer, "\n\n\n<b>he") == ["\n\n", "\n", "<b>", "he"]
    assert pieces(tokenizer, "a   b") == ["a", "  ", SPACE, "b"]


def test_control_pieces_in_the_text_count_as_such(tokenizer):
    assert pieces(tokenizer, "he<end_of_turn>") == ["he", "<end_of_turn>"]
    assert decode(tokenizer, tokenizer.encode("he<end_of_turn>")) == "he"
    assert tokenizer.stop_tokens == {1, 4}


def test_what_is_not_in_the_vocabulary_becomes_bytes(tokenizer):
    assert pieces(tokenizer, "hé") == ["h", "<0xC3>", "<0xA9>"]
    assert pieces(tokenizer, "\x00") == ["<0x00>"]


def test_without_byte_pieces_it_becomes_unknown():
    names = metadata()["tokenizer.ggml.tokens"]
    kinds = np.where(metadata()["tokenizer.ggml.token_type"] == 6, 5, metadata()["tokenizer.ggml.token_type"])
    tokens = Tokenizer(metadata(token_type=kinds)).encode("hé")
    assert [names[token] for token in tokens] == ["<bos>", "h", "<unk>", "<unk>"]


def test_prefixes_as_the_metadata_says():
    plain = Tokenizer(metadata()).encode("world")
    spaced = Tokenizer(metadata(add_space_prefix=True)).encode("world")
    assert len(spaced) == 2 < len(plain)
    assert Tokenizer(metadata(add_bos_token=False)).encode("he") == Tokenizer(metadata()).encode("he")[1:]
    assert Tokenizer(metadata(add_space_prefix=True)).encode("") == [2]


@given(st.text(st.characters(codec="utf-8"), max_size=60))
def test_decoding_gives_the_text_back(text):
    tokenizer = Tokenizer(metadata())
    # Two things do not survive: control pieces, and the visible space, which reads as a space.
    assume(not any(piece in text for piece, kind in SPECIAL if kind == CONTROL))
    assert decode(tokenizer, tokenizer.encode(text)) == text.replace(SPACE, " ")


def test_a_character_is_shown_when_it_is_whole(tokenizer):
    stream = TextStream(tokenizer)
    shown = [stream.feed(token) for token in tokenizer.encode("h🦜e")]
    assert shown == ["", "h", "", "", "", "🦜", "e"]
    assert stream.finish() == ""


def test_a_character_that_breaks_off_is_replaced(tokenizer):
    tokens = tokenizer.encode("🦜")
    assert decode(tokenizer, tokens[:-1]) == "\ufffd"
    assert decode(tokenizer, [*tokens[:-1], *tokenizer.encode("he")]) == "\ufffdhe"


def test_long_texts_do_not_take_quadratic_time(tokenizer):
    assert len(tokenizer.encode("hello world" * 20_000)) == 40_001


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs named pipes")
def test_a_pipe_is_no_file(tmp_path):
    os.mkfifo(tmp_path / "fifo")
    with pytest.raises(ModelFileError, match="not a regular file"):
        GgufFile.open(tmp_path / "fifo")


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"model": "gpt2"}, "tokenizer.ggml.model"),
        ({"model": None}, "tokenizer.ggml.model"),
        ({"tokens": None}, "tokens"),
        ({"tokens": np.arange(300)}, "tokens"),
        ({"scores": np.zeros(7, np.float32)}, "differ in length"),
        ({"scores": ["a"] * 300}, "scores"),
        ({"token_type": 3}, "token_type"),
        ({"bos_token_id": 10**6}, "bos_token_id"),
        ({"eos_token_id": "x"}, "eos_token_id"),
        ({"token_type": np.full(len(metadata()["tokenizer.ggml.tokens"]), 6, np.int32)}, "is no byte"),
    ],
)
def test_a_broken_vocabulary_is_named(changes, named):
    with pytest.raises(ModelFileError, match=named):
        Tokenizer(metadata(**changes))


# --- the shape ---


def test_every_sixth_layer_is_full_by_default(path):
    shape = {**SHAPE, "block_count": 13, "attention.sliding_window_pattern": None}
    layers = Config.from_file(GgufFile.open(write_model(path, shape=shape))).layers
    assert tuple(layer.window for layer in layers) == (12, 12, 12, 12, 12, None, 12, 12, 12, 12, 12, None, 12)


def test_the_pattern_may_be_a_flag_a_layer(path):
    shape = {**SHAPE, "attention.sliding_window_pattern": [True, False, True]}
    layers = Config.from_file(GgufFile.open(write_model(path, shape=shape))).layers
    assert [layer.window for layer in layers] == [12, None, 12]


def test_optional_keys_have_gemma_s_defaults(path):
    names = ("attention.head_count_kv", "attention.key_length", "attention.value_length", "rope.freq_base")
    config = Config.from_file(GgufFile.open(write_model(path, shape={**SHAPE, **dict.fromkeys(names)})))
    assert (config.n_kv_heads, config.head_dim, config.v_head_dim) == (4, 8, 8)
    assert (config.rope_base, config.rope_base_windowed, config.rope_scale) == (1e6, 1e4, 1.0)


@pytest.mark.parametrize(
    ("key", "value"),
    [(key, None) for key in ("block_count", "embedding_length", "attention.sliding_window", "context_length")]
    + [("block_count", 0), ("block_count", 2**31), ("block_count", "many"), ("attention.key_length", 15)]
    + [("attention.layer_norm_rms_epsilon", 0.0), ("attention.layer_norm_rms_epsilon", float("nan"))]
    + [("attention.sliding_window_pattern", 0), ("attention.sliding_window_pattern", [True])]
    + [("rope.scaling.type", "yarn")],
)
def test_a_key_that_is_missing_or_senseless_is_named(path, key, value):
    file = GgufFile.open(write_model(path, shape={**SHAPE, key: value}))
    with pytest.raises(ModelFileError, match=key.replace(".", r"\.")):
        Config.from_file(file)


def test_heads_have_to_divide(path):
    file = GgufFile.open(write_model(path, shape={**SHAPE, "attention.head_count_kv": 3}))
    with pytest.raises(ModelFileError, match="num_key_value_heads: expected a divisor of 4"):
        Config.from_file(file)


def test_other_architectures_are_named(path):
    with pytest.raises(ModelFileError, match="expected 'gemma3', got 'llama'"):
        Config.from_file(GgufFile.open(write_model(path, architecture="llama")))


@pytest.mark.parametrize("name", ["token_embd.weight", "output_norm.weight", "blk.2.ffn_up.weight"])
def test_a_missing_tensor_is_named(path, name):
    weights = tensors()
    del weights[name]
    with pytest.raises(ModelFileError, match=rf"{name} is missing"):
        Gemma3(GgufFile.open(write_model(path, weights=weights)))


def test_a_tensor_of_another_shape_is_named(path):
    weights = tensors()
    weights["blk.1.ffn_down.weight"] = weights["blk.1.ffn_down.weight"].T.copy()
    with pytest.raises(ModelFileError, match=r"blk.1.ffn_down.weight: expected shape \[32, 64\], got \[64, 32\]"):
        Gemma3(GgufFile.open(write_model(path, weights=weights)))


def test_a_tensor_of_more_dimensions_is_named(path):
    weights = tensors()
    weights["blk.1.ffn_down.weight"] = np.zeros((2, 16, 64), np.float32)
    with pytest.raises(ModelFileError, match=r"expected shape \[32, 64\], got \[2, 16, 64\]"):
        Gemma3(GgufFile.open(write_model(path, weights=weights)))


def test_a_type_that_cannot_be_dequantised_is_named(path):
    weights = tensors()
    weights["output_norm.weight"] = np.arange(32, dtype=np.int32)
    with pytest.raises(ModelFileError, match=r"output_norm.weight: cannot dequantise I32"):
        Gemma3(GgufFile.open(write_model(path, weights=weights)))
