"""One server with emulated devices under load, and what is seen of it: times, device time, CPU time."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from benchmarks.cells import Cell, Prepared, body, prepare, tokens
from benchmarks.load import Answer, run
from benchmarks.systems import System
from benchmarks.timeline import Wave, busiest, cost_error, host_time, of_requests, read_stage, split
from sglang_wavepp.launch.replay import percentile
from sglang_wavepp.launch.server import HOST, Server, ServerError
from sglang_wavepp.mpu.planner import load_of
from sglang_wavepp.mpu.profile import Profile

SEEDING = 4
"""Prefixes that are computed at a time while waves take no device time."""
WARM_UP = 131_072
"""Tokens that a server computes before anything is measured."""
HOST_LIMIT = 0.20
"""Share of the window beyond which the host, or the front end, rather than the device was measured."""
COST_LIMIT = 0.01
MOST_KINDS = 4
_PATIENCE_S = 300.0
"""Over what the device takes four times over, a cell may take this much longer."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """What all servers of a comparison share."""

    source: str
    """Of the profile, as a server takes it."""
    profile: Profile
    pp: int
    dilation: float
    pool: int
    context: int
    rows: int
    """--max-running-requests: stock gives each microbatch a stage's share of it."""

    def device_s(self, requests: Sequence[Prepared]) -> float:
        """Dilated seconds that the slowest stage takes for these, each in a wave of its own."""
        loads = [load_of([(0, request.cached, request.tokens)]) for request in requests]
        stages = self.profile.stages(self.pp)
        return max(sum(stage.of(load) for load in loads) for stage in stages) * self.dilation / 1e6


@dataclasses.dataclass(frozen=True, slots=True)
class Observed:
    """A load and the CPU time of the processes around it, as shares of the window (1: one core)."""

    answers: list[Answer]
    begin: float
    end: float
    front_end: float
    detokenizer: float
    client: float
    idle: float
    """Of all cores of the machine, as a share of them."""


class Bench:
    """A server from entry to exit, warm at first. ServerError if it does not start, or dies."""

    def __init__(self, model: Path, system: System, setting: Setting, folder: Path) -> None:
        self.setting = setting
        self._trace = folder / "trace"
        self._trace.mkdir(parents=True)
        self._server = Server(
            model,
            pp_size=setting.pp,
            wavepp=system.wavepp,
            max_total_tokens=setting.pool,
            context_length=setting.context,
            chunked_prefill_size=system.budget,
            env=system.env,
            log_path=folder / "server.log",
            ready_timeout=900.0,
            flags=[
                *("--wavepp-emulate", setting.source),
                *("--wavepp-emulate-dilation", f"{setting.dilation:g}"),
                *("--wavepp-emulate-trace", str(self._trace)),
                *("--max-running-requests", str(setting.rows)),
                *system.flags,
            ],
        )

    def __enter__(self) -> Bench:
        self._server.start()
        run(HOST, self._server.port, [[request] for request in warm_up(self.setting.context)], 2, _PATIENCE_S)
        return self

    def __exit__(self, *_: object) -> None:
        self._server.stop()

    def flush(self) -> None:
        """Empty the caches. ServerError if the server does not come to rest within a minute."""
        deadline = time.monotonic() + 60.0
        while True:
            try:
                self._server.post("/flush_cache")
                return
            except ServerError as error:
                if error.status != 400 or time.monotonic() > deadline:
                    raise
            time.sleep(0.2)

    def seed(self, seeds: Sequence[Prepared]) -> None:
        """Have these computed without device time."""
        free = self._trace / "free"
        free.touch()
        try:
            run(HOST, self._server.port, [[seed] for seed in seeds], SEEDING, _PATIENCE_S)
        finally:
            free.unlink()

    def load(self, jobs: Sequence[Sequence[Prepared]], concurrency: int, longest: float = 0.0) -> Observed:
        """Send `jobs`, `concurrency` at a time; `longest` seconds of pauses. LoadError if one fails."""
        requests = [request for job in jobs for request in job]
        timeout = 4 * self.setting.device_s(requests) + longest + _PATIENCE_S
        processes = self._processes()
        before = [_cpu(p) for p in processes], time.process_time(), psutil.cpu_times()
        answers = run(HOST, self._server.port, jobs, concurrency, timeout)
        after = [_cpu(p) for p in processes], time.process_time(), psutil.cpu_times()
        begin, end = min(a.sent for a in answers), max(a.arrivals[-1] for a in answers)
        front, *others = [(b - a) / (end - begin) for a, b in zip(before[0], after[0], strict=True)]
        total = sum(after[2]) - sum(before[2])
        idle = (after[2].idle - before[2].idle) / total if total else 1.0
        client = (after[1] - before[1]) / (end - begin)
        return Observed(answers, begin, end, front, sum(others), client, idle)

    def _processes(self) -> list[psutil.Process]:
        main = psutil.Process(self._server.pid)
        named = ((child, " ".join(child.cmdline())) for child in main.children(recursive=True))
        return [main, *(child for child, title in named if title.startswith("sglang::detokenizer"))]

    def waves(self, rids: Collection[str]) -> list[list[Wave]]:
        """The waves of these requests on each stage, once all stages have told as many."""
        deadline = time.monotonic() + 10.0
        while True:
            files = [self._trace / f"stage{stage}.jsonl" for stage in range(self.setting.pp)]
            found = [of_requests(read_stage(file) if file.exists() else [], rids) for file in files]
            if found[0] and len({len(waves) for waves in found}) == 1:
                return found
            if time.monotonic() > deadline:
                counts = [len(waves) for waves in found]
                raise ServerError(f"the stages' traces hold {counts} waves of the same requests")
            time.sleep(0.1)

    def cell(self, cell: Cell, requests: int | None = None) -> dict[str, Any]:
        """Measure one cell: see `summary`. LoadError or ServerError if it cannot be."""
        seeds, measured = prepare(cell, requests)
        self.flush()
        if seeds:
            self.seed(seeds)
        observed = self.load([[request] for request in measured], cell.concurrency)
        waves = self.waves({request.rid for request in measured})
        return summary(self.setting, observed, waves)


