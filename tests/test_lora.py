"""LoRA adapters of `--lora-paths`: answers equal plain SGLang's, and adapters never share KV."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
from conftest import NOTHING, start, statistics
from safetensors.numpy import load_file, save_file

from sglang_wavepp.launch.server import Server, ServerError

ADAPTERS = (None, "a", "b")
"""None is the model itself."""
RANKS = {"a": 4, "b": 8}
ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
PLACES = {"a": (*ATTENTION, "gate_proj", "up_proj", "down_proj"), "b": ATTENTION}
"""Linear layers that an adapter changes."""
VOCABULARY = range(300, 1000)
NEW = 8
SAMPLING = {"temperature": 0, "max_new_tokens": NEW, "ignore_eos": True}


class Answer(NamedTuple):
    output: list[int]
    cached: int


def make_adapter(model: Path, folder: Path, *, rank: int, places: tuple[str, ...], seed: int) -> None:
    """A random adapter in PEFT's format, large enough to change greedy outputs."""
    random = np.random.default_rng(seed)
    tensors = {}
    for name, weight in load_file(model / "model.safetensors").items():
        layer = name.removesuffix(".weight")
        if layer.rsplit(".", 1)[-1] not in places:
            continue
        outputs, inputs = weight.shape
        scale = float(weight.std())
        for part, shape in (("A", (rank, inputs)), ("B", (outputs, rank))):
            drawn = random.standard_normal(shape, dtype=np.float32)
            tensors[f"base_model.model.{layer}.lora_{part}.weight"] = drawn * np.float32(
                (scale / rank) ** 0.5
            )
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": 2 * rank, "target_modules": list(places)}
    folder.mkdir()
    (folder / "adapter_config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "adapter_model.safetensors")


@pytest.fixture(scope="module")
def lora(model: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, ...]:
    """The flags of a server with both adapters."""
    folder = tmp_path_factory.mktemp("adapters")
    for seed, name in enumerate(RANKS):
        make_adapter(model, folder / name, rank=RANKS[name], places=PLACES[name], seed=seed)
    paths = [f"{name}={folder / name}" for name in RANKS]
    return ("--enable-lora", "--lora-paths", *paths, "--max-loras-per-batch", str(len(ADAPTERS)))


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
    model: Path, lora: tuple[str, ...], tmp_path_factory: pytest.TempPathFactory
) -> list[tuple[Answer, Answer]]:
    """Plain SGLang's answers on one stage. Its server has ended when the other one starts."""
    log = tmp_path_factory.mktemp("logs") / "stock-lora.log"
    with start(model, log, flags=(*lora, "--sleep-on-idle")) as server:
        return sessions(server, 1)


@pytest.fixture(scope="module")
def wave(
    model: Path, lora: tuple[str, ...], expected: object, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Server]:
    """WavePP on two stages."""
    log = tmp_path_factory.mktemp("logs") / "wave-lora.log"
    with start(model, log, pp_size=2, wavepp=True, flags=lora) as server:
        yield server


def test_answers_and_reuse_equal_plain_sglang(wave: Server, expected: list[tuple[Answer, Answer]]) -> None:
    first = outputs(expected)[::2]
    by_prompt = [first[i : i + len(ADAPTERS)] for i in range(0, len(first), len(ADAPTERS))]
    assert all(len({tuple(o) for o in same}) == len(ADAPTERS) for same in by_prompt), (
        "adapters change nothing"
    )
    wave.post("/flush_cache")
    assert sessions(wave, 1) == expected
    assert all(second.cached > 0 for _, second in expected)


def test_mixed_batches_give_the_same_answers(wave: Server, expected: list[tuple[Answer, Answer]]) -> None:
    wave.post("/flush_cache")
    before = statistics(wave)
    assert outputs(sessions(wave, 8)) == outputs(expected)
    after = statistics(wave)
    rows = len(expected) * 2 * (NEW - 1)
    assert after["decode_waves"] - before["decode_waves"] < rows // 2, "few decode waves had several rows"
    assert after["held"] == NOTHING


def test_adapters_never_share_kv(wave: Server, expected: list[tuple[Answer, Answer]]) -> None:
    """One long prompt at once under every adapter, each twice: computed once for each adapter."""
    prompt = prompts()[-1]
    wave.post("/flush_cache")
    with ThreadPoolExecutor(6) as pool:
        answers = list(pool.map(lambda adapter: generate(wave, prompt, adapter), ADAPTERS * 2))
    want = [first.output for first, _ in expected[-len(ADAPTERS) :]]
    assert [a.output for a in answers] == want * 2
    for one, two in zip(answers[: len(ADAPTERS)], answers[len(ADAPTERS) :], strict=True):
        assert min(one.cached, two.cached) == 0 < max(one.cached, two.cached)


def test_a_batch_names_an_adapter_for_each_prompt(
    wave: Server, expected: list[tuple[Answer, Answer]]
) -> None:
    body = {"input_ids": [prompts()[0]] * len(ADAPTERS), "lora_path": ADAPTERS, "sampling_params": SAMPLING}
    got = [answer["output_ids"] for answer in wave.post("/generate", body)]
    assert got == [first.output for first, _ in expected[: len(ADAPTERS)]]


def test_an_unknown_adapter_is_refused(wave: Server) -> None:
    with pytest.raises(ServerError, match="never been loaded: c") as raised:
        generate(wave, [400], "c")
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
    path: str, more: dict[str, object], wave: Server, expected: list[tuple[Answer, Answer]]
) -> None:
    with pytest.raises(ServerError, match="does not load or unload LoRA adapters at run time") as raised:
        wave.post(path, {"lora_name": "a", **more})
    assert raised.value.status == 400
    assert generate(wave, prompts()[0], "a").output == expected[1][0].output
