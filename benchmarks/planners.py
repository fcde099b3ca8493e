"""What planning a wave costs stage 0, by planner: CPU time, with 128 committed requests by default.

    python -m benchmarks.planners [--requests N] [--json]

`plan` is the whole step of the sequencer, from the committed requests to the decision; `observe` is what a
planner does with the times that all stages report for a wave.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from collections.abc import Sequence
from typing import Any

from sglang_wavepp.admission import Committed
from sglang_wavepp.mpu import PLANNERS, WaveLimits
from sglang_wavepp.mpu.planner import Load
from sglang_wavepp.sequencer import Sequencer

STAGES = 8
SUFFIXES = {"4K suffixes": (3500, 4500), "13K suffixes, a long prefix": (13_000, 13_200)}


def measure(planner: str, requests: int, suffix: tuple[int, int], waves: int) -> dict[str, float]:
    """Microseconds of CPU for each wave; a request that is planned makes room for another one."""
    draw = random.Random(1)
    limits = WaveLimits(stages=STAGES, ring=2 * STAGES, budget=16384, align=64, least=1024)
    made = PLANNERS[planner](limits)
    sequencer = Sequencer(
        planner=made, run_ahead=2 * STAGES, groups=STAGES, growth=512, rows=128, wave=limits.budget
    )
    plan: list[float] = []
    observe: list[float] = []
    seq = live = 0
    ring: list[tuple[int, list[int], Load]] = []
    for _ in range(waves):
        while live < requests:
            begin = draw.randrange(0, 2000) * 64
            length = begin + draw.randrange(*suffix)
            committed = Committed(
                seq=seq,
                order=seq,
                boundary=begin,
                length=length,
                until=length + 1,
                again=False,
                rank=0,
                rounds=1,
                waited=0.0,
            )
            sequencer.commit(committed, length + 1)
            seq, live = seq + 1, live + 1
        if len(ring) == 2 * STAGES - 1:
            wave, finished, load = ring.pop(0)
            began = time.thread_time_ns()
            for stage in range(STAGES):
                took = 9000 + 17 * load.tokens + 1.2e-4 * load.attention * draw.uniform(0.95, 1.05)
                sequencer.took(stage, wave, round(took))
            observe.append((time.thread_time_ns() - began) / 1e3)
            sequencer.output(wave, sequencer.join_group(wave), finished)
            live -= len(finished)
        began = time.thread_time_ns()
        decision: Any = sequencer.next(0)
        plan.append((time.thread_time_ns() - began) / 1e3)
        ended = [span.seq for span in decision.spans if span.last]
        ring.append((decision.wave, ended, sequencer._loads[decision.wave]))
    return {
        "plan_p50_us": statistics.median(plan),
        "plan_p99_us": _high(plan),
        "observe_p50_us": statistics.median(observe),
        "observe_mean_us": statistics.mean(observe),
    }


def _high(values: Sequence[float]) -> float:
    return statistics.quantiles(values, n=100)[98]


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--requests", type=int, default=128, help="committed requests (128)")
    parser.add_argument("--waves", type=int, default=2000, help="waves to plan (2000)")
    parser.add_argument("--json", action="store_true", help="print JSON")
    options = parser.parse_args()
    rows = [
        {"planner": planner, "load": name, **measure(planner, options.requests, suffix, options.waves)}
        for name, suffix in SUFFIXES.items()
        for planner in PLANNERS
    ]
    if options.json:
        print(json.dumps({"requests": options.requests, "rows": rows}, indent=1))
        return
    print(f"{options.requests} committed requests, microseconds of CPU for each wave")
    for row in rows:
        print("  ".join(f"{v:8.1f}" if isinstance(v, float) else f"{v:<28}" for v in row.values()))


if __name__ == "__main__":
    main()
