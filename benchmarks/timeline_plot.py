"""The stages' timelines of several systems in one cell: a picture, and a trace for Perfetto or Chrome.

    python -m benchmarks.grid --cells suffix-4k:8 --out RUN
    python -m benchmarks.timeline_plot --run RUN --cell suffix-4k:8 --systems stock-8192 wavepp-timed \\
        --png timeline.png --perfetto timeline.json

A row is a stage, a bar a wave, a colour a request; a wave of several requests has a part for each, by its
tokens. What is white is a device that waits. Times are undilated seconds since the first wave of the cell.
Open the trace in https://ui.perfetto.dev or chrome://tracing.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.timeline import Wave, of_requests, read_stage

COLOURS = 20


def load(run: Path, system: str, cell: str) -> list[list[Wave]]:
    """The waves of a cell on each stage, of the first round. FileNotFoundError or ValueError without any."""
    files = sorted((run / f"0-{system}" / "trace").glob("stage*.jsonl"), key=lambda file: int(file.stem[5:]))
    if not files:
        raise FileNotFoundError(f"{run} holds no traces of {system} in round 0")
    waves = [read_stage(file) for file in files]
    own = {rid for stage in waves for wave in stage for rid in wave.rids if rid.rpartition("-")[0] == cell}
    if not own:
        raise ValueError(f"the traces of {system} hold no requests of {cell}")
    return [of_requests(stage, own) for stage in waves]


def dilation_of(run: Path) -> float:
    """Of a run of the grid."""
    return float(json.loads((run / "rows.json").read_text())["dilation"])


def parts(wave: Wave) -> list[tuple[str, float, float]]:
    """(request, begin, end) of each request's share of a wave, by its new tokens, one after the other."""
    total = sum(new for _, new in wave.spans)
    found, at = [], wave.start
    for rid, (_, new) in zip(wave.rids, wave.spans, strict=True):
        until = at + (wave.end - wave.start) * new / total
        found.append((rid, at, until))
        at = until
    return found


def perfetto(systems: Mapping[str, Sequence[Sequence[Wave]]], dilation: float) -> dict[str, Any]:
    """Chrome's trace event format: a process is a system, a thread a stage; undilated microseconds."""
    events: list[dict[str, Any]] = []
    for pid, (name, stages) in enumerate(systems.items()):
        zero = min(wave.start for stage in stages for wave in stage)
        events.append({"ph": "M", "pid": pid, "name": "process_name", "args": {"name": name}})
        for tid, waves in enumerate(stages):
            thread = {"name": f"stage {tid}"}
            events.append({"ph": "M", "pid": pid, "tid": tid, "name": "thread_name", "args": thread})
            for wave in waves:
                details = {
                    "requests": list(wave.rids),
                    "spans": [list(span) for span in wave.spans],
                    "launched_ms": round(1e3 * (wave.launched - zero) / dilation, 3),
                    "input_ms": round(1e3 * (wave.input - zero) / dilation, 3) if wave.input else None,
                }
                events.append(
                    {
                        "ph": "X",
                        "pid": pid,
                        "tid": tid,
                        "name": f"{wave.kind} {wave.wave}",
                        "ts": round(1e6 * (wave.start - zero) / dilation, 1),
                        "dur": round(1e6 * (wave.end - wave.start) / dilation, 1),
                        "args": details,
                    }
                )
    return {"displayTimeUnit": "ms", "traceEvents": events}


def draw(
    systems: Mapping[str, Sequence[Sequence[Wave]]],
    dilation: float,
    png: Path,
    title: str,
    seconds: Sequence[float] | None = None,
) -> None:
    """The picture; `seconds` is the part of the time axis to show, all of it by default."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import colormaps, pyplot

    colours = colormaps["tab20"].colors  # type: ignore[attr-defined]
    heights = [len(stages) for stages in systems.values()]
    figure, axes = pyplot.subplots(
        len(systems), 1, sharex=True, squeeze=False, figsize=(12, 0.9 * len(systems) + 0.32 * sum(heights))
    )
    for axis, (name, stages) in zip(axes[:, 0], systems.items(), strict=True):
        zero = min(wave.start for stage in stages for wave in stage)
        for number, waves in enumerate(stages):
            pieces = [part for wave in waves for part in parts(wave)]
            axis.broken_barh(
                [((begin - zero) / dilation, (end - begin) / dilation) for _, begin, end in pieces],
                (number - 0.42, 0.84),
                facecolors=[colours[int(rid.rpartition("-")[2]) % COLOURS] for rid, _, _ in pieces],
            )
            axis.vlines(
                [(wave.start - zero) / dilation for wave in waves],
                number - 0.42,
                number + 0.42,
                colors="black",
                linewidth=0.4,
            )
        axis.set_yticks(range(len(stages)), [f"stage {number}" for number in range(len(stages))])
        axis.invert_yaxis()
        end = max(wave.end for stage in stages for wave in stage)
        busy = max(sum(wave.end - wave.start for wave in stage) for stage in stages) / (end - zero)
        axis.set_title(f"{name}: {(end - zero) / dilation:.2f} s, busiest stage {busy:.0%}", loc="left")
    if seconds:
        axes[-1, 0].set_xlim(*seconds)
    axes[-1, 0].set_xlabel("seconds since the first wave")
    figure.suptitle(title, x=0.01, ha="left")
    figure.tight_layout()
    figure.savefig(png, dpi=110)
    pyplot.close(figure)


def main() -> None:
    """Parse, read, draw."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--run", type=Path, required=True, help="the --out of benchmarks.grid")
    parser.add_argument("--cell", required=True)
    parser.add_argument("--systems", nargs="+", required=True, help="from top to bottom")
    parser.add_argument("--png", type=Path)
    parser.add_argument("--perfetto", type=Path, metavar="FILE")
    parser.add_argument("--seconds", type=float, nargs=2, metavar=("FROM", "TO"), help="part to show")
    options = parser.parse_args()
    try:
        dilation = dilation_of(options.run)
        systems = {name: load(options.run, name, options.cell) for name in options.systems}
    except (OSError, ValueError, KeyError) as error:
        raise SystemExit(f"error: {error}") from None
    if options.png:
        draw(systems, dilation, options.png, options.cell, options.seconds)
    if options.perfetto:
        options.perfetto.write_text(json.dumps(perfetto(systems, dilation)))


if __name__ == "__main__":
    main()
