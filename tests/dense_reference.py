"""Attention in plain NumPy, float64, over dense matrices: what the kernels are compared with."""

from __future__ import annotations

import numpy as np


def dense_attention(q, k, v, *, scale=None, window=None, softcap=None, sinks=None, alibi_slopes=None, causal=True):
    """out [n, n_q_heads, v_head_dim] and lse [n, n_q_heads] of one sequence, both float64.

    q [n, n_q_heads, head_dim] are the last n of the s positions of k [s, n_kv_heads, head_dim] and
    v [s, n_kv_heads, v_head_dim].
    """
    q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))
    n, n_q_heads, head_dim = q.shape
    s, n_kv_heads, _ = k.shape
    out = np.zeros((n, n_q_heads, v.shape[2]))
    lse = np.full((n, n_q_heads), -np.inf)
    scale = 1 / np.sqrt(head_dim) if scale is None else scale
    for i in range(n):
        position = s - n + i
        first = 0 if window is None else max(0, position - window + 1)
        end = position + 1 if causal else s if window is None else min(s, position + window)
        end = max(first, end)
        for head in range(n_q_heads):
            kv_head = head // (n_q_heads // n_kv_heads)
            score = scale * (k[first:end, kv_head] @ q[i, head])
            if softcap is not None:
                score = softcap * np.tanh(score / softcap)
            if alibi_slopes is not None:
                score = score - float(alibi_slopes[head]) * np.abs(position - np.arange(first, end))
            if sinks is not None:
                score = np.append(score, float(sinks[head]))
            if score.size == 0:
                continue
            # NaN is kept out of the maximum, and spreads from the weights.
            most = np.fmax.reduce(score) if not np.isnan(score).all() else 0.0
            weight = np.exp(score - most)
            total = weight.sum()
            out[i, head] = weight[:end - first] @ v[first:end, kv_head] / total
            lse[i, head] = most + np.log(total)
    return out, lse
