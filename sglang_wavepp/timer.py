"""How long a stage takes for its waves, for a planner and decode groups that learn from it.

A wave counts from when its input is there and the wave before it is through, so neither waiting nor what was
launched ahead is part of it. Devices measure with events. A device without timed events (the CPU) works
while the launch lasts, and the host's clock says the same.
"""

from __future__ import annotations

import math
import time
from collections import deque
from typing import Any

_BUSY = 1.1
_PREPARES_MS = 0.5
"""What lies between two waves of a busy device: `_BUSY` times a wave's time and this after the end of the one
before, a wave is through. Inputs are made ready on the device, too."""


class WaveTimer:
    """Times launches. Used by the wave loop alone; nothing here waits.

    Args:
        device: torch's module of the device (`torch.cuda`, ...).
        stream: where the forward passes run.
    """

    def __init__(self, device: Any, stream: Any) -> None:
        self._device, self._stream = device, stream
        self._pending: deque[tuple[int, bool, Any, Any, Any]] = deque()
        """Waves that count as (wave, also behind nothing, start, end of the wave before, end)."""
        self._ready: list[tuple[int, int]] = []
        self._start: Any = None
        self._end: Any = None
        try:
            device.Event(enable_timing=True)
            self._events = True
        except TypeError:
            self._events = False

    def start(self) -> None:
        """A wave is launched next; its input was received, on the current stream."""
        if self._events:
            self._start = self._device.Event(enable_timing=True)
            self._start.record(self._device.current_stream())
        else:
            self._start = time.perf_counter()

    def stop(self, wave: int, counts: bool, behind_nothing: bool = True) -> None:
        """It was launched. Without `counts` only what follows it is measured.

        A wave for which the device was idle also takes what the host needs to launch it. Without
        `behind_nothing` it does not count then, where events tell.
        """
        if not self._events:
            if counts:
                self._ready.append((wave, round((time.perf_counter() - self._start) * 1e6)))
            return
        before, self._end = self._end, self._device.Event(enable_timing=True)
        self._end.record(self._stream)
        if counts:
            self._pending.append((wave, behind_nothing, self._start, before, self._end))

    @property
    def queued(self) -> int:
        """Waves that were launched and have not begun. 0 without events: a launch lasts as long as a wave."""
        return max(0, sum(not end.query() for *_, end in self._pending) - 1)

    def take(self) -> list[tuple[int, int]]:
        """Waves that are through and were not taken yet: (wave, microseconds)."""
        while self._pending and self._pending[0][4].query():
            wave, behind_nothing, start, before, end = self._pending.popleft()
            took = start.elapsed_time(end)
            since = math.inf if before is None else before.elapsed_time(end)
            if behind_nothing or since <= _BUSY * took + _PREPARES_MS:
                self._ready.append((wave, round(min(took, since) * 1e3)))
        taken, self._ready = self._ready, []
        return taken
