"""WavePP beside stock SGLang's pipeline, on emulated devices: the same requests, servers in turn.

    python -m benchmarks.grid                                    a quick look: PP4, a few cells, four systems
    python -m benchmarks.grid --pp 8 --all --systems all --json > grid.json
    python -m benchmarks.grid --retention                        what is still cached (benchmarks.retention)

Everything of the servers is real but the devices: a wave takes the time that the profile says, times the
dilation, during which the host goes on. Each round starts every system once and measures all cells on it; the
order of the systems alternates. All figures are undilated, except CPU times. Cells are described in
`benchmarks.cells`, systems in `benchmarks.systems`, bubbles in `benchmarks.timeline`.

A measurement does not count, and the report says why, if a request reused something else than was seeded, if
the host of the busiest stage or the front end took more than 20 % of the time, or if device time is not what
the profile says. The host was then measured rather than the pipeline: raise --dilation.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks import report, retention
from benchmarks.cells import QUICK, WORKLOADS, Cell, parse_cells
from benchmarks.load import LoadError
from benchmarks.measure import Bench, Setting, folder
from benchmarks.systems import ALL, DEFAULT, System, system
from sglang_wavepp.errors import WavePPError
from sglang_wavepp.launch.demo import signals_raise
from sglang_wavepp.launch.models import make_model
from sglang_wavepp.mpu.profile import ProfileError, load_profile

Measure = Callable[[Bench], dict[str, Any]]

PROFILES = {4: "glm-5.2-b300", 8: "kimi-k3-gb300"}
"""By the number of stages, if none is named."""


def chosen_systems(options: argparse.Namespace) -> list[System]:
    """ValueError for an unknown one."""
    return [system(name) for name in (ALL if options.systems == ["all"] else options.systems)]


def setting(options: argparse.Namespace, *, context: int, pool: int, concurrency: int) -> Setting:
    """For all servers of a run: the longest request has `context` tokens; `--pool` goes before `pool`."""
    source = options.profile or PROFILES.get(options.pp, "laptop")
    return Setting(
        source=source,
        profile=load_profile(source),
        pp=options.pp,
        dilation=options.dilation or float(options.pp),
        pool=options.pool or pool,
        context=context + 64,
        rows=options.pp * concurrency,
    )


def compared(
    options: argparse.Namespace, shared: Setting, systems: Sequence[System], loads: Mapping[str, Measure]
) -> dict[str, Any]:
    """All rounds of all systems, and what comes of them, also in `--out`. ServerError if one fails."""
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="wavepp-grid-") as temporary:
        base = options.out or Path(temporary)
        model = make_model(base / "model", "emulated", layers=max(8, shared.pp), context=shared.context)
        rows: list[dict[str, Any]] = []
        raw: dict[str, Any] = {
            "options": {k: str(v) if isinstance(v, Path) else v for k, v in vars(options).items()},
            "profile": shared.source,
            "dilation": shared.dilation,
            "pool": shared.pool,
            "cores": os.cpu_count(),
        }
        for number in range(options.rounds):
            for chosen in systems if number % 2 == 0 else systems[::-1]:
                where = folder(base, f"{number}-{chosen.name}")
                for row in _served(model, chosen, shared, where, loads):
                    rows.append({"round": number, **row})
                    raw |= {"minutes": round((time.monotonic() - began) / 60, 1), "rows": rows}
                    (base / "rows.json").write_text(json.dumps({**raw, **report.compare(rows)}, indent=1))
    return {**raw, **report.compare(rows)}


def _served(
    model: Path, chosen: System, shared: Setting, where: Path, loads: Mapping[str, Measure]
) -> Iterator[dict[str, Any]]:
    began = time.monotonic()
    with Bench(model, chosen, shared, where) as bench:
        note(f"{where.name}: started in {time.monotonic() - began:.0f} s")
        for name, measure in loads.items():
            began = time.monotonic()
            try:
                row = measure(bench)
            except LoadError as error:
                row = {"doubts": [str(error)]}
            said = "; ".join(row["doubts"]) or f"{row['input_tokens_s']:.0f} input tokens/s"
            note(f"  {name}: {said} ({time.monotonic() - began:.0f} s)")
            yield {"system": chosen.name, "cell": name, **row}


def note(text: str) -> None:
    """Progress, on stderr."""
    print(text, file=sys.stderr, flush=True)


@contextlib.contextmanager
def fail() -> Iterator[None]:
    """What users can get wrong, and servers that fail, end the program with one line; no server is left."""
    try:
        with signals_raise():
            yield
    except KeyboardInterrupt:
        raise SystemExit(130) from None
    except (WavePPError, ProfileError, ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(2) from None


def add_server_arguments(parser: argparse.ArgumentParser) -> None:
    """What all comparisons have in common."""
    parser.add_argument("--pp", type=int, default=4, metavar="P", help="stages (4)")
    parser.add_argument("--profile", help=f"name or .toml file (by the stages: {PROFILES})")
    parser.add_argument(
        "--systems", nargs="+", default=list(DEFAULT), help=f"'all' is {' '.join(ALL)}; default: %(default)s"
    )
    parser.add_argument("--rounds", type=int, default=2, help="(2)")
    parser.add_argument("--dilation", type=float, help="emulated times are so many times longer (the stages)")
    parser.add_argument("--pool", type=int, metavar="TOKENS", help="KV of a stage (as much as is needed)")
    parser.add_argument("--out", type=Path, metavar="DIR", help="keeps logs, traces and rows.json there")
    parser.add_argument("--json", action="store_true", help="print JSON")


def grid(options: argparse.Namespace) -> str:
    """Run it; what is to be printed."""
    systems = chosen_systems(options)
    if options.retention:
        count, longest = options.requests or 48, retention.PROMPT + 1
        shared = setting(options, context=longest, pool=retention.POOL, concurrency=retention.SESSIONS)
        loads: dict[str, Measure] = {
            f"retention-{rate:g}": partial(retention.measure, rate=rate, requests=count)
            for rate in retention.RATES
        }
        raw = compared(options, shared, systems, loads)
        return json.dumps(raw) if options.json else retention.text(raw["rows"])
    names = list(WORKLOADS) if options.all else options.cells or QUICK
    cells: list[Cell] = parse_cells(names, options.concurrency)
    shared = setting(
        options,
        context=max(cell.longest for cell in cells),
        pool=max(cell.pool(options.requests) for cell in cells),
        concurrency=max(cell.concurrency for cell in cells),
    )
    loads = {cell.name: partial(Bench.cell, cell=cell, requests=options.requests) for cell in cells}
    raw = compared(options, shared, systems, loads)
    return json.dumps(raw) if options.json else report.text(raw["rows"])


def main() -> None:
    """Parse, measure, print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cells", nargs="+", metavar="CELL", help=f"default: {' '.join(QUICK)}")
    parser.add_argument("--all", action="store_true", help="all workloads at all their concurrencies")
    parser.add_argument("--concurrency", type=int, nargs="+", metavar="C", help="of cells that name none")
    parser.add_argument("--retention", action="store_true", help="the retention test instead of cells")
    parser.add_argument("--requests", type=int, help="of each cell (four for each under way, 32 at least)")
    add_server_arguments(parser)
    options = parser.parse_args()
    with fail():
        text = grid(options)
    print(text)


if __name__ == "__main__":
    main()
