"""A mixed load for minutes: sessions of several turns, bursts, clients that go away, aborts, flushes, pauses.

The suite runs it for three minutes. By itself, on its own servers:

    python tests/soak.py --minutes 30 --pp-size 4 --pools 6000,4000,5000,3500
"""

from __future__ import annotations

import argparse
import contextlib
import json
import random
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import psutil
import requests
from conftest import eventually, start, statistics
from test_oracle import VOCABULARY, generate

from sglang_wavepp.launch.models import make_model
from sglang_wavepp.launch.server import Server, ServerError

SESSIONS, TURNS, CLIENTS = 16, 3, 8
GROWTH = 48 * 2**20
"""Bytes that all stages together may grow by after the first third of the time."""


class Turn(NamedTuple):
    prompt: list[int]
    output: list[int]


def sessions(stock: Server, seed: int = 31) -> list[list[Turn]]:
    """Sessions of some turns over four system prompts, with plain SGLang's answers."""
    rng = random.Random(seed)
    system = [rng.choices(VOCABULARY, k=k) for k in (700, 400, 150, 0)]

    def one(number: int) -> list[Turn]:
        mine = random.Random(f"{seed} {number}")
        prompt = system[number % len(system)] + mine.choices(VOCABULARY, k=mine.randrange(5, 500))
        turns = []
        for _ in range(TURNS):
            turns.append(Turn(prompt, generate(stock, prompt, mine.randrange(2, 40)).output))
            prompt = prompt + turns[-1].output + mine.choices(VOCABULARY, k=mine.randrange(1, 100))
        return turns

    with ThreadPoolExecutor(CLIENTS) as pool:
        return list(pool.map(one, range(SESSIONS)))


class Soak:
    """Runs the load. `counts` says what happened; a wrong answer or an unexpected error raises in `run`."""

    def __init__(self, server: Server, expected: list[list[Turn]], seed: int) -> None:
        self.server, self.expected, self.seed = server, expected, seed
        self.counts: Counter[str] = Counter()
        self._deadline = 0.0
        self._failed = threading.Event()

    def run(self, seconds: float) -> None:
        """Load for so long; then everything must have ended, nothing be held, and the memory be flat."""
        started = time.monotonic()
        self._deadline = started + seconds
        jobs: list[Callable[[random.Random], None]] = [self._session] * CLIENTS
        jobs += [self._burst, self._leaver, self._operator]
        with ThreadPoolExecutor(len(jobs)) as pool:
            running = [pool.submit(self._repeat, job, f"{self.seed} {i}") for i, job in enumerate(jobs)]
            self._failed.wait(seconds / 3)
            before = self._memory()
            for job in running:
                job.result()
        eventually(lambda: statistics(self.server)["running"] == statistics(self.server)["waiting"] == 0)
        held = statistics(self.server)["held"]
        assert not any(held.values()), f"something is still held: {held}"
        grown = self._memory() - before
        self.counts["grown_bytes"] = grown
        assert grown < GROWTH, f"the stages grew by {grown / 2**20:.0f} MiB"

    def _repeat(self, job: Callable[[random.Random], None], seed: str) -> None:
        rng = random.Random(seed)
        try:
            while time.monotonic() < self._deadline and not self._failed.is_set():
                job(rng)
        except BaseException:
            self._failed.set()
            raise

    def _memory(self) -> int:
        return sum(psutil.Process(p).memory_info().rss for p in self.server.scheduler_pids().values())

    def _ask(self, turn: Turn) -> None:
        got = generate(self.server, turn.prompt, len(turn.output))
        assert got.output == turn.output, f"a prompt of {len(turn.prompt)} tokens got another answer"
        self.counts["answers"] += 1
        self.counts["cached"] += got.cached

    def _session(self, rng: random.Random) -> None:
        for turn in rng.choice(self.expected)[: rng.randrange(1, TURNS + 1)]:
            self._ask(turn)

    def _burst(self, rng: random.Random) -> None:
        """Many first turns at once; often with a common system prompt that is not cached."""
        with ThreadPoolExecutor(6) as pool:
            list(pool.map(self._ask, [session[0] for session in rng.sample(self.expected, 6)]))
        self.counts["bursts"] += 1
        self._pause(rng, 2.0)

    def _leaver(self, rng: random.Random) -> None:
        """A client that goes away in the middle, or aborts."""
        turn = rng.choice(self.expected)[-1]
        rid = f"leaver-{rng.random()}"
        body = {
            "rid": rid,
            "input_ids": turn.prompt,
            "stream": True,
            "sampling_params": {"temperature": 0, "max_new_tokens": 600, "ignore_eos": True},
        }
        with requests.post(f"{self.server.url}/generate", json=body, stream=True, timeout=120) as answer:
            lines = answer.iter_lines()
            aborts = rng.random() < 0.5
            # The answer begins before SGLang knows the request; an abort has to come after that.
            for _ in range(rng.randrange(aborts, 6)):
                next(lines, None)
            if aborts:
                self.server.post("/abort_request", {"rid": rid})
                assert any(b'"abort"' in line for line in lines)
        self.counts["left"] += 1

    def _operator(self, rng: random.Random) -> None:
        """Flushes, pauses, looks."""
        what = rng.choice(("flush", "pause", "retract", "look", "health"))
        if what == "flush":
            # Refused while requests run: then it is for the next time.
            with contextlib.suppress(ServerError):
                self.server.post("/flush_cache?timeout=0.5")
                self.counts["flushed"] += 1
        elif what in ("pause", "retract"):
            self.server.post("/pause_generation", {"mode": "in_place" if what == "pause" else "retract"})
            self._pause(rng, 0.2)
            if what == "retract":
                self.server.post("/flush_cache")
                self.counts["flushed"] += 1
            self.server.post("/continue_generation", {})
        elif what == "look":
            assert statistics(self.server)["running"] >= 0
        else:
            self.server.get("/health", timeout=60)
        self.counts[what] += 1
        self._pause(rng, 3.0)

    def _pause(self, rng: random.Random, seconds: float) -> None:
        self._failed.wait(rng.uniform(0, seconds))


def main() -> None:
    """Soak a server of its own."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--pp-size", type=int, default=4)
    parser.add_argument("--pools", default="6000,4000,5000,3500", help="KV tokens of each stage")
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        model = directory / "model"
        make_model(model, arch="llama", layers=8, hidden=64, context=16384, seed=1)
        with start(model, directory / "stock.log", flags=("--sleep-on-idle",)) as stock:
            expected = sessions(stock)
        flags = ("--wavepp-pool-tokens", args.pools, "--wavepp-decode-reserve", "64")
        log = Path(tempfile.gettempdir()) / "wavepp-soak.log"
        with start(model, log, pp_size=args.pp_size, wavepp=True, flags=flags) as server:
            soak = Soak(server, expected, args.seed)
            try:
                soak.run(args.minutes * 60)
            finally:
                print(json.dumps({**soak.counts, "server": statistics(server)}, indent=1))


if __name__ == "__main__":
    main()
