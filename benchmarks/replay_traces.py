"""Traces replayed on emulated devices, WavePP beside stock SGLang: closed loops of sessions with think times.

    python -m benchmarks.replay_traces --trace claude_code_sessions.jsonl --concurrency 8 32

The first `--sessions` of the file, as many as `--concurrency` at a time, each in turn. Prompts of more than
`--longest` tokens end their session. Outputs and think times are bounded, as this is about prefill. Prompts
and what they share are those of the trace; caches are empty at first. `reuse` is the share of prompt tokens
whose KV was there. See `benchmarks.grid` for how systems are compared and when a measurement does not count.
"""

from __future__ import annotations

import argparse
import json
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks import report
from benchmarks.grid import add_server_arguments, chosen_systems, compared, fail, setting
from benchmarks.measure import Bench, summary
from benchmarks.traces import jobs, read


def measure(bench: Bench, work: Any, concurrency: int) -> dict[str, Any]:
    """One replay."""
    bench.flush()
    pauses = sum(request.pause for job in work for request in job) / concurrency
    observed = bench.load(work, concurrency, longest=4 * pauses)
    waves = bench.waves({request.rid for job in work for request in job})
    return summary(bench.setting, observed, waves, reused=False)


def text(rows: Any) -> str:
    """The grid's tables, and what was reused."""
    found = report.medians(rows, "reuse")
    lines = [(cell, name, f"{share:.1%}") for (name, cell), share in found.items()]
    return report.text(rows) + "\n\n" + report.table(("cell", "system", "reuse"), lines)


def main() -> None:
    """Parse, measure, print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--trace", type=Path, required=True, metavar="FILE")
    parser.add_argument("--sessions", type=int, default=16, help="(16)")
    parser.add_argument("--turns", type=int, default=4, help="of a session at most (4)")
    parser.add_argument("--longest", type=int, default=131_072, metavar="TOKENS", help="(131072)")
    parser.add_argument("--output", type=int, default=4, metavar="TOKENS", help="of a request at most (4)")
    parser.add_argument("--think", type=float, default=2.0, metavar="SECONDS", help="at most (2)")
    parser.add_argument("--concurrency", type=int, nargs="+", default=[8], metavar="C")
    add_server_arguments(parser)
    options = parser.parse_args()
    with fail():
        found, size = read(options.trace, options.sessions, options.longest, options.turns)
        systems = chosen_systems(options)
        shared = setting(
            options,
            context=options.longest + options.output,
            pool=max(options.concurrency) * options.longest,
            concurrency=max(options.concurrency),
        )
        work = jobs(found, size, options.output, options.think, shared.dilation)
        loads = {
            f"{options.trace.stem}:{c}": partial(measure, work=work, concurrency=c)
            for c in options.concurrency
        }
        raw = compared(options, shared, systems, loads)
    print(json.dumps(raw) if options.json else text(raw["rows"]))


if __name__ == "__main__":
    main()
