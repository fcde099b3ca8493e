"""Greedy answers of WavePP equal plain SGLang's on one stage, cold and with reuse, alone and under load."""

from __future__ import annotations

import random
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import pytest
from conftest import BUDGET, NOTHING, eventually, statistics

from sglang_wavepp.launch.server import Server

SESSIONS, TURNS = 8, 4
VOCABULARY = range(300, 1000)


class Answer(NamedTuple):
    output: list[int]
    cached: int
    prompt: int


def _first_prompts() -> list[list[int]]:
    """Prompts of 3 to 1500 tokens; five of eight share a prefix of 611 tokens, some in part."""
    rng = random.Random(11)
    shared = rng.choices(VOCABULARY, k=611)
    heads = [shared, shared, shared[:600], shared[:257], shared[:33], [], [], []]
    tails = [1, 90, 350, 40, 7, 3, 700, 1500]
    return [head + rng.choices(VOCABULARY, k=tail) for head, tail in zip(heads, tails, strict=True)]


def _greedy(new: int) -> dict[str, object]:
    return {"temperature": 0, "max_new_tokens": new, "ignore_eos": True}


def generate(server: Server, tokens: list[int], new: int) -> Answer:
    got = server.post("/generate", {"input_ids": tokens, "sampling_params": _greedy(new)})
    return Answer(got["output_ids"], got["meta_info"]["cached_tokens"], len(tokens))


def _session(server: Server, number: int, prompt: list[int]) -> list[Answer]:
    rng = random.Random(number)
    answers = []
    for _ in range(TURNS):
        answers.append(generate(server, prompt, rng.randrange(1, 18)))
        prompt = prompt + answers[-1].output + rng.choices(VOCABULARY, k=rng.randrange(1, 120))
    return answers


def replay(server: Server, concurrency: int) -> list[list[Answer]]:
    with ThreadPoolExecutor(concurrency) as pool:
        return list(pool.map(lambda x: _session(server, *x), enumerate(_first_prompts())))


def outputs(replayed: list[list[Answer]]) -> list[list[list[int]]]:
    return [[answer.output for answer in session] for session in replayed]


