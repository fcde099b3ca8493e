"""Which prompts are being computed, and who would only compute the same again. Pure; the leader asks it."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterable, Sequence
from typing import NamedTuple


class Awaited(NamedTuple):
    """What a request waits for: `seq` has computed `tokens` tokens of its prompt."""

    seq: int
    tokens: int


_RECENT = 64
"""Requests that ended last, of which the stages may not have all in their trees yet."""


class _Prompt(NamedTuple):
    tokens: Sequence[int]
    chain: Sequence[int]


class PromptsInFlight:
    """The prompts of all known requests, and how far those of committed ones are computed.

    Args:
        block: tokens of a block of the chained prompt hashes. Nobody waits for less than a block.
        page: tokens of a KV page: what is shared is whole pages.
    """

    def __init__(self, block: int, page: int) -> None:
        self._block, self._page = block, page
        self._prompts: dict[int, _Prompt] = {}
        self._computed: dict[int, int] = {}
        """seq -> prompt tokens that every stage has, of committed requests with full blocks to compute."""
        self._ended: deque[tuple[int, int | Sequence[int], int]] = deque(maxlen=_RECENT)
        """Of requests that ended: full blocks, hash of the last (or the tokens), log position after it."""

    def add(self, seq: int, tokens: Sequence[int], chain: Sequence[int]) -> None:
        """A request came in. `chain`: the hashes of its full prompt blocks, none if its KV is not shared."""
        self._prompts[seq] = _Prompt(tokens, chain)

    def ended(self, seq: int, position: int) -> None:
        """The request has ended before `position` of the log; what it computed is cached from there on."""
        prompt = self._prompts[seq]
        blocks = len(prompt.chain)
        if blocks or len(prompt.tokens) < self._block:
            end = prompt.chain[blocks - 1] if blocks else prompt.tokens
            self._ended.append((blocks, end, position))

    def continued(self, seq: int) -> int:
        """The log position from which on a stage has what this request's prompt continues; 0 if it is none.

        O(1), for each of the last requests that ended.
        """
        tokens, chain = self._prompts[seq]
        position = 0
        for blocks, end, at in self._ended if len(chain) or len(tokens) < self._block else ():
            if isinstance(end, int):
                follows = blocks <= len(chain) and chain[blocks - 1] == end
            else:
                follows = tokens[: len(end)] == end
            if follows:
                position = at
        return position

    def forget(self, seq: int) -> None:
        """The request is over."""
        self._prompts.pop(seq, None)
        self.leave(seq)

    def begin(self, seq: int, computed: int) -> None:
        """The request was committed; every stage has `computed` tokens of its prompt."""
        prompt = self._prompts[seq]
        if len(prompt.chain) and computed < len(prompt.tokens):
            self._computed[seq] = computed
        else:
            self.leave(seq)

    def advance(self, seq: int, computed: int) -> None:
        """Every stage has that much more; nothing if nobody could wait for it."""
        if seq in self._computed:
            self.begin(seq, computed)

    def leave(self, seq: int) -> None:
        """Nobody may wait for this request any more: its prompt is complete, or it is not computed now."""
        self._computed.pop(seq, None)

    def awaited(
        self, seq: int, reusable: int, before: Awaited | None, held: Iterable[tuple[int, int]]
    ) -> Awaited | None:
        """Whom a request waits for, that reuses `reusable` tokens so far; None if it should go on.

        `before` is whom it waited for the last time. `held` has requests that are about to be committed, as
        (seq, tokens that they reuse). O(requests that compute prompts), O(log blocks) for the one found.
        """
        if before is not None and self._computed.get(before.seq, before.tokens) < before.tokens:
            return before
        own, first = self._prompts[seq], reusable // self._block
        for other, computed in itertools.chain(self._computed.items(), held):
            theirs = self._prompts[other]
            # Equal hashes at a block mean equal prompts up to there: the chain covers all that is before.
            if first < min(len(own.chain), len(theirs.chain)) and own.chain[first] == theirs.chain[first]:
                common = self._common(own, theirs)
                if computed < common:
                    return Awaited(other, common)
        return None

    def continues(self, seq: int, reusable: int, other: int, computed: int) -> bool:
        """Is in `computed` tokens of `other` the block that follows what `seq` reuses? O(1)."""
        own, theirs, at = self._prompts[seq], self._prompts.get(other), reusable // self._block
        if theirs is None or at >= min(len(own.chain), computed // self._block, len(theirs.chain)):
            return False
        return own.chain[at] == theirs.chain[at]

    def _common(self, one: _Prompt, other: _Prompt) -> int:
        """Tokens that two prompts share, whole pages."""
        shared, bound = 0, min(len(one.chain), len(other.chain))
        while shared < bound:
            middle = (shared + bound + 1) // 2
            if one.chain[middle - 1] == other.chain[middle - 1]:
                shared = middle
            else:
                bound = middle - 1
        begin, end = shared * self._block, (shared + 1) * self._block
        tail = zip(one.tokens[begin:end], other.tokens[begin:end], strict=False)
        common = begin + sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], tail))
        return common // self._page * self._page
