"""What tests share: servers, since each takes half a minute to start, and SGLang in this process."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from adapters import make_adapters

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
POOLS = (4000, 3000, 3500, 3200)
"""KV tokens of the stages of `unequal`."""


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
    make_model(path, arch="llama", layers=4, hidden=64, context=16384, seed=1)
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


class Shared:
    """The servers that several tests use. They start one after the other, also while tests run."""

    def __init__(self, servers: dict[str, Server]) -> None:
        self._servers = servers
        self._pool = ThreadPoolExecutor(1)
        self._started: dict[str, Future[None]] = {}

    def start(self, name: str) -> Future[None]:
        """Start a server in the background, once."""
        if name not in self._started:
            self._started[name] = self._pool.submit(self._servers[name].start)
        return self._started[name]

    def ready(self, name: str) -> Server:
        """The server of this name, when it serves."""
        self.start(name).result()
        return self._servers[name]

    def stop(self) -> None:
        """Stop all, those that still start, too."""
        self._pool.shutdown(wait=False, cancel_futures=True)
        for server in self._servers.values():
            server.stop()
        self._pool.shutdown()


def pytest_collection_modifyitems(items: list[Any]) -> None:
    """Tests that need no server come first: meanwhile the shared ones start."""
    items.sort(key=lambda item: "model" in item.fixturenames)


@pytest.fixture(scope="session")
def decisions(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the stages of `wave2` write their decision logs."""
    return tmp_path_factory.mktemp("decisions")


@pytest.fixture(scope="session")
def unequal_decisions(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the stages of `unequal` write their decision logs."""
    return tmp_path_factory.mktemp("unequal-decisions")


@pytest.fixture(scope="session")
def adapters(model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The LoRA adapters of `wave4`."""
    return make_adapters(model, tmp_path_factory.mktemp("adapters"))


@pytest.fixture(scope="session")
def shared(
    model: Path,
    adapters: dict[str, Path],
    decisions: Path,
    unequal_decisions: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Shared]:
    logs = tmp_path_factory.mktemp("logs")

    def stock() -> Server:
        return start(model, logs / "stock.log", flags=("--sleep-on-idle",))

    def wave2() -> Server:
        flags = ("--wavepp-decode-reserve", "64", "--wavepp-decision-log", str(decisions))
        return start(model, logs / "wave2.log", pp_size=2, wavepp=True, flags=flags)

    def wave4() -> Server:
        priority = ("--enable-priority-scheduling", "--disable-priority-preemption")
        limits = ("--max-queued-requests", str(QUEUED), "--prefill-decode-interval", str(INTERVAL))
        pools = ("--wavepp-pool-tokens", "auto")
        flags = ("--enable-metrics", "--radix-cache-backend", "wavepp", *priority, *limits, *pools)
        flags += ("--enable-lora", "--max-loras-per-batch", str(1 + len(adapters)), "--lora-paths")
        flags += tuple(f"{name}={path}" for name, path in adapters.items())
        return start(model, logs / "wave4.log", pp_size=4, wavepp=True, page_size=16, flags=flags)

    def unequal() -> Server:
        flags = ("--wavepp-pool-tokens", ",".join(map(str, POOLS)), "--wavepp-decode-reserve", "64")
        flags += ("--wavepp-decision-log", str(unequal_decisions))
        env = {"PYTHONPATH": str(Path(__file__).with_name("disturbed"))}
        log = logs / "unequal.log"
        return start(model, log, pp_size=len(POOLS), wavepp=True, flags=flags, env=env)

    # Made before they start: tests change the environment meanwhile.
    servers = Shared({make.__name__: make() for make in (stock, wave2, wave4, unequal)})
    yield servers
    servers.stop()


@pytest.fixture(scope="session", autouse=True)
def _started(request: pytest.FixtureRequest) -> None:
    """Start the shared servers that the selected tests name, in the order in which they come."""
    named = {name for item in request.session.items for name in item.fixturenames}
    for name in ("stock", "wave2", "wave4", "unequal"):
        if name in named:
            request.getfixturevalue("shared").start(name)


@pytest.fixture(scope="session")
def stock(shared: Shared) -> Server:
    """Plain SGLang on one stage: the oracle."""
    return shared.ready("stock")


@pytest.fixture(scope="session")
def wave2(shared: Shared) -> Server:
    """WavePP on two stages. The small reserve makes every longer output ask for more room."""
    return shared.ready("wave2")


@pytest.fixture(scope="session")
def wave4(shared: Shared) -> Server:
    """WavePP on four stages, KV in pages of 16 tokens, with LoRA, metrics, priorities, decode interval.

    WavePP's cache is chosen by its name, which makes no difference.
    """
    return shared.ready("wave4")


@pytest.fixture(scope="session")
def unequal(shared: Shared) -> Server:
    """WavePP on four stages whose pools differ, and which are disturbed: see `disturbed/sitecustomize.py`."""
    return shared.ready("unequal")


@pytest.fixture(scope="session")
def replayed(stock: Server) -> dict[str, Any]:
    """Plain SGLang's answers to the sessions of `test_oracle`, cold and then with everything cached."""
    from test_oracle import replay

    stock.post("/flush_cache")
    return {"cold": replay(stock, 1), "warm": replay(stock, 1)}
