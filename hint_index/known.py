"""The chains of recent prompts: a prompt that continues one of them is hashed from there on only.

The next turn of a conversation repeats all of the last one, and agents share long system prompts. Comparing
tokens takes a quarter of the time of hashing them, so stage 0 keeps the latest prompts with their chains,
finds those that begin alike by the hashes at checkpoints (one every `STRIDE` blocks), and takes over what
the tokens say is common.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from typing import NamedTuple

import numpy as np

from sglang_wavepp.hint_index.chain import chain

STRIDE = 64
"""Blocks from one checkpoint to the next: what is hashed in vain, at most, before a known prompt is found."""


class _Known(NamedTuple):
    tokens: array[int]
    hashes: array[int]


class KnownChains:
    """A bounded memory of chains. One thread.

    Args:
        block: tokens a block, >= 1.
        capacity: tokens of the prompts that are kept, 8 bytes each unless the caller keeps them anyway. The
            least recently used go first.
    """

    def __init__(self, block: int, capacity: int) -> None:
        self._block, self._capacity = block, capacity
        self._prompts: OrderedDict[int, _Known] = OrderedDict()
        self._checkpoints: dict[int, int] = {}
        """Hash at a checkpoint -> the latest prompt that has it."""
        self._next = 0
        self._kept = 0
        self.reused = 0
        """Blocks that were not hashed since they were known."""

    def __len__(self) -> int:
        """Prompts that are kept."""
        return len(self._prompts)

    def chain(self, tokens: array[int], seed: int) -> array[int]:
        """What `chain.chain(tokens, block, seed)` returns: shared with later calls, not to be changed.

        Keeps a reference to `tokens`, an array('q') that must not change either. Raises like `chain.chain`.
        """
        total = len(tokens) // self._block
        have = array("Q")
        with memoryview(tokens) as view:
            while (at := (len(have) // STRIDE + 1) * STRIDE) <= total:
                have = chain(view[: at * self._block], self._block, seed, have=have)
                number = self._checkpoints.get(have[-1])
                if number is None:
                    break  # whoever had a later checkpoint would have this one, too
                known = self._prompts[number]
                have = known.hashes[: at + self._common(tokens, known.tokens, at)]
                self.reused += len(have) - at
                if len(have) == len(known.hashes):
                    self._forget(number)  # this prompt has all that the known one has
                else:
                    self._prompts.move_to_end(number)
        have = chain(tokens, self._block, seed, have=have)
        if total >= STRIDE:
            self._keep(_Known(tokens, have))
        return have

    def _common(self, one: array[int], other: array[int], at: int) -> int:
        """Full blocks from block `at` on in which two prompts are alike."""
        n = min(len(one), len(other))
        differ = (
            np.frombuffer(one, np.int64)[at * self._block : n]
            != (np.frombuffer(other, np.int64)[at * self._block : n])
        )
        first = int(differ.argmax()) if differ.any() else len(differ)
        return first // self._block

    def _keep(self, known: _Known) -> None:
        self._prompts[self._next] = known
        for at in range(STRIDE, len(known.hashes) + 1, STRIDE):
            self._checkpoints[known.hashes[at - 1]] = self._next
        self._next += 1
        self._kept += len(known.tokens)
        while self._kept > self._capacity and len(self._prompts) > 1:
            self._forget(next(iter(self._prompts)))

    def _forget(self, number: int) -> None:
        known = self._prompts.pop(number)
        self._kept -= len(known.tokens)
        for at in range(STRIDE, len(known.hashes) + 1, STRIDE):
            if self._checkpoints.get(known.hashes[at - 1]) == number:
                del self._checkpoints[known.hashes[at - 1]]
