"""Counters of a WavePP server, kept by stage 0; `/server_info` has them in `internal_states[0].wavepp`."""

from __future__ import annotations

import statistics
from collections import deque
from typing import Any

_WINDOW = 4096
"""Admissions that percentiles are taken over."""


class Stats:
    """Counts since the start; latencies over the last 4096 admissions."""

    def __init__(self, stages: int) -> None:
        self.stages = stages
        self.admitted = 0
        self.rounds = 0
        self.retracted = 0
        self.readmitted = 0
        self.rejected = 0
        self.prefill_waves = 0
        self.decode_waves = 0
        self.prompt_tokens = 0
        self.reused_tokens = 0
        self._waits_ms: deque[float] = deque(maxlen=_WINDOW)
        self._waves_ms: deque[float] = deque(maxlen=_WINDOW)

    def wave(self, elapsed_us: int) -> None:
        """The last stage took this long for a wave."""
        self._waves_ms.append(elapsed_us / 1e3)

    def admission(self, *, rounds: int, waited_s: float, length: int, boundary: int) -> None:
        """One request was committed."""
        self.admitted += 1
        self.rounds += rounds
        self.prompt_tokens += length
        self.reused_tokens += boundary
        self._waits_ms.append(waited_s * 1e3)

    def snapshot(self) -> dict[str, Any]:
        """JSON-ready values. `admission_ms` is from arrival to COMMIT, waiting for room included."""
        waits, waves = sorted(self._waits_ms), sorted(self._waves_ms)
        return {
            "stages": self.stages,
            "admitted": self.admitted,
            "rejected": self.rejected,
            "retracted": self.retracted,
            "readmitted": self.readmitted,
            "rounds": self.rounds,
            "rounds_per_request": self.rounds / self.admitted if self.admitted else 0.0,
            "admission_ms": {"p50": _percentile(waits, 50), "p99": _percentile(waits, 99)},
            "prompt_tokens": self.prompt_tokens,
            "reused_tokens": self.reused_tokens,
            "waves": self.prefill_waves + self.decode_waves,
            "last_stage_wave_ms": {"p50": _percentile(waves, 50), "p99": _percentile(waves, 99)},
            "prefill_waves": self.prefill_waves,
            "decode_waves": self.decode_waves,
        }


def _percentile(ordered: list[float], percent: int) -> float:
    if not ordered:
        return 0.0
    if len(ordered) == 1:
        return ordered[0]
    return statistics.quantiles(ordered, n=100, method="inclusive")[percent - 1]
