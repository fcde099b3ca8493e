"""Who comes next: first come, first served, but a long prompt lets short ones pass. Pure.

With one queue for the whole pipeline, all that come behind a prompt of 262K tokens would wait until it is
through. So while the oldest request has more than the largest wave left, those behind it with at most half as
much left go before it. They pass as long as they have no more tokens together than were planned of the oldest
itself, and half a wave; a wave without any of its tokens counts as its own latest part at least. So once a
request is the oldest, those that pass it at most double the time until its last wave is planned. Requests of
about the same length do not pass each other: taking turns, all would be through later than the first of them
need be. And who may pass is not passed itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import chain

from sglang_wavepp.mpu.packing import Pending


class Turns:
    """The order in which a planner gets to see what is pending.

    Args:
        wave: tokens of the largest wave.
        rank: of a request; those of a lower rank are not passed by those of a higher one.
    """

    def __init__(self, wave: int, rank: Callable[[int], int] = lambda seq: 0) -> None:
        self._wave, self._rank = wave, rank
        self._oldest = -1
        self._may_pass = 0
        """Tokens that may still be planned before the oldest request's next ones."""
        self._part = 0
        """Of the oldest: its tokens in the latest wave that had any."""

    def order(self, pending: Iterable[Pending]) -> Iterable[Pending]:
        """`pending`, first come first, as it is to be planned. O(pending) behind a long prompt, else O(1)."""
        waiting = iter(pending)
        oldest = next(waiting, None)
        if oldest is None:
            return ()
        if oldest.seq != self._oldest:
            self._oldest, self._may_pass, self._part = oldest.seq, self._wave // 2, self._wave // 4
        left = oldest.end - oldest.begin
        if left <= self._wave:
            return chain((oldest,), waiting)
        room, rank = self._may_pass, self._rank(oldest.seq)
        first: list[Pending] = []
        others = [oldest]
        for p in waiting:
            new = p.end - p.begin
            if new <= min(room, left // 2) and self._rank(p.seq) <= rank:
                room -= new
                first.append(p)
            else:
                others.append(p)
                rank = min(rank, self._rank(p.seq))
        return first + others

    def planned(self, spans: Iterable[Pending]) -> None:
        """The next wave has these spans of what `order` returned."""
        own = others = 0
        for seq, begin, end in spans:
            if seq == self._oldest:
                own = end - begin
            else:
                others += end - begin
        self._part = own or self._part
        self._may_pass += own - (others if own else max(others, self._part))

    def gone(self, seq: int) -> None:
        """A request ended, or comes back later."""
        if seq == self._oldest:
            self._oldest = -1
