"""Start, idleness and the end of a server, with real processes."""

from __future__ import annotations

import os
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest
from conftest import NOTHING, start, statistics

from sglang_wavepp.launch.server import Server, ServerError

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


def _kill_and_check(server: Server, victim: int) -> None:
    os.kill(server.scheduler_pids()[victim], signal.SIGKILL)
    deadline = time.monotonic() + 30.0
    with pytest.raises(ServerError):
        while time.monotonic() < deadline:
            server.check()
            threading.Event().wait(0.05)
    assert f"the process of stage {victim} " in server.log_path.read_text()


def _changed_sglang(tmp_path: Path) -> dict[str, str]:
    """An environment in which an SGLang function looks different from the tested one."""
    (tmp_path / "sitecustomize.py").write_text(
        "try:\n"
        "    import sglang_wavepp.tested as t\n"
        "    table = next(iter(t.TESTED.values()))\n"
        "    table['sglang.srt.mem_cache.common.release_kv_cache'] = 'changed'\n"
        "except ImportError:\n"
        "    pass\n"
    )
    return {"PYTHONPATH": str(tmp_path)}


def test_untested_sglang_is_refused(model: Path, tmp_path: Path) -> None:
    log = tmp_path / "refused.log"
    with (
        pytest.raises(ServerError),
        start(model, log, pp_size=2, wavepp=True, env=_changed_sglang(tmp_path)),
    ):
        raise AssertionError("it must not serve")
    text = log.read_text()
    assert "differs from the tested one in sglang.srt.mem_cache.common.release_kv_cache" in text
    assert "Traceback" not in text


def test_untested_sglang_can_be_allowed(model: Path, tmp_path: Path) -> None:
    """The flag turns the refusal into a warning, and nothing else: a killed member still ends the server."""
    flags = ("--wavepp-allow-untested-sglang",)
    env = _changed_sglang(tmp_path)
    with start(model, tmp_path / "warned.log", pp_size=2, wavepp=True, env=env, flags=flags) as server:
        body = {"input_ids": [400, 401], "sampling_params": {"temperature": 0, "max_new_tokens": 3}}
        assert server.post("/generate", body)["meta_info"]["prompt_tokens"] == 2
        assert "serving all the same" in server.log_path.read_text()
        _kill_and_check(server, 1)


def test_memory_stays_flat(wave2: Server) -> None:
    """After a warm-up, hundreds of requests leave every stage's memory where it was."""
    pids = list(wave2.scheduler_pids().values())

    def load(seed: int) -> None:
        def one(i: int) -> None:
            body = {
                "input_ids": [300 + (seed * 31 + i * 7 + k * k) % 700 for k in range(400)],
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