@pytest.mark.parametrize("name", ["wave2", "wave4"])
def test_answers_equal_plain_sglang(
    name: str, request: pytest.FixtureRequest, replayed: dict[str, list[list[Answer]]]
) -> None:
    server: Server = request.getfixturevalue(name)
    page = server.get("/server_info")["page_size"]
    want = outputs(replayed["cold"])
    assert len({tuple(o) for session in want for o in session}) > SESSIONS * TURNS // 2

    before = statistics(server)
    server.post("/flush_cache")
    cold = replay(server, 1)
    assert outputs(cold) == want
    for mine, stock in zip(cold, replayed["cold"], strict=True):
        assert [a.cached for a in mine] == [a.cached // page * page for a in stock]

    warm = replay(server, 1)
    assert outputs(warm) == want
    for mine, stock in zip(warm, replayed["warm"], strict=True):
        assert [a.cached for a in mine] == [a.cached // page * page for a in stock]
    assert all(a.cached > 0 for session in warm for a in session if a.prompt > 2 * page)

    server.post("/flush_cache")
    assert outputs(replay(server, 8)) == want
    assert outputs(replay(server, 8)) == want

    after = statistics(server)
    admitted = after["admitted"] - before["admitted"]
    assert admitted == 4 * SESSIONS * TURNS
    # A hint and a hold; a second hint where waves finished meanwhile; some wait for others' prefixes.
    assert 2 <= (after["rounds"] - before["rounds"]) / admitted < 4
    assert after["prefill_waves"] > before["prefill_waves"] and after["decode_waves"] > before["decode_waves"]


def test_metrics_of_all_stages(wave4: Server) -> None:
    generate(wave4, [400] * 40, 2)
    metrics = wave4.get("/metrics")
    assert "sglang:prompt_tokens_total{" in metrics
    assert "sglang:num_running_reqs{" in metrics


TRUNK, LIMB, OWN = 1001, 333, 10


def _family(seed: int, branches: int) -> list[list[int]]:
    """16 prompts with a common beginning, then one of some branches, then tokens of their own."""
    rng = random.Random(seed)
    trunk = rng.choices(VOCABULARY, k=TRUNK)
    limbs = [[1 + b, *rng.choices(VOCABULARY, k=LIMB - 1)] for b in range(branches)]
    return [trunk + limbs[i % branches] + [100 + i] * OWN for i in range(16)]


def _together(server: Server, prompts: list[list[int]]) -> list[Answer]:
    """Answers to prompts that arrive at one moment, on an empty cache."""
    server.post("/flush_cache")
    together = server.post("/generate", {"input_ids": prompts, "sampling_params": _greedy(3)})
    return [
        Answer(got["output_ids"], got["meta_info"]["cached_tokens"], len(prompt))
        for got, prompt in zip(together, prompts, strict=True)
    ]


@pytest.mark.parametrize("branches", [1, 3])
def test_a_cold_prefix_that_arrives_many_times_is_computed_once(
    branches: int, wave2: Server, stock: Server
) -> None:
    prompts = _family(8, branches)
    answers = _together(wave2, prompts)
    computed = sum(a.prompt - a.cached for a in answers)
    least = TRUNK + branches * LIMB + 16 * OWN
    assert least <= computed <= least + BUDGET
    theirs = _together(stock, prompts)
    assert [a.output for a in answers] == [a.output for a in theirs]
    assert sum(a.cached for a in answers) >= sum(a.cached for a in theirs)


def test_the_prefix_goes_on_when_its_first_request_is_aborted(wave2: Server) -> None:
    prompts = _family(9, 1)
    wave2.post("/flush_cache")
    before = statistics(wave2)
    long = {"max_new_tokens": 2000, "ignore_eos": True}
    body = {"rid": "first", "input_ids": prompts[0] + [7] * 5000, "sampling_params": long}
    with ThreadPoolExecutor(len(prompts)) as pool:
        first = pool.submit(wave2.post, "/generate", body)
        eventually(lambda: statistics(wave2)["prefill_waves"] > before["prefill_waves"])
        others = [pool.submit(generate, wave2, p, 3) for p in prompts[1:]]
        wave2.post("/abort_request", {"rid": "first"})
        answers = [f.result() for f in others]
        assert first.result()["meta_info"]["finish_reason"]["type"] == "abort"
    computed = sum(a.prompt - a.cached for a in answers)
    assert computed <= TRUNK + LIMB + 15 * OWN + BUDGET


def _at_once(server: Server, prompts: list[list[int]], new: int) -> list[list[int]]:
    with ThreadPoolExecutor(len(prompts)) as pool:
        return list(pool.map(lambda prompt: generate(server, prompt, new).output, prompts))


def test_more_requests_than_room_all_finish(wave2: Server, stock: Server) -> None:
    """Prompts and outputs of together twice the pool: admission waits, decode grows, nothing is lost."""
    rng = random.Random(5)
    prompts = [rng.choices(VOCABULARY, k=1200) for _ in range(20)]
    wave2.post("/flush_cache")
    assert _at_once(wave2, prompts, 24) == _at_once(stock, prompts, 24)


def test_retraction_keeps_answers(wave2: Server, stock: Server) -> None:
    """Outputs far beyond the escrowed head start, of together more than the pool: some must be retracted."""
    rng = random.Random(6)
    prompts = [rng.choices(VOCABULARY, k=1500) for _ in range(6)]
    wave2.post("/flush_cache")
    assert _at_once(wave2, prompts, 200) == _at_once(stock, prompts, 200)
    after = statistics(wave2)
    assert after["retracted"] > 0
    assert after["held"] == NOTHING
