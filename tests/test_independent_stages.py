"""What ends a stock pipeline within a second, all at once on one server, and its answers stay right.

The stages' pools differ, each stage at random reuses less than the others or less than it could, and a
foreign thread splits and reorders the tree of each.
"""

from __future__ import annotations

import os
import random
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest
from conftest import NOTHING, eventually, start, statistics
from soak import Soak, sessions
from test_oracle import VOCABULARY, Answer, generate, outputs, replay

from sglang_wavepp.launch.server import Server, ServerError

POOLS = [4000, 3000, 3500, 3200]

DISTURB = """
import os, random, threading
try:
    from sglang_wavepp.member import Member
    from sglang_wavepp.radix.lease import LeaseTable
except ImportError:
    Member = None

if Member is not None:
    rng = random.Random(os.getpid())
    find, construct = LeaseTable.find, Member.__init__
    recent = []

    def shorter(table, owner, prefix, limit):
        recent[:] = recent[-20:] + [prefix]
        if rng.random() < 0.3:
            limit = rng.randrange(limit + 1)
        return find(table, owner, prefix, limit)

    def hammer(tree, guard):
        while True:
            threading.Event().wait(0.002)
            if not recent:
                continue
            prefix = rng.choice(recent)
            tree.hint(prefix)
            found = tree.match(prefix, rng.randrange(prefix.max_boundary + 1))
            with guard():
                tree.unlock(tree.lock(prefix, found).lock)

    def disturbed(member, tree, guard, send):
        construct(member, tree, guard, send)
        threading.Thread(target=hammer, args=(tree, guard), daemon=True).start()

    LeaseTable.find, Member.__init__ = shorter, disturbed
"""
"""Put into every process of the server. The foreign thread may lock only under the guard: whoever holds a
lock without being in the ledger takes room that was promised."""


@pytest.fixture(scope="module")
def decisions(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the stages write their decision logs."""
    return tmp_path_factory.mktemp("unequal-decisions")


@pytest.fixture(scope="module")
def unequal(model: Path, decisions: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    directory = tmp_path_factory.mktemp("disturb")
    (directory / "sitecustomize.py").write_text(DISTURB)
    flags = ("--wavepp-pool-tokens", ",".join(map(str, POOLS)), "--wavepp-decode-reserve", "64")
    flags += ("--wavepp-decision-log", str(decisions))
    env = {"PYTHONPATH": str(directory)}
    with start(model, directory / "log", pp_size=len(POOLS), wavepp=True, flags=flags, env=env) as server:
        yield server


def test_the_smallest_pool_is_what_users_see(unequal: Server) -> None:
    info = unequal.get("/server_info")
    state = info["internal_states"][0]
    assert state["wavepp"]["kv_tokens"] == POOLS
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
    """Outputs of together twice the smallest pool: all finish, the retracted ones with the same answers."""
    rng = random.Random(12)
    prompts = [rng.choices(VOCABULARY, k=rng.randrange(50, 400)) for _ in range(16)]
    with ThreadPoolExecutor(16) as pool:
        got = list(pool.map(lambda p: generate(unequal, p, 300).output, prompts))
    with ThreadPoolExecutor(16) as pool:
        assert got == list(pool.map(lambda p: generate(stock, p, 300).output, prompts))
    after = statistics(unequal)
    assert after["retracted"] > 0
    assert after["held"] == NOTHING


def test_a_storm_of_cancellations(unequal: Server, stock: Server, decisions: Path) -> None:
    """Two minutes of everything; three of ten requests are cancelled, at every point of their way."""
    before = statistics(unequal)
    soak = Soak(unequal, sessions(stock), decisions, seed=1)
    soak.run(120.0)
    after = statistics(unequal)
    assert soak.counts["answers"] > 100 and soak.counts["flushed"] > 0
    assert soak.counts["cancelled"] > 0.2 * soak.counts["answers"]
    assert all(soak.cancelled_at[point] for point in ("waiting", "admitted", "in its prompt", "decoding"))
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
