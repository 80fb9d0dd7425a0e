"""Which segment goes: the one whose loss is the least.

A record is of use together with all that come before it in its prompt. So a segment's loss is that of its own records
and of all that follow one of them, in whatever segment they are: heads of prompts outlast tails. A record counts for
its bytes, times the rank of its last use among all.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from pagedkv.tiers.segments import Place, Segment

# What a record counts for that was used before all others; the one that was used last counts for one more. Where it is
# less, and conversations go on side by side, the order of their last turns decides, and leaves tails without heads.
_LEAST = 3.0


def by_loss(
    segments: Sequence[Segment],
    known: Mapping[bytes, tuple[Place, Sequence[Segment]]],
    last_use: Mapping[bytes, float],
) -> list[Segment]:
    """These segments; first that one whose loss is the least, for each byte that comes free.

    `known` has for each key its place in the newest of the segments that have it, and these segments, the newest last.
    """
    needed = _needed(known)
    uses = {}
    for key in needed:
        place, where = known[key]
        uses[key] = max(last_use.get(key, 0.0), where[-1].used_by_others, place.time)
    ordered = sorted(set(uses.values()))
    ranks = {use: _LEAST + rank / len(ordered) for rank, use in enumerate(ordered)}
    lost = dict.fromkeys((segment.name for segment in segments), 0.0)
    for key, names in needed.items():
        weight = ranks[uses[key]] * known[key][0].nbytes
        for name in names & lost.keys():
            lost[name] += weight
    return sorted(segments, key=lambda segment: (lost[segment.name] / max(segment.nbytes, 1), segment.used_by_others))


def _needed(known: Mapping[bytes, tuple[Place, Sequence[Segment]]]) -> dict[bytes, frozenset[str]]:
    """For each record that is of use, the segments that it is lost with: those that alone have it, or one before it."""
    needed: dict[bytes, frozenset[str]] = {}
    # In order of position parents come before their children.
    for key, (place, where) in sorted(known.items(), key=lambda item: item[1][0].first_position):
        if place.is_windowed or place.parent == place.root:
            before: frozenset[str] = frozenset()
        elif place.parent in needed:
            before = needed[place.parent]
        else:
            continue  # of no use to anybody
        alone = where[0].name if len(where) == 1 else None
        needed[key] = before if alone is None or alone in before else before | {alone}
    return needed
