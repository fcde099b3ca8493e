"""LoRA adapters of `--lora-paths`: answers equal those of merged weights, and adapters never share KV."""

from __future__ import annotations

import random
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import pytest
from adapters import merge
from conftest import NOTHING, statistics

from sglang_wavepp.launch.server import Server, ServerError

ADAPTERS = (None, "a", "b")
"""None is the model itself."""
VOCABULARY = range(300, 1000)
NEW = 8
SAMPLING = {"temperature": 0, "max_new_tokens": NEW, "ignore_eos": True}


class Answer(NamedTuple):
    output: list[int]
    cached: int


def generate(server: Server, tokens: list[int], adapter: str | None) -> Answer:
    got = server.post("/generate", {"input_ids": tokens, "lora_path": adapter, "sampling_params": SAMPLING})
    return Answer(got["output_ids"], got["meta_info"]["cached_tokens"])


def prompts() -> list[list[int]]:
    """Six prompts of 41 to 460 tokens; the last four begin alike, and take one or two waves."""
    rng = random.Random(2)
    heads = [rng.choices(VOCABULARY, k=k) for k in (40, 360)]
    return [
        head + rng.choices(VOCABULARY, k=k)
        for head, ks in zip(heads, ((1, 60), (1, 10, 60, 100)), strict=True)
        for k in ks
    ]


def session(server: Server, prompt: list[int], adapter: str | None) -> tuple[Answer, Answer]:
    """An answer, and one to a prompt that continues it."""
    first = generate(server, prompt, adapter)
    return first, generate(server, prompt + first.output + [400, 401], adapter)


def sessions(server: Server, concurrency: int) -> list[tuple[Answer, Answer]]:
    """One for every prompt under every adapter."""
    asked = [(server, prompt, adapter) for prompt in prompts() for adapter in ADAPTERS]
    with ThreadPoolExecutor(concurrency) as pool:
        return list(pool.map(lambda a: session(*a), asked))


def outputs(answers: list[tuple[Answer, Answer]]) -> list[list[int]]:
    return [answer.output for session in answers for answer in session]


@pytest.fixture(scope="module")
def expected(
    model: Path, adapters: dict[str, Path], stock: Server, tmp_path_factory: pytest.TempPathFactory
) -> list[tuple[Answer, Answer]]:
    """As `sessions`: the answers of plain SGLang on one stage, with each adapter merged into its weights."""
    folder = tmp_path_factory.mktemp("merged")
    answers = []
    for name in ADAPTERS:
        merged = model if name is None else merge(model, adapters[name], folder / name)
        stock.post("/update_weights_from_disk", {"model_path": str(merged)})
        answers.append([session(stock, prompt, None) for prompt in prompts()])
    stock.post("/update_weights_from_disk", {"model_path": str(model)})
    return [answer for same_prompt in zip(*answers, strict=True) for answer in same_prompt]


def test_answers_and_reuse_equal_those_of_merged_weights(
    wave4: Server, expected: list[tuple[Answer, Answer]]
) -> None:
    first = outputs(expected)[::2]
    by_prompt = [first[i : i + len(ADAPTERS)] for i in range(0, len(first), len(ADAPTERS))]
    assert all(len({tuple(o) for o in same}) == len(ADAPTERS) for same in by_prompt), (
        "adapters change nothing"
    )
    wave4.post("/flush_cache")
    page = wave4.get("/server_info")["page_size"]
    assert sessions(wave4, 1) == [
        tuple(Answer(a.output, a.cached // page * page) for a in answers) for answers in expected
    ]
    assert all(second.cached > page for _, second in expected)


def test_mixed_batches_give_the_same_answers(wave4: Server, expected: list[tuple[Answer, Answer]]) -> None:
    wave4.post("/flush_cache")
    before = statistics(wave4)
    assert outputs(sessions(wave4, 8)) == outputs(expected)
    after = statistics(wave4)
    # Eight clients are spread over a decode group for each stage.
    rows = len(expected) * 2 * (NEW - 1)
    assert after["decode_waves"] - before["decode_waves"] < rows * 4 // 5, "few decode waves had several rows"
    assert after["held"] == NOTHING


def test_adapters_never_share_kv(wave4: Server, expected: list[tuple[Answer, Answer]]) -> None:
    """One long prompt at once under every adapter, each twice: computed once for each adapter."""
    prompt = prompts()[-1]
    wave4.post("/flush_cache")
    with ThreadPoolExecutor(6) as pool:
        answers = list(pool.map(lambda adapter: generate(wave4, prompt, adapter), ADAPTERS * 2))
    want = [first.output for first, _ in expected[-len(ADAPTERS) :]]
    assert [a.output for a in answers] == want * 2
    for one, two in zip(answers[: len(ADAPTERS)], answers[len(ADAPTERS) :], strict=True):
        assert min(one.cached, two.cached) == 0 < max(one.cached, two.cached)


def test_a_batch_names_an_adapter_for_each_prompt(
    wave4: Server, expected: list[tuple[Answer, Answer]]
) -> None:
    body = {"input_ids": [prompts()[0]] * len(ADAPTERS), "lora_path": ADAPTERS, "sampling_params": SAMPLING}
    got = [answer["output_ids"] for answer in wave4.post("/generate", body)]
    assert got == [first.output for first, _ in expected[: len(ADAPTERS)]]


def test_an_unknown_adapter_is_refused(wave4: Server) -> None:
    with pytest.raises(ServerError, match="never been loaded: c") as raised:
        generate(wave4, [400], "c")
    assert raised.value.status == 400


@pytest.mark.parametrize(
    ("path", "more"),
    [
        ("/load_lora_adapter", {"lora_path": "nowhere"}),
        ("/load_lora_adapter_from_tensors", {"config_dict": {}, "serialized_named_tensors": [""]}),
        ("/unload_lora_adapter", {}),
    ],
)
def test_adapters_stay_as_they_are(
    path: str, more: dict[str, object], wave4: Server, expected: list[tuple[Answer, Answer]]
) -> None:
    with pytest.raises(ServerError, match="does not load or unload LoRA adapters at run time") as raised:
        wave4.post(path, {"lora_name": "a", **more})
    assert raised.value.status == 400
    assert generate(wave4, prompts()[0], "a").output == expected[1][0].output
