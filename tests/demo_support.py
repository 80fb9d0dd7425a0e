"""A tiny Gemma 3 in a GGUF file, with random weights, and the plain way to run it."""

import math

import gguf
import numpy as np

SPACE = "\u2581"
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, BYTE = 1, 2, 3, 4, 6

# (piece, kind, score). Letters and the pairs that they merge into, best score first to merge.
SPECIAL = [("<pad>", CONTROL), ("<eos>", CONTROL), ("<bos>", CONTROL), ("<unk>", UNKNOWN), ("<end_of_turn>", CONTROL)]
WORDS = ["he", "ll", "llo", "hello", f"{SPACE}w", "or", f"{SPACE}wor", "ld", f"{SPACE}world"]
USER = ["\n", "\n\n", "  ", "<b>"]


def vocabulary():
    """Pieces, scores and kinds: specials, 256 bytes, user-defined pieces, words, letters."""
    entries = [(piece, -1000.0, kind) for piece, kind in SPECIAL]
    entries += [(f"<0x{byte:02X}>", -1000.0, BYTE) for byte in range(256)]
    entries += [(piece, -1000.0, USER_DEFINED) for piece in USER]
    entries += [(word, -float(rank), NORMAL) for rank, word in enumerate(WORDS)]
    entries += [(letter, -100.0 - rank, NORMAL) for rank, letter in enumerate(f"{SPACE}abcdefghijklmnopqrstuvwxyz.,")]
    return zip(*entries, strict=True)


def metadata(**changes):
    """A tokenizer's metadata, as `GgufFile` gives it."""
    pieces, scores, kinds = vocabulary()
    values = {
        "model": "llama",
        "tokens": list(pieces),
        "scores": np.array(scores, np.float32),
        "token_type": np.array(kinds, np.int32),
        "bos_token_id": 2,
        "eos_token_id": 1,
        "unknown_token_id": 3,
    }
    return {f"tokenizer.ggml.{key}": value for key, value in {**values, **changes}.items() if value is not None}


SHAPE = {
    "block_count": 3,
    "context_length": 256,
    "embedding_length": 32,
    "feed_forward_length": 64,
    "attention.head_count": 4,
    "attention.head_count_kv": 2,
    "attention.key_length": 16,
    "attention.value_length": 8,
    "attention.sliding_window": 12,
    "attention.sliding_window_pattern": 2,
    "attention.layer_norm_rms_epsilon": 1e-6,
    "rope.freq_base": 1e6,
}


def tensors(seed=0):
    """Random weights for `SHAPE`: name to float32 array, matrices [out, in]."""
    rng = np.random.default_rng(seed)
    n_tokens = len(next(iter(vocabulary())))

    def matrix(n_out, n_in):
        return (rng.standard_normal((n_out, n_in)) / math.sqrt(n_in)).astype(np.float32)

    def norm(size):
        return rng.uniform(0.5, 1.5, size).astype(np.float32)

    result = {"token_embd.weight": matrix(n_tokens, 32), "output_norm.weight": norm(32)}
    for layer in range(SHAPE["block_count"]):
        weights = {
            "attn_norm": norm(32),
            "attn_q": matrix(4 * 16, 32),
            "attn_k": matrix(2 * 16, 32),
            "attn_v": matrix(2 * 8, 32),
            "attn_q_norm": norm(16),
            "attn_k_norm": norm(16),
            "attn_output": matrix(32, 4 * 8),
            "post_attention_norm": norm(32),
            "ffn_norm": norm(32),
            "ffn_gate": matrix(64, 32),
            "ffn_up": matrix(64, 32),
            "ffn_down": matrix(32, 64),
            "post_ffw_norm": norm(32),
        }
        result |= {f"blk.{layer}.{name}.weight": array for name, array in weights.items()}
    return result


