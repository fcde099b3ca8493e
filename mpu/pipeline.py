"""When the waves of a pipeline start and end on each stage: recurrences, no events.

Every stage runs the waves in the order of issue, one at a time, each as soon as its input is there. So what a
wave does is known when it is issued: on stage s it starts at max(end on stage s - 1 + hop, end of the wave
before on stage s).
"""

from __future__ import annotations

from typing import NamedTuple

from sglang_wavepp.mpu.planner import Load
from sglang_wavepp.mpu.profile import Profile


class Passage(NamedTuple):
    """A wave on its way through the pipeline. Seconds."""

    begins: float
    """On stage 0."""
    done: float
    """It ends on the last stage."""
    gap: float
    """For so long the slowest stage has waited for it."""
    took: tuple[float, ...]
    """By each stage."""


class Pipeline:
    """The stages of a model.

    Args:
        profile: what the waves take.
        stages: how many stages.
        extra_s: host time of each wave during which every stage waits.
    """

    def __init__(self, profile: Profile, stages: int, extra_s: float = 0.0) -> None:
        self.times = profile.stages(stages)
        self._profile = profile
        self.extra_s = extra_s
        self._free = [0.0] * stages
        """When each stage is through with what was issued."""
        self.busy = [0.0] * stages
        """Seconds of work of each stage, without waiting."""
        typical = Load(4096.0, 4096.0 * 65536, 65536.0, 1.0)
        self.slowest = max(range(stages), key=lambda s: self.times[s].of(typical))
        self._same = all(time == self.times[0] for time in self.times)

    @property
    def free(self) -> float:
        """When stage 0 is through with what was issued."""
        return self._free[0]

    def ends(self, stage: int) -> float:
        """When a stage is through with what was issued."""
        return self._free[stage]

    def issue(self, at: float, load: Load, waits: float = 0.0) -> Passage:
        """A wave is ready for stage 0, which waits for its admission so long before it starts."""
        hop, ready, gap = self._profile.hop_s(load), at, 0.0
        took = [self.times[0].of(load) / 1e6] * len(self._free) if self._same else []
        took = took or [time.of(load) / 1e6 for time in self.times]
        begins = max(ready, self.free) + self.extra_s + waits
        for stage, free in enumerate(self._free):
            start = max(ready, free) + self.extra_s + (0.0 if stage else waits)
            if stage == self.slowest:
                gap = start - free
            self._free[stage] = ready = start + took[stage]
            self.busy[stage] += took[stage]
            ready += hop
        return Passage(begins, self._free[-1], gap, tuple(took))
