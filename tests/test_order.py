"""In which order requests and waves come: priorities, and decode waves between prefill waves."""

from __future__ import annotations

import random
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from conftest import INTERVAL, POOL, QUEUED, eventually, statistics
from test_oracle import VOCABULARY

from sglang_wavepp.launch.server import Server, ServerError

MORE_THAN_HALF = POOL * 51 // 100


def _ask(server: Server, length: int, new: int, **fields: Any) -> Any:
    rng = random.Random(length)
    sampling = {"temperature": 0, "max_new_tokens": new, "ignore_eos": True}
    body = {"input_ids": rng.choices(VOCABULARY, k=length), "sampling_params": sampling, **fields}
    return server.post("/generate", body)


def test_higher_priorities_go_first(wave4: Server) -> None:
    """One request fills the pool; of those that wait for it, one fits at a time.

    The queue is full then: one more takes the place of the lowest, or is refused if it is the lowest itself.
    """
    wave4.post("/flush_cache")
    priorities = [1, 5, 3, 2, 4, 8, 6, 7]
    assert len(priorities) == QUEUED
    order: list[int] = []

    def wait(priority: int) -> None:
        _ask(wave4, MORE_THAN_HALF + priority, 1, priority=priority)
        order.append(priority)

    with ThreadPoolExecutor(2 + len(priorities)) as pool:
        first = pool.submit(_ask, wave4, MORE_THAN_HALF, 3000, rid="first", priority=0)
        eventually(lambda: statistics(wave4)["running"] == 1)
        waiting = {priority: pool.submit(wait, priority) for priority in priorities}
        eventually(lambda: statistics(wave4)["waiting"] == QUEUED)
        for extra, loser in ((9, 1), (0, 0)):
            waiting[extra] = pool.submit(wait, extra)
            refused = waiting.pop(loser).exception(60)
            assert isinstance(refused, ServerError) and refused.status == 503
        assert statistics(wave4)["waiting"] == QUEUED
        wave4.post("/abort_request", {"rid": "first"})
        assert first.result(60)["meta_info"]["finish_reason"]["type"] == "abort"
        for future in waiting.values():
            future.result(120)
    assert order == [9, 8, 7, 6, 5, 4, 3, 2]


def test_short_prompts_pass_a_long_one(wave2: Server, stock: Server) -> None:
    """The long one comes first, but all wait until another request gives its room back."""
    wave2.post("/flush_cache")
    lengths = [MORE_THAN_HALF, 40, 41, 42]
    order: list[int] = []

    def ask(length: int) -> Any:
        answer = _ask(wave2, length, 2)["output_ids"]
        order.append(length)
        return answer

    with ThreadPoolExecutor(1 + len(lengths)) as pool:
        first = pool.submit(_ask, wave2, MORE_THAN_HALF + 1, 3000, rid="first")
        eventually(lambda: statistics(wave2)["running"] == 1)
        answers = []
        for count, length in enumerate(lengths, 1):
            answers.append(pool.submit(ask, length))
            eventually(lambda c=count: statistics(wave2)["waiting"] == c)  # type: ignore[misc]
        wave2.post("/abort_request", {"rid": "first"})
        assert first.result(60)["meta_info"]["finish_reason"]["type"] == "abort"
        found = [answer.result(120) for answer in answers]
    assert sorted(order[:3]) == lengths[1:] and order[3] == lengths[0]
    assert found == [_ask(stock, length, 2)["output_ids"] for length in lengths]


def test_decode_waves_between_prefill_waves(wave4: Server) -> None:
    """While somebody decodes, the waves of a long prompt leave room for as many decode waves as asked for."""
    wave4.post("/flush_cache")
    with ThreadPoolExecutor(1) as pool:
        decoding = pool.submit(_ask, wave4, 20, 2000, rid="decoding")
        eventually(lambda: statistics(wave4)["decode_waves"] > 3 and statistics(wave4)["running"] == 1)
        before = statistics(wave4)
        _ask(wave4, 5000, 1)
        after = statistics(wave4)
        assert not decoding.done()
        wave4.post("/abort_request", {"rid": "decoding"})
        decoding.result(60)
    prefill = after["prefill_waves"] - before["prefill_waves"]
    assert prefill >= 5000 // 256
    assert after["decode_waves"] - before["decode_waves"] >= INTERVAL * (prefill - 1)
