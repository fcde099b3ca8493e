"""The grid's tables, from its raw measurements. Pure."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from benchmarks.timeline import CAUSES, busiest

Row = Mapping[str, Any]
"""One measurement: `system`, `cell`, `round`, and what `benchmarks.measure.summary` tells."""
NAMES = {"no_work": "no work", "fill": "fill/drain"}


def valid(rows: Iterable[Row]) -> list[Row]:
    """Those that count."""
    return [row for row in rows if not row["doubts"]]


def medians(rows: Iterable[Row], what: str) -> dict[tuple[str, str], float]:
    """(system, cell) -> median over the rounds that count, where there are any."""
    found: dict[tuple[str, str], list[float]] = {}
    for row in valid(rows):
        if row[what] is not None:
            found.setdefault((row["system"], row["cell"]), []).append(row[what])
    return {key: statistics.median(values) for key, values in found.items()}


def spread(rows: Iterable[Row], system: str, cell: str) -> float | None:
    """Largest over smallest throughput of the rounds, minus 1; None with less than two that count."""
    values = [row["input_tokens_s"] for row in valid(rows) if (row["system"], row["cell"]) == (system, cell)]
    return max(values) / min(values) - 1 if len(values) > 1 else None


def geomean(values: Sequence[float]) -> float:
    """Of at least one value above 0."""
    return math.exp(sum(map(math.log, values)) / len(values))


def best_single(speed: Mapping[tuple[str, str], float], stock: Sequence[str], cells: Sequence[str]) -> str:
    """The stock system with the highest geomean over the cells that all of them have; '' if there are none.

    A system that has none of the cells is left out.
    """
    present = [s for s in stock if any((s, cell) in speed for cell in cells)]
    shared = [cell for cell in cells if all((s, cell) in speed for s in present)]
    if not present or not shared:
        return ""
    return max(present, key=lambda s: geomean([speed[s, cell] for cell in shared]))


def compare(rows: Sequence[Row]) -> dict[str, Any]:
    """Each cell's systems beside stock.

    The bound of a cell is 1 / (share of the time for which the bottleneck stage of the best stock system was
    busy): with as much device time, nobody can be faster. What a system is short of it, shares of its time,
    is how long its busiest stage waited, and device time that its waves took beyond stock's.
    """
    speed, busy = medians(rows, "input_tokens_s"), medians(rows, "busy")
    busiest_stages = [{**row, **busiest(row["stages"])[1]} for row in valid(rows)]
    waited = {cause: medians(busiest_stages, cause) for cause in CAUSES[1:]}
    cells = list(dict.fromkeys(row["cell"] for row in rows))
    systems = list(dict.fromkeys(row["system"] for row in rows))
    stock = [name for name in systems if name.startswith("stock")]
    others = [name for name in systems if name not in stock]
    single = best_single(speed, stock, cells)
    table = []
    for cell in cells:
        ran = [name for name in stock if (name, cell) in speed]
        best = max(ran, key=lambda name: speed[name, cell]) if ran else ""
        bound = 1 / busy[best, cell] if best else None
        for name in systems:
            if (name, cell) not in speed:
                continue
            own = speed[name, cell]
            ratio = own / speed[best, cell] if best else None
            of_bound = ratio / bound if ratio and bound else None
            table.append(
                {
                    "cell": cell,
                    "system": name,
                    "input_tokens_s": own,
                    "best_stock": best,
                    "over_best_stock": ratio,
                    "over_single_stock": own / speed[single, cell] if (single, cell) in speed else None,
                    "bound": bound,
                    "of_bound": of_bound,
                    "short": of_bound
                    and {
                        "device": busy[name, cell] - of_bound,
                        **{cause: waited[cause][name, cell] for cause in waited},
                    },
                    "spread": spread(rows, name, cell),
                }
            )
    summary = {}
    for name in others:
        ran_by = [row for row in table if row["system"] == name]
        summary[name] = {
            yardstick: geomean(values) if values else None
            for yardstick in ("over_best_stock", "over_single_stock", "bound")
            if (values := [row[yardstick] for row in ran_by if row[yardstick]]) is not None
        }
    return {"best_single_stock": single, "cells": table, "geomean": summary}


def text(rows: Sequence[Row]) -> str:
    """All tables; only what is wrong, if nothing counts."""
    if not valid(rows):
        return _doubts(rows)
    found = compare(rows)
    parts = [
        _throughput(found),
        _short(found),
        _latency(rows),
        _kinds(rows),
        _bubbles(rows),
        _host(rows),
        _doubts(rows),
    ]
    return "\n\n".join(part for part in parts if part)


def table(head: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    """Columns as wide as they have to be, the first two to the left."""
    every = [list(head), *map(list, lines)]
    widths = [max(len(line[i]) for line in every) for i in range(len(head))]
    return "\n".join(
        "  ".join(
            value.ljust(width) if i < 2 else value.rjust(width)
            for i, (value, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in every
    )


def _show(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def _throughput(found: Mapping[str, Any]) -> str:
    head = ("cell", "system", "tokens/s", "spread", "/ best stock", "bound", "of it", "/ single stock")
    lines = []
    for row in found["cells"]:
        name = row["system"] + (" *" if row["system"] == row["best_stock"] else "")
        lines.append(
            (
                row["cell"],
                name,
                f"{row['input_tokens_s']:.0f}",
                _show(row["spread"], ".1%"),
                _show(row["over_best_stock"], ".3f"),
                _show(row["bound"], ".3f"),
                _show(row["of_bound"], ".1%"),
                _show(row["over_single_stock"], ".3f"),
            )
        )
    notes = [
        "Input tokens/s, cached ones included (median of the rounds). *: the best stock system of the cell;",
        f"single stock: {found['best_single_stock'] or 'none'}, the best one over all cells.",
    ]
    for name, means in found["geomean"].items():
        notes.append(
            f"{name}, geomean: {_show(means['over_best_stock'], '.3f')} of each cell's best stock system, "
            f"{_show(means['over_single_stock'], '.3f')} of the single one; "
            f"bound {_show(means['bound'], '.3f')}"
        )
    return "\n".join([table(head, lines), *notes])


def _short(found: Mapping[str, Any]) -> str:
    lines = [
        (row["cell"], row["system"], *(f"{share:.1%}" for share in (row["of_bound"], *row["short"].values())))
        for row in found["cells"]
        if row["short"] and row["system"] in found["geomean"]
    ]
    if not lines:
        return ""
    head = ("cell", "system", "of the bound", "device time", *(NAMES.get(c, c) for c in CAUSES[1:]))
    return "What is missing to the bound: shares of the time that sum to it\n" + table(head, lines)


def _latency(rows: Sequence[Row]) -> str:
    names = {
        "first_p50_s": "prefill p50 s",
        "first_p95_s": "p95 s",
        "output_tokens_s": "output tokens/s",
        "gap_p99_s": "inter-token p99 s",
    }
    found = {what: medians(rows, what) for what in names}
    lines = [
        (cell, name, *(_show(found[what].get((name, cell)), ".3f") for what in names))
        for name, cell in sorted(found["first_p50_s"], key=lambda key: (_order(rows, key[1]), key[0]))
    ]
    return table(("cell", "system", *names.values()), lines)


def _kinds(rows: Sequence[Row]) -> str:
    lines = [
        (row["cell"], row["system"], str(row["round"]), kind, *(f"{t[q]:.3f}" for q in ("p50", "p95")))
        for row in valid(rows)
        for kind, t in row["kinds"].items()
    ]
    lines.sort(key=lambda line: (_order(rows, line[0]), line[1]))
    head = ("cell", "system", "round", "prompt tokens", "prefill p50 s", "p95 s")
    return table(head, lines) if lines else ""


def _order(rows: Sequence[Row], cell: str) -> int:
    return next(i for i, row in enumerate(rows) if row["cell"] == cell)


def _bubbles(rows: Sequence[Row]) -> str:
    lines = []
    for row in valid(rows):
        number, _ = busiest(row["stages"])
        for label, chosen in (("busiest", number), ("first", 0)):
            stage = row["stages"][chosen]
            if label == "first" and not number:
                continue
            shares = (f"{stage[cause]:.1%}" for cause in CAUSES)
            used = (str(stage["waves"]), f"{stage['busy'] * row['window_s']:.2f}")
            where = (row["cell"], row["system"], str(row["round"]), f"{label} ({chosen})")
            lines.append((*where, *used, *shares))
    causes = (NAMES.get(cause, cause) for cause in CAUSES)
    head = ("cell", "system", "round", "stage", "waves", "device s", *causes)
    lines.sort(key=lambda line: (_order(rows, line[0]), line[1]))
    return "Where the stages' time went, and the device time that the requests took\n" + table(head, lines)


def _host(rows: Sequence[Row]) -> str:
    lines = []
    for row in valid(rows):
        for number, stage in enumerate(row["stages"]):
            host = stage["host_ms"]
            lines.append(
                (
                    row["cell"],
                    row["system"],
                    str(row["round"]),
                    str(number),
                    str(stage["waves"]),
                    *(f"{host[k]:.2f}" for k in ("loop_wave", "process_wave", "loop_request")),
                    f"{host['process_request']:.2f}",
                    f"{row['front_end']:.1%}",
                    f"{row['idle']:.1%}",
                )
            )
    head = ("cell", "system", "round", "stage", "waves", "loop/wave", "process/wave", "loop/request")
    lines.sort(key=lambda line: (_order(rows, line[0]), line[1], line[2], line[3]))
    return "CPU milliseconds of the schedulers; CPU share of the front end; idle share of the machine\n" + (
        table((*head, "process/request", "front end", "idle"), lines)
    )


def _doubts(rows: Sequence[Row]) -> str:
    lines = [
        f"invalid: {row['cell']} {row['system']} round {row['round']}: {'; '.join(row['doubts'])}"
        for row in rows
        if row["doubts"]
    ]
    return "\n".join(lines)
