"""A light client: one process, a thread and a connection for each request under way, bodies made beforehand.

Inside the measured window it sends bytes, and notes when events of the answer arrive; JSON is parsed later.
"""

from __future__ import annotations

import dataclasses
import http.client
import json
import queue
import threading
import time
from collections.abc import Sequence
from typing import Any

from benchmarks.cells import Prepared


class LoadError(Exception):
    """A request failed or took too long. The text says which, and why."""


@dataclasses.dataclass(frozen=True, slots=True)
class Answer:
    """When a request was sent and its tokens arrived, on the monotonic clock; what its last event says."""

    request: Prepared
    sent: float
    arrivals: tuple[float, ...]
    """Of each event: the first token or tokens, and so on."""
    output: int
    """Tokens."""
    cached: int
    """Tokens whose KV the server had, as it says."""

    @property
    def first(self) -> float:
        """Seconds until the first token arrived: the prefill was complete."""
        return self.arrivals[0] - self.sent

    @property
    def gaps(self) -> list[float]:
        """Seconds between events."""
        return [b - a for a, b in zip(self.arrivals, self.arrivals[1:], strict=False)]


def run(
    host: str, port: int, jobs: Sequence[Sequence[Prepared]], concurrency: int, timeout: float
) -> list[Answer]:
    """Have all requests answered; in the order of `jobs`. `concurrency` jobs run at a time, each in turn.

    Raises LoadError as soon as a request fails, or when the whole takes longer than `timeout` seconds.
    """
    waiting: queue.SimpleQueue[tuple[int, Sequence[Prepared]]] = queue.SimpleQueue()
    for job in enumerate(jobs):
        waiting.put(job)
    done: queue.SimpleQueue[tuple[int, int, Any] | LoadError] = queue.SimpleQueue()
    stopped = threading.Event()
    began = time.monotonic()

    def work() -> None:
        connection = http.client.HTTPConnection(host, port, timeout=timeout)
        try:
            while not stopped.is_set():
                try:
                    number, job = waiting.get_nowait()
                except queue.Empty:
                    return
                for turn, request in enumerate(job):
                    delay = max(request.pause, began + request.at - time.monotonic())
                    if delay > 0:
                        connection.close()  # the server would close it, too, sooner or later
                        if stopped.wait(delay):
                            return
                    done.put((number, turn, (request, *_send(connection, request))))
        except (OSError, http.client.HTTPException, LoadError) as error:
            done.put(LoadError(f"request {request.rid}: {error or type(error).__name__}"))
        finally:
            connection.close()

    for _ in range(min(concurrency, len(jobs))):
        threading.Thread(target=work, daemon=True, name="load").start()
    total = sum(map(len, jobs))
    found: list[tuple[int, int, Any]] = []
    try:
        while len(found) < total:
            try:
                item = done.get(timeout=max(0.0, began + timeout - time.monotonic()))
            except queue.Empty:
                text = f"{len(found)} of {total} requests were answered within {timeout:.0f} s"
                raise LoadError(text) from None
            if isinstance(item, LoadError):
                raise item
            found.append(item)
    finally:
        stopped.set()
    return [_answer(*raw) for _, _, raw in sorted(found, key=lambda item: item[:2])]


def _send(
    connection: http.client.HTTPConnection, request: Prepared
) -> tuple[float, list[float], list[bytes]]:
    sent = time.monotonic()
    connection.request("POST", "/generate", request.body, {"Content-Type": "application/json"})
    answer = connection.getresponse()
    if answer.status != 200:
        raise LoadError(f"the server answered {answer.status}: {answer.read(500)!r}")
    arrivals, events = [], []
    while line := answer.readline():
        if line.startswith(b"data:") and not line.startswith(b"data: [DONE]"):
            arrivals.append(time.monotonic())
            events.append(line)
    return sent, arrivals, events


def _answer(request: Prepared, sent: float, arrivals: list[float], events: list[bytes]) -> Answer:
    if not events:
        raise LoadError(f"request {request.rid}: the stream was empty")
    last = json.loads(events[-1][len(b"data:") :])
    if "error" in last or last["meta_info"]["finish_reason"] is None:
        raise LoadError(f"request {request.rid}: no complete answer: {str(last)[:300]}")
    meta = last["meta_info"]
    if meta["finish_reason"]["type"] != "length":
        raise LoadError(f"request {request.rid}: ended with {meta['finish_reason']}")
    return Answer(request, sent, tuple(arrivals), meta["completion_tokens"], meta["cached_tokens"])
