"""Decode-heavy traffic: WavePP beside stock SGLang, both with pipeline parallelism, on the CPU.

    python benchmarks/decode.py --json

Two servers over the same tiny model take turns with the same requests: short prompts, long outputs, all at
once. The one whose turn it is not stands still (SIGSTOP), since stock's idle loops would take its cores. The
model is so small that what is compared is the work of the schedulers and of the pipeline, not of kernels.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import signal
import statistics
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from sglang_wavepp.launch.models import make_model
from sglang_wavepp.launch.server import Server


@contextlib.contextmanager
def _awake(server: Server) -> Iterator[None]:
    os.killpg(server.pid, signal.SIGCONT)
    try:
        yield
    finally:
        os.killpg(server.pid, signal.SIGSTOP)


def _turn(server: Server, prompts: list[list[int]], output: int) -> tuple[float, list[list[int]]]:
    """Output tokens per second over all requests, and the answers."""

    def ask(prompt: list[int]) -> list[int]:
        sampling = {"temperature": 0, "max_new_tokens": output, "ignore_eos": True}
        body = {"input_ids": prompt, "sampling_params": sampling}
        ids: list[int] = server.post("/generate", body, timeout=600.0)["output_ids"]
        return ids

    with _awake(server), ThreadPoolExecutor(len(prompts)) as pool:
        started = time.monotonic()
        answers = list(pool.map(ask, prompts))
        elapsed = time.monotonic() - started
    return sum(map(len, answers)) / elapsed, answers


def measure(args: argparse.Namespace) -> dict[str, object]:
    """Run all rounds. The ratios are WavePP's tokens per second over stock's of the same round."""
    rng = random.Random(1)
    rates: dict[str, list[float]] = {"stock": [], "wavepp": []}
    with tempfile.TemporaryDirectory() as name, contextlib.ExitStack() as stack:
        model = Path(name) / "model"
        make_model(model, arch="llama", layers=8, hidden=64, context=16384, seed=1)
        servers = {}
        for system in rates:
            log = Path(name) / f"{system}.log"
            server = Server(model, pp_size=args.pp_size, wavepp=system == "wavepp", log_path=log)
            servers[system] = stack.enter_context(server)
            os.killpg(server.pid, signal.SIGSTOP)
        stack.callback(lambda: [os.killpg(s.pid, signal.SIGCONT) for s in servers.values()])
        for number in range(args.rounds + 1):
            prompts = [rng.choices(range(300, 1000), k=args.prompt) for _ in range(args.requests)]
            order = list(servers) if number % 2 else list(servers)[::-1]
            got = {system: _turn(servers[system], prompts, args.output) for system in order}
            if got["stock"][1] != got["wavepp"][1]:
                raise SystemExit("error: the two systems gave different answers")
            if number:  # the first one warms up
                for system, (rate, _) in got.items():
                    rates[system].append(rate)
    ratios = [w / s for w, s in zip(rates["wavepp"], rates["stock"], strict=True)]
    return {
        "pp": args.pp_size,
        "requests": args.requests,
        "output_tokens": args.output,
        "rounds": args.rounds,
        "wavepp_over_stock": {
            "median": round(statistics.median(ratios), 3),
            "min": round(min(ratios), 3),
            "max": round(max(ratios), 3),
        },
    }


def main() -> None:
    """Parse, measure, print."""
    parser = argparse.ArgumentParser(description="Decode throughput of WavePP over stock SGLang's.")
    parser.add_argument("--pp-size", type=int, default=2)
    parser.add_argument("--requests", type=int, default=32, help="at a time")
    parser.add_argument("--prompt", type=int, default=64, help="tokens of a prompt")
    parser.add_argument("--output", type=int, default=128, help="tokens of an output")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--json", action="store_true", help="print JSON")
    args = parser.parse_args()
    result = measure(args)
    if args.json:
        print(json.dumps(result))
    else:
        ratio = result["wavepp_over_stock"]
        print(f"output tokens/s of WavePP over stock SGLang, PP{args.pp_size}, {args.rounds} rounds: {ratio}")


if __name__ == "__main__":
    main()
