"""WavePP beside stock SGLang's pipeline, on emulated devices: the same requests, servers in turn.

    python -m benchmarks.grid                                    a quick look: PP4, a few cells, four systems
    python -m benchmarks.grid --pp 8 --profile kimi-k3-gb300 --all --systems all --json > grid.json

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
import json
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks import report
from benchmarks.cells import QUICK, WORKLOADS, Cell, parse_cells
from benchmarks.load import LoadError
from benchmarks.measure import Bench, Setting, folder
from benchmarks.systems import ALL, DEFAULT, System, system
from sglang_wavepp.errors import WavePPError
from sglang_wavepp.launch.models import make_model
from sglang_wavepp.launch.server import ServerError
from sglang_wavepp.mpu.profile import DATA, ProfileError, load_profile

PROFILES = {4: "glm-5.2-b300", 8: "kimi-k3-gb300"}
"""By the number of stages, if none is named."""


def profile_source(name: str) -> str:
    """The name of a profile, where `profile-` may be left out."""
    return f"profile-{name}" if (DATA / f"profile-{name}.toml").is_file() else name


def setting(options: argparse.Namespace, base: Path, cells: Sequence[Cell]) -> Setting:
    """For all servers of a run over these cells. ProfileError."""
    source = profile_source(options.profile or PROFILES.get(options.pp, "laptop"))
    context = max(cell.longest for cell in cells) + 64
    return Setting(
        model=make_model(base / "model", "emulated", layers=max(8, options.pp), context=context),
        source=source,
        profile=load_profile(source),
        pp=options.pp,
        dilation=options.dilation or options.pp,
        pool=options.pool or max(cell.pool(options.requests) for cell in cells),
        context=context,
        rows=options.pp * max(cell.concurrency for cell in cells),
    )


def measure(options: argparse.Namespace, base: Path, cells: Sequence[Cell], systems: Sequence[System]) -> Any:
    """All rounds: one row for each round, system and cell. ServerError if a server fails."""
    shared = setting(options, base, cells)
    rows = []
    for number in range(options.rounds):
        for chosen in systems if number % 2 == 0 else systems[::-1]:
            where = folder(base, f"{number}-{chosen.name}")
            began = time.monotonic()
            with Bench(chosen, shared, where) as bench:
                note(f"round {number}, {chosen.name}: started in {time.monotonic() - began:.0f} s")
                for cell in cells:
                    row = _row(bench, cell, options.requests)
                    rows.append({"system": chosen.name, "cell": cell.name, "round": number, **row})
                    said = "; ".join(row["doubts"]) or f"{row['input_tokens_s']:.0f} input tokens/s"
                    note(f"  {cell.name}: {said}")
    return rows


def _row(bench: Bench, cell: Cell, requests: int | None) -> dict[str, Any]:
    try:
        return bench.cell(cell, requests)
    except LoadError as error:
        return {"doubts": [str(error)]}


def note(text: str) -> None:
    """Progress, on stderr."""
    print(text, file=sys.stderr, flush=True)


def parser() -> argparse.ArgumentParser:
    """The options."""
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--pp", type=int, default=4, metavar="P", help="stages (4)")
    made.add_argument("--profile", help=f"name or .toml file (by the stages: {PROFILES})")
    made.add_argument("--cells", nargs="+", metavar="CELL", help=f"default: {' '.join(QUICK)}")
    made.add_argument("--all", action="store_true", help="all workloads at all their concurrencies")
    made.add_argument("--concurrency", type=int, nargs="+", metavar="C", help="of cells that name none")
    made.add_argument(
        "--systems", nargs="+", default=list(DEFAULT), help=f"'all' is {' '.join(ALL)}; default: %(default)s"
    )
    made.add_argument("--rounds", type=int, default=2, help="(2)")
    made.add_argument("--dilation", type=float, help="emulated times are so many times longer (the stages)")
    made.add_argument("--requests", type=int, help="of each cell (two for each one under way, 16 at least)")
    made.add_argument("--pool", type=int, metavar="TOKENS", help="KV of a stage (as much as the cells need)")
    made.add_argument("--out", type=Path, metavar="DIR", help="keeps logs, traces and rows.json there")
    made.add_argument("--json", action="store_true", help="print JSON")
    return made


def main() -> None:
    """Parse, measure, print."""
    options = parser().parse_args()
    try:
        names = list(WORKLOADS) if options.all else options.cells or QUICK
        cells = parse_cells(names, options.concurrency)
        systems = [system(name) for name in (ALL if options.systems == ["all"] else options.systems)]
        with tempfile.TemporaryDirectory() as temporary:
            base = options.out or Path(temporary)
            base.mkdir(parents=True, exist_ok=True)
            began = time.monotonic()
            rows = measure(options, base, cells, systems)
            raw = {
                "options": {name: value for name, value in vars(options).items() if name != "out"},
                "cores": os.cpu_count(),
                "minutes": round((time.monotonic() - began) / 60, 1),
                "rows": rows,
                **report.compare(rows),
            }
            if options.out:
                (base / "rows.json").write_text(json.dumps(raw, indent=1))
    except (WavePPError, ServerError, ProfileError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(2) from None
    print(json.dumps(raw) if options.json else report.text(rows))


if __name__ == "__main__":
    main()
