"""The pipeline model against what is quoted of the paper: predicted over quoted, for every figure.

    python -m benchmarks.pipeline_model            the table of docs/pipeline-model.md
    python -m benchmarks.pipeline_model --planners static and timed in the cells of the pipeline
    python -m benchmarks.pipeline_model --fit      fit the free parameters anew, and print them
    python -m benchmarks.pipeline_model --json     for programs

The figures are in `mpu/data/paper.toml`, workloads and servers in `mpu/data/cells.toml`.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import random
import tomllib
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from sglang_wavepp.launch.pipeline_server import PipelineServer
from sglang_wavepp.launch.workload import Offered, Outcome, ServerOptions
from sglang_wavepp.mpu.profile import DATA, Profile, load_profile

CELLS = tomllib.loads((DATA / "cells.toml").read_text())
PAPER = tomllib.loads((DATA / "paper.toml").read_text())
K3 = ("cold-65k", "cold-131k", "cold-262k", "reuse-131k", "reuse-262k", "mixed")
PP4 = ("cold-16k", "mixed-16k", "short-reuse", "long-reuse", "suffix-4k")
ROUNDS = 4
"""Requests of a cell for each one under way. In the ablation 1."""
GOAL = 0.10


_outcomes: dict[tuple[str, int, int, Profile, ServerOptions], Outcome] = {}


class Settings:
    """Servers and profiles, with the changes of a fit."""

    def __init__(self, changes: Mapping[str, Mapping[str, float]] | None = None) -> None:
        self._changes = dict(changes or {})

    def profile(self, name: str) -> Profile:
        return dataclasses.replace(load_profile(name), **self._changes.get(name, {}))  # type: ignore[arg-type]

    def server(self, name: str, **more: Any) -> tuple[Profile, ServerOptions]:
        options = {**CELLS["servers"][name], **self._changes.get(name, {}), **more}
        del options["rule"]
        return self.profile(options.pop("profile")), ServerOptions(**options)

    def outcome(self, workload: str, concurrency: int, name: str, rounds: int = ROUNDS) -> Outcome:
        profile, options = self.server(name)
        key = (workload, concurrency, rounds, profile, options)
        if key not in _outcomes:
            of = CELLS["workloads"][workload]["of"]
            count = max(rounds * concurrency, len(of))
            requests = [Offered(**of[i % len(of)]) for i in range(count)]
            server = PipelineServer(profile, options)
            if options.planner == "timed":
                server.learn([Offered(tokens=131072)])
            _outcomes[key] = server.run(requests, concurrency)
        return _outcomes[key]

    def throughput(self, workload: str, concurrency: int, name: str) -> float:
        return self.outcome(workload, concurrency, name).throughput


def grid(workload: str) -> list[tuple[str, int]]:
    """The cells of a workload, of all (`all`), or of those without reuse from concurrency 8 on (`cold`)."""
    if workload == "cold":
        return [(w, c) for w, c in grid("all") if w.startswith("cold") and c >= 8]
    workloads = K3 if workload == "all" else (workload,)
    return [(w, c) for w in workloads for c in CELLS["workloads"][w]["concurrency"]]


def value(settings: Settings, figure: Mapping[str, Any]) -> float:
    """What the model says about a figure."""
    kind, workload, server = figure["kind"], figure["workload"], figure["server"]
    rounds = 1 if figure["name"].startswith("ablation") else ROUNDS

    def of(name: str, cell: tuple[str, int]) -> Outcome:
        return settings.outcome(*cell, name, rounds)

    def quotients(cells: Iterable[tuple[str, int]], what: Callable[[Outcome], float]) -> list[float]:
        return [what(of(server, cell)) / what(of(figure["other"], cell)) for cell in cells]

    cell = (workload, figure.get("concurrency", 0))
    match kind:
        case "throughput":
            return of(server, cell).throughput
        case "p50":
            return of(server, cell).completion(0.5)
        case "ratio":
            return quotients([cell], lambda o: o.throughput)[0]
        case "geomean":
            logs = [math.log(q) for q in quotients(grid(workload), lambda o: o.throughput)]
            return math.exp(sum(logs) / len(logs))
        case "p50-ratio" | "p95-ratio":
            return quotients([cell], lambda o: o.completion(int(kind[1:3]) / 100))[0]
        case "p50-least" | "p50-most":
            every = quotients(grid(workload), lambda o: o.completion(0.5))
            return min(every) if kind == "p50-least" else max(every)
    raise ValueError(f"a figure of kind {kind!r}")


# --- fit -------------------------------------------------------------------------------------------

PARAMETERS: Mapping[str, Sequence[tuple[str, str]]] = {
    "the pipelined model": [
        ("profile-kimi-k3-gb300", "flops_per_token"),
        ("profile-kimi-k3-gb300", "attention_flops"),
        ("profile-kimi-k3-gb300", "weight_bytes"),
    ],
    "R1 and R2": [("r2", "match_s"), ("r1", "wave_s")],
    "TP8/EP8": [
        ("profile-kimi-k3-gb300-tp8", "flops_per_token"),
        ("profile-kimi-k3-gb300-tp8", "attention_flops"),
        ("profile-kimi-k3-gb300-tp8", "wave_s"),
    ],
    "SGLang PP8": [("sglang-pp8", "wave_s"), ("sglang-pp8", "request_s")],
    "vLLM PP8": [("vllm-pp8", "wave_s"), ("vllm-pp8", "request_s")],
    "PP4": [("trtllm-glm", "request_s"), ("trtllm-minimax", "request_s")],
}
FITTED: Mapping[str, Sequence[str]] = {
    "the pipelined model": [
        "k3-cold-65k-c32",
        "k3-cold-262k-c32",
        "k3-reuse-131k-c32",
        "ablation-reuse-r3",
        "ablation-reuse-r4",
    ],
    "R1 and R2": ["ablation-reuse-r2", "ablation-cold-r1"],
    "TP8/EP8": ["k3-cold-65k-tp", "k3-cold-262k-tp", "k3-reuse-262k-tp"],
    "SGLang PP8": ["k3-all-sglang", "k3-reuse-262k-sglang"],
    "vLLM PP8": ["k3-all-vllm", "k3-reuse-262k-vllm"],
    "PP4": ["pp4-glm-c128", "pp4-minimax-c128"],
}
"""Which figures decide on which parameters, one group after the other."""


def fit() -> dict[str, dict[str, float]]:
    """Least squares of log(predicted / quoted), by Gauss and Newton on the logarithms of the parameters."""
    changes: dict[str, dict[str, float]] = {}
    figures = {f["name"]: f for f in PAPER["figure"]}
    for group, parameters in PARAMETERS.items():
        fitted = [figures[name] for name in FITTED[group]]
        off = partial(_off, changes, parameters, fitted)
        x = _minimise(off, np.log([_now(owner, name) for owner, name in parameters]))
        print(f"{group}: log(predicted / quoted) {np.round(off(x), 3).tolist()}", flush=True)
        changes = _changed(changes, parameters, x)
        for owner, name in parameters:
            print(f"  {owner}: {name} = {changes[owner][name]:.4g}", flush=True)
    return changes


def _off(
    changes: Mapping[str, Mapping[str, float]],
    parameters: Sequence[tuple[str, str]],
    fitted: Iterable[Mapping[str, Any]],
    x: np.ndarray,
) -> np.ndarray:
    trial = Settings(_changed(changes, parameters, x))
    return np.array([math.log(value(trial, f) / f["value"]) for f in fitted])


def _now(owner: str, name: str) -> float:
    if owner in CELLS["servers"]:
        return float(CELLS["servers"][owner][name])
    return float(getattr(load_profile(owner), name))


def _changed(
    changes: Mapping[str, Mapping[str, float]], parameters: Sequence[tuple[str, str]], x: np.ndarray
) -> dict[str, dict[str, float]]:
    new = {owner: dict(values) for owner, values in changes.items()}
    for (owner, name), logarithm in zip(parameters, x, strict=True):
        new.setdefault(owner, {})[name] = float(np.exp(logarithm))
        if (owner, name) == ("r2", "match_s"):
            new.setdefault("r1", {})[name] = float(np.exp(logarithm))
    return new


def _minimise(residuals: Callable[[np.ndarray], np.ndarray], x: np.ndarray) -> np.ndarray:
    step, damping = 0.05, 1e-2
    now = residuals(x)
    for _ in range(3):
        columns = [(residuals(x + step * unit) - now) / step for unit in np.eye(len(x))]
        jacobian = np.stack(columns, axis=1)
        for _ in range(2):
            normal = jacobian.T @ jacobian + damping * np.eye(len(x))
            move = np.clip(np.linalg.solve(normal, -jacobian.T @ now), -0.7, 0.7)
            then = residuals(x + move)
            if then @ then < now @ now * (1 - 1e-4):
                x, now, damping = x + move, then, damping / 4
                break
            damping *= 4
        else:
            return x
    return x


# --- statements without a number ---------------------------------------------------------------------


def orders(settings: Settings) -> dict[str, Any]:
    """What the model says to each statement of order."""
    others = ("trtllm-tp8", "sglang-pp8", "vllm-pp8")

    def ahead(cell: tuple[str, int]) -> bool:
        own = settings.throughput(*cell, "wavepp")
        return all(own > settings.throughput(*cell, other) for other in others)

    won = {cell: ahead(cell) for cell in grid("all")}
    pp4 = {
        (model, w, c): settings.throughput(w, c, f"wavepp-{model}")
        > settings.throughput(w, c, f"trtllm-{model}")
        for model in ("glm", "minimax")
        for w in PP4
        for c in CELLS["workloads"][w]["concurrency"]
    }

    def lower(share: float) -> list[str]:
        found = []
        for w, c in grid("cold"):
            own = settings.outcome(w, c, "wavepp").completion(share)
            if any(own >= settings.outcome(w, c, other).completion(share) for other in others[1:]):
                found.append(f"{w} c={c}")
        return found

    return {
        "wins-k3-high": sum(won[cell] for cell in won if cell[1] >= 8),
        "wins-k3-all": sum(won.values()),
        "lost-k3": [f"{w} c={c}" for (w, c), own in won.items() if not own],
        "wins-pp4": sum(pp4.values()),
        "loss-pp4": [f"{m} {w} c={c}" for (m, w, c), own in pp4.items() if not own],
        "p50-pp-high": lower(0.5) or "below both",
        "p95-pp-high": lower(0.95) or "below both",
        "mixed-highest": sum(won[cell] for cell in grid("mixed")),
        "retention": {name: retention(settings, name) for name in ("wavepp", "trtllm-tp8")},
    }


POOL = 2_500_000
"""KV tokens in the retention experiment, of both servers. Assumed, like all of its load but the rates."""


def retention(settings: Settings, server: str) -> dict[str, float]:
    """The share of good hits (80 % of the expected prefix or more) by the rate of arrivals."""
    found = {}
    for rate in (0.5, 0.6, 0.7, 0.8, 0.9, 1.0):
        draw = random.Random(1)
        at, requests = 0.0, []
        for turn in range(300):
            at += draw.expovariate(rate)
            session = draw.randrange(16)
            requests.append(Offered(arrival=at, tokens=131072, cached=117952, prefix=f"session {session}"))
            if turn % 2:  # cold traffic besides
                requests.append(Offered(arrival=at, tokens=65536))
        profile, options = settings.server(server)
        outcome = PipelineServer(dataclasses.replace(profile, kv_tokens=POOL), options).run(requests)
        seen: set[str] = set()
        hits = []
        for served in outcome.served:
            name = served.offered.prefix
            if name in seen:
                hits.append(served.reused >= 0.8 * served.offered.cached)
            if name:
                seen.add(name)
        found[f"{rate:.1f}"] = round(sum(hits) / len(hits), 3)
    return found


# --- output ------------------------------------------------------------------------------------------


def table(settings: Settings) -> list[dict[str, Any]]:
    """Every figure with a number, and predicted over quoted."""
    rows = []
    for figure in PAPER["figure"]:
        predicted = value(settings, figure)
        rows.append({**figure, "predicted": predicted, "quotient": predicted / figure["value"]})
    return rows


def planners(settings: Settings) -> list[tuple[str, int, dict[str, float]]]:
    """Throughput of each planner in every cell of the pipeline."""
    names = ("wavepp-static", "wavepp", "wavepp-timed")
    cells = grid("all")
    return [(w, c, {name: settings.throughput(w, c, name) for name in names}) for w, c in cells]


def main() -> None:
    """Print what was asked for."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--fit", action="store_true", help="fit the free parameters, and print them")
    parser.add_argument("--planners", action="store_true", help="compare static, MPU and timed waves")
    parser.add_argument("--json", action="store_true", help="print JSON")
    options = parser.parse_args()
    settings = Settings(fit() if options.fit else None)
    if options.planners:
        for w, c, found in planners(settings):
            one, mpu, timed = found.values()
            print(f"| {w} | {c} | {one:,.0f} | {mpu / one:.3f} | {timed / one:.3f} |")
        return
    rows, said = table(settings), orders(settings)
    if options.json:
        print(json.dumps({"figures": rows, "orders": said}, indent=1))
        return
    print("| figure | use | quoted | predicted | predicted/quoted |\n|---|---|---|---|---|")
    for row in rows:
        mark = "" if abs(row["quotient"] - 1) <= GOAL else " *"
        shown = f"{row['value']:,.4g} | {row['predicted']:,.4g}"
        print(f"| {row['name']} | {row['use']} | {shown} | {row['quotient']:.3f}{mark} |")
    for use in ("fit", "predict"):
        off = [abs(math.log(row["quotient"])) for row in rows if row["use"] == use]
        inside = sum(abs(row["quotient"] - 1) <= GOAL for row in rows if row["use"] == use)
        print(f"{use}: {inside} of {len(off)} within 10 %, median off by {np.median(off):.1%}")
    for order in PAPER["order"]:
        print(f"{order['name']}: quoted {order['says']}; model {said[order['name']]}")
    print(f"lost in the model: {', '.join(said['lost-k3'])}")


if __name__ == "__main__":
    main()
