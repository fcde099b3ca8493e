"""What ends a stock pipeline within a second, all at once on one server, and its answers stay right.

The stages' pools differ, each stage at random reuses less than the others or less than it could, and a
foreign thread splits and reorders the tree of each.
"""

from __future__ import annotations

import os
import random
import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest
from conftest import NOTHING, POOLS, eventually, statistics
from soak import Soak, sessions
from test_oracle import VOCABULARY, Answer, generate, outputs, replay

from sglang_wavepp.launch.server import Server, ServerError


def test_the_smallest_pool_is_what_users_see(unequal: Server) -> None:
    info = unequal.get("/server_info")
    state = info["internal_states"][0]
    assert state["wavepp"]["kv_tokens"] == list(POOLS)
    assert info["max_total_num_tokens"] == state["memory_usage"]["token_capacity"] == min(POOLS)
    assert unequal.get("/v1/loads")["loads"][0]["max_total_num_tokens"] == min(POOLS)
    with pytest.raises(ServerError) as refused:
        generate(unequal, [400] * 3500, 1)
    assert refused.value.status == 400
    # As plain SGLang clips: the pool without a page, the prompt and one token.
    body = {"input_ids": [400] * 2900, "sampling_params": {"temperature": 0, "max_new_tokens": 500}}
    body["sampling_params"]["ignore_eos"] = True
    assert unequal.post("/generate", body)["meta_info"]["completion_tokens"] == min(POOLS) - 2900 - 2


def test_answers_stay_right(unequal: Server, replayed: dict[str, list[list[Answer]]]) -> None:
    want = outputs(replayed["cold"])
    for concurrency in (1, 4):
        again = replay(unequal, concurrency)
        assert outputs(again) == want
        assert any(a.cached for session in again for a in session)
    held = statistics(unequal)
    assert held["held"] == NOTHING
    # A shortened boundary costs one more round.
    assert held["rounds_per_request"] > 2.2


def test_long_outputs_in_a_tiny_pool(unequal: Server, stock: Server) -> None:
    """Prompts and outputs of together more than a pool: all finish, the retracted with the same answers."""
    rng = random.Random(12)
    prompts = [rng.choices(VOCABULARY, k=rng.randrange(50, 400)) for _ in range(10)]
    with ThreadPoolExecutor(10) as pool:
        got = list(pool.map(lambda p: generate(unequal, p, 200).output, prompts))
    with ThreadPoolExecutor(10) as pool:
        assert got == list(pool.map(lambda p: generate(stock, p, 200).output, prompts))
    after = statistics(unequal)
    assert after["retracted"] > 0
    assert after["held"] == NOTHING


def test_a_storm_of_cancellations(unequal: Server, stock: Server, unequal_decisions: Path) -> None:
    """A minute of everything; three of ten requests are cancelled, at every point of their way."""
    before = statistics(unequal)
    soak = Soak(unequal, sessions(stock), unequal_decisions, seed=1)
    soak.run(60.0)
    after = statistics(unequal)
    assert soak.counts["answers"] > 25 and soak.counts["flushed"] > 0
    assert soak.counts["cancelled"] > 0.3 * soak.counts["answers"]
    assert soak.counts["cold tokens"] < 0.1 * soak.counts["prompt tokens"]
    assert all(soak.cancelled_at[point] for point in ("waiting", "in its prompt", "decoding"))
    assert after["retracted"] > before["retracted"]
    assert after["reused_tokens"] > before["reused_tokens"]


def test_sigterm_under_load(unequal: Server) -> None:
    """The server ends by itself, with code 0: the last test of this server."""
    prompts = [[400 + i] * 500 for i in range(4)]
    with ThreadPoolExecutor(4) as pool:
        asked = [pool.submit(generate, unequal, p, 20) for p in prompts]
        eventually(lambda: statistics(unequal)["running"] > 0)
        pids = unequal.scheduler_pids().values()
        os.kill(unequal.pid, signal.SIGTERM)
        how = os.WEXITED | os.WNOHANG | os.WNOWAIT
        eventually(lambda: os.waitid(os.P_PID, unequal.pid, how) is not None)
        ended = os.waitid(os.P_PID, unequal.pid, how)
        assert ended is not None and (ended.si_code, ended.si_status) == (os.CLD_EXITED, 0)
        assert not any(map(psutil.pid_exists, pids))
        for future in asked:
            assert future.exception() is not None or len(future.result().output) == 20
