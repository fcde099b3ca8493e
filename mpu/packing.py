"""Packing prompt spans into a wave of a fixed token budget."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple


class Pending(NamedTuple):
    """A request whose prompt tokens [begin, end) still need a wave."""

    seq: int
    begin: int
    end: int


def pack(pending: Iterable[Pending], budget: int, align: int) -> list[Pending]:
    """Fill one wave first come, first served. Returns spans of together at most `budget` tokens.

    The packer splits: a request that does not fit is cut at a multiple of `align` (a page, or the distance of
    recurrent checkpoints) and goes on in the next wave. Only the last span of a wave can be cut, so there is
    at most one unfinished request a wave. A wave is never empty while there is work: `budget` is at least
    `align`. O(spans).
    """
    spans: list[Pending] = []
    room = budget
    for p in pending:
        if room <= 0:
            break
        seq, begin, end = p
        if end - begin > room:
            cut = (begin + room) // align * align
            if cut > begin:
                spans.append(Pending(seq, begin, cut))
            break
        spans.append(p)
        room -= end - begin
    return spans


def pack_whole(pending: Iterable[Pending], budget: int, align: int) -> list[Pending]:
    """As `pack`, for the published budget rule: what fits into a wave of its own is never split.

    A request that finds too little room ends the wave and begins the next one. Only one with more than
    `budget` tokens left is cut, and only as the first of a wave, so two that have more than half a budget
    left never share one. O(spans).
    """
    spans: list[Pending] = []
    room = budget
    for p in pending:
        seq, begin, end = p
        if end - begin <= room:
            spans.append(p)
            room -= end - begin
            continue
        if not spans:
            spans.append(Pending(seq, begin, (begin + budget) // align * align))
        break
    return spans
