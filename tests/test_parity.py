"""The request surface: what plain SGLang answers, WavePP answers."""

from __future__ import annotations

import json
import random
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import requests
from conftest import NOTHING, eventually, statistics

from sglang_wavepp.launch.server import Server, ServerError

PROMPT = "def quicksort(items):\n    if len(items) < 2:\n        return items\n    pivot ="
LONG = random.Random(3).choices(range(300, 1000), k=700)
BOUND = 60.0


def _ask(server: Server, **body: Any) -> Any:
    return server.post("/generate", body)


def _greedy(**more: Any) -> dict[str, Any]:
    return {"temperature": 0, "max_new_tokens": 12, "ignore_eos": True, **more}


def _text_and_ids(answer: Any) -> Any:
    answers = answer if isinstance(answer, list) else [answer]
    return [(a["text"], a["output_ids"], a["meta_info"]["finish_reason"]) for a in answers]


REQUESTS: dict[str, dict[str, Any]] = {
    "text": {"text": PROMPT, "sampling_params": _greedy()},
    "one token": {"input_ids": [400], "sampling_params": _greedy()},
    "no output": {"input_ids": LONG, "sampling_params": _greedy(max_new_tokens=0)},
    "length one": {"input_ids": LONG, "sampling_params": _greedy(max_new_tokens=1)},
    "batch": {"input_ids": [LONG, LONG[:300], [500, 501]], "sampling_params": _greedy()},
    "n": {"text": PROMPT, "sampling_params": _greedy(n=3)},
    "stop token": {"input_ids": LONG, "sampling_params": _greedy(stop_token_ids=list(range(300, 700)))},
    "frequency penalty": {"input_ids": LONG, "sampling_params": _greedy(frequency_penalty=1.5)},
    "presence penalty": {"input_ids": LONG, "sampling_params": _greedy(presence_penalty=1.9)},
    "repetition penalty": {"input_ids": LONG, "sampling_params": _greedy(repetition_penalty=1.7)},
    "min new tokens": {
        "input_ids": LONG,
        "sampling_params": _greedy(ignore_eos=False, min_new_tokens=8, stop_token_ids=list(range(300, 900))),
    },
    "regex": {"text": PROMPT, "sampling_params": _greedy(ignore_eos=False, regex="[0-9]{3}-[a-f]{2}")},
    "json schema": {
        "text": PROMPT,
        "sampling_params": _greedy(
            ignore_eos=False,
            max_new_tokens=40,
            json_schema=json.dumps(
                {
                    "type": "object",
                    "properties": {"n": {"type": "integer", "minimum": 1, "maximum": 9}},
                    "required": ["n"],
                    "additionalProperties": False,
                }
            ),
        ),
    },
}


@pytest.mark.parametrize("name", REQUESTS)
def test_same_answer(name: str, stock: Server, wave2: Server) -> None:
    want = _text_and_ids(_ask(stock, **REQUESTS[name]))
    assert _text_and_ids(_ask(wave2, **REQUESTS[name])) == want