def warm_up(context: int) -> list[Prepared]:
    """Cold prompts of `WARM_UP` tokens in all: from these a planner learns what waves take."""
    length = min(context - 64, WARM_UP)
    draw = np.random.default_rng(2)
    return [
        Prepared(f"warm-{number}", body(f"warm-{number}", [tokens(draw, length, number)], 1), length, 0)
        for number in range(-(-WARM_UP // length))
    ]


def _cpu(process: psutil.Process) -> float:
    used = process.cpu_times()
    return float(used.user + used.system)


def summary(
    setting: Setting, observed: Observed, waves: Sequence[Sequence[Wave]], *, reused: bool = True
) -> dict[str, Any]:
    """What is reported of one load, undilated; CPU times are as they were. With `reused`, see `doubts`."""
    answers, dilation = observed.answers, setting.dilation
    window = observed.end - observed.begin
    count = sum(a.request.tokens for a in answers)
    firsts = [a.first / dilation for a in answers]
    gaps = [gap / dilation for a in answers for gap in a.gaps]
    stages: list[dict[str, Any]] = []
    for number, (stage, told) in enumerate(zip(setting.profile.stages(setting.pp), waves, strict=True)):
        shares = split(told, observed.begin, observed.end, first_stage=not number).shares()
        host = dataclasses.asdict(host_time(told, len(answers)))
        error = cost_error(told, stage, dilation)
        stages.append({"waves": len(told), **shares, "host_ms": host, "cost_error": error})
    result: dict[str, Any] = {
        "requests": len(answers),
        "window_s": window / dilation,
        "input_tokens_s": count * dilation / window,
        "computed_tokens": count - sum(a.cached for a in answers),
        "reuse": sum(a.cached for a in answers) / count,
        "first_p50_s": percentile(firsts, 0.5),
        "first_p95_s": percentile(firsts, 0.95),
        "kinds": kinds(answers, dilation),
        "output_tokens_s": sum(a.output for a in answers) * dilation / window,
        "gap_p99_s": percentile(gaps, 0.99) if gaps else None,
        "busy": max(stage["busy"] for stage in stages),
        "stages": stages,
        **{name: getattr(observed, name) for name in ("front_end", "detokenizer", "client", "idle")},
    }
    return {**result, "doubts": doubts(result, answers if reused else [])}


def kinds(answers: Sequence[Answer], dilation: float) -> dict[str, dict[str, float]]:
    """p50 and p95 of the prefill by the kind of request, if there are a few: "tokens, cached", undilated."""
    found: dict[str, list[float]] = {}
    for answer in answers:
        kind = f"{answer.request.tokens}, {answer.request.cached} cached"
        found.setdefault(kind, []).append(answer.first / dilation)
    if not 1 < len(found) <= MOST_KINDS:
        return {}
    return {kind: {"p50": percentile(t, 0.5), "p95": percentile(t, 0.95)} for kind, t in found.items()}


def doubts(result: dict[str, Any], answers: Sequence[Answer]) -> list[str]:
    """Why a measurement does not count; empty if it does. `answers` had to reuse what was seeded."""
    found = []
    off = [a for a in answers if abs(a.cached - a.request.cached) >= 64]
    if off:
        one = off[0]
        found.append(
            f"{len(off)} requests reused something else than was seeded: "
            f"{one.request.rid} {one.cached} tokens instead of {one.request.cached}"
        )
    number, stage = busiest(result["stages"])
    if stage["host"] > HOST_LIMIT:
        found.append(f"the host of stage {number}, the busiest, was late for {stage['host']:.0%} of the time")
    if result["front_end"] > HOST_LIMIT:
        found.append(f"the front end computed for {result['front_end']:.0%} of the time")
    worst = max(stage["cost_error"] for stage in result["stages"])
    if worst > COST_LIMIT:
        found.append(f"device time is {worst:.1%} off the profile's")
    return found


def folder(base: Path, name: str) -> Path:
    """A new folder below `base`; it stays."""
    for number in range(1000):
        path = base / (f"{name}-{number}" if number else name)
        if not path.exists():
            path.mkdir(parents=True)
            return path
    raise ServerError(f"{base} holds a thousand runs of {name}")
