"""The planners beside static chunks of five sizes, in simulated time: does one of them ever lose?

    python -m benchmarks.planner_cells

Closed loops over the profiles of emulated devices. A server has one budget: for WavePP's planners it is the
largest; `best` is the best of the static ones for each cell. Clients ask again some 8 ms after an answer.
The server has seen one cold prompt before. Throughput: cached tokens count.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping, Sequence

from benchmarks.cells import WORKLOADS
from benchmarks.report import geomean, table
from sglang_wavepp.launch.pipeline_server import PipelineServer
from sglang_wavepp.launch.workload import Offered, ServerOptions
from sglang_wavepp.mpu.profile import load_profile

PROFILES = {"glm-5.2-b300": 4, "minimax-m2.7-b300": 4, "kimi-k3-gb300": 8}
CELLS = ("suffix-4k", "short-reuse", "cold-16k", "mixed-16k", "reuse-131k")
CONCURRENCY = (2, 4, 8, 16, 32)
BUDGETS = (1024, 2048, 4096, 8192, 16384)
CLIENT_S = 0.008
EACH = 16
"""Requests for each one under way."""


def throughput(
    profile: str, stages: int, workload: str, concurrency: int, planner: str, budget: int
) -> float:
    """Prompt tokens per second of one server."""
    options = ServerOptions(stages=stages, planner=planner, budget=budget, client_s=CLIENT_S)
    server = PipelineServer(load_profile(profile), options)
    server.learn([Offered(tokens=131072)])
    of = WORKLOADS[workload]["of"]
    offered = [Offered(**of[number % len(of)]) for number in range(EACH * concurrency)]
    return server.run(offered, concurrency).throughput


def measured() -> Iterator[tuple[str, str, int, Mapping[str, float]]]:
    """(profile, workload, concurrency, throughput of each server)."""
    servers = [("static", budget) for budget in BUDGETS] + [("mpu", BUDGETS[-1]), ("timed", BUDGETS[-1])]
    for profile, stages in PROFILES.items():
        for workload in CELLS:
            for concurrency in CONCURRENCY:
                found = {
                    f"{planner}-{budget}": throughput(profile, stages, workload, concurrency, planner, budget)
                    for planner, budget in servers
                }
                yield profile, workload, concurrency, found


def main() -> None:
    """Print a line a cell, and what it comes to."""
    argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    ).parse_args()
    lines: list[tuple[str, ...]] = []
    over: dict[str, list[tuple[float, float]]] = {}
    for profile, workload, concurrency, found in measured():
        best = max(value for name, value in found.items() if name.startswith("static"))
        shares = {name: value / best for name, value in found.items()}
        for name, share in shares.items():
            over.setdefault(name, []).append((share, found[name] / found[f"static-{BUDGETS[-1]}"]))
        lines.append(
            (profile, f"{workload}:{concurrency}", f"{best:.0f}", *(f"{s:.3f}" for s in shares.values()))
        )
    print(table(("profile", "cell", "best static", *over), lines))
    for name, pairs in over.items():
        to_best, to_largest = zip(*pairs, strict=True)
        print(f"{name}: {_range(to_best)} of the best static one, {_range(to_largest)} of the largest")


def _range(shares: Sequence[float]) -> str:
    return f"{min(shares):.2f} to {max(shares):.2f} (geomean {geomean(shares):.3f})"


if __name__ == "__main__":
    main()
