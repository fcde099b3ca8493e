"""Is what was cached still there when it is asked for? Arrivals at a rate; the pool is too small for all.

Sessions with a seeded prefix of 117,952 tokens ask in random order for 131,072; every other time a cold
prompt of 65,536 tokens comes besides. The pool has room for `ROOM` of the sessions' prompts. Sessions, their
lengths and the pool are assumed; the rates are quoted (0.5 to 1.0 a second). A reusable token is one of a
seeded prefix, also where it has been evicted since.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from benchmarks import report
from benchmarks.cells import Prepared, body, tokens
from benchmarks.load import Answer
from benchmarks.measure import Bench, summary

RATES = (0.5, 0.75, 1.0)
SESSIONS = 16
PROMPT, PREFIX, COLD = 131_072, 117_952, 65_536
ROOM = 0.75
POOL = int(ROOM * SESSIONS * PROMPT)
GOOD = 0.8
"""A hit is good that reuses this share of the reusable tokens, or more."""


def offered(rate: float, requests: int, dilation: float) -> tuple[list[Prepared], list[Prepared]]:
    """What seeds the caches, and `requests` of sessions with cold ones between them, by arrival."""
    words, draw = np.random.default_rng(1), random.Random(1)
    prefixes = [tokens(words, PREFIX, number) for number in range(SESSIONS)]
    seeds = [
        Prepared(f"seed-{rate:g}-{number}", body(f"seed-{rate:g}-{number}", [prefix], 1), PREFIX, 0)
        for number, prefix in enumerate(prefixes)
    ]
    at, measured = 0.0, []
    for number in range(requests):
        at += dilation * draw.expovariate(rate)
        rid = f"retention-{rate:g}-{number}"
        ids = [prefixes[draw.randrange(SESSIONS)], tokens(words, PROMPT - PREFIX, SESSIONS + 2 * number)]
        measured.append(Prepared(rid, body(rid, ids, 1), PROMPT, PREFIX, at=at))
        if number % 2:
            ids = [tokens(words, COLD, SESSIONS + 2 * number + 1)]
            measured.append(Prepared(f"{rid}-cold", body(f"{rid}-cold", ids, 1), COLD, 0, at=at))
    return seeds, measured


def hits(answers: Sequence[Answer]) -> dict[str, Any]:
    """Of the requests with reusable tokens: the share of these that was reused; the share of good hits."""
    warm = [answer for answer in answers if answer.request.cached]
    shares = [min(1.0, answer.cached / answer.request.cached) for answer in warm]
    return {
        "reused_of_reusable": sum(shares) / len(shares),
        "good_hits": sum(share >= GOOD for share in shares) / len(shares),
    }


def measure(bench: Bench, rate: float, requests: int) -> dict[str, Any]:
    """One rate of the retention test."""
    seeds, measured = offered(rate, requests, bench.setting.dilation)
    bench.flush()
    bench.seed(seeds)
    observed = bench.load([[request] for request in measured], len(measured), longest=measured[-1].at)
    waves = bench.waves({request.rid for request in measured})
    return {**summary(bench.setting, observed, waves, reused=False), **hits(observed.answers)}


def text(rows: Sequence[Mapping[str, Any]]) -> str:
    """What was still there."""
    names = ("reused_of_reusable", "good_hits", "first_p50_s")
    found = {name: report.medians(rows, name) for name in names}
    lines = [
        (cell, name, *(f"{found[n][name, cell]:.3f}" for n in names)) for name, cell in found["good_hits"]
    ]
    return report.table(("cell", "system", *names), sorted(lines))
