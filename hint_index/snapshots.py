"""Where recurrent states are resident on this stage: hybrid models can go on only from such a position.

A recurrent state (Mamba, KDA, ...) belongs to the *end* of a tree node. States are sparse, one every few
thousand tokens, and not prefix-closed: an earlier one may be evicted while a later one stays. So the last
one at or before a position is found by a reverse scan, not by bisection.

Segments keep that scan short. A chain is cut into segments of `SEGMENT` blocks, and for each segment (named
by the hash of its first block) the index notes at which blocks of it states are, on whatever branch. The
scan looks at one entry a segment and tests only blocks that have a state on some branch: at 200K tokens and
64 a block some 50 dictionary lookups where there is no state at all.

Only positions that are a multiple of the block are kept; the others are counted (`unaligned`). SGLang puts
states on a grid that is a multiple of 64 tokens and of the page wherever it checkpoints a prompt, so those
are kept. A missing one makes the hint too short, which costs what every under-count costs (see `index`).

Threads, collisions, costs of a wrong answer: as in `index`.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Sequence
from typing import NamedTuple

from sglang_wavepp.hint_index.index import KEPT

SEGMENT = 64
"""Blocks."""


class Snapshot(NamedTuple):
    """A recurrent state after `blocks` blocks of a path: what `add` returns and `remove` takes."""

    blocks: int
    hash: int
    segment: int


class SnapshotIndex:
    """The resident recurrent states of one stage. One writer (LOOP), any reader, no lock."""

    __slots__ = ("_present", "_segments", "unaligned")

    def __init__(self) -> None:
        self._present: set[int] = set()
        self._segments: dict[int, tuple[int, ...]] = {}
        """Kept hash of a segment's first block -> the `blocks` of its states, ascending, with repetitions."""
        self.unaligned = 0
        """States that were not kept, since no block ends where they are."""

    def __len__(self) -> int:
        """States present. O(1), any thread."""
        return len(self._present)

    def add(self, hashes: Sequence[int], blocks: int) -> Snapshot:
        """Writer: a state is resident after `blocks` blocks of `hashes`, a chain from block 0 on.

        Idempotent. O(states in its segment). Raises ValueError unless 1 <= blocks <= len(hashes).
        """
        if not 1 <= blocks <= len(hashes):
            raise ValueError(f"a state after {blocks} blocks is outside a chain of {len(hashes)} blocks")
        first = (blocks - 1) // SEGMENT * SEGMENT
        state = Snapshot(blocks, hashes[blocks - 1] & KEPT, hashes[first] & KEPT)
        if state.hash not in self._present:
            there = list(self._segments.get(state.segment, ()))
            insort(there, blocks)
            self._segments[state.segment] = tuple(there)
            self._present.add(state.hash)
        return state

    def remove(self, state: Snapshot) -> None:
        """Writer: the state is gone. Idempotent. O(states in its segment)."""
        if state.hash not in self._present:
            return
        self._present.discard(state.hash)
        there = list(self._segments[state.segment])
        there.remove(state.blocks)
        if there:
            self._segments[state.segment] = tuple(there)
        else:
            del self._segments[state.segment]

    def clear(self) -> None:
        """Writer: no state is resident any more."""
        self._present.clear()
        self._segments.clear()

    def last(self, hashes: Sequence[int], blocks: int) -> int:
        """The last state at or before `blocks` blocks of `hashes`, in blocks; 0 if there is none. Any thread.

        hashes: a chain from block 0 on. O(blocks / SEGMENT + states of other branches in passed segments).
        """
        at = min(blocks, len(hashes))
        segments, present = self._segments, self._present
        for first in range((at - 1) // SEGMENT * SEGMENT, -1, -SEGMENT):
            for there in reversed(segments.get(hashes[first] & KEPT, ())):
                if there <= at and hashes[there - 1] & KEPT in present:
                    return there
        return 0
