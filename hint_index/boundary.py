"""A stage's hint for a request, in tokens."""

from __future__ import annotations

from collections.abc import Sequence

from sglang_wavepp.hint_index.index import HintIndex
from sglang_wavepp.hint_index.snapshots import SnapshotIndex


class Hints:
    """What one stage could reuse: of plain models any prefix with KV, of hybrid ones up to a recurrent state.

    Args:
        block: tokens a block, a multiple of the tree's page.
        seed: of the server's chains; see `chain.seed_of`.
        recurrent: the model has recurrent layers.
    """

    def __init__(self, block: int, seed: int, recurrent: bool = False) -> None:
        self.block, self.seed = block, seed
        self.index = HintIndex()
        self.snapshots = SnapshotIndex() if recurrent else None

    def boundary(self, hashes: Sequence[int], limit: int) -> int:
        """Tokens of a request, at most `limit` (>= 0), that this stage could reuse. Any thread, no lock.

        hashes: the request's chain from block 0 on. The answer is a whole number of blocks, or `limit` where
        the last block reaches beyond it (not so for hybrid models, that cannot cut a state). What is cached
        of a further, partial block is not counted. See `index` for when it is wrong otherwise.
        """
        if self.snapshots is not None:
            blocks = min(self.index.probe(hashes), limit // self.block)
            return self.snapshots.last(hashes, blocks) * self.block
        return min(self.index.probe(hashes) * self.block, limit)

    def clear(self) -> None:
        """Writer: the tree was reset."""
        self.index.clear()
        if self.snapshots is not None:
            self.snapshots.clear()