def write_model(path, *, architecture="gemma3", shape=SHAPE, weights=None, tokenizer=None, kinds=None, seed=0):
    """Writes a GGUF file. A None among `shape`, `weights` or `tokenizer` leaves the key out; returns the path.

    `kinds` maps names of tensors to the quantisation they are written in.
    """
    writer = gguf.GGUFWriter(path, architecture)
    for key, value in shape.items():
        add = {int: writer.add_uint32, float: writer.add_float32, str: writer.add_string, list: writer.add_array}
        if value is not None:
            add[type(value)](f"gemma3.{key}", value)
    for key, value in (metadata() if tokenizer is None else tokenizer).items():
        if isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, int):
            writer.add_uint32(key, value)
        elif isinstance(value, str):
            writer.add_string(key, value)
        else:
            writer.add_array(key, [item.item() if hasattr(item, "item") else item for item in value])
    for name, array in (tensors(seed) if weights is None else weights).items():
        kind = (kinds or {}).get(name)
        if kind is None:
            writer.add_tensor(name, array)
        else:
            writer.add_tensor(name, gguf.quants.quantize(array, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def reference_logits(weights, tokens, shape=SHAPE):
    """The logits after the last token, [vocabulary]: the model as the papers have it, in float64, with no cache."""
    heads, kv_heads, dim = shape["attention.head_count"], shape["attention.head_count_kv"], 16
    eps, n = shape["attention.layer_norm_rms_epsilon"], len(tokens)
    embedding = weights["token_embd.weight"].astype(float)

    def norm(x, name):
        return x / np.sqrt((x**2).mean(-1, keepdims=True) + eps) * weights[f"{name}.weight"]

    def rotate(x, base, scale):  # [n, heads, dim]
        angles = np.arange(n)[:, None] / scale * base ** (-np.arange(0, dim, 2) / dim)
        turned = (x[..., : dim // 2] + 1j * x[..., dim // 2 :]) * np.exp(1j * angles)[:, None]
        return np.concatenate([turned.real, turned.imag], -1)

    x = embedding[tokens] * math.sqrt(32)
    for layer in range(shape["block_count"]):
        is_full = layer % shape["attention.sliding_window_pattern"] == shape["attention.sliding_window_pattern"] - 1
        rope = (1e6, shape.get("rope.scaling.factor", 1.0)) if is_full else (1e4, 1.0)
        b = f"blk.{layer}."
        h = norm(x, f"{b}attn_norm")
        q = rotate(norm((h @ weights[f"{b}attn_q.weight"].T).reshape(n, heads, dim), f"{b}attn_q_norm"), *rope)
        k = rotate(norm((h @ weights[f"{b}attn_k.weight"].T).reshape(n, kv_heads, dim), f"{b}attn_k_norm"), *rope)
        v = (h @ weights[f"{b}attn_v.weight"].T).reshape(n, kv_heads, -1)
        k, v = (np.repeat(rows, heads // kv_heads, axis=1) for rows in (k, v))
        scores = np.einsum("ihd,jhd->hij", q, k) / math.sqrt(dim)
        back = np.arange(n)[:, None] - np.arange(n)
        visible = (back >= 0) & (is_full | (back < shape["attention.sliding_window"]))
        scores = np.where(visible, scores, -np.inf)
        scores = np.exp(scores - scores.max(-1, keepdims=True))
        scores /= scores.sum(-1, keepdims=True)
        h = np.einsum("hij,jhd->ihd", scores, v).reshape(n, -1) @ weights[f"{b}attn_output.weight"].T
        x = x + norm(h, f"{b}post_attention_norm")
        h = norm(x, f"{b}ffn_norm")
        gate, up = h @ weights[f"{b}ffn_gate.weight"].T, h @ weights[f"{b}ffn_up.weight"].T
        gelu = 0.5 * gate * (1 + np.tanh(math.sqrt(2 / math.pi) * (gate + 0.044715 * gate**3)))
        x = x + norm((gelu * up) @ weights[f"{b}ffn_down.weight"].T, f"{b}post_ffw_norm")
    return norm(x[-1], "output_norm") @ embedding.T
