"""The hint index: which chained block hashes have their KV on this stage, and how far a request's go.

Ownership of blocks
    A block belongs to the tree node in which it *ends*: node (path_start, path_end] in tokens owns
    the blocks [path_start // block, path_end // block) of its path's chain. A split divides a node's blocks
    between the halves, so each resident block has exactly one owner at any time, provided that
    `block` is a multiple of the tree's page size. Otherwise siblings that part inside a page would both
    own a block that lies before the token in which they differ.

Discipline of the writer
    insert   `add` the blocks [prefix_len // block, end // block) of the inserted path's chain, where
             `prefix_len` is what the tree already held.
    evict    `remove` the blocks [path_start // block, path_end // block) of the evicted leaf, whichever path
             through it their hashes came from. A leaf that came from a split takes them from the
             descendants that were evicted before it.
    reset    `clear()`.
    A set is enough then, and a reference count would be wrong: a prefix that is inserted again over
    resident nodes adds nothing that will be removed twice, its blocks still have one owner and go with
    it. Under this discipline `duplicates` and `missing` of the statistics stay 0 (short of a collision);
    anything else says that the adapter and the tree are out of step.

Prefix closure
    Trees insert from the front and evict from the leaves, so with block k of a chain all blocks before
    it are present: membership along a chain is monotone, and the probe may gallop. Each call is
    one step for a reader, so the set is prefix-closed at any time.

Threads
    One writer (LOOP); any thread may read (WAVE does), without a lock: each membership test is atomic in
    CPython. A probe that overlaps writes returns a value between the smallest and the largest true length
    during that probe, never outside [0, len(hashes)]. Seen from the tree, the answer is
    * too long (over-count) between an eviction in the tree and its `remove`, and when the writer
      removes after the probe has passed. Cost: the hold that follows compares tokens, answers with a shorter
      boundary, and the admission takes one more round.
    * too short (under-count) between an insert in the tree and its `add`, and for less than one block at the
      end, always. Cost: if this stage is the minimum, tokens that were reusable are computed again, unless
      the request is re-admitted for a longer boundary before its first span is planned.
    Neither can read wrong KV: a hash never decides which KV is read.
    A collision may also leave a hole or drop a block that is resident; the same two costs, no others.

Size: at most 86 bytes a block above 100,000 blocks: a set slot of 16 bytes in a table that is 30 to 60 %
full (CPython doubles it), and an int of 32. That is why a hash is kept to 60 bits: a 64-bit int takes 48.
The table does not shrink when blocks go, so it is the largest number of blocks so far that counts. 200K
blocks of 64 tokens (64 sequences of 200K) take some 14 MB.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

KEPT = (1 << 60) - 1
"""The bits of a hash that are kept. Two of a million blocks share them with a probability below 10**-6."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HintIndexStatistics:
    """Counters since the index was made; read while the writer is active, they may differ by one call."""

    blocks: int
    """Blocks present now."""
    added: int
    """Blocks that became present."""
    removed: int
    """Blocks that ceased to be present through `remove`."""
    duplicates: int
    """Blocks given to `add` that were present already. Not 0: a resident block had a second owner."""
    missing: int
    """Blocks given to `remove` that were absent. Not 0: an insert was missed, or an eviction seen twice."""
    clears: int
    """Calls of `clear`."""


class HintIndex:
    """Set of the chained block hashes that are resident on this stage. The module text has the contract."""

    __slots__ = ("_added", "_clears", "_duplicates", "_missing", "_present", "_removed")

    def __init__(self) -> None:
        self._present: set[int] = set()
        self._added = 0
        self._removed = 0
        self._duplicates = 0
        self._missing = 0
        self._clears = 0

    def __len__(self) -> int:
        """Blocks present. O(1), any thread."""
        return len(self._present)

    def add(self, hashes: Sequence[int], start_block: int, end_block: int) -> None:
        """Writer: the blocks [start_block, end_block) of `hashes` are resident now.

        hashes: array('Q') or a memoryview of one, which is not kept. All blocks of their path before these
        must be present. Idempotent. O(blocks added), amortised: the call that outgrows the table rehashes
        it (some 5 ms at 200K blocks, GIL held). Raises ValueError unless 0 <= start_block <= end_block <=
        len(hashes); nothing is added then.
        """
        blocks = _kept(hashes, start_block, end_block)
        before = len(self._present)
        self._present.update(blocks)
        new = len(self._present) - before
        self._added += new
        self._duplicates += len(blocks) - new

    def remove(self, hashes: Sequence[int], start_block: int, end_block: int) -> None:
        """Writer: the blocks [start_block, end_block) of `hashes` are no longer resident.

        hashes: as for `add`. No block that extends these may be present. Idempotent. O(blocks removed).
        Raises ValueError as `add` does; nothing is removed then. (A chain too short for its leaf would leave
        hashes behind that nobody ever removes.)
        """
        blocks = _kept(hashes, start_block, end_block)
        before = len(self._present)
        self._present.difference_update(blocks)
        gone = before - len(self._present)
        self._removed += gone
        self._missing += len(blocks) - gone

    def clear(self) -> None:
        """Writer: nothing is resident any more (tree reset). O(blocks): some 15 ms at 200K, GIL held."""
        self._present.clear()
        self._clears += 1

    def probe(self, hashes: Sequence[int]) -> int:
        """Number of leading blocks of `hashes` that are present, in [0, len(hashes)]. Any thread, no lock.

        hashes: a chain from block 0 on, array('Q') or a memoryview of one. Looks at both ends, gallops, each
        step eight times the last one, then bisects: O(log n) membership tests, 16 for 3125 blocks, one if
        nothing is present and two if everything is. (Doubling would take 23: the tests cost the time, most
        of them a cache miss.) Mutates nothing. See "Threads" above for what the answer means while the
        writer is active.
        """
        present, kept = self._present, KEPT
        last = len(hashes) - 1
        if last < 0 or hashes[0] & kept not in present:
            return 0
        if hashes[last] & kept in present:
            return last + 1
        low, step = 0, 8
        while (high := low + step) < last and hashes[high] & kept in present:
            low = high
            step *= 8
        high = min(high, last)
        # hashes[low] was present when it was tested, and hashes[high] was not.
        while high - low > 1:
            middle = (low + high) >> 1
            if hashes[middle] & kept in present:
                low = middle
            else:
                high = middle
        return high

    def statistics(self) -> HintIndexStatistics:
        """The counters as they are now. O(1), any thread."""
        return HintIndexStatistics(
            blocks=len(self._present),
            added=self._added,
            removed=self._removed,
            duplicates=self._duplicates,
            missing=self._missing,
            clears=self._clears,
        )


def _kept(hashes: Sequence[int], start: int, end: int) -> list[int]:
    if not 0 <= start <= end <= len(hashes):
        raise ValueError(f"blocks [{start}, {end}) are outside a chain of {len(hashes)} blocks")
    kept: list[int] = (np.asarray(hashes[start:end], np.uint64) & np.uint64(KEPT)).tolist()
    return kept
