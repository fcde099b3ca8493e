"""What tests share: servers, since each takes half a minute to start, and SGLang in this process."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

os.environ.setdefault("SGLANG_PLATFORM", "wavepp-cpu")

from sglang_wavepp.launch.models import make_model
from sglang_wavepp.launch.server import Server

POOL = 10_000
"""KV tokens of a stage: fewer than the context, so that a prompt can be too long for either."""
BUDGET = 256
"""Tokens of a prefill wave: most prompts need several."""
READY_S = 480.0
"""What a server may take to start: half a minute, on a machine that does nothing else."""
QUEUED = 8
"""Waiting requests at most, on `wave4`."""
INTERVAL = 2
"""Decode waves between prefill waves, on `wave4`."""


@pytest.fixture(scope="module")
def sglang_with_plugins() -> Iterator[None]:
    """SGLang on the CPU platform, with this plugin loaded. It changes the environment: undo that."""
    before = dict(os.environ)
    os.environ["SGLANG_PLATFORM"] = "wavepp-cpu"
    from sglang.srt.plugins import load_plugins

    load_plugins()
    yield
    os.environ.clear()
    os.environ.update(before)


@pytest.fixture
def own_log_handlers() -> Iterator[None]:
    """SGLang's parser replaces the root handlers by one on the stderr of this test."""
    root = logging.getLogger()
    before, level = root.handlers[:], root.level
    yield
    root.handlers[:] = before
    root.setLevel(level)


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small Llama in float32."""
    path = tmp_path_factory.mktemp("models") / "llama"
    make_model(path, arch="llama", layers=8, hidden=64, context=16384, seed=1)
    return path


def start(model: Path, log: Path, *, flags: tuple[str, ...] = (), **options: object) -> Server:
    """A server with the pool and the budget of the tests, not yet started."""
    return Server(
        model,
        max_total_tokens=POOL,
        context_length=16384,
        chunked_prefill_size=BUDGET,
        log_path=log,
        ready_timeout=READY_S,
        flags=("--enable-cache-report", "--enable-custom-logit-processor", *flags),
        **options,  # type: ignore[arg-type]
    )


def statistics(server: Server) -> dict[str, Any]:
    """A WavePP server's counters, and what its stage 0 holds now."""
    wavepp: dict[str, Any] = server.get("/server_info")["internal_states"][0]["wavepp"]
    return wavepp


NOTHING = {"leases": 0, "escrow_tokens": 0, "escrow_rows": 0}
"""What a server holds, of `statistics`, when no request is under way."""


def eventually(condition: Callable[[], bool], what: str = "it", bound: float = 60.0) -> None:
    """Wait until something is so, for at most `bound` seconds."""
    deadline = time.monotonic() + bound
    while not condition():
        assert time.monotonic() < deadline, f"{what} did not happen in {bound:.0f} s"
        threading.Event().wait(0.02)


@pytest.fixture(scope="session")
def stock(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Plain SGLang on one stage: the oracle."""
    log = tmp_path_factory.mktemp("logs") / "stock.log"
    with start(model, log, flags=("--sleep-on-idle",)) as server:
        yield server


@pytest.fixture(scope="session")
def decisions(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the stages of `wave2` write their decision logs."""
    return tmp_path_factory.mktemp("decisions")


@pytest.fixture(scope="session")
def wave2(model: Path, decisions: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """WavePP on two stages. The small reserve makes every longer output ask for more room."""
    log = tmp_path_factory.mktemp("logs") / "wave2.log"
    flags = ("--wavepp-decode-reserve", "64", "--wavepp-decision-log", str(decisions))
    with start(model, log, pp_size=2, wavepp=True, flags=flags) as server:
        yield server


@pytest.fixture(scope="session")
def wave4(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """WavePP on four stages, KV in pages of 16 tokens, with SGLang's metrics, priorities, decode interval.

    WavePP's cache is chosen by its name, which makes no difference.
    """
    log = tmp_path_factory.mktemp("logs") / "wave4.log"
    priority = ("--enable-priority-scheduling", "--disable-priority-preemption")
    limits = ("--max-queued-requests", str(QUEUED), "--prefill-decode-interval", str(INTERVAL))
    pools = ("--wavepp-pool-tokens", "auto")
    flags = ("--enable-metrics", "--radix-cache-backend", "wavepp", *priority, *limits, *pools)
    with start(model, log, pp_size=4, wavepp=True, page_size=16, flags=flags) as server:
        yield server


@pytest.fixture(scope="session")
def replayed(stock: Server) -> dict[str, Any]:
    """Plain SGLang's answers to the sessions of `test_oracle`, cold and then with everything cached."""
    from test_oracle import replay

    stock.post("/flush_cache")
    return {"cold": replay(stock, 1), "warm": replay(stock, 1)}
