"""The cells of the grid: a workload of `mpu/data/cells.toml` at one concurrency, and its requests as bytes.

    suffix-4k:8,32      a workload at two concurrencies
    mixed-16k+32:8      the same prompts with 32 output tokens each

A cell is a closed loop: `concurrency` requests are under way until all are sent. A request with cached tokens
has a prefix that was seeded before the clock starts. Each has a prefix of its own up to `prefixes` of them
(as many as requests, two for each one under way, or 64, whichever is least); later ones take turns with
the same prefixes. Suffixes are always new, and differ in their first token, so that nothing but the prefix
can be reused.
"""

from __future__ import annotations

import dataclasses
import re
import tomllib
from collections.abc import Sequence
from typing import Any

import numpy as np

from sglang_wavepp.launch.replay import LOWEST_ID
from sglang_wavepp.mpu.profile import DATA

WORKLOADS: dict[str, Any] = tomllib.loads((DATA / "cells.toml").read_text())["workloads"]
QUICK = ("suffix-4k:8,32", "short-reuse:32", "mixed-16k:8", "mixed-16k+32:8")
MOST_PREFIXES = 64
LOWEST, HIGHEST = LOWEST_ID, 1000
"""Token ids are in [LOWEST, HIGHEST)."""
_NAME = re.compile(r"(?P<workload>[\w.-]+?)(?:\+(?P<output>\d+))?(?::(?P<concurrency>\d+(?:,\d+)*))?")
_WORDS = [str(word) for word in range(HIGHEST)]


@dataclasses.dataclass(frozen=True, slots=True)
class Cell:
    """A workload at a concurrency."""

    workload: str
    concurrency: int
    output: int = 1
    """Tokens that each request asks for."""

    @property
    def name(self) -> str:
        output = f"+{self.output}" if self.output > 1 else ""
        return f"{self.workload}{output}:{self.concurrency}"

    @property
    def of(self) -> list[dict[str, int]]:
        """`tokens` and `cached` of its requests, again and again."""
        return [{"cached": 0, **request} for request in WORKLOADS[self.workload]["of"]]

    @property
    def longest(self) -> int:
        """Tokens of its longest request, output included."""
        return max(request["tokens"] for request in self.of) + self.output

    def count(self, requests: int | None = None) -> int:
        """How many requests it has: as many as asked for, but all kinds of the workload."""
        return max(requests or max(4 * self.concurrency, 32), len(self.of))

    def prefixes(self, requests: int | None = None) -> int:
        """How many prefixes are seeded at most."""
        most = min(self.count(requests), max(2 * self.concurrency, 8), MOST_PREFIXES)
        return most - most % len(self.of)  # taken in turns, each prefix is of one kind of request

    def pool(self, requests: int | None = None) -> int:
        """KV tokens of a stage with which no seeded prefix is evicted before its turn, and nothing waits."""
        of, prefixes = self.of, self.prefixes(requests)
        seeded = sum(of[i % len(of)]["cached"] for i in range(prefixes))
        new = sum(request["tokens"] - request["cached"] + self.output for request in of) / len(of)
        kept = min(self.count(requests), prefixes + self.concurrency) if seeded else 1.25 * self.concurrency
        return seeded + round(kept * new) + self.longest


@dataclasses.dataclass(frozen=True, slots=True)
class Prepared:
    """A request ready to be sent."""

    rid: str
    body: bytes
    tokens: int
    cached: int
    """Tokens that have to be reused."""
    pause: float = 0.0
    """Seconds to wait before it is sent, after the answer to the one before it."""
    at: float = 0.0
    """Seconds after the start before which it is not sent."""


def parse_cells(names: Sequence[str], concurrency: Sequence[int] | None = None) -> list[Cell]:
    """The cells that `names` stand for.

    Without a concurrency in the name it is `concurrency`, and without that all of the workload. Raises
    ValueError, with a line for the user.
    """
    found = []
    for name in names:
        match = _NAME.fullmatch(name)
        if match is None or match["workload"] not in WORKLOADS:
            known = ", ".join(WORKLOADS)
            raise ValueError(f"{name!r} is no cell: WORKLOAD[+OUTPUT][:C,C], workloads are {known}")
        given = [int(c) for c in match["concurrency"].split(",")] if match["concurrency"] else concurrency
        workload, output = match["workload"], int(match["output"] or 1)
        for c in given or WORKLOADS[workload]["concurrency"]:
            if c < 1 or output < 1:
                raise ValueError(f"{name!r}: concurrency and output are at least 1")
            found.append(Cell(workload, c, output))
    return list(dict.fromkeys(found))


def tokens(draw: np.random.Generator, count: int, first: int | None = None) -> str:
    """`count` token ids as they stand in a JSON list; `first` is the first one's number among all ids."""
    ids = draw.integers(LOWEST, HIGHEST, count)
    if first is not None and count:
        ids[0] = LOWEST + first % (HIGHEST - LOWEST)
    return ",".join([_WORDS[i] for i in ids.tolist()])


def body(rid: str, ids: Sequence[str], output: int) -> bytes:
    """The JSON of a /generate request over the joined parts of `tokens`."""
    sampling = f'{{"temperature":0,"max_new_tokens":{output},"ignore_eos":true}}'
    joined = ",".join(part for part in ids if part)
    return f'{{"rid":"{rid}","input_ids":[{joined}],"sampling_params":{sampling},"stream":true}}'.encode()


def prepare(cell: Cell, requests: int | None = None, tag: str = "") -> tuple[list[Prepared], list[Prepared]]:
    """What seeds the caches, and the requests of the cell in their order. `tag` makes request ids unique."""
    of = cell.of
    draw = np.random.default_rng(1)
    limit = cell.prefixes(requests)
    seeds: list[Prepared] = []
    parts: list[str] = []
    for number in range(limit):
        cached = of[number % len(of)]["cached"]
        parts.append(tokens(draw, cached, number))
        if cached:
            rid = f"{tag}seed-{number}"
            seeds.append(Prepared(rid, body(rid, parts[-1:], 1), cached, 0))
    measured = []
    for number in range(cell.count(requests)):
        kind = of[number % len(of)]
        suffix = tokens(draw, kind["tokens"] - kind["cached"], limit + number)
        rid = f"{tag}{cell.name}-{number}"
        content = body(rid, [parts[number % limit], suffix], cell.output)
        measured.append(Prepared(rid, content, kind["tokens"], kind["cached"]))
    return seeds, measured
