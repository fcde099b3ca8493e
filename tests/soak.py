"""A mixed load for minutes: sessions over common prefixes, bursts, cancellations, flushes, pauses.

Three of ten requests are cancelled, by an abort or by a client that goes away, at random points of their way;
nine of ten prompt tokens are shared with other prompts. The suite runs it for two minutes. By itself, on its
own servers:

    python tests/soak.py --minutes 10 --pp-size 4 --pools 4000,3000,3500,3200
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import random
import tempfile
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import psutil
import requests
from conftest import eventually, start, statistics
from test_oracle import VOCABULARY, generate

from sglang_wavepp.launch.models import make_model
from sglang_wavepp.launch.server import Server, ServerError
from sglang_wavepp.messages import Commit, Decision, Decode, Drop, Output, Prefill, decode_decision
from sglang_wavepp.record import read

SESSIONS, TURNS, CLIENTS = 16, 3, 8
SYSTEM = (1100, 800)
"""Tokens of the prompts that sessions begin with."""
CANCELLED = 0.3
"""Share of the requests that are cancelled."""
LONG = 300
"""Tokens that a request which will be cancelled asks for."""
COLD = 0.08
"""Share of the prompt tokens that nothing else begins with."""
GROWTH = 24 * 2**20
"""Bytes that a stage may grow by on average after the first third of the time."""


class Turn(NamedTuple):
    prompt: list[int]
    output: list[int]


def sessions(stock: Server, seed: int = 31) -> list[list[Turn]]:
    """Sessions of some turns over two system prompts, with plain SGLang's answers."""
    rng = random.Random(seed)
    system = [rng.choices(VOCABULARY, k=k) for k in SYSTEM]

    def one(number: int) -> list[Turn]:
        mine = random.Random(f"{seed} {number}")
        prompt = system[number % len(system)] + mine.choices(VOCABULARY, k=mine.randrange(5, 100))
        turns = []
        for _ in range(TURNS):
            turns.append(Turn(prompt, generate(stock, prompt, mine.randrange(2, 40)).output))
            prompt = prompt + turns[-1].output + mine.choices(VOCABULARY, k=mine.randrange(1, 50))
        return turns

    with ThreadPoolExecutor(CLIENTS) as pool:
        made = list(pool.map(one, range(SESSIONS)))
    assert shared(turn.prompt for session in made for turn in session) > 0.9
    return made


def shared(prompts: Iterable[list[int]]) -> float:
    """Which part of the prompts' tokens an earlier one begins with, too."""
    seen: set[tuple[int, ...]] = set()
    tokens = new = 0
    for prompt in prompts:
        beginnings = {tuple(prompt[: i + 1]) for i in range(len(prompt))}
        tokens += len(prompt)
        new += len(beginnings - seen)
        seen |= beginnings
    return 1 - new / tokens


def cancelled_at(log: Iterable[Decision]) -> Counter[str]:
    """How far the requests were that clients cancelled, from a stage's decisions.

    Those that were cancelled before they were admitted have a number and no COMMIT.
    """
    state: dict[int, str] = {}
    cancelled: Counter[str] = Counter()
    for d in log:
        if isinstance(d, Commit):
            state[d.seq] = "admitted"
        elif isinstance(d, Prefill):
            state |= {span.seq: "in its prompt" for span in d.spans}
        elif isinstance(d, Decode):
            state |= dict.fromkeys(d.seqs, "decoding")
        elif isinstance(d, Output):
            state |= dict.fromkeys(d.finished, "ended")
        elif isinstance(d, Drop):
            cancelled.update(state[seq] for seq in d.seqs if not d.retract)
            state |= dict.fromkeys(d.seqs, "retracted" if d.retract else "ended")
    cancelled["waiting"] = max(state) + 1 - len(state)
    cancelled["retracted"] = list(state.values()).count("retracted")
    return cancelled


