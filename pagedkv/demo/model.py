"""Gemma 3 in NumPy: float32, for a ragged batch, with the attention left to the caller."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from pagedkv.demo.config import Config
from pagedkv.demo.gguf_file import GgufFile

F32 = NDArray[np.float32]

# Vocabulary entries in a slab of the unembedding, see `Gemma3.logits`.
_SLAB = 4096


class Attend(Protocol):
    """One layer's attention: stores the new rows of K and V, and lets the queries see them and all before.

    q is [rows, n_q_heads, head_dim], k [rows, n_kv_heads, head_dim], v [rows, n_kv_heads, v_head_dim],
    the result [rows, n_q_heads, v_head_dim]; all float32.
    """

    def __call__(self, layer: int, q: F32, k: F32, v: F32) -> F32: ...


@dataclass(frozen=True)
class Layer:
    """The weights of one layer. Matrices that read the same input are one matrix.

    For a few rows, OpenBLAS is fastest along a matrix's longer side: those that widen are kept [in, out], those
    that narrow [out, in].
    """

    attention_norm: F32  # [width]
    qkv: F32  # [width, (n_q_heads + n_kv_heads) * head_dim + n_kv_heads * v_head_dim]
    qk_norm: F32  # [n_q_heads + n_kv_heads, head_dim]: one row for each query head, then each key head
    attention_out: F32  # [width, n_q_heads * v_head_dim]
    post_attention_norm: F32  # [width]
    feed_forward_norm: F32  # [width]
    gate_up: F32  # [2, width, feed_forward]
    down: F32  # [width, feed_forward]
    post_feed_forward_norm: F32  # [width]


class Gemma3:
    """A Gemma 3 text model with its weights in float32.

    Parameters
    ----------
    file
        The weights, quantised or not.
    advance
        Called with the number of file bytes that have been read, as they are.

    Raises
    ------
    ModelFileError
        A tensor is missing, has another shape than the metadata says, or cannot be dequantised.
    """

    def __init__(self, file: GgufFile, advance: Callable[[int], object] = lambda n_bytes: None) -> None:
        self.config = config = Config.from_file(file)
        self._file, self._advance = file, advance
        self._unembedding = self._read_unembedding()
        self._layers = [self._read_layer(f"blk.{index}.") for index in range(config.n_layers)]
        self._output_norm = np.empty(config.width, np.float32)
        file.read_into("output_norm.weight", self._output_norm, advance)
        del self._file, self._advance
        pairs = np.arange(0, config.head_dim, 2) / config.head_dim
        self._frequencies_full = config.rope_base**-pairs / config.rope_scale
        self._frequencies_windowed = config.rope_base_windowed**-pairs

    def forward(self, tokens: Sequence[int], positions: NDArray[np.int64], attend: Attend) -> F32:
        """Runs all layers over a ragged batch.

        Parameters
        ----------
        tokens
            The new tokens of all sequences, one after the other.
        positions
            [rows]: each token's position in its own sequence.
        attend
            Called once for every layer, in order.

        Returns
        -------
        [rows, width], the hidden states after the last norm: what `logits` takes.
        """
        config = self.config
        epsilon = config.norm_epsilon
        rotation_full = _rotation(positions, self._frequencies_full)
        rotation_windowed = _rotation(positions, self._frequencies_windowed)
        x = self._embed(tokens)
        for index, (layer, shape) in enumerate(zip(self._layers, config.layers, strict=True)):
            h = _rms_norm(x, layer.attention_norm, epsilon)
            q, k, v = self._split_qkv(h @ layer.qkv, layer, rotation_windowed if shape.window else rotation_full)
            h = attend(index, q, k, v).reshape(len(x), -1)
            x += _rms_norm(_narrow(h, layer.attention_out), layer.post_attention_norm, epsilon)

            gate, up = np.matmul(_rms_norm(x, layer.feed_forward_norm, epsilon), layer.gate_up)
            h = _gelu_gated(gate, up)
            x += _rms_norm(_narrow(h, layer.down), layer.post_feed_forward_norm, epsilon)
        return _rms_norm(x, self._output_norm, epsilon)

    def logits(self, hidden: F32) -> F32:
        """The scores of every vocabulary entry: [rows, width] to [rows, vocabulary].

        The unembedding is by far the largest matrix. In slabs of [width, 4096] OpenBLAS takes a quarter
        less time for a few rows than for one piece, whose rows lie a megabyte apart.
        """
        n_rows, n_slabs = len(hidden), len(self._unembedding)
        scores = np.empty((n_rows, n_slabs * _SLAB), np.float32)
        np.matmul(hidden, self._unembedding, out=scores.reshape(n_rows, n_slabs, _SLAB).transpose(1, 0, 2))
        return scores[:, : self.config.vocabulary]

    def _embed(self, tokens: Sequence[int]) -> F32:
        slab, column = np.divmod(np.asarray(tokens, dtype=np.intp), _SLAB)
        rows: F32 = self._unembedding[slab, :, column]
        rows *= math.sqrt(self.config.width)
        return rows

    def _split_qkv(self, qkv: F32, layer: Layer, rotation: tuple[F32, F32]) -> tuple[F32, F32, F32]:
        """Takes the product with `Layer.qkv` apart; queries and keys are normalised and rotated together."""
        config = self.config
        n_qk = config.n_q_heads + config.n_kv_heads
        rows = len(qkv)
        qk = qkv[:, : n_qk * config.head_dim].reshape(rows, n_qk, config.head_dim)
        qk = _rotate(_rms_norm(qk, layer.qk_norm, config.norm_epsilon), *rotation)
        v = qkv[:, n_qk * config.head_dim :].reshape(rows, config.n_kv_heads, config.v_head_dim)
        return qk[:, : config.n_q_heads], qk[:, config.n_q_heads :], v

    def _read_unembedding(self) -> F32:
        """The token embedding, transposed in slabs: [slabs, width, 4096], zeros past the vocabulary."""
        config = self.config
        n_slabs = -(-config.vocabulary // _SLAB)
        slabs = np.zeros((n_slabs, config.width, _SLAB), np.float32)
        for slab in range(n_slabs):
            first = slab * _SLAB
            last = min(first + _SLAB, config.vocabulary)
            out = slabs[slab, :, : last - first].T
            self._file.read_into("token_embd.weight", out, self._advance, rows=slice(first, last))
        return slabs

    def _read_layer(self, prefix: str) -> Layer:
        config = self.config
        width, feed_forward = config.width, config.feed_forward
        n_q, n_k = config.n_q_heads * config.head_dim, config.n_kv_heads * config.head_dim
        n_v, n_o = config.n_kv_heads * config.v_head_dim, config.n_q_heads * config.v_head_dim

        def read(name: str, out: F32) -> F32:
            self._file.read_into(f"{prefix}{name}.weight", out, self._advance)
            return out

        def vector(name: str, size: int) -> F32:
            return read(name, np.empty(size, np.float32))

        # The file has matrices as [out, in].
        qkv = np.empty((width, n_q + n_k + n_v), np.float32)
        read("attn_q", qkv[:, :n_q].T)
        read("attn_k", qkv[:, n_q : n_q + n_k].T)
        read("attn_v", qkv[:, n_q + n_k :].T)
        gate_up = np.empty((2, width, feed_forward), np.float32)
        read("ffn_gate", gate_up[0].T)
        read("ffn_up", gate_up[1].T)
        q_norm, k_norm = vector("attn_q_norm", config.head_dim), vector("attn_k_norm", config.head_dim)
        return Layer(
            attention_norm=vector("attn_norm", width),
            qkv=qkv,
            qk_norm=np.stack([q_norm] * config.n_q_heads + [k_norm] * config.n_kv_heads),
            attention_out=read("attn_output", np.empty((width, n_o), np.float32)),
            post_attention_norm=vector("post_attention_norm", width),
            feed_forward_norm=vector("ffn_norm", width),
            gate_up=gate_up,
            down=read("ffn_down", np.empty((width, feed_forward), np.float32)),
            post_feed_forward_norm=vector("post_ffw_norm", width),
        )


def _narrow(x: F32, matrix: F32) -> F32:
    """x @ matrix.T for a matrix [out, in], in the order that is faster where out is the shorter side."""
    return np.ascontiguousarray(np.matmul(matrix, x.T).T)


def _rms_norm(x: F32, weight: F32, epsilon: float) -> F32:
    """x / rms(x) * weight over the last axis."""
    rms: F32 = np.add.reduce(x * x, axis=-1, keepdims=True)
    rms /= x.shape[-1]
    rms += epsilon
    np.sqrt(rms, out=rms)
    normed: F32 = x / rms
    normed *= weight
    return normed


def _gelu_gated(gate: F32, up: F32) -> F32:
    """gelu(gate) * up with the tanh approximation, written as gate / (1 + exp(-2 z)) * up: exp is faster than tanh."""
    root = math.sqrt(2 / math.pi)
    out: F32 = gate * gate
    out *= -2 * root * 0.044715
    out -= 2 * root
    out *= gate  # -2 z
    np.minimum(out, 80, out=out)  # exp stays finite; from there on gelu is 0 in float32
    np.exp(out, out=out)
    out += 1
    np.divide(gate, out, out=out)
    out *= up
    return out


def _rotation(positions: NDArray[np.int64], frequencies: NDArray[np.float64]) -> tuple[F32, F32]:
    """Cosine and sine of every row's rotary angles, [rows, 1, head_dim / 2].

    The angles are made in float64: far into a context a float32 angle is off by a thousandth.
    """
    angles = np.multiply.outer(positions, frequencies)[:, np.newaxis]
    return np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)


def _rotate(x: F32, cosine: F32, sine: F32) -> F32:
    """Rotary position embedding; dimension i is paired with i + head_dim / 2."""
    half = x.shape[-1] // 2
    first, second = x[..., :half], x[..., half:]
    out = np.empty_like(x)
    np.subtract(first * cosine, second * sine, out=out[..., :half])
    np.add(second * cosine, first * sine, out=out[..., half:])
    return out
