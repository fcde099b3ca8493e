"""Control requests under load: each takes effect once, at one place of the log, and nothing stays held."""

from __future__ import annotations

import base64
import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from conftest import NOTHING, eventually, statistics
from safetensors.torch import load_file
from test_oracle import VOCABULARY, Answer, generate

from sglang_wavepp.launch.models import make_model
from sglang_wavepp.launch.server import Server, ServerError


def _prompts(seed: int, count: int = 6, length: int = 500) -> list[list[int]]:
    rng = random.Random(seed)
    return [rng.choices(VOCABULARY, k=length) for _ in range(count)]


def _all(server: Server, prompts: list[list[int]], new: int = 8) -> list[list[int]]:
    with ThreadPoolExecutor(len(prompts)) as pool:
        return [a.output for a in pool.map(lambda p: generate(server, p, new), prompts)]


def _is_empty(server: Server) -> None:
    """Nothing runs, waits or is held; and SGLang's own strict check of the pools had its turn since."""
    eventually(lambda: statistics(server)["running"] == statistics(server)["waiting"] == 0)
    after = statistics(server)
    assert after["held"] == NOTHING
    server.post("/flush_cache")
    assert generate(server, [400, 401, 402], 2).cached == 0


@pytest.fixture
def other_model(tmp_path: Path) -> Path:
    """The same shapes with other weights."""
    make_model(tmp_path / "other", arch="llama", layers=4, hidden=64, context=16384, seed=2)
    return tmp_path / "other"


@pytest.fixture(scope="module")
def expected(stock: Server) -> list[list[int]]:
    stock.post("/flush_cache")
    return [generate(stock, p, 8).output for p in _prompts(1)]


@pytest.fixture
def expected_of_other(stock: Server, model: Path, other_model: Path) -> Iterator[list[list[int]]]:
    stock.post("/update_weights_from_disk", {"model_path": str(other_model)})
    yield [generate(stock, p, 8).output for p in _prompts(1)]
    stock.post("/update_weights_from_disk", {"model_path": str(model)})


def test_weights_from_disk(
    wave2: Server,
    model: Path,
    other_model: Path,
    expected: list[list[int]],
    expected_of_other: list[list[int]],
) -> None:
    """They change on every stage at once, and the KV of the old ones is gone."""
    assert expected_of_other != expected
    prompts = _prompts(1)
    assert _all(wave2, prompts) == expected
    wave2.post("/update_weights_from_disk", {"model_path": str(other_model)})
    first = generate(wave2, prompts[0], 8)
    assert first == Answer(expected_of_other[0], 0, len(prompts[0]))
    assert _all(wave2, prompts) == expected_of_other
    wave2.post("/update_weights_from_disk", {"model_path": str(model)})
    assert _all(wave2, prompts) == expected
    _is_empty(wave2)


def test_weights_that_cannot_be_loaded_change_nothing(wave2: Server, expected: list[list[int]]) -> None:
    with pytest.raises(ServerError) as refused:
        wave2.post("/update_weights_from_disk", {"model_path": "/no/such/model"})
    assert refused.value.status == 400
    assert _all(wave2, _prompts(1)) == expected


def test_weights_from_tensors(
    wave2: Server,
    model: Path,
    other_model: Path,
    expected: list[list[int]],
    expected_of_other: list[list[int]],
) -> None:
    from sglang.srt.utils import MultiprocessingSerializer

    # By name, as for processes that are not this one's children.
    torch.multiprocessing.set_sharing_strategy("file_system")

    def update(path: Path) -> None:
        tensors = [t for file in sorted(path.glob("*.safetensors")) for t in load_file(file).items()]
        packed = base64.b64encode(MultiprocessingSerializer.serialize(tensors)).decode()
        wave2.post("/begin_weight_update", {})
        wave2.post("/update_weights_from_tensor", {"serialized_named_tensors": [packed]})
        wave2.post("/end_weight_update", {})

    prompts = _prompts(1)
    update(other_model)
    assert _all(wave2, prompts) == expected_of_other
    update(model)
    assert _all(wave2, prompts) == expected
    _is_empty(wave2)


