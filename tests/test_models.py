"""Tiny model folders: reproducible, complete, readable by the usual tools, safe to ask for again."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import load, load_file
from tokenizers import Tokenizer

from sglang_wavepp.errors import ConfigError
from sglang_wavepp.launch import models
from sglang_wavepp.launch.models import ARCHITECTURES, MARKER, ModelSpec, make_model, model_files

SMALL = {"layers": 2, "hidden": 32}


def contents(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in folder.iterdir()}


def stamps(folder: Path) -> dict[str, int]:
    return {file.name: file.stat().st_mtime_ns for file in folder.iterdir()}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model"), **SMALL)


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> Tokenizer:
    return Tokenizer.from_file(str(folder / "tokenizer.json"))


# ---- contents


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_same_parameters_give_the_same_bytes(arch: str, tmp_path: Path) -> None:
    first = make_model(tmp_path / "first", arch, seed=7, **SMALL)
    second = make_model(tmp_path / "second", arch, seed=7, **SMALL)
    assert contents(first) == contents(second)


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_the_seed_changes_the_weights_and_nothing_else(arch: str) -> None:
    one = model_files(ModelSpec(arch=arch, seed=1, **SMALL))
    two = model_files(ModelSpec(arch=arch, seed=2, **SMALL))
    assert {name for name in one if one[name] != two[name]} == {"model.safetensors"}


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_weights_match_the_configuration(arch: str) -> None:
    files = model_files(ModelSpec(arch=arch, layers=3, hidden=64, context=5000))
    config, weights = json.loads(files["config.json"]), load(files["model.safetensors"])
    assert config["num_hidden_layers"] == 3
    assert config["max_position_embeddings"] == 5000
    layers = {name.split(".")[2] for name in weights if name.startswith("model.layers.")}
    assert layers == (set() if arch == "emulated" else {"0", "1", "2"})
    assert all(tensor.dtype == np.float32 and np.isfinite(tensor).all() for tensor in weights.values())
    assert weights["model.embed_tokens.weight"].shape == (config["vocab_size"], 64)
    assert weights["lm_head.weight"].shape == (config["vocab_size"], 64)
    if arch not in ("deepseek-mla", "emulated"):
        rows = config["num_attention_heads"] * config["head_dim"]
        assert weights["model.layers.0.self_attn.q_proj.weight"].shape == (rows, 64)
        rows = config["num_key_value_heads"] * config["head_dim"]
        assert weights["model.layers.0.self_attn.k_proj.weight"].shape == (rows, 64)


@pytest.mark.parametrize("context", [1, 4096, 4097, 131072])
def test_yarn_covers_the_whole_context(context: int) -> None:
    config = json.loads(model_files(ModelSpec(arch="deepseek-mla", context=context, **SMALL))["config.json"])
    scaling = config["rope_scaling"]
    assert scaling["factor"] * scaling["original_max_position_embeddings"] >= context


def test_greedy_decoding_can_reach_only_what_prints(folder: Path, tokenizer: Tokenizer) -> None:
    head = load_file(folder / "model.safetensors")["lm_head.weight"]
    reachable = np.flatnonzero(np.abs(head).sum(axis=1))
    assert models.EOS_TOKEN_ID in reachable
    texts = [tokenizer.decode([int(i)]) for i in reachable if i != models.EOS_TOKEN_ID]
    assert all(text and (text.isprintable() or text == "\n") and text.isascii() for text in texts)
    assert len(texts) > 700


# ---- tokenizer


@given(st.text())
@settings(max_examples=300, deadline=None)
def test_tokenizer_round_trips_any_text(tokenizer: Tokenizer, text: str) -> None:
    ids = tokenizer.encode(text).ids
    assert tokenizer.decode(ids, skip_special_tokens=False) == text
    assert all(0 <= i < models.TOKENIZER_SIZE for i in ids)


def test_tokenizer_joins_letters(tokenizer: Tokenizer) -> None:
    assert tokenizer.encode("pipeline").tokens == ["p", "ip", "el", "in", "e"]
    assert tokenizer.encode("a b").tokens == ["a", "\u0120b"]  # how byte-level tokens write a space


def test_vocabulary_fits_the_embedding(tokenizer: Tokenizer) -> None:
    assert tokenizer.get_vocab_size() == models.TOKENIZER_SIZE <= models.VOCAB_SIZE
    assert [tokenizer.token_to_id(token) for token in models.SPECIAL_TOKENS] == [0, 1, 2]


def test_chat_template(folder: Path) -> None:
    from transformers import PreTrainedTokenizerFast

    chat = PreTrainedTokenizerFast.from_pretrained(folder)
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "grüße\n☃ <|x|>"}]
    text = "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\ngrüße\n☃ <|x|><|im_end|>\n"
    assert chat.apply_chat_template(messages, tokenize=False) == text
    prompt = text + "<|im_start|>assistant\n"
    assert chat.apply_chat_template(messages, tokenize=False, add_generation_prompt=True) == prompt
    ids = chat(prompt)["input_ids"]
    assert chat.decode(ids) == prompt
    assert ids.count(1) == 3
    assert ids.count(chat.eos_token_id) == 2
    assert chat.eos_token_id == models.EOS_TOKEN_ID


# ---- asking again


def test_a_folder_of_the_same_parameters_is_left_alone(tmp_path: Path) -> None:
    folder = make_model(tmp_path / "m", **SMALL)
    before = stamps(folder)
    assert make_model(str(folder), **SMALL) == folder
    assert stamps(folder) == before


def test_a_folder_of_other_parameters_is_rewritten(tmp_path: Path) -> None:
    folder = make_model(tmp_path / "m", "llama", **SMALL)
    make_model(folder, "qwen3-moe", **SMALL)
    assert contents(folder) == contents(make_model(tmp_path / "fresh", "qwen3-moe", **SMALL))


@pytest.mark.parametrize("damage", ["missing file", "interrupted", "unreadable marker"])
def test_a_damaged_folder_is_made_again(damage: str, tmp_path: Path) -> None:
    folder = make_model(tmp_path / "m", **SMALL)
    whole = contents(folder)
    if damage == "missing file":
        (folder / "tokenizer.json").unlink()
    elif damage == "interrupted":
        (folder / "model.safetensors").write_bytes(b"half")
        marker = json.loads((folder / MARKER).read_text())
        (folder / MARKER).write_text(json.dumps(marker | {"complete": False}))
    else:
        (folder / MARKER).write_text("{")
    make_model(folder, **SMALL)
    assert contents(folder) == whole


def test_an_empty_folder_is_filled(tmp_path: Path) -> None:
    assert (make_model(tmp_path, **SMALL) / "config.json").is_file()


def test_many_at_once(tmp_path: Path) -> None:
    with ThreadPoolExecutor(8) as pool:
        made = list(pool.map(lambda _: make_model(tmp_path / "m", **SMALL), range(8)))
    assert set(made) == {tmp_path / "m"}
    assert contents(tmp_path / "m") == contents(make_model(tmp_path / "alone", **SMALL))


# ---- errors


@pytest.mark.parametrize(
    ("parameters", "complaint"),
    [
        ({"arch": "mamba"}, "architecture 'mamba': use one of llama, qwen3-moe, deepseek-mla"),
        ({"layers": 0}, "layers must be at least 1, got 0"),
        ({"hidden": 0}, "hidden size must be a multiple of 32, got 0"),
        ({"hidden": -32}, "hidden size must be a multiple of 32, got -32"),
        ({"hidden": 48}, "hidden size must be a multiple of 32, got 48"),
        ({"context": 0}, "context must be at least 1, got 0"),
        ({"seed": -1}, "seed must be at least 0, got -1"),
    ],
)
def test_bad_parameters(parameters: dict[str, object], complaint: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        make_model(tmp_path / "m", **parameters)  # type: ignore[arg-type]
    assert complaint in str(caught.value)
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "m").exists()


def test_a_folder_with_something_else_is_not_touched(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("mine")
    with pytest.raises(ConfigError, match="something else than a model made by WavePP"):
        make_model(tmp_path, **SMALL)
    assert contents(tmp_path) == {"config.json": b"mine"}


def test_a_file_is_not_touched(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("mine")
    with pytest.raises(ConfigError, match="something else"):
        make_model(file, **SMALL)
    assert file.read_text() == "mine"


def test_a_path_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"cannot use .* as a model folder: Not a directory"):
        make_model(tmp_path / "file" / "m", **SMALL)
