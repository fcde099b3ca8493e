"""How long LOOP waits for the GIL and for the guard because of WAVE, at several switch intervals.

    python -m benchmarks.gil --json

A real WavePP server whose waves sleep (see `benchmarks.probe`) in slices of a millisecond: after each of them
LOOP needs the GIL to go on, as it does after every call that gives it up. Long prompts arrive all the time,
so the WAVE threads receive, build, hash, offer, hint and hold. The switch intervals take turns in one server.
In the rows, `what` is

* `beside wave`: how late LOOP went on after slices that ended while the stage's WAVE thread was at work;
* `alone`: the same for all other slices: what the machine alone makes of it;
* `guard`: how long LOOP waited for the stage's guard.

`p99_net_ms` and `max_net_ms` leave out for how long LOOP could have run but had no core (from Linux's
schedstat): on a busy machine that is most of it.
"""

from __future__ import annotations

import argparse
import json
import random
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.admission import READY_S, WORDS, ask, decoding, percentile
from benchmarks.probe import Probe
from sglang_wavepp.launch.models import make_model
from sglang_wavepp.launch.server import Server

CONTEXT = 262_144
WHAT = ("alone", "beside wave", "guard")


def summary(delays: Iterable[list[Any]]) -> list[dict[str, Any]]:
    """Rows from what the probe has seen as `delays`: stage, switch interval and three lists of µs."""
    cells: dict[tuple[int, float, str], list[tuple[int, int]]] = defaultdict(list)
    for stage, switch_ms, alone, beside, guard in delays:
        for what, samples in zip(WHAT, (alone, beside, [(each, 0) for each in guard]), strict=True):
            cells[stage, round(switch_ms, 6), what] += [(late, queued) for late, queued in samples]
    rows = []
    for (stage, switch_ms, what), samples in sorted(cells.items()):
        if len(samples) < 2:
            continue
        late = [us / 1e3 for us, _ in samples]
        row = {
            "stage": stage,
            "switch_ms": switch_ms,
            "what": what,
            "samples": len(late),
            "p50_ms": round(percentile(late, 50), 3),
            "p99_ms": round(percentile(late, 99), 3),
            "max_ms": round(max(late), 3),
        }
        if what != "guard":
            net = [max(0, us - queued) / 1e3 for us, queued in samples]
            row |= {"p99_net_ms": round(percentile(net, 99), 3), "max_net_ms": round(max(net), 3)}
        rows.append(row)
    return rows


def measure(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Start a server, let the switch intervals take turns under load, and sum up."""
    rng = random.Random(1)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model = make_model(folder / "model", layers=args.pp, hidden=32, context=CONTEXT, seed=1)
        (folder / "probe").mkdir()
        probe = Probe(folder / "probe", delays=True)
        options: dict[str, Any] = {
            "chunked_prefill_size": args.longest,
            "context_length": CONTEXT,
            "max_total_tokens": 6 * args.longest,
            "ready_timeout": READY_S,
            "env": probe.env,
            "log_path": folder / "server.log",
        }
        with Server(model, pp_size=args.pp, wavepp=True, **options) as server:
            cached = rng.choices(WORDS, k=args.shortest)
            ask(server, cached, 1)
            with ThreadPoolExecutor(args.clients) as pool, decoding(server, args.pp):
                for _ in range(args.rounds):
                    for switch_ms in args.switch_ms:
                        probe.set(wave_ms=args.wave_ms, switch_ms=switch_ms)
                        until = time.monotonic() + args.seconds
                        seeds = [rng.random() for _ in range(args.clients)]
                        list(pool.map(partial(_send, server, cached, args, until), seeds))
        return summary(probe.seen("delays"))


def _send(server: Server, cached: list[int], args: argparse.Namespace, until: float, seed: float) -> None:
    """One prompt after the other until then; half of them begin with a cached prefix."""
    rng = random.Random(seed)
    while time.monotonic() < until:
        length = rng.randint(args.shortest, args.longest)
        known = cached if rng.random() < 0.5 else []
        ask(server, known + rng.choices(WORDS, k=length - len(known)), 1)


def main() -> None:
    """Parse, measure, print."""
    parser = argparse.ArgumentParser(description="LOOP's delays by WAVE, at several switch intervals.")
    parser.add_argument("--pp", type=int, default=2)
    parser.add_argument("--switch-ms", type=float, nargs="+", default=[5.0, 0.5, 0.05])
    parser.add_argument("--wave-ms", type=float, default=100.0)
    parser.add_argument("--shortest", type=int, default=65_536, help="tokens of a prompt, at least")
    parser.add_argument("--longest", type=int, default=200_000, help="tokens of a prompt, at most")
    parser.add_argument("--clients", type=int, default=3, help="prompts at a time")
    parser.add_argument("--seconds", type=float, default=20.0, help="for each switch interval and round")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", action="store_true", help="print JSON")
    args = parser.parse_args()
    rows = measure(args)
    if args.json:
        print(json.dumps(rows))
    else:
        for row in rows:
            print(*(f"{key} {value:<12}" for key, value in row.items()))


if __name__ == "__main__":
    main()
