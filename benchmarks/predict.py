"""The pipeline model beside what the grid has measured: predicted over measured throughput, for each cell.

    python -m benchmarks.grid --systems wavepp-static wavepp-timed --out RUN
    python -m benchmarks.predict RUN/rows.json [--json]

Both run the same planners and admission over the same profile. What a token costs the HTTP front is taken
from the measurement; the model has no other host time. Cells with several output tokens are left out.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from benchmarks.cells import Cell, parse_cells
from benchmarks.measure import warm_up
from benchmarks.report import table
from benchmarks.systems import system
from sglang_wavepp.launch.pipeline_server import PipelineServer
from sglang_wavepp.launch.workload import Offered, ServerOptions
from sglang_wavepp.mpu.profile import Profile, load_profile


def predicted(
    profile: Profile, stages: int, name: str, cell: Cell, requests: int, front_s: float, context: int
) -> float:
    """Prompt tokens per second of a WavePP system of the grid in a cell."""
    chosen = system(name)
    options = ServerOptions(
        stages=stages,
        planner=chosen.planner,
        budget=chosen.budget,
        page=1,
        front_s=front_s,
    )
    server = PipelineServer(profile, options)
    if options.planner == "timed":
        server.learn(Offered(tokens=prompt.tokens) for prompt in warm_up(context))
    of = cell.of
    return server.run([Offered(**of[i % len(of)]) for i in range(requests)], cell.concurrency).throughput


def compared(raw: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Each measurement of a WavePP system that counts, with what the model says."""
    profile = load_profile(raw["profile"])
    cells = {name: parse_cells([name])[0] for name in {row["cell"] for row in raw["rows"]}}
    context = max(cell.longest for cell in cells.values()) + 64
    for row in raw["rows"]:
        cell = cells[row["cell"]]
        if not row["system"].startswith("wavepp") or row["doubts"] or cell.output > 1:
            continue
        measured = row["input_tokens_s"]
        front_s = row["front_end"] / measured
        said = predicted(
            profile, raw["options"]["pp"], row["system"], cell, row["requests"], front_s, context
        )
        yield {
            "cell": cell.name,
            "system": row["system"],
            "measured": measured,
            "predicted": said,
            "ratio": said / measured,
        }


def main() -> None:
    """Parse, predict, print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("rows", type=Path, nargs="+", help="rows.json of a grid")
    parser.add_argument("--json", action="store_true", help="print JSON")
    options = parser.parse_args()
    found: list[dict[str, Any]] = []
    for file in options.rows:
        try:
            found += compared(json.loads(file.read_text()))
        except (OSError, ValueError, KeyError) as error:
            parser.error(f"{file} is not of a grid: {error!r}")
    if options.json:
        print(json.dumps(found))
        return
    lines = [
        (r["cell"], r["system"], f"{r['measured']:.0f}", f"{r['predicted']:.0f}", f"{r['ratio']:.3f}")
        for r in found
    ]
    print(table(("cell", "system", "measured", "predicted", "ratio"), lines))


if __name__ == "__main__":
    main()
