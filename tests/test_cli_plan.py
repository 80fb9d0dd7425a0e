"""`python -m pagedkv plan`, against arithmetic done by hand, real stores and real sequences."""

import json

import numpy as np
import pytest
from cli_support import fails

import pagedkv
from pagedkv.__main__ import main
from pagedkv.cli import plan
from pagedkv.shapes import LayerShape

GIB = 1 << 30
LLAMA = ["--layers", "32", "--kv-heads", "8", "--head-dim", "128"]


def planned(capsys, *arguments):
    assert main(["plan", *arguments, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


@pytest.mark.parametrize(("dtype", "position_bytes", "sequences"), [
    ("float32", 262144, 16),  # 2 * 32 * 8 * 128 * 4 bytes: 512 MiB for 2048
    ("float16", 131072, 32),
    ("bfloat16", 131072, 32),
    ("int8", 69632, 60),  # 2 * 32 * 8 * (128 + 4 * 2): 136 MiB, and 8192 / 136 = 60.2
])
def test_by_hand(capsys, dtype, position_bytes, sequences):
    found = planned(capsys, "--memory", "8GiB", *LLAMA, "--length", "2048", "--dtype", dtype)
    assert found["memory"] == 8 * GIB
    [fit] = found["fits"]
    assert fit == {
        "dtype": dtype, "block_size": 16, "length": 2048, "sequences": sequences, "bytes_each": 2048 * position_bytes,
        "blocks_each": [128], "total_blocks": [128 * sequences], "wasted_bytes": 0,
        "mean_wasted_bytes": 7.5 * position_bytes,
    }  # fmt: skip


def test_the_waste_at_the_block_ends_by_hand(capsys):
    found = planned(capsys, "--memory", "1GiB", *LLAMA, "--length", "2050", "--dtype", "float32", "--block-size", "64")
    [fit] = found["fits"]
    assert fit["blocks_each"] == [33]  # 2112 positions, 62 of them not written
    assert fit["wasted_bytes"] == 62 * 262144
    assert fit["mean_wasted_bytes"] == 31.5 * 262144
    assert fit["sequences"] == 1  # 528 MiB


@pytest.mark.parametrize("dtype", plan.DTYPES)
@pytest.mark.parametrize(("heads", "dim", "v_dim"), [(2, 64, 64), (3, 5, 7), (1, 576, 512)])
def test_stores_of_the_plan_fit_and_one_sequence_more_would_not(dtype, heads, dim, v_dim):
    layers = {LayerShape(None, heads, dim, v_dim): 2, LayerShape(40, heads, dim, v_dim): 5}
    memory = 50_000_000
    fit = plan.fit(layers, memory, dtype, 16, 1000)

    def nbytes(n_sequences):
        return sum(
            pagedkv.PagedKvStore(
                16, n_sequences * n, heads, dim, v_head_dim=v_dim, n_layers=n_layers, dtype=dtype
            ).nbytes
            for n, n_layers in zip(fit.blocks_each, layers.values(), strict=True)
        )

    assert fit.total_blocks == tuple(fit.sequences * n for n in fit.blocks_each)
    assert nbytes(1) == fit.bytes_each
    assert nbytes(fit.sequences) <= memory < nbytes(fit.sequences + 1)


def test_one_group_agrees_with_from_bytes():
    fit = plan.fit({LayerShape(None, 2, 64): 4}, 10_000_000, "int8", 16, 100)
    store = pagedkv.PagedKvStore.from_bytes(10_000_000, 16, 2, 64, n_layers=4, dtype="int8")
    assert fit.sequences == store.total_blocks // 7  # 100 positions in blocks of 16


@pytest.mark.parametrize(("window", "block_size", "chunk"), [
    (1, 4, 1), (4, 4, 1), (5, 4, 1), (6, 4, 1), (9, 4, 1), (10, 3, 1), (7, 1, 1), (6, 4, 3), (3, 16, 1), (2, 5, 7),
])
@pytest.mark.parametrize("length", [1, 3, 5, 8, 63, 105])
def test_a_sequence_with_a_window_holds_as_many_blocks_as_planned(window, block_size, chunk, length):
    """Decoding in steps of `chunk`, dropping what the next query does not see."""
    store, cache = pagedkv.PagedKvStore(block_size, 256, 1, 1), pagedkv.PagedKvCache()
    most = 0
    while cache.seq_len < length:
        n = min(chunk, length - cache.seq_len)
        cache.append_contiguous(store, *np.zeros((2, n, 1), np.float32), n)
        most = max(most, 256 - store.free_block_count)
        cache.drop_before(store, max(0, cache.seq_len + 1 - window))
    expected = plan.held_blocks(LayerShape(window, 1, 1), block_size, length, chunk)
    # Steps of several positions do not meet every offset in a block on a short way.
    assert most == expected if chunk == 1 or length > 100 else most <= expected


def test_a_window_by_hand(capsys):
    """22 layers see 512: at most 33 blocks of 16, whatever the length. Four see all 8192: 512 blocks."""
    numbers = ["--layers", "26", "--kv-heads", "4", "--head-dim", "256", "--window", "512", "--window-layers", "22"]
    found = planned(capsys, "--memory", "4GiB", *numbers, "--length", "8192", "--dtype", "float16")
    [fit] = found["fits"]
    assert [store["n_layers"] for store in found["stores"]] == [4, 22]
    assert fit["blocks_each"] == [512, 33]
    row = 2 * 4 * 256 * 2
    assert fit["bytes_each"] == 16 * row * (4 * 512 + 22 * 33)
    assert fit["sequences"] == 4 * GIB // (16 * row * (4 * 512 + 22 * 33)) == 23
    assert fit["wasted_bytes"] == 22 * row * (33 * 16 - 512)


def test_a_prefill_holds_its_chunk_beside_the_window():
    shape = LayerShape(512, 1, 4)
    assert plan.held_blocks(shape, 16, 8192, 1) == 33  # 512 + 15 positions
    assert plan.held_blocks(shape, 16, 8192, 256) == 49  # 511 + 256 + 15 = 782
    assert plan.held_blocks(shape, 16, 100, 256) == 7


def test_nothing_fits(capsys):
    found = planned(capsys, "--memory", "1MiB", *LLAMA)
    assert {fit["sequences"] for fit in found["fits"]} == {0}
    assert len(found["fits"]) == 16  # four dtypes, four lengths


def test_the_table(capsys):
    assert main(["plan", "--memory", "8GiB", *LLAMA, "--length", "2048", "--length", "100", "--dtype", "float32"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[:2] == ["8.0 GiB for K/V of the model:", "  32 layers of 8 K/V heads of 128 that see all positions"]
    assert lines[-2].split() == ["float32", "16", "2048", "16", "512.0", "MiB", "128", "0.0%", "0.4%"]
    assert lines[-1].split() == ["float32", "16", "100", "292", "28.0", "MiB", "7", "10.7%", "6.7%"]


@pytest.mark.parametrize(("arguments", "said"), [
    ([], "the following arguments are required: --memory"),
    (["--memory", "1G"], "--layers is missing"),
    (["--memory", "1G", "--layers", "2", "--kv-heads", "2"], "--head-dim is missing"),
    (["--memory", "1G", "--config", "x", "--layers", "2"], "--layers: not together with --config"),
    (["--memory", "1G", "--config", "/none/config.json"], "/none/config.json: No such file"),
    (["--memory", "1G", *LLAMA, "--window-layers", "2"], "--window-layers: expected --window too"),
    (["--memory", "1G", *LLAMA, "--window", "9", "--window-layers", "33"], "expected at most 32, got 33"),
    (["--memory", "1G", *LLAMA, "--dtype", "float64"], "invalid choice: 'float64'"),
    (["--memory", "1G", *LLAMA, "--block-size", "0"], "from 1 to"),
    (["--memory", "1G", *LLAMA, "--block-size", "70000"], "--block-size: expected at most 65536"),
    (["--memory", "1G", "--layers", "2147483647", "--kv-heads", "2147483647", "--head-dim", "2147483647"],
     "the model: "),
])
def test_what_is_refused(capsys, arguments, said):
    assert said in fails(capsys, "plan", *arguments)


# --- config.json ---

GEMMA = {
    "model_type": "gemma3_text", "num_hidden_layers": 18, "num_attention_heads": 4, "num_key_value_heads": 1,
    "head_dim": 256, "hidden_size": 640, "sliding_window": 512, "max_position_embeddings": 32768,
    "layer_types": (["sliding_attention"] * 5 + ["full_attention"]) * 3,
}  # fmt: skip
DEEPSEEK = {
    "model_type": "deepseek_v3", "num_hidden_layers": 61, "num_attention_heads": 128, "num_key_value_heads": 128,
    "kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128, "hidden_size": 7168,
}  # fmt: skip


def write(folder, config):
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


def test_a_configuration(capsys, tmp_path):
    """What is in one is the business of test_shapes.py."""
    options = ["--config", write(tmp_path, GEMMA), "--length", "4096", "--dtype", "float32"]
    found = planned(capsys, "--memory", "1G", *options)
    shape = {"n_kv_heads": 1, "head_dim": 256, "v_head_dim": 256}
    assert found["stores"] == [{"n_layers": 15, "window": 512, **shape}, {"n_layers": 3, "window": None, **shape}]
    [fit] = found["fits"]
    assert fit["blocks_each"] == [33, 256]
    assert fit["bytes_each"] == 2 * 256 * 4 * 16 * (15 * 33 + 3 * 256)


@pytest.mark.parametrize(("options", "values", "line"), [
    ([], 576, "  61 layers of 1 K/V heads of 512/64 that see all positions"),
    (["--latent", "absorbed"], 1088, "  61 layers of 1 K/V heads of 576/512 that see all positions"),
    (["--latent", "expanded"], 128 * 320, "  61 layers of 128 K/V heads of 192/128 that see all positions"),
])
def test_how_latent_attention_is_kept_is_said(capsys, tmp_path, options, values, line):
    path = write(tmp_path, DEEPSEEK)
    arguments = ["--memory", "64G", "--config", path, "--length", "16", "--dtype", "float16", *options]
    found = planned(capsys, *arguments)
    [note], [fit] = found["notes"], found["fits"]
    assert fit["bytes_each"] == 16 * 61 * values * 2
    assert main(["plan", *arguments]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[1] == line
    assert lines[2] == f"  {note}"
    assert note.startswith(f"kept {options[-1] if options else 'split'}: ")


def test_layers_that_share_take_nothing(capsys, tmp_path):
    path = write(tmp_path, {**GEMMA, "num_kv_shared_layers": 6})
    assert [store["n_layers"] for store in planned(capsys, "--memory", "1G", "--config", path)["stores"]] == [10, 2]
    assert main(["plan", "--memory", "1G", "--config", path]) == 0
    assert capsys.readouterr().out.splitlines()[3] == "  6 layers use the K/V of others"


@pytest.mark.parametrize(("change", "said"), [
    ({"num_hidden_layers": None}, "expected num_hidden_layers"),
    ({"num_hidden_layers": "18"}, "num_hidden_layers: expected an integer, got str"),
    ({"layer_types": ["mamba"] * 18}, "layer_types: layer 0 of gemma3_text is 'mamba', which a store cannot hold"),
])
def test_configurations_that_are_refused(capsys, tmp_path, change, said):
    path = write(tmp_path, {**GEMMA, **change})
    assert f"{path}: " in fails(capsys, "plan", "--memory", "1G", "--config", path)
    assert said in fails(capsys, "plan", "--memory", "1G", "--config", path)


@pytest.mark.parametrize(("text", "said"), [("[]", "expected a JSON object"), ("{", "is no JSON file")])
def test_files_that_are_no_configuration(capsys, tmp_path, text, said):
    (tmp_path / "config.json").write_text(text)
    assert said in fails(capsys, "plan", "--memory", "1G", "--config", str(tmp_path / "config.json"))


def test_lengths_go_as_far_as_the_model(capsys, tmp_path):
    path = write(tmp_path, {**GEMMA, "max_position_embeddings": 2048})
    found = planned(capsys, "--memory", "1G", "--config", path, "--dtype", "int8")
    assert found["model"] == "gemma3_text"
    assert [fit["length"] for fit in found["fits"]] == [512, 2048]
