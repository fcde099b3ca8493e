"""Why the slowest stage of the modelled pipeline does nothing, and for how long."""

from __future__ import annotations

CAUSES = {
    "host": "admission and other host work on the execution path",
    "admission": "requests wait for admission, nothing else is there",
    "too few waves": "all that was admitted is under way",
    "run-ahead": "the ring is full",
    "idle": "there are no requests",
    "fill": "the stages before are not done",
    "drain": "the stages behind end the last waves",
}
"""Why the slowest stage does nothing."""


class Bubbles:
    """Seconds in which the slowest stage did nothing, by cause."""

    def __init__(self) -> None:
        self.seconds = dict.fromkeys(CAUSES, 0.0)
        self.cause = "idle"
        """Why stage 0 does nothing at the moment, if it is free."""
        self._waits: dict[str, float] = {}
        """Seconds in which stage 0 did nothing since the latest wave was issued, by cause."""

    def waited(self, began: float, until: float) -> None:
        """Stage 0 had nothing to do from `began` on, if that is before `until`."""
        if until > began:
            self._waits[self.cause] = self._waits.get(self.cause, 0.0) + until - began

    def issued(self, gap: float, host: float) -> None:
        """The slowest stage waits for a wave for `gap` seconds.

        Of these, up to `host` go to the host's work for this wave, others to what stage 0 waited for, and the
        rest to the stages between.
        """
        on_path = min(gap, host)
        self.seconds["host"] += on_path
        gap -= on_path
        for cause, seconds in self._waits.items():
            part = min(gap, seconds)
            self.seconds[cause] += part
            gap -= part
        self.seconds["fill"] += gap
        self._waits.clear()

    def drained(self, seconds: float) -> None:
        """So long the other stages went on after the slowest one."""
        self.seconds["drain"] += max(0.0, seconds)
