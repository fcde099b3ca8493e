"""What stage 0 asks a planner: which spans make up the next prefill wave."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from itertools import islice
from typing import Any, NamedTuple, Protocol

from sglang_wavepp.mpu.packing import Pending, pack


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class WaveLimits:
    """What a wave may be. Lengths are tokens."""

    stages: int
    ring: int
    """Waves that may be under way at a time: the execution ring R, 2 for each stage by default."""
    budget: int
    """The largest wave, M."""
    align: int
    """Requests are cut at multiples of this: a page, or the distance of recurrent checkpoints. At most
    `budget`."""
    least: int = 1
    """No planner makes waves smaller than this on purpose."""

    @property
    def floor(self) -> int:
        """The smallest budget: `least` in whole multiples of `align`, `budget` at most."""
        return min(self.budget // self.align, -(-self.least // self.align)) * self.align

    @property
    def ahead(self) -> int:
        """Committed tokens without a wave, at which admission waits: as many as fill the ring.

        With fewer the prefixes of those that are next could be evicted; what waits longer may reuse more. Of
        four waves at least, so that short prompts find room behind long ones: see `admission.Limits`.
        """
        return max(4, self.ring) * self.budget


class Load(NamedTuple):
    """What the time of a wave depends on; sums over its spans."""

    tokens: float
    attention: float
    """Pairs of a token and one that it attends to."""
    prefix: float
    """Tokens before the spans: their KV is read once for each span."""
    spans: float


NOTHING = Load(0.0, 0.0, 0.0, 0.0)


def load_of(spans: Iterable[Pending]) -> Load:
    """The load of a wave. O(spans)."""
    tokens = attention = prefix = 0.0
    count = 0
    for _, begin, end in spans:
        new = end - begin
        tokens += new
        attention += new * (begin + new / 2)
        prefix += begin
        count += 1
    return Load(tokens, attention, prefix, float(count))


class Planner(Protocol):
    """Cuts prompts into waves. One for a server; the wave loop of stage 0 alone calls it.

    A planner keeps the order of the requests, plans each token once, never exceeds the budget, and answers
    with an empty wave only if nothing is pending. Every wave has at least `WaveLimits.floor` tokens or
    completes a request, so there are never more of them than the sum over requests of ceil(suffix / floor),
    where suffixes begin at a multiple of `align`.
    """

    def spans(self, pending: Iterable[Pending], rows: int, ring: Sequence[Load]) -> list[Pending]:
        """The next prefill wave.

        Args:
            pending: committed requests with prompt tokens left to plan, in the order in which they come.
            rows: requests in a wave at most.
            ring: the prefill waves under way, the oldest first.
        """

    def observe(self, stage: int, load: Load, elapsed_us: int) -> None:
        """A stage has taken this long for a prefill wave, without waiting for its input."""

    def statistics(self) -> dict[str, Any]:
        """JSON-ready values for `/server_info`."""


class StaticPlanner:
    """Waves of the largest budget, filled first come, first served."""

    def __init__(self, limits: WaveLimits) -> None:
        self._limits = limits

    def spans(self, pending: Iterable[Pending], rows: int, ring: Sequence[Load]) -> list[Pending]:
        """See `Planner`. O(spans)."""
        return pack(islice(pending, rows), self._limits.budget, self._limits.align)

    def observe(self, stage: int, load: Load, elapsed_us: int) -> None:
        """Nothing is learned."""

    def statistics(self) -> dict[str, Any]:
        """See `Planner`."""
        return {"planner": "static", "budget": self._limits.budget}
