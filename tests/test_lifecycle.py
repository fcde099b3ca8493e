"""What a server takes while it serves: no time when idle, no more memory with time."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import psutil
from conftest import NOTHING, statistics

from sglang_wavepp.launch.server import Server

IDLE_WINDOW_S = 5.0


def _cpu_seconds(pids: list[int]) -> list[float]:
    return [sum(psutil.Process(p).cpu_times()[:2]) for p in pids]


def test_idle_stages_sleep(wave4: Server) -> None:
    """An idle stage takes under a tenth of a core, and the next request is served from there."""
    pids = list(wave4.scheduler_pids().values())
    assert len(pids) == 4
    before = _cpu_seconds(pids)
    started = time.monotonic()
    while time.monotonic() - started < IDLE_WINDOW_S:
        threading.Event().wait(0.5)
    elapsed = time.monotonic() - started
    used = [b - a for a, b in zip(before, _cpu_seconds(pids), strict=True)]
    assert max(used) / elapsed < 0.1, f"CPU shares of idle stages: {[u / elapsed for u in used]}"
    body = {"input_ids": [400, 401, 402], "sampling_params": {"temperature": 0, "max_new_tokens": 2}}
    assert len(wave4.post("/generate", body)["output_ids"]) <= 2


def test_memory_stays_flat(wave2: Server) -> None:
    """After a warm-up, hundreds of requests leave every stage's memory where it was."""
    pids = list(wave2.scheduler_pids().values())

    def load(seed: int) -> None:
        def one(i: int) -> None:
            body = {
                "input_ids": [300 + (seed * 31 + i * 7 + k * k) % 700 for k in range(100)],
                "sampling_params": {"temperature": 0, "max_new_tokens": 4, "ignore_eos": True},
            }
            wave2.post("/generate", body)

        with ThreadPoolExecutor(8) as pool:
            list(pool.map(one, range(100)))

    def resident() -> int:
        return sum(psutil.Process(p).memory_info().rss for p in pids)

    load(0)
    load(1)
    before = resident()
    for seed in range(2, 6):
        load(seed)
    assert resident() - before < 32 * 2**20
    assert statistics(wave2)["held"] == NOTHING
