"""The benchmarks run and print what their readers rely on. Small: no figure is looked at."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import threading
import time
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from benchmarks import host_time
from benchmarks.admission import latencies, prompts
from benchmarks.gil import summary
from benchmarks.probe import Probe

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


def test_admission_asks_for_cold_and_for_cached_prompts() -> None:
    cached = [[7] * 600, [8] * 600]
    asked = list(islice(prompts(random.Random(1), cached, 640), 200))
    assert all(10 <= len(prompt) <= 640 for prompt in asked)
    begins = [prompt[:150] in ([7] * 150, [8] * 150) for prompt in asked]
    assert begins == [False, True] * 100


def test_admission_measures_the_requests_of_its_cell() -> None:
    sent = {"a-1": 10.0, "a-2": 20.0, "b-1": 30.0}
    arrived = {"a-2": 20.5, "b-1": 31.0, "a-1": 10.25}
    assert latencies(sent, arrived, "a-") == [250.0, 500.0]
    with pytest.raises(KeyError, match="b-1"):
        latencies(sent, {"a-1": 10.25, "a-2": 20.5}, "b-")


def test_gil_sums_up_by_stage_and_switch_interval() -> None:
    seen = [
        [0, 5.0, [[1000, 400], [1000, 400]], [[5000, 0], [3000, 3500]], [100]],
        [0, 0.5, [], [[2000, 0], [2000, 0]], []],
        [0, 5.0, [[4000, 4000]], [], [300]],
        [1, 5.0, [[7000, 0], [7000, 0]], [], []],
    ]
    rows = {(row["stage"], row["switch_ms"], row["what"]): row for row in summary(seen)}
    assert rows.keys() == {
        (0, 5.0, "alone"),
        (0, 5.0, "beside wave"),
        (0, 5.0, "guard"),
        (0, 0.5, "beside wave"),
        (1, 5.0, "alone"),
    }
    alone, beside = rows[0, 5.0, "alone"], rows[0, 5.0, "beside wave"]
    assert (alone["samples"], alone["p50_ms"], alone["max_ms"], alone["max_net_ms"]) == (3, 1.0, 4.0, 0.6)
    assert (beside["max_ms"], beside["max_net_ms"]) == (5.0, 5.0)
    assert rows[0, 5.0, "guard"]["p50_ms"] == 0.2


def test_a_probe_is_a_plugin_only_where_its_environment_is(tmp_path: Path) -> None:
    listing = """
from importlib.metadata import entry_points
for plugin in entry_points(group="sglang.srt.plugins"):
    print(plugin.value, callable(plugin.load()))
"""

    def plugins(env: dict[str, str]) -> list[str]:
        command = [sys.executable, "-c", listing]
        done = subprocess.run(command, cwd=tmp_path, env=os.environ | env, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return done.stdout.splitlines()

    mine = "benchmarks.probe:register True"
    assert mine in plugins(Probe(tmp_path).env)
    assert mine not in plugins({})


def test_a_probe_reads_what_the_processes_wrote(tmp_path: Path) -> None:
    probe = Probe(tmp_path)
    (tmp_path / "seen" / "1").write_text('["sent", "a", 1.5]\n["received", "a", 2.5]\n["sent", "b", 3')
    (tmp_path / "seen" / "2").write_text('["sent", "c", 4.5]\n')
    assert list(probe.seen("sent")) == [["a", 1.5], ["c", 4.5]], "a row that is being written does not count"


def test_host_time_is_counted_once_and_by_thread(tmp_path: Path) -> None:
    clock = host_time._Clock(tmp_path / "stage0.json")

    def burn(seconds: float) -> None:
        end = time.thread_time() + seconds
        while time.thread_time() < end:
            pass

    def inner() -> None:
        burn(0.02)

    def outer() -> str:
        burn(0.01)
        clock.count("match and lock", inner)
        return "done"

    beside = threading.Thread(target=clock.count, args=("make a request", inner))
    beside.start()
    beside.join()
    assert clock.count("launch", outer) == "done"
    (told,) = host_time.counts(tmp_path)
    loop, others = told["loop"], told["others"]
    assert told["waves"] == 1
    assert loop["match and lock"] >= 0.02 and loop["launch"] >= 0.01 and "make a request" not in loop
    assert loop["launch"] + loop["match and lock"] <= loop["all"]
    assert others["make a request"] >= 0.02 and "launch" not in others
    assert told["faults"]["loop"] > 0


def test_host_time_tells_the_median_of_its_rounds() -> None:
    def round_of(launch: float, faults: int) -> list[dict[str, Any]]:
        loop = {"launch": launch, "all": 2.0} if launch else {"all": 2.0}
        return [{"waves": 8, "faults": {"loop": faults}, "loop": loop, "others": {}}]

    found = {"stock": host_time.median([round_of(1.5, 70), round_of(0.0, 50), round_of(1.25, 512)])}
    assert host_time.table(found, "loop").splitlines() == [
        "ms a request               stock 0",
        "launch                        1.25",
        "all                           2.00",
        "page faults                     70",
        "waves                            8",
    ]
