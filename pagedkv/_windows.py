"""What a sequence holds of the positions that a window has passed: block by block, when it grows in pieces.

A window is the number of positions that a query sees, its own included; None: all. Before a step ``window - 1``
positions are seen from its first new one; they begin anywhere in a block, at worst at its last row.
"""

from __future__ import annotations


def first_needed(window: int | None, seq_len: int) -> int:
    """The first position that queries from position ``seq_len`` on can see."""
    return 0 if window is None else max(0, seq_len + 1 - window)


def first_held(window: int | None, seq_len: int, block_size: int) -> int:
    """Where the block of that position begins: what comes before can be given back."""
    return first_needed(window, seq_len) // block_size * block_size


def most_held(window: int | None, n_positions: int, chunk: int, block_size: int) -> int:
    """The most positions held at once by who grows to so many, ``chunk`` at a time, and drops what is behind."""
    return n_positions if window is None else min(n_positions, window - 1 + chunk + block_size - 1)


def growth(window: int | None, seq_len: int, n_new: int, chunk: int | None, block_size: int) -> int:
    """The positions beyond ``seq_len`` for which it must have blocks, so as never to hold more at once on its way.

    Without a chunk it grows at once, and drops nothing before.
    """
    if chunk is None:
        return n_new
    n_held = seq_len - first_held(window, seq_len, block_size)
    return max(0, most_held(window, n_held + n_new, chunk, block_size) - n_held)
