"""The benchmarks run and print what their readers rely on. Small: no figure is looked at."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
SMALL = "--tokens 2048 --sequences 2 --chunk 256 --blocks 64 --rounds 1 --burst 0.001"


def test_hint_index_compares_all_systems() -> None:
    command = [sys.executable, "-m", "benchmarks.hint_index", "--json", *SMALL.split()]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    rows = json.loads(done.stdout)["rows"]
    keys = {"system", "op", "tokens", "block", "reuse", "concurrency", "writer"}
    assert all(row.keys() >= keys | {"p50_us", "p99_us", "p99_cpu_us"} for row in rows)
    probes = {row["system"] for row in rows if row["op"] in ("probe", "match_prefix", "match")}
    assert {"wavepp", "linear", "sglang-rust", "sglang-python"} <= probes
    cells = {(row["reuse"], row["concurrency"], row["writer"]) for row in rows if row["op"] == "probe"}
    assert cells == {(r, c, w) for r in (0, 50, 90, 100) for c in (1, 2) for w in (False, True)}
