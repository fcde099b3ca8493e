"""The planners beside static chunks of five sizes, in simulated time: does one of them ever lose?

    python -m benchmarks.planner_cells              closed loops: throughput, cached tokens included
    python -m benchmarks.planner_cells --arrivals   requests that come by chance: how long their prefill takes

Over the profiles of emulated devices. A server has one budget: for WavePP's planners it is the largest;
`best` is the best of the static ones for each cell. The clients of closed loops ask again some 8 ms after an
answer. Arrivals are those of a Poisson process, at shares of what chunks of 8,192 tokens can do. The server
has seen one cold prompt before.
"""

from __future__ import annotations

import argparse
import random
import statistics
from collections.abc import Iterator, Mapping, Sequence

from benchmarks.cells import WORKLOADS
from benchmarks.report import geomean, table
from sglang_wavepp.launch.pipeline_server import PipelineServer
from sglang_wavepp.launch.workload import Offered, Outcome, ServerOptions
from sglang_wavepp.mpu.profile import load_profile

PROFILES = {"glm-5.2-b300": 4, "minimax-m2.7-b300": 4, "kimi-k3-gb300": 8}
CELLS = ("suffix-4k", "short-reuse", "cold-16k", "mixed-16k", "reuse-131k")
CONCURRENCY = (2, 4, 8, 16, 32)
BUDGETS = (1024, 2048, 4096, 8192, 16384)
SERVERS = {
    f"{planner}-{budget}": (planner, budget)
    for planner, budget in [*(("static", b) for b in BUDGETS), ("mpu", BUDGETS[-1]), ("timed", BUDGETS[-1])]
}
"""Planner and budget of each."""
CLIENT_S = 0.008
EACH = 16
"""Requests for each one under way."""
LOADS = (0.3, 0.5, 0.7, 0.85)
"""Arrivals as shares of the capacity."""
ARRIVALS = 300
SEEDS = (1, 2, 3)


def served(
    profile: str, stages: int, planner: str, budget: int, offered: Sequence[Offered], concurrency: int = 0
) -> Outcome:
    """What one server makes of the requests."""
    options = ServerOptions(stages=stages, planner=planner, budget=budget, client_s=CLIENT_S)
    server = PipelineServer(load_profile(profile), options)
    server.learn([Offered(tokens=131072)])
    return server.run(offered, concurrency)


def throughput(
    profile: str, stages: int, workload: str, concurrency: int, planner: str, budget: int
) -> float:
    """Prompt tokens per second of one server in a closed loop."""
    of = WORKLOADS[workload]["of"]
    offered = [Offered(**of[number % len(of)]) for number in range(EACH * concurrency)]
    return served(profile, stages, planner, budget, offered, concurrency).throughput


def measured() -> Iterator[tuple[str, str, int, Mapping[str, float]]]:
    """(profile, workload, concurrency, throughput of each server)."""
    for profile, stages in PROFILES.items():
        for workload in CELLS:
            for concurrency in CONCURRENCY:
                found = {
                    name: throughput(profile, stages, workload, concurrency, *server)
                    for name, server in SERVERS.items()
                }
                yield profile, workload, concurrency, found


def closed_loops() -> None:
    """Print a line a cell, and what it comes to."""
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


def arriving(workload: str, rate: float, seed: int) -> list[Offered]:
    """Requests of a workload, of its kinds by chance, so many a second on average."""
    of, draw, at, found = WORKLOADS[workload]["of"], random.Random(seed), 0.0, []
    for _ in range(ARRIVALS):
        at += draw.expovariate(rate)
        found.append(Offered(arrival=at, **draw.choice(of)))
    return found


def completion(profile: str, stages: int, workload: str, rate: float, planner: str, budget: int) -> float:
    """Mean seconds from arrival until the prefill is complete."""
    return statistics.fmean(
        one.prefilled - one.arrived
        for seed in SEEDS
        for one in served(profile, stages, planner, budget, arriving(workload, rate, seed)).served
    )


def arrivals() -> None:
    """Print for each load and server by how much it takes longer than the timed planner."""
    lines: list[tuple[str, ...]] = []
    over: dict[tuple[float, str], list[float]] = {}
    for profile, stages in PROFILES.items():
        for workload in (*CELLS, "long-and-short"):
            of = WORKLOADS[workload]["of"]
            tokens = statistics.fmean(request["tokens"] for request in of)
            capacity = throughput(profile, stages, workload, CONCURRENCY[-1], "static", 8192) / tokens
            for load in LOADS:
                took = {
                    name: completion(profile, stages, workload, load * capacity, *server)
                    for name, server in SERVERS.items()
                }
                timed = took[f"timed-{BUDGETS[-1]}"]
                for name, seconds in took.items():
                    over.setdefault((load, name), []).append(seconds / timed)
                ratios = (f"{seconds / timed:.2f}" for seconds in took.values())
                lines.append((profile, workload, f"{load:.2f}", f"{timed:.3f}", *ratios))
    print(table(("profile", "workload", "load", "timed, s", *SERVERS), lines))
    for (load, name), shares in over.items():
        print(f"{load:.2f} {name}: {_range(shares)} times as long as timed")


def _range(shares: Sequence[float]) -> str:
    return f"{min(shares):.2f} to {max(shares):.2f} (geomean {geomean(shares):.3f})"


def main() -> None:
    """Parse, and print what was asked for."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--arrivals", action="store_true", help="open loops instead of closed ones")
    arrivals() if parser.parse_args().arrivals else closed_loops()


if __name__ == "__main__":
    main()