def test_stop_string(stock: Server, wave2: Server) -> None:
    whole = _ask(stock, text=PROMPT, sampling_params=_greedy(max_new_tokens=24))["text"]
    stop = whole[len(whole) // 2 : len(whole) // 2 + 3]
    body = {"text": PROMPT, "sampling_params": _greedy(max_new_tokens=24, stop=[stop])}
    want = _text_and_ids(_ask(stock, **body))
    assert want[0][2]["type"] == "stop"
    assert _text_and_ids(_ask(wave2, **body)) == want


def test_grammar_that_does_not_compile_is_refused_alike(stock: Server, wave2: Server) -> None:
    body = {"text": PROMPT, "sampling_params": _greedy(regex="[unclosed")}
    errors = []
    for server in (stock, wave2):
        with pytest.raises(ServerError) as caught:
            _ask(server, **body)
        errors.append(caught.value.status)
    assert errors[0] == errors[1] == 400
    assert _ask(wave2, text=PROMPT, sampling_params=_greedy())["output_ids"]


@pytest.mark.parametrize("start", [0, 100, 699])
def test_logprobs(start: int, stock: Server, wave2: Server) -> None:
    body = {
        "input_ids": LONG,
        "sampling_params": _greedy(),
        "return_logprob": True,
        "logprob_start_len": start,
        "top_logprobs_num": 2,
        "token_ids_logprob": [400, 500],
    }
    want, got = (_ask(server, **body)["meta_info"] for server in (stock, wave2))
    for key in ("input_token_logprobs", "output_token_logprobs"):
        assert [x[1] for x in got[key]] == [x[1] for x in want[key]]
        assert [x[0] for x in got[key][1:]] == pytest.approx([x[0] for x in want[key][1:]], abs=1e-3)
    for key in (
        "input_top_logprobs",
        "output_top_logprobs",
        "input_token_ids_logprobs",
        "output_token_ids_logprobs",
    ):
        assert _ids(got[key]) == _ids(want[key])


def _ids(rows: list[Any]) -> list[Any]:
    return [row and [x[1] for x in row] for row in rows]


def test_seeded_sampling_is_reproducible(wave2: Server) -> None:
    body = {
        "input_ids": LONG,
        "sampling_params": _greedy(temperature=0.8, top_k=20, top_p=0.9, sampling_seed=7),
    }
    wanted = _ask(wave2, **body)["output_ids"]
    assert len(wanted) == 12
    assert all(0 <= t < 2048 for t in wanted)


def test_streaming(stock: Server, wave2: Server) -> None:
    def stream(server: Server) -> list[str]:
        body = {"text": PROMPT, "sampling_params": _greedy(), "stream": True}
        with requests.post(f"{server.url}/generate", json=body, stream=True, timeout=BOUND) as answer:
            lines = [line for line in answer.iter_lines() if line.startswith(b"data: ")]
        assert lines[-1] == b"data: [DONE]"
        return [json.loads(line[6:])["text"] for line in lines[:-1]]

    want, got = stream(stock), stream(wave2)
    assert got[-1] == want[-1]
    assert len(got) > 3


def test_chat(stock: Server, wave2: Server) -> None:
    body = {
        "model": "default",
        "messages": [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": "Name a colour."},
        ],
        "temperature": 0,
        "max_tokens": 10,
    }
    want, got = (server.post("/v1/chat/completions", body) for server in (stock, wave2))
    assert got["choices"][0]["message"] == want["choices"][0]["message"]
    again = wave2.post("/v1/chat/completions", body)
    assert again["usage"]["prompt_tokens_details"]["cached_tokens"] > 0


def test_custom_logit_processor(stock: Server, wave2: Server) -> None:
    from sglang.srt.sampling.custom_logit_processor import DisallowedTokensLogitsProcessor

    free = _ask(stock, text=PROMPT, sampling_params=_greedy())["output_ids"]
    body = {
        "text": PROMPT,
        "custom_logit_processor": DisallowedTokensLogitsProcessor.to_str(),
        "sampling_params": _greedy(custom_params={"token_ids": free[:3]}),
    }
    want, got = (_ask(server, **body)["output_ids"] for server in (stock, wave2))
    assert got == want
    assert not set(got) & set(free[:3])


ERRORS: dict[str, dict[str, Any]] = {
    "empty prompt": {"input_ids": [], "sampling_params": _greedy()},
    "over the pool": {"input_ids": [400] * 12_000, "sampling_params": _greedy()},
    "over the context": {"input_ids": [400] * 17_000, "sampling_params": _greedy()},
    "bad temperature": {"text": PROMPT, "sampling_params": {"temperature": -1}},
    "bad top_p": {"text": PROMPT, "sampling_params": {"top_p": 3}},
    "negative length": {"text": PROMPT, "sampling_params": {"max_new_tokens": -5}},
    "logprob start beyond the prompt": {
        "input_ids": [400, 401],
        "return_logprob": True,
        "logprob_start_len": 50,
        "sampling_params": _greedy(),
    },
}


@pytest.mark.parametrize("name", ERRORS)
def test_same_error(name: str, stock: Server, wave2: Server) -> None:
    answers = []
    for server in (stock, wave2):
        with requests.post(f"{server.url}/generate", json=ERRORS[name], timeout=BOUND) as answer:
            answers.append((answer.status_code, answer.json().get("error")))
    assert answers[0][0] >= 400
    assert answers[1] == answers[0]


def test_session_request_is_refused_by_name(wave2: Server) -> None:
    with pytest.raises(ServerError) as caught:
        _ask(wave2, text=PROMPT, sampling_params=_greedy(), session_params={"id": "x", "rid": None})
    assert caught.value.status == 400
    assert "session_params" in str(caught.value)


def test_abort_by_rid_prefix(wave2: Server) -> None:
    body = {"input_ids": LONG, "sampling_params": _greedy(max_new_tokens=4000)}
    with ThreadPoolExecutor(4) as pool:
        victims = [pool.submit(_ask, wave2, rid=rid, **body) for rid in ("victim", "victim-1", "victim-2")]
        other = pool.submit(_ask, wave2, rid="other", input_ids=LONG, sampling_params=_greedy())
        eventually(lambda: statistics(wave2)["running"] >= 3)
        wave2.post("/abort_request", {"rid": "victim"})
        for victim in victims:
            assert victim.result(BOUND)["meta_info"]["finish_reason"]["type"] == "abort"
        assert other.result(BOUND)["meta_info"]["finish_reason"]["type"] == "length"
    eventually(lambda: statistics(wave2)["running"] == 0)
    assert statistics(wave2)["held"] == NOTHING


def test_abort_while_waiting(wave2: Server) -> None:
    """More than fits: the last ones wait for room and are aborted there."""
    rng = random.Random(9)
    prompts = [rng.choices(range(300, 1000), k=6000) for _ in range(6)]
    with ThreadPoolExecutor(6) as pool:
        asked = [
            pool.submit(
                _ask, wave2, rid=f"wait-{i}", input_ids=p, sampling_params=_greedy(max_new_tokens=1500)
            )
            for i, p in enumerate(prompts)
        ]
        eventually(lambda: statistics(wave2)["waiting"] > 0 and statistics(wave2)["running"] > 0)
        wave2.post("/abort_request", {"abort_all": True, "rid": ""})
        assert {f.result(BOUND)["meta_info"]["finish_reason"]["type"] for f in asked} == {"abort"}
    eventually(lambda: statistics(wave2)["running"] == 0)
    assert statistics(wave2)["held"] == NOTHING


def test_client_that_goes_away_frees_its_request(wave2: Server) -> None:
    body = {"input_ids": LONG, "sampling_params": _greedy(max_new_tokens=4000), "stream": True}
    with requests.post(f"{wave2.url}/generate", json=body, stream=True, timeout=BOUND) as answer:
        next(answer.iter_lines())
    eventually(lambda: statistics(wave2)["running"] == 0)


def test_duplicate_rids_are_two_requests(stock: Server, wave2: Server) -> None:
    body = {"rid": "twin", "input_ids": LONG, "sampling_params": _greedy(max_new_tokens=100)}

    def outcomes(server: Server) -> list[Any]:
        def one(_: int) -> Any:
            try:
                return _ask(server, **body)["output_ids"]
            except ServerError as error:
                return error.status

        with ThreadPoolExecutor(2) as pool:
            return sorted(pool.map(one, range(2)), key=str)

    first = _ask(stock, **body)["output_ids"]
    got = outcomes(wave2)
    assert first in got
    assert all(x == first or x == 400 for x in got)


def test_flush_and_pause(wave2: Server) -> None:
    _ask(wave2, input_ids=LONG, sampling_params=_greedy())
    assert _ask(wave2, input_ids=LONG, sampling_params=_greedy())["meta_info"]["cached_tokens"] == 699
    wave2.post("/flush_cache")
    assert _ask(wave2, input_ids=LONG, sampling_params=_greedy())["meta_info"]["cached_tokens"] == 0

    def waves() -> int:
        return int(statistics(wave2)["waves"])

    with ThreadPoolExecutor(1) as pool:
        before = waves()
        asked = pool.submit(_ask, wave2, input_ids=LONG, sampling_params=_greedy(max_new_tokens=300))
        eventually(lambda: waves() > before + 10)
        wave2.post("/pause_generation", {"mode": "in_place"})
        paused = waves()
        assert waves() == waves() == paused
        assert not asked.done()
        wave2.post("/continue_generation", {})
        assert len(asked.result(BOUND)["output_ids"]) == 300


def test_health_generate_answers_idle_and_busy(wave2: Server) -> None:
    wave2.get("/health_generate")
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(_ask, wave2, input_ids=LONG, sampling_params=_greedy(max_new_tokens=300))
        eventually(lambda: statistics(wave2)["running"] > 0)
        wave2.get("/health_generate")
        asked.result(BOUND)