def test_pause_that_retracts(wave2: Server, stock: Server) -> None:
    """All KV is given back, the cache can be flushed meanwhile, and everybody ends with the same answer."""
    prompts = _prompts(2)
    before = statistics(wave2)["retracted"]
    with ThreadPoolExecutor(len(prompts)) as pool:
        asked = [pool.submit(generate, wave2, p, 150) for p in prompts]
        eventually(lambda: statistics(wave2)["running"] == len(prompts))
        waves = statistics(wave2)["decode_waves"]
        eventually(lambda: statistics(wave2)["decode_waves"] > waves + 5)
        wave2.post("/pause_generation", {"mode": "retract"})
        eventually(lambda: statistics(wave2)["running"] == 0)
        paused = statistics(wave2)
        assert paused["held"] == NOTHING
        assert paused["retracted"] - before == paused["waiting"] == len(prompts)
        wave2.post("/flush_cache")
        late = pool.submit(generate, wave2, prompts[0][:100], 4)
        assert not any(f.done() for f in asked)
        wave2.post("/continue_generation", {})
        got = [f.result(120).output for f in asked]
        assert late.result(120).output == generate(stock, prompts[0][:100], 4).output
    assert got == [generate(stock, p, 150).output for p in prompts]
    _is_empty(wave2)


def test_memory_is_released_when_the_running_requests_have_ended(wave2: Server, stock: Server) -> None:
    prompts = _prompts(3)
    wave2.post("/resume_memory_occupation", {})  # nothing was released: that changes nothing
    with ThreadPoolExecutor(len(prompts)) as pool:
        asked = [pool.submit(generate, wave2, p, 60) for p in prompts]
        eventually(lambda: statistics(wave2)["running"] > 0)
        wave2.post("/release_memory_occupation", {})
        released = statistics(wave2)
        assert released["running"] == 0 and released["held"] == NOTHING
        late = pool.submit(generate, wave2, prompts[0][:100], 4)
        eventually(lambda: statistics(wave2)["waiting"] > 0)
        wave2.post("/resume_memory_occupation", {})
        got = [f.result(120).output for f in asked]
        assert late.result(120).output == generate(stock, prompts[0][:100], 4).output
    assert got == [generate(stock, p, 60).output for p in prompts]
    _is_empty(wave2)


def test_profile_of_every_stage(wave2: Server, tmp_path: Path) -> None:
    wave2.post("/start_profile", {"output_dir": str(tmp_path), "activities": ["CPU"]})
    generate(wave2, _prompts(4)[0], 4)
    wave2.post("/stop_profile")
    eventually(lambda: len(list(tmp_path.rglob("*.trace.json.gz"))) == wave2.pp_size)


def test_the_rest_of_the_control_requests(wave2: Server, expected: list[list[int]]) -> None:
    """Under load: they are answered, and change no answer."""
    prompts = _prompts(1)
    with ThreadPoolExecutor(len(prompts)) as pool:
        asked = [pool.submit(generate, wave2, p, 8) for p in prompts]
        wave2.post("/freeze_gc")
        wave2.post("/configure_logging", {"log_requests": False})
        wave2.post("/set_internal_state", {"server_args": {"pp_max_micro_batch_size": 64}})
        assert len(wave2.get("/server_info")["internal_states"]) == 1
        assert wave2.post("/update_weight_version", {"new_version": "2", "abort_all_requests": False})
        assert len(wave2.post("/get_weights_by_name", {"name": "model.embed_tokens.weight"})) > 0
        with pytest.raises(ServerError) as refused:
            wave2.post("/open_session", {"capacity_of_str_len": 1000})
        assert refused.value.status == 400
        assert [f.result(120).output for f in asked] == expected


def test_aborts_at_random_moments(wave2: Server, stock: Server) -> None:
    """Hinted, held, committed, between the waves of a prompt, decoding: the others' answers stay right."""
    rng = random.Random(21)
    shared = rng.choices(VOCABULARY, k=1000)
    prompts = [shared[: rng.randrange(1, 1000)] + rng.choices(VOCABULARY, k=300) for _ in range(30)]
    victims = {f"v{i}" for i in range(30) if i % 3}

    def ask(i: int) -> tuple[str, list[int]]:
        body = {"input_ids": prompts[i], "sampling_params": {"temperature": 0, "max_new_tokens": 30}}
        body["sampling_params"]["ignore_eos"] = True
        rid = f"v{i}" if f"v{i}" in victims else f"kept{i}"
        got = wave2.post("/generate", {"rid": rid, **body})
        return got["meta_info"]["finish_reason"]["type"], got["output_ids"]

    wave2.post("/flush_cache")
    with ThreadPoolExecutor(16) as pool:
        asked = [pool.submit(ask, i) for i in range(30)]
        while not all(f.done() for f in asked):
            wave2.post("/abort_request", {"rid": rng.choice(sorted(victims))})
    ends = [f.result() for f in asked]
    assert {kind for kind, _ in ends} == {"abort", "length"}
    for i, (kind, output) in enumerate(ends):
        want = generate(stock, prompts[i], 30).output
        assert output == want if kind == "length" else output == want[: len(output)]
        assert kind == "length" or i % 3
    _is_empty(wave2)
