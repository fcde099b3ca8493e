"""`wavepp plan`: what a server would do with a list of requests, without a device.

The admission, the escrow and the planners of the server run over a model of the cache and of the pipeline, in
simulated time (`pipeline_server`).
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from sglang_wavepp.errors import WavePPError
from sglang_wavepp.launch.bubbles import CAUSES
from sglang_wavepp.launch.flags import positive_int
from sglang_wavepp.launch.pipeline_server import PipelineServer
from sglang_wavepp.launch.workload import Offered, Outcome, ServerOptions
from sglang_wavepp.mpu import PLANNERS
from sglang_wavepp.mpu.profile import Profile, ProfileError, load_profile

FORMAT = """FILE has one JSON object a line, in any order:
  arrival  seconds from the start; 0 if left out
  tokens   of the prompt, cached ones included
  cached   tokens of it that are in the cache already, or, with "prefix", that it has in common with the other
           requests of that prefix and finds if one of them has left them there; 0 if left out
  output   tokens to generate; 1, which is prefill alone, if left out
  prefix   a name

such as {"arrival": 0.5, "tokens": 65536, "cached": 61440, "prefix": "agent 7"}
"""

_LONGEST = 10_000_000
"""Tokens of a prompt and of an output at most: a slip of the pen shall not take hours."""
_TAKEN = 0.99
"""Of budgets whose throughput is at least this part of the best, the one with the shortest p95 is best."""


class _Line(msgspec.Struct, forbid_unknown_fields=True):
    tokens: int
    arrival: float = 0.0
    cached: int = 0
    output: int = 1
    prefix: str = ""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = FORMAT
    parser.add_argument(
        "--requests", required=True, metavar="FILE", help="the requests, see below; - for stdin"
    )
    parser.add_argument("--stages", type=positive_int, default=8, metavar="N", help="pipeline stages (8)")
    parser.add_argument(
        "--profile",
        default="kimi-k3-gb300",
        metavar="X",
        help="what model and device cost: a .toml file, or a name (kimi-k3-gb300)",
    )
    parser.add_argument(
        "--planner",
        action="append",
        choices=list(PLANNERS),
        help="as --wavepp-planner; may be repeated (all of them)",
    )
    parser.add_argument(
        "--budget",
        action="append",
        type=positive_int,
        metavar="TOKENS",
        help="as --chunked-prefill-size; may be repeated (4096, 8192, 16384 and 32768)",
    )
    parser.add_argument("--page", type=positive_int, default=64, metavar="TOKENS", help="of a KV page (64)")
    parser.add_argument("--kv-tokens", type=positive_int, metavar="TOKENS", help="KV pool (the profile's)")
    parser.add_argument(
        "--concurrency",
        type=positive_int,
        metavar="N",
        help="offer so many requests at a time, in the order of FILE, instead of at their arrivals",
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--plot", metavar="FILE", help="draw where the time goes, as SVG, PNG or PDF")


def run(options: argparse.Namespace) -> int:
    """Run every planner with every budget and print what they do. Raises `WavePPError`."""
    if options.plot:
        _pyplot()  # before the work
    requests = read_requests(options.requests)
    try:
        profile = load_profile(options.profile)
        profile.stages(options.stages)
    except ProfileError as error:
        raise WavePPError(str(error)) from None
    if options.kv_tokens:
        profile = dataclasses.replace(profile, kv_tokens=options.kv_tokens)
    budgets = sorted(set(options.budget or (4096, 8192, 16384, 32768)))
    if budgets[0] < options.page:
        raise WavePPError(f"a budget of {budgets[0]} tokens is less than a page of {options.page}")
    rows = [
        _row(profile, options, requests, planner, budget)
        for planner in options.planner or PLANNERS
        for budget in budgets
    ]
    for planner in {row["planner"] for row in rows}:
        best = max((r for r in rows if r["planner"] == planner), key=lambda r: r["tokens_per_s"])
        good = [
            r for r in rows if r["planner"] == planner and r["tokens_per_s"] >= _TAKEN * best["tokens_per_s"]
        ]
        min(good, key=lambda r: r["completion_s"]["p95"])["best_budget"] = True
    if options.plot:
        _plot(rows, options.plot)
    if options.json:
        print(json.dumps({"profile": profile.name, "stages": options.stages, "rows": rows}, indent=1))
    else:
        _print(rows)
    return 0


def read_requests(file: str) -> list[Offered]:
    """The requests in a JSONL file. Raises `WavePPError` with the line that is wrong."""
    try:
        lines = (sys.stdin.read() if file == "-" else Path(file).read_text()).splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise WavePPError(f"{file} cannot be read: {error}") from None
    decoder, requests = msgspec.json.Decoder(_Line), []
    for number, text in enumerate(lines, 1):
        if not text.strip():
            continue
        try:
            line = decoder.decode(text)
        except msgspec.DecodeError as error:
            raise WavePPError(f"{file}, line {number}: {error}") from None
        lengths = all(1 <= length <= _LONGEST for length in (line.tokens, line.output))
        if not lengths or line.arrival < 0 or not 0 <= line.cached <= line.tokens:
            raise WavePPError(
                f"{file}, line {number}: tokens and output are from 1 to {_LONGEST:,}, arrival from 0 on, "
                "cached from 0 to tokens"
            )
        requests.append(Offered(**msgspec.structs.asdict(line)))
    if not requests:
        raise WavePPError(f"{file} has no requests")
    return requests


def _row(
    profile: Profile, options: argparse.Namespace, requests: Sequence[Offered], planner: str, budget: int
) -> dict[str, Any]:
    setup = ServerOptions(stages=options.stages, planner=planner, budget=budget, page=options.page)
    outcome = PipelineServer(profile, setup).run(requests, options.concurrency or 0)
    refused = [s for s in outcome.served if s.rejected]
    if len(refused) == len(requests):
        raise WavePPError(f"no request can be served: {refused[0].rejected}")
    return {"planner": planner, "budget": budget, "best_budget": False, **_said(outcome, len(refused))}


def _said(outcome: Outcome, refused: int) -> dict[str, Any]:
    return {
        "tokens_per_s": outcome.throughput,
        "completion_s": {f"p{p}": outcome.completion(p / 100) for p in (50, 95)},
        "seconds": outcome.seconds,
        "waves": outcome.waves,
        "refused": refused,
        "busy": max(outcome.busy) / outcome.seconds,
        "bubbles": {cause: seconds / outcome.seconds for cause, seconds in outcome.bubbles.items()},
    }


def _print(rows: Sequence[dict[str, Any]]) -> None:
    seen = [cause for cause in CAUSES if any(row["bubbles"][cause] >= 0.0005 for row in rows)]
    head = ["planner", "budget", "tokens/s", "p50 s", "p95 s", "waves", "busy", *seen]
    body = [
        [
            row["planner"],
            f"{row['budget']}{' *' if row['best_budget'] else '  '}",
            f"{row['tokens_per_s']:,.0f}",
            f"{row['completion_s']['p50']:.2f}",
            f"{row['completion_s']['p95']:.2f}",
            str(row["waves"]),
            f"{row['busy']:.1%}",
            *(f"{row['bubbles'][cause]:.1%}" for cause in seen),
        ]
        for row in rows
    ]
    widths = [max(map(len, column)) for column in zip(head, *body, strict=True)]
    for line in (head, *body):
        print("  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)).rstrip())
    print("\n* best budget of the planner. Completion is from arrival to the first token.")
    print("busy and the rest: of the time of the slowest stage.")
    for cause in seen:
        print(f"  {cause}: {CAUSES[cause]}")
    if refused := max(row["refused"] for row in rows):
        print(f"{refused} requests were refused: the KV pool is too small for them.")


def _pyplot() -> Any:
    try:
        import matplotlib
    except ModuleNotFoundError:
        raise WavePPError("--plot needs matplotlib (pip install matplotlib)") from None
    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot


def _plot(rows: Sequence[dict[str, Any]], file: str) -> None:
    pyplot = _pyplot()
    figure, (where, speed) = pyplot.subplots(1, 2, figsize=(11, 4.5), layout="constrained")
    names = [f"{row['planner']} {row['budget']}" for row in rows]
    left = [row["busy"] for row in rows]
    where.barh(names, left, label="busy")
    for cause in CAUSES:
        width = [row["bubbles"][cause] for row in rows]
        if max(width) >= 0.0005:
            where.barh(names, width, left=left, label=cause)
            left = [a + b for a, b in zip(left, width, strict=True)]
    where.set_xlabel("share of the slowest stage's time")
    where.invert_yaxis()
    where.legend(fontsize="small", loc="upper center", bbox_to_anchor=(0.5, -0.12), ncols=4)
    for planner in dict.fromkeys(row["planner"] for row in rows):
        own = [row for row in rows if row["planner"] == planner]
        speed.plot(
            [row["completion_s"]["p50"] for row in own],
            [row["tokens_per_s"] for row in own],
            marker="o",
            label=planner,
        )
        for row in own:
            speed.annotate(str(row["budget"]), (row["completion_s"]["p50"], row["tokens_per_s"]), fontsize=7)
    speed.set_xlabel("p50 completion, s")
    speed.set_ylabel("prompt tokens/s")
    speed.legend(fontsize="small")
    try:
        figure.savefig(file)
    except (OSError, ValueError) as error:
        raise WavePPError(f"{file} cannot be written: {error}") from None
