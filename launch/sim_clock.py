"""Simulated time: calls at given times."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator


class SimClock:
    """Makes calls in the order of their times, and of being asked for at the same time. Seconds."""

    def __init__(self) -> None:
        self.now = 0.0
        self._calls: list[tuple[float, int, Callable[[], None]]] = []
        self._count = 0
        self._wakes: set[float] = set()

    def at(self, at: float, call: Callable[[], None]) -> None:
        """Make a call at a time that is not past. O(log calls)."""
        self._count += 1
        heapq.heappush(self._calls, (at, self._count, call))

    def wake(self, at: float) -> None:
        """Stop at this time, also if there is nothing to call."""
        if at > self.now and at not in self._wakes:
            self._wakes.add(at)
            self.at(at, lambda: self._wakes.discard(at))

    def times(self) -> Iterator[float]:
        """Every time with calls, after they were made. It ends when no calls are left."""
        while self._calls:
            self.now, _, call = heapq.heappop(self._calls)
            call()
            while self._calls and self._calls[0][0] <= self.now:
                heapq.heappop(self._calls)[2]()
            yield self.now
