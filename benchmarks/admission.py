"""How long admission takes, WavePP beside stock SGLang, while waves of a given length run.

    python -m benchmarks.admission --json

One server after the other, same requests: for each `--pp`, stock SGLang and WavePP. Waves sleep instead of
computing (see `benchmarks.probe`), so the cores are free for what is measured. Decoding requests, as many as
stages, keep the pipeline full; prompts of up to `--longest` tokens arrive at random times, every other one
with a prefix that is cached. The clock starts when the tokenizer process sends the request to stage 0. It
stops for

* `wavepp` when stage 0 commits it: every stage has it, holds its prefix and has promised room for the rest;
* `stock` when the last stage's scheduler has it, before anything is matched, locked or allocated there.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import random
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from benchmarks.probe import Probe
from sglang_wavepp.launch.models import make_model
from sglang_wavepp.launch.server import Server, ServerError

SYSTEMS = ("stock", "wavepp")
BUDGET = 8192
"""Tokens of a prefill wave."""
POOL = 262_144
"""KV tokens of a stage."""
READY_S = 900.0
"""What a server may take to start on a busy machine."""
CACHED = 8
"""Prompts whose prefixes are cached from the start."""
WORDS = range(300, 1000)
"""Token ids."""


def prompts(rng: random.Random, cached: list[list[int]], longest: int) -> Iterator[list[int]]:
    """Prompts of up to `longest` tokens; every other one begins with a part of one of `cached`."""
    while True:
        yield rng.choices(WORDS, k=rng.randint(longest // 64, longest))
        known = rng.choice(cached)
        known = known[: rng.randint(len(known) // 4, len(known))]
        yield known + rng.choices(WORDS, k=rng.randint(1, longest - len(known)))


def percentile(values: list[float], percent: int) -> float:
    """Of at least two values, interpolated."""
    return statistics.quantiles(values, n=100, method="inclusive")[percent - 1]


def latencies(sent: dict[str, float], arrived: dict[str, float], prefix: str) -> list[float]:
    """ms from `sent` to `arrived` of the requests whose id begins with `prefix`. All of them have arrived."""
    return [(arrived[rid] - at) * 1e3 for rid, at in sent.items() if rid.startswith(prefix)]


@contextlib.contextmanager
def decoding(server: Server, requests: int) -> Iterator[None]:
    """Keep `requests` requests decoding."""
    stop = threading.Event()

    def decode(number: int) -> None:
        rng = random.Random(number)
        while not stop.is_set():
            with contextlib.suppress(ServerError):  # of one that was aborted at the end
                ask(server, rng.choices(WORDS, k=64), 8000)

    with ThreadPoolExecutor(requests) as pool:
        for number in range(requests):
            pool.submit(decode, number)
        try:
            yield
        finally:
            stop.set()
            server.post("/abort_request", {"abort_all": True})


def ask(server: Server, prompt: list[int], output: int, rid: str | None = None) -> None:
    """Have `output` tokens generated."""
    sampling = {"temperature": 0, "max_new_tokens": output, "ignore_eos": True}
    body = {"input_ids": prompt, "sampling_params": sampling} | ({"rid": rid} if rid else {})
    server.post("/generate", body, timeout=600.0)


def measure(system: str, pp: int, args: argparse.Namespace, model: Path) -> Iterator[dict[str, Any]]:
    """Start one server and measure it with each wave length."""
    rng = random.Random(1)
    cached = [rng.choices(WORDS, k=args.longest * 7 // 8) for _ in range(CACHED)]
    with tempfile.TemporaryDirectory() as name:
        probe = Probe(Path(name))
        options: dict[str, Any] = {
            "chunked_prefill_size": BUDGET,
            "max_total_tokens": POOL,
            "ready_timeout": READY_S,
        }
        log = Path(name) / "server.log"
        with Server(
            model, pp_size=pp, wavepp=system == "wavepp", env=probe.env, log_path=log, **options
        ) as server:
            for prompt in cached:
                ask(server, prompt, 1)
            for wave_ms in args.wave_ms:
                yield _cell(server, probe, system, pp, wave_ms, cached, args)


def _cell(
    server: Server,
    probe: Probe,
    system: str,
    pp: int,
    wave_ms: float,
    cached: list[list[int]],
    args: argparse.Namespace,
) -> dict[str, Any]:
    rng = random.Random(pp)
    cell = f"cell-{wave_ms:g}-"
    probe.set(wave_ms=wave_ms)
    with ThreadPoolExecutor(64) as pool, decoding(server, pp):
        time.sleep(2 * pp * wave_ms / 1e3 + 1.0)  # until the pipeline is full
        asked = []
        for number, prompt in enumerate(itertools.islice(prompts(rng, cached, args.longest), args.requests)):
            time.sleep(rng.expovariate(args.rate))
            asked.append(pool.submit(ask, server, prompt, 1, f"{cell}{number}"))
        for each in asked:
            each.result()
    sent = {rid: at for rid, at in probe.seen("sent")}
    end = "committed" if system == "wavepp" else "received"
    took = latencies(sent, {rid: at for rid, at, *_ in probe.seen(end)}, cell)
    return {
        "system": system,
        "pp": pp,
        "wave_ms": wave_ms,
        "p50_ms": round(percentile(took, 50), 2),
        "p99_ms": round(percentile(took, 99), 2),
        "requests": len(took),
    }


def main() -> None:
    """Parse, measure, print."""
    parser = argparse.ArgumentParser(description="Admission latency of WavePP beside stock SGLang's.")
    parser.add_argument("--systems", nargs="+", choices=SYSTEMS, default=list(SYSTEMS))
    parser.add_argument("--pp", type=int, nargs="+", default=[4, 8])
    parser.add_argument("--wave-ms", type=float, nargs="+", default=[50.0, 200.0])
    parser.add_argument("--requests", type=int, default=120, help="for each system, --pp and --wave-ms")
    parser.add_argument("--rate", type=float, default=2.0, help="requests a second, on average")
    parser.add_argument("--longest", type=int, default=8192, help="tokens of a prompt, at most")
    parser.add_argument("--json", action="store_true", help="print JSON")
    args = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory() as name:
        model = make_model(Path(name) / "model", layers=max(args.pp), hidden=32, context=16384, seed=1)
        for pp, system in itertools.product(args.pp, args.systems):
            for row in measure(system, pp, args, model):
                print(row, file=sys.stderr)
                rows.append(row)
    if args.json:
        print(json.dumps(rows))
    else:
        for row in rows:
            print(*(f"{key} {value:<8}" for key, value in row.items()))


if __name__ == "__main__":
    main()
