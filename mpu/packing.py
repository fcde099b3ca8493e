"""Packing prompt spans into a wave of a fixed token budget."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple


class Pending(NamedTuple):
    """A request whose prompt tokens [begin, end) still need a wave."""

    seq: int
    begin: int
    end: int


def pack(pending: Iterable[Pending], budget: int, page: int) -> list[Pending]:
    """Fill one wave first come, first served. Returns spans of together at most `budget` tokens.

    The packer splits: a request that does not fit is cut at a page boundary and goes on in the next wave.
    Only the last span of a wave can be cut, so there is at most one unfinished request a wave. A wave is
    never empty while there is work: `budget` is at least a page. O(spans).
    """
    spans: list[Pending] = []
    room = budget
    for seq, begin, end in pending:
        if room <= 0:
            break
        if end - begin > room:
            cut = (begin + room) // page * page
            if cut > begin:
                spans.append(Pending(seq, begin, cut))
            break
        spans.append(Pending(seq, begin, end))
        room -= end - begin
    return spans