class Soak:
    """Runs the load. `counts` says what happened; a wrong answer or an unexpected error raises in `run`.

    The server has just been started, and writes its decision logs into the folder `decisions`.
    """

    def __init__(self, server: Server, expected: list[list[Turn]], decisions: Path, seed: int) -> None:
        self.server, self.expected, self.decisions, self.seed = server, expected, decisions, seed
        self.counts: Counter[str] = Counter()
        self.cancelled_at: Counter[str] = Counter()
        self._deadline = 0.0
        self._failed = threading.Event()

    def run(self, seconds: float) -> None:
        """Load for so long; then nothing may be left of it, and all stages must have decided the same."""
        started = time.monotonic()
        self._deadline = started + seconds
        jobs: list[Callable[[random.Random], None]] = [self._session] * CLIENTS
        jobs += [self._burst, self._cold, self._operator]
        with ThreadPoolExecutor(len(jobs)) as pool:
            running = [pool.submit(self._repeat, job, f"{self.seed} {i}") for i, job in enumerate(jobs)]
            self._failed.wait(seconds / 3)
            before = self._memory()
            for job in running:
                job.result()
        self._is_empty()
        grown = self._memory() - before
        self.counts["grown_bytes"] = grown
        assert grown < GROWTH * self.server.pp_size, f"the stages grew by {grown / 2**20:.0f} MiB"
        self._compare_logs()

    def _is_empty(self) -> None:
        """Nothing runs, waits or is held, and all KV is back.

        A stage that becomes idle compares its free and cached tokens with its pool, by SGLang's own strict
        check, and ends the server if some are missing. One last prompt takes all but 16 of the smallest pool.
        """

        def ended() -> bool:
            now = statistics(self.server)
            return now["running"] == now["waiting"] == 0

        def nothing_held() -> None:
            held = statistics(self.server)["held"]
            assert not any(held.values()), f"something is still held: {held}"

        eventually(ended, "the end of all requests", bound=300.0)
        nothing_held()
        generate(self.server, [VOCABULARY[0]] * (min(statistics(self.server)["kv_tokens"]) - 16), 1)
        eventually(ended)
        nothing_held()
        self.server.post("/flush_cache")

    def _compare_logs(self) -> None:
        logs = sorted(self.decisions.iterdir())
        assert len(logs) == self.server.pp_size
        eventually(lambda: len({log.stat().st_size for log in logs}) == 1, "equal length of the logs")
        entries = list(read(logs[0])[1])
        assert all(list(read(log)[1]) == entries for log in logs[1:]), "the stages' decision logs differ"
        self.counts["decisions"] = len(entries)
        self.cancelled_at = cancelled_at(map(decode_decision, entries))

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

    def _ask(self, rng: random.Random, turn: Turn) -> None:
        """A turn; or something like it, which is cancelled."""
        if rng.random() < CANCELLED:
            points = ("at once", "a little later", "after some tokens", "after the last")
            self._cancel(rng.choice(points), rng, turn)
            return
        self.counts["prompt tokens"] += len(turn.prompt)
        got = generate(self.server, turn.prompt, len(turn.output))
        assert got.output == turn.output, f"a prompt of {len(turn.prompt)} tokens got another answer"
        self.counts["answers"] += 1

    def _cold(self, rng: random.Random) -> None:
        """A prompt of its own, longer than all others, which is cancelled as soon as it is admitted."""
        if self.counts["cold tokens"] < COLD * self.counts["prompt tokens"]:
            self.counts["cold prompts"] += 1
            length = max(SYSTEM) + 500 + self.counts["cold prompts"]
            self.counts["cold tokens"] += length
            self._cancel("admitted", rng, Turn(rng.choices(VOCABULARY, k=length), []))
        self._pause(rng, 2.0)

    def _admitted(self, length: int) -> bool:
        """Has stage 0 logged the COMMIT of a prompt of this length?"""
        log = read(min(self.decisions.iterdir()))[1]
        return any(isinstance(d, Commit) and d.length == length for d in map(decode_decision, log))

    def _cancel(self, point: str, rng: random.Random, turn: Turn) -> None:
        """A client that aborts its request, or goes away, at some point of it."""
        rid = f"cancelled-{rng.random()}"
        self.counts["prompt tokens"] += len(turn.prompt)
        new = len(turn.output) if point == "after the last" else LONG
        sampling = {"temperature": 0, "max_new_tokens": new, "ignore_eos": True}
        body = {"rid": rid, "input_ids": turn.prompt, "stream": True, "sampling_params": sampling}
        seen: deque[bytes] = deque(maxlen=1)
        with requests.post(f"{self.server.url}/generate", json=body, stream=True, timeout=120) as answer:
            # The answer has begun, its first line comes with the first token.
            lines = (line for line in answer.iter_lines() if line.startswith(b"data: {"))
            if point == "a little later":
                self._pause(rng, 1.0)
            elif point == "admitted":
                eventually(lambda: self._admitted(len(turn.prompt)), "admission", bound=300.0)
            elif point == "after some tokens":
                seen.extend(itertools.islice(lines, rng.randrange(1, 20)))
            elif point == "after the last":
                seen.extend(lines)
            way = rng.choice(("aborted", "left"))
            if way == "aborted":
                self.server.post("/abort_request", {"rid": rid})
                for line in lines:
                    seen.append(line)
                    # SGLang ignores an abort of a request that it does not know yet.
                    self.server.post("/abort_request", {"rid": rid})
        self.counts["cancelled"] += 1
        self.counts[f"{way} {point}"] += 1
        if seen:
            got = json.loads(seen[0].removeprefix(b"data: "))
            output, end = got["output_ids"], got["meta_info"]["finish_reason"]
            assert output[: len(turn.output)] == turn.output[: len(output)]
            if point == "after the last":
                assert end["type"] == "length"
            elif way == "aborted" and end["type"] != "abort":
                # While it is paused, SGLang's front keeps new requests back and loses their aborts.
                assert point != "after some tokens" and len(output) == LONG, f"{point}: {end}"
                self.counts["aborts lost to a pause"] += 1

    def _session(self, rng: random.Random) -> None:
        for turn in rng.choice(self.expected)[: rng.randrange(1, TURNS + 1)]:
            self._ask(rng, turn)

    def _burst(self, rng: random.Random) -> None:
        """Many first turns at once; often with a common system prompt that is not cached."""
        with ThreadPoolExecutor(6) as pool:
            first = [session[0] for session in rng.sample(self.expected, 6)]
            list(pool.map(self._ask, [random.Random(rng.random()) for _ in first], first))
        self.counts["bursts"] += 1
        self._pause(rng, 2.0)

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
        self._pause(rng, 5.0)

    def _pause(self, rng: random.Random, seconds: float) -> None:
        self._failed.wait(rng.uniform(0, seconds))


def main() -> None:
    """Soak a server of its own."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--pp-size", type=int, default=4)
    parser.add_argument("--pools", default="4000,3000,3500,3200", help="KV tokens of each stage")
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        model = directory / "model"
        make_model(model, arch="llama", layers=4, hidden=64, context=16384, seed=1)
        with start(model, directory / "stock.log", flags=("--sleep-on-idle",)) as stock:
            expected = sessions(stock)
        decisions = directory / "decisions"
        decisions.mkdir()
        flags = ("--wavepp-pool-tokens", args.pools, "--wavepp-decode-reserve", "64")
        flags += ("--wavepp-decision-log", str(decisions))
        log = Path(tempfile.gettempdir()) / "wavepp-soak.log"
        with start(model, log, pp_size=args.pp_size, wavepp=True, flags=flags) as server:
            soak = Soak(server, expected, decisions, args.seed)
            try:
                soak.run(args.minutes * 60)
            finally:
                counted = {"cancelled at": soak.cancelled_at, "server": statistics(server)}
                print(json.dumps({**soak.counts, **counted}, indent=1))


if __name__ == "__main__":
    main()
