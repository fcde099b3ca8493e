"""What the stages of a pipeline did, from the trace of its emulated devices. Pure, but for `read_stage`.

A device is busy or waits. What it waits for before a wave is told by when the wave could have run, when its
activations were there and when the host launched it:

* `no_work`: on stage 0, until the last of the wave's requests could run;
* `activations`: on later stages, until the previous stage's activations were there;
* `outputs`: after that the loop waited for outputs of earlier waves, or for a decision that they hold up;
* `host`: the rest. The host computed, or had no core: its launch was late;
* `fill`: before the first wave of the window and after its last.

Times are seconds of the system's monotonic clock, dilated as the run was.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from sglang_wavepp.mpu.planner import load_of
from sglang_wavepp.mpu.stage_time import StageTime

CAUSES = ("busy", "no_work", "activations", "outputs", "host", "fill")
"""The fields of `Split`, in the order of reports."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Wave:
    """One line of a stage's trace."""

    wave: int
    """Launches of this stage before it."""
    kind: str
    """`extend` or `decode`."""
    rids: tuple[str, ...]
    spans: tuple[tuple[int, int], ...]
    """Tokens before, and new ones, of each request."""
    runnable: float
    launched: float
    input: float
    """When its activations were there; 0 on stage 0."""
    start: float
    end: float
    cost: float
    """Seconds of the device."""
    blocked: float
    """Seconds that the loop waited since the launch before, for outputs or input, with the device idle."""
    cpu: float
    """CPU seconds of the scheduler process so far."""
    loop_cpu: float
    """CPU seconds of its loop thread so far."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Split:
    """Where the time of a window went on one stage: the fields add up to the window's length."""

    busy: float
    no_work: float
    activations: float
    outputs: float
    host: float
    fill: float

    @property
    def window(self) -> float:
        """Seconds."""
        return sum(getattr(self, cause) for cause in CAUSES)

    def shares(self) -> dict[str, float]:
        """Of the window, which must not be empty."""
        window = self.window
        return {cause: getattr(self, cause) / window for cause in CAUSES}


def busiest(stages: Sequence[Mapping[str, Any]]) -> tuple[int, Mapping[str, Any]]:
    """The number and the shares of the stage that was busy for most of the time."""
    return max(enumerate(stages), key=lambda item: item[1]["busy"])


def read_stage(file: Path) -> list[Wave]:
    """The waves of a trace file in the order of their launch, without a last line that is not complete."""
    complete = file.read_bytes().split(b"\n")[:-1]
    return [parse(line) for line in complete]


def parse(line: bytes | str) -> Wave:
    """One line. KeyError or ValueError if it is none."""
    raw = json.loads(line)
    return Wave(
        rids=tuple(raw.pop("rids")),
        spans=tuple((before, new) for before, new in raw.pop("spans")),
        **{f.name: raw[f.name] for f in dataclasses.fields(Wave) if f.name not in ("rids", "spans")},
    )


def of_requests(waves: Iterable[Wave], rids: Collection[str]) -> list[Wave]:
    """The waves that hold one of these requests."""
    return [wave for wave in waves if any(rid in rids for rid in wave.rids)]


def split(waves: Sequence[Wave], begin: float, end: float, *, first_stage: bool) -> Split:
    """Where one stage's time went from `begin` to `end`. `waves` in the order of their launch. O(waves)."""
    found = dict.fromkeys(CAUSES, 0.0)
    cursor = begin
    for number, wave in enumerate(waves):
        start, done = min(max(wave.start, cursor), end), min(max(wave.end, cursor), end)
        if not number:
            found["fill"] += start - cursor
        elif start > cursor:
            until = wave.runnable if first_stage else wave.input
            cut = min(max(until, cursor), start)
            late = start - cut
            # While it waited for work or activations, the loop was blocked, too.
            blocked = min(late, max(0.0, wave.blocked - (cut - cursor)))
            found["no_work" if first_stage else "activations"] += cut - cursor
            found["outputs"] += blocked
            found["host"] += late - blocked
        found["busy"] += done - start
        cursor = done
    found["fill"] += max(0.0, end - cursor)
    return Split(**found)


def expected_cost(waves: Iterable[Wave], stage: StageTime, dilation: float) -> float:
    """Seconds that a stage takes for these waves by its profile."""
    total = 0.0
    for wave in waves:
        load = load_of((number, before, before + new) for number, (before, new) in enumerate(wave.spans))
        total += stage.of(load)
    return total * dilation / 1e6


def cost_error(waves: Sequence[Wave], stage: StageTime, dilation: float) -> float:
    """By how much the costs of the trace are off the profile's, relative; also where busy time is."""
    expected = expected_cost(waves, stage, dilation)
    if not expected:
        return 0.0
    told = sum(wave.cost for wave in waves)
    busy = sum(wave.end - wave.start for wave in waves)
    return max(abs(told - expected), abs(busy - expected)) / expected


@dataclasses.dataclass(frozen=True, slots=True)
class HostTime:
    """CPU milliseconds of one stage's scheduler."""

    loop_wave: float
    """Of the loop thread for a wave."""
    process_wave: float
    """Of the process for a wave."""
    loop_request: float
    process_request: float


def host_time(waves: Sequence[Wave], requests: int) -> HostTime:
    """Of `waves` that served this many requests. Zeros for less than two waves.

    The trace tells CPU time at launches, so the first wave's own is not in it: it counts as a mean one.
    """
    if len(waves) < 2:
        return HostTime(0.0, 0.0, 0.0, 0.0)
    loop, process = (
        1e3 * (getattr(waves[-1], name) - getattr(waves[0], name)) / (len(waves) - 1)
        for name in ("loop_cpu", "cpu")
    )
    each = len(waves) / requests
    return HostTime(loop, process, loop * each, process * each)
