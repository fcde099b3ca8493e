"""Planning waves: how the prompt tokens of committed requests are cut into microbatches.

* `packing`: which spans make up the next prefill wave for a given budget (first come, first served).
* `planner`: what a planner is, the limits of a wave, and waves of a static budget.
* `rule`: the published rule, which halves the budget until the waves fill the pipeline.
* `timed`: waves of equal time; `stage_time` learns how long a stage takes for a wave.
* `profile`, `pipeline`: what a model costs on a device, and when the stages of a pipeline run their waves.

`data/` has profiles, the workloads and servers of the paper's settings, and the figures quoted of it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from sglang_wavepp.mpu.planner import Planner, StaticPlanner, WaveLimits
from sglang_wavepp.mpu.rule import MpuPlanner
from sglang_wavepp.mpu.timed import TimedPlanner

__all__ = ["PLANNERS", "Planner", "WaveLimits"]

PLANNERS: Mapping[str, Callable[[WaveLimits], Planner]] = {
    "static": StaticPlanner,
    "mpu": MpuPlanner,
    "timed": TimedPlanner,
}
"""Planners by the name that `--wavepp-planner` gives."""
