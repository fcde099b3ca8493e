"""Replay of agent sessions against a server: prompts from block ids, sessions in parallel, turns in order."""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import json
import math
import queue
import threading
import time
from collections.abc import Callable, Sequence
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np
import requests

from sglang_wavepp.errors import WavePPError

LOWEST_ID = 16
"""Token ids below this are not used: special tokens come first in a vocabulary."""


class ReplayError(WavePPError):
    """A request failed or took too long. The text names session and turn."""


@dataclasses.dataclass(frozen=True, slots=True)
class Turn:
    """One request of a session. Lengths are tokens."""

    prompt: tuple[int, ...]
    kept: int
    """Leading tokens that are those of the session's previous prompt; 0 in its first turn."""
    output: int


@dataclasses.dataclass(frozen=True, slots=True)
class Session:
    name: str
    turns: tuple[Turn, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class Result:
    """What a server answered to one turn, and when. Times are seconds since the request was sent."""

    session: str
    turn: int
    prompt_tokens: int
    cached_tokens: int
    """Prompt tokens whose KV the server had, as it says."""
    output_ids: tuple[int, ...]
    ttft: float
    """Until the first token arrived."""
    latency: float
    """Until the last token arrived."""


def load_sessions(path: Path | None = None, *, vocab_size: int, limit: int | None = None) -> list[Session]:
    """The first `limit` sessions of a file, by default of the sample that comes with the package.

    Token ids are in [LOWEST_ID, vocab_size) and depend on the file and on `vocab_size` alone. Raises
    ReplayError if the file holds fewer sessions or the vocabulary is too small.
    """
    if vocab_size <= LOWEST_ID + 1:
        raise ReplayError(f"a vocabulary of {vocab_size} tokens is too small for a replay")
    source = path or resources.files("sglang_wavepp.launch").joinpath("data/agent_sessions.jsonl")
    lines = source.read_text().splitlines()
    if limit is not None and not 1 <= limit <= len(lines):
        raise ReplayError(f"{limit} sessions were asked for, {source.name} holds {len(lines)}")
    return [_session(json.loads(line), vocab_size) for line in lines[:limit]]


def _session(record: dict[str, Any], vocab_size: int) -> Session:
    size, shared = record["bs"], record["sys"] // record["bs"]
    turns: list[Turn] = []
    ids: list[int] = []
    for _, length, output, keep, runs in record["reqs"]:
        ids = ids[:keep]
        for start, count in zip(runs[::2], runs[1::2], strict=True):
            ids += range(start, start + count)
        tokens: list[int] = []
        for block in ids:
            scope = "shared" if block < shared else record["id"]
            tokens += block_tokens(f"{scope}/{block}", size, vocab_size)
        # The previous prompt's last block may be partial, and then it is complete here.
        kept = min(keep * size, len(turns[-1].prompt)) if turns else 0
        turns.append(Turn(tuple(tokens[:length]), kept, output))
    return Session(record["id"], tuple(turns))


def block_tokens(name: str, size: int, vocab_size: int) -> list[int]:
    """The token ids that a block of this name stands for, in [LOWEST_ID, vocab_size)."""
    raw = hashlib.shake_128(name.encode()).digest(4 * size)
    values = np.frombuffer(raw, "<u4") % (vocab_size - LOWEST_ID) + LOWEST_ID
    return [int(v) for v in values]


def replay(
    url: str,
    sessions: Sequence[Session],
    *,
    concurrency: int,
    max_new_tokens: int = 16,
    request_timeout: float = 120.0,
    timeout: float = 600.0,
    progress: Callable[[Result], None] | None = None,
) -> list[Result]:
    """Send all turns, greedily decoded, to the server at `url`; results in the order of the sessions.

    `concurrency` sessions run at a time, each one sends its next turn when the previous one is answered. A
    turn asks for its own number of output tokens, but for at most `max_new_tokens`. `progress` is called in
    this thread, once for each result. Raises ReplayError as soon as a request fails or takes longer than
    `request_timeout` seconds, or when the whole takes longer than `timeout` seconds; requests in flight are
    then left to their own time limit, in daemon threads.
    """
    waiting: queue.SimpleQueue[tuple[int, Session]] = queue.SimpleQueue()
    for job in enumerate(sessions):
        waiting.put(job)
    done: queue.SimpleQueue[tuple[int, Result] | ReplayError] = queue.SimpleQueue()
    stopped = threading.Event()

    def work() -> None:
        with requests.Session() as http:
            http.trust_env = False  # no proxy: the server is named by its address
            while not stopped.is_set():
                try:
                    position, session = waiting.get_nowait()
                except queue.Empty:
                    return
                for number, turn in enumerate(session.turns):
                    try:
                        answer = _generate(http, url, turn, max_new_tokens, request_timeout)
                    except (ReplayError, requests.RequestException, ValueError, KeyError) as error:
                        text = f"session {session.name}, turn {number}: {error or type(error).__name__}"
                        done.put(ReplayError(text))
                        return
                    done.put((position, Result(session.name, number, len(turn.prompt), *answer)))
                    if stopped.is_set():
                        return

    for _ in range(min(concurrency, len(sessions))):
        threading.Thread(target=work, daemon=True, name="wavepp-replay").start()
    deadline = time.monotonic() + timeout
    results: list[tuple[int, Result]] = []
    total = sum(len(s.turns) for s in sessions)
    try:
        while len(results) < total:
            try:
                item = done.get(timeout=max(0.0, deadline - time.monotonic()))
            except queue.Empty:
                raise ReplayError(
                    f"the replay took longer than {timeout:.0f} s; {len(results)} of {total} turns answered"
                ) from None
            if isinstance(item, ReplayError):
                raise item
            results.append(item)
            if progress:
                progress(item[1])
    finally:
        stopped.set()
    return [result for _, result in sorted(results, key=lambda r: (r[0], r[1].turn))]


def _generate(
    http: requests.Session, url: str, turn: Turn, max_new_tokens: int, timeout: float
) -> tuple[int, tuple[int, ...], float, float]:
    """One streamed request: cached tokens, output ids, time to the first token, latency."""
    body: Any = {
        "input_ids": turn.prompt,
        "sampling_params": {
            "temperature": 0,
            "max_new_tokens": min(turn.output, max_new_tokens),
            "ignore_eos": True,
        },
        "stream": True,
    }
    began = time.monotonic()
    ttft: float | None = None
    last: dict[str, Any] = {}
    with http.post(f"{url}/generate", json=body, stream=True, timeout=timeout) as answer:
        if answer.status_code != 200:
            raise ReplayError(f"the server answered {answer.status_code}: {answer.text[:500]}")
        for line in answer.iter_lines():
            now = time.monotonic() - began
            if now > timeout:
                raise ReplayError(f"no complete answer within {timeout:.0f} s")
            if not line.startswith(b"data:") or line.endswith(b"[DONE]"):
                continue
            event = json.loads(line[len(b"data:") :])
            if "error" in event:
                raise ReplayError(f"the server answered an error: {event['error']}")
            if ttft is None and event["output_ids"]:
                ttft = now
            last = event
    if ttft is None or last["meta_info"]["finish_reason"] is None:
        raise ReplayError("the stream ended before the answer did")
    meta = last["meta_info"]
    if meta["finish_reason"]["type"] != "length" or len(last["output_ids"]) != meta["completion_tokens"]:
        raise ReplayError(f"not a full answer: {len(last['output_ids'])} tokens, {meta['finish_reason']}")
    return meta["cached_tokens"], tuple(last["output_ids"]), ttft, time.monotonic() - began


def percentile(values: Sequence[float], share: float) -> float:
    """The smallest value that at least `share` (0..1) of the values do not exceed (nearest rank)."""
    if not values:
        raise ValueError("no values")
    return sorted(values)[max(0, math.ceil(share * len(values)) - 1)]


def summary(results: Sequence[Result]) -> dict[str, Any]:
    """Counts, reuse (cached / prompt tokens), and p50 and p99 of TTFT and latency in milliseconds."""
    prompt = sum(r.prompt_tokens for r in results)
    cached = sum(r.cached_tokens for r in results)

    def milliseconds(values: list[float]) -> dict[str, float]:
        return {f"p{p}": round(1000 * percentile(values, p / 100), 1) for p in (50, 99)}

    return {
        "requests": len(results),
        "prompt_tokens": prompt,
        "cached_tokens": cached,
        "reuse": round(cached / prompt, 4),
        "output_tokens": sum(len(r.output_ids) for r in results),
        "ttft_ms": milliseconds([r.ttft for r in results]),
        "latency_ms": milliseconds([r.latency for r in results]),
    }


def differences(results: Sequence[Result], expected: Sequence[Result]) -> list[str]:
    """One line for each turn whose output ids are not those of `expected`; both in the order of `replay`."""
    lines = []
    for one, other in zip(results, expected, strict=True):
        if (one.session, one.turn) != (other.session, other.turn):
            raise ValueError("the results are not of the same replay")
        if one.output_ids != other.output_ids:
            pairs = itertools.zip_longest(one.output_ids, other.output_ids)
            at = next(i for i, (a, b) in enumerate(pairs) if a != b)
            lines.append(
                f"session {one.session}, turn {one.turn}: token {at} of the answer differs: "
                f"{list(one.output_ids[at:][:4])}... instead of {list(other.output_ids[at:][:4])}..."
            )
    return lines
