"""Tiny Hugging Face model folders for servers without a GPU: random weights, a byte-level tokenizer.

The folder is a function of its parameters alone: no download, no training text, weights from NumPy's
seeded generator. Making it again gives the same bytes. The weights are scaled so that greedy outputs
vary from token to token (unscaled random weights fall into loops), and are float32, where outputs do not
depend on how requests are batched or split over stages.

`make_model` writes a folder; `model_files` is the pure part, its contents as bytes.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sglang_wavepp.errors import ConfigError

VOCAB_SIZE = 1024
"""Rows of the embedding. The tokenizer knows `TOKENIZER_SIZE` of them; the rest is never generated."""
SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
"""Ids 0, 1, 2: padding, begin of a chat turn, end of a chat turn (which is also the EOS)."""
EOS_TOKEN_ID = 2
CHAT_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
MARKER = "wavepp-model.json"
"""The file that says that a folder is ours, what it was made from, and whether it is complete."""

_FORMAT = 1
_HEAD_DIM = 16
_EXPERTS = 8
_LETTERS = "abcdefghijklmnopqrstuvwxyz"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """What a model folder is made from. Equal specs give equal bytes."""

    arch: str = "llama"
    """A key of `ARCHITECTURES`."""
    layers: int = 8
    hidden: int = 64
    """Width; a multiple of 32 (heads of 16, two query heads for each KV head)."""
    context: int = 32768
    """Longest sequence in tokens (`max_position_embeddings`)."""
    seed: int = 1234

    def check(self) -> None:
        """Raise ConfigError, with the value, if no model can be made from this."""
        if self.arch not in ARCHITECTURES:
            raise ConfigError(
                f"unknown model architecture {self.arch!r}: use one of {', '.join(ARCHITECTURES)}"
            )
        for name, least in (("layers", 1), ("context", 1), ("seed", 0)):
            value = getattr(self, name)
            if value < least:
                raise ConfigError(f"a model's {name} must be at least {least}, got {value}")
        if self.hidden < 1 or self.hidden % (2 * _HEAD_DIM):
            raise ConfigError(
                f"a model's hidden size must be a multiple of {2 * _HEAD_DIM}, got {self.hidden}"
            )


def make_model(
    path: str | os.PathLike[str],
    arch: str = "llama",
    *,
    layers: int = 8,
    hidden: int = 64,
    context: int = 32768,
    seed: int = 1234,
) -> Path:
    """Make sure that `path` holds this model, and return it.

    A folder made from the same parameters is left untouched; one of ours made from others is rewritten
    file by file (a server that has loaded it keeps what it has). Several processes may make the same
    model at the same time.

    Raises:
        ConfigError: a parameter is out of range, `path` holds something that this function did not make,
            or it cannot be written.
    """
    spec = ModelSpec(arch=arch, layers=layers, hidden=hidden, context=context, seed=seed)
    spec.check()
    folder = Path(path)
    marker = folder / MARKER
    try:
        occupied = folder.exists() and (not folder.is_dir() or any(folder.iterdir()))
        found = _read_marker(marker)  # after the listing: the marker is the first file of a folder of ours
        if occupied and found is None:
            raise ConfigError(f"{folder} exists and holds something else than a model made by WavePP")
        if found == _marker(spec, complete=True) and all((folder / name).is_file() for name in _FILES):
            return folder
        folder.mkdir(parents=True, exist_ok=True)
        marker.write_bytes(_json(_marker(spec, complete=False)))
        for name, content in model_files(spec).items():
            _write(folder / name, content)
        _write(marker, _json(_marker(spec, complete=True)))
    except OSError as error:
        raise ConfigError(f"cannot use {folder} as a model folder: {error.strerror or error}") from error
    return folder


def model_files(spec: ModelSpec) -> dict[str, bytes]:
    """File name -> contents of the folder, without the marker. `spec` must have passed `check`."""
    from safetensors.numpy import save

    weights = _Weights(spec.seed)
    config = _COMMON_CONFIG | {
        "hidden_size": spec.hidden,
        "intermediate_size": 2 * spec.hidden,
        "num_hidden_layers": spec.layers,
        "num_attention_heads": spec.hidden // _HEAD_DIM,
        "max_position_embeddings": spec.context,
    }
    weights.add("model.embed_tokens", VOCAB_SIZE, spec.hidden, scale=math.sqrt(spec.hidden))
    config |= ARCHITECTURES[spec.arch](spec, weights)
    weights.norm("model.norm", spec.hidden)
    weights.add("lm_head", VOCAB_SIZE, spec.hidden, scale=3.0)
    weights.tensors["lm_head.weight"][_never_generated()] = 0.0
    return {
        "config.json": _json(config),
        "generation_config.json": _json({"eos_token_id": EOS_TOKEN_ID, "do_sample": False}),
        "model.safetensors": save(weights.tensors, metadata={"format": "pt"}),
        "tokenizer.json": _tokenizer_json(),
        "tokenizer_config.json": _json(_TOKENIZER_CONFIG),
    }


_FILES = (
    "config.json",
    "generation_config.json",
    "model.safetensors",
    "tokenizer.json",
    "tokenizer_config.json",
)

_COMMON_CONFIG: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "torch_dtype": "float32",
    "bos_token_id": None,
    "eos_token_id": EOS_TOKEN_ID,
    "pad_token_id": 0,
    "tie_word_embeddings": False,
    "attention_bias": False,
}

_TOKENIZER_CONFIG: dict[str, Any] = {
    "tokenizer_class": "PreTrainedTokenizerFast",
    "bos_token": None,
    "eos_token": SPECIAL_TOKENS[EOS_TOKEN_ID],
    "pad_token": SPECIAL_TOKENS[0],
    "unk_token": None,
    "clean_up_tokenization_spaces": False,
    "chat_template": CHAT_TEMPLATE,
}


# ---- weights


class _Weights:
    """Named float32 tensors, drawn in the order in which they are added."""

    def __init__(self, seed: int) -> None:
        self.tensors: dict[str, NDArray[np.float32]] = {}
        self._random = np.random.default_rng(seed)

    def add(self, name: str, rows: int, columns: int, scale: float = 1.0) -> None:
        """A matrix of N(0, scale / sqrt(columns)): it keeps the scale of what it multiplies."""
        drawn = self._random.standard_normal((rows, columns), dtype=np.float32)
        self.tensors[name + ".weight"] = drawn * np.float32(scale / math.sqrt(columns))

    def norm(self, name: str, size: int, gain: float = 1.0) -> None:
        drawn = self._random.standard_normal(size, dtype=np.float32)
        self.tensors[name + ".weight"] = np.float32(gain) + np.float32(0.1) * drawn

    def mlp(self, name: str, hidden: int, inner: int) -> None:
        self.add(name + ".gate_proj", inner, hidden)
        self.add(name + ".up_proj", inner, hidden)
        self.add(name + ".down_proj", hidden, inner)

    def experts(self, name: str, hidden: int, inner: int) -> None:
        self.add(name + ".gate", _EXPERTS, hidden, scale=3.0)
        for expert in range(_EXPERTS):
            self.mlp(f"{name}.experts.{expert}", hidden, inner)

    def grouped_query_attention(self, name: str, hidden: int, *, qk_norm: bool) -> None:
        # Queries and keys are twice as wide as values, so that attention prefers some tokens to others.
        self.add(name + ".q_proj", hidden, hidden, scale=2.0)
        self.add(name + ".k_proj", hidden // 2, hidden, scale=2.0)
        self.add(name + ".v_proj", hidden // 2, hidden)
        self.add(name + ".o_proj", hidden, hidden)
        if qk_norm:
            self.norm(name + ".q_norm", _HEAD_DIM, gain=2.0)
            self.norm(name + ".k_norm", _HEAD_DIM, gain=2.0)


def _each_layer(spec: ModelSpec, weights: _Weights) -> list[str]:
    """Names of the layers, whose norms are added."""
    names = [f"model.layers.{layer}" for layer in range(spec.layers)]
    for name in names:
        weights.norm(name + ".input_layernorm", spec.hidden)
        weights.norm(name + ".post_attention_layernorm", spec.hidden)
    return names


def _llama(spec: ModelSpec, weights: _Weights) -> dict[str, Any]:
    for name in _each_layer(spec, weights):
        weights.grouped_query_attention(name + ".self_attn", spec.hidden, qk_norm=False)
        weights.mlp(name + ".mlp", spec.hidden, 2 * spec.hidden)
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "head_dim": _HEAD_DIM,
        "num_key_value_heads": spec.hidden // _HEAD_DIM // 2,
    }


def _qwen3_moe(spec: ModelSpec, weights: _Weights) -> dict[str, Any]:
    for name in _each_layer(spec, weights):
        weights.grouped_query_attention(name + ".self_attn", spec.hidden, qk_norm=True)
        weights.experts(name + ".mlp", spec.hidden, spec.hidden // 2)
    return {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "head_dim": _HEAD_DIM,
        "num_key_value_heads": spec.hidden // _HEAD_DIM // 2,
        "num_experts": _EXPERTS,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": spec.hidden // 2,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    }


def _deepseek_mla(spec: ModelSpec, weights: _Weights) -> dict[str, Any]:
    heads, nope, rope, value, latent = spec.hidden // _HEAD_DIM, _HEAD_DIM, 8, _HEAD_DIM, spec.hidden // 2
    for layer, name in enumerate(_each_layer(spec, weights)):
        attention = name + ".self_attn"
        weights.add(attention + ".q_proj", heads * (nope + rope), spec.hidden, scale=2.0)
        weights.add(attention + ".kv_a_proj_with_mqa", latent + rope, spec.hidden)
        weights.norm(attention + ".kv_a_layernorm", latent)
        weights.add(attention + ".kv_b_proj", heads * (nope + value), latent)
        weights.add(attention + ".o_proj", spec.hidden, heads * value)
        if layer == 0:
            weights.mlp(name + ".mlp", spec.hidden, 2 * spec.hidden)
        else:
            weights.experts(name + ".mlp", spec.hidden, spec.hidden // 2)
            weights.mlp(name + ".mlp.shared_experts", spec.hidden, spec.hidden // 2)
    return {
        "architectures": ["DeepseekV2ForCausalLM"],
        "model_type": "deepseek_v2",
        "num_key_value_heads": heads,
        "q_lora_rank": None,
        "kv_lora_rank": latent,
        "qk_nope_head_dim": nope,
        "qk_rope_head_dim": rope,
        "v_head_dim": value,
        "first_k_dense_replace": 1,
        "moe_layer_freq": 1,
        "n_routed_experts": _EXPERTS,
        "n_shared_experts": 1,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": spec.hidden // 2,
        "norm_topk_prob": False,
        "scoring_func": "softmax",
        "topk_method": "greedy",
        "n_group": 1,
        "topk_group": 1,
        "routed_scaling_factor": 1.0,
        "aux_loss_alpha": 0.0,
        "seq_aux": True,
        # On a CPU, SGLang has rotary embeddings for this model in its YaRN form only.
        "rope_scaling": {
            "type": "yarn",
            "factor": max(1, math.ceil(spec.context / 4096)),
            "original_max_position_embeddings": 4096,
            "beta_fast": 32,
            "beta_slow": 1,
            "mscale": 0.707,
            "mscale_all_dim": 0.707,
        },
    }


def _emulated(spec: ModelSpec, weights: _Weights) -> dict[str, Any]:
    """Nothing but a place for KV, as small as can be: for `--wavepp-emulate`."""
    return {
        "architectures": ["EmulatedForCausalLM"],
        "model_type": "llama",
        "head_dim": 2,
        "num_key_value_heads": 1,
    }


ARCHITECTURES: dict[str, Callable[[ModelSpec, _Weights], dict[str, Any]]] = {
    "llama": _llama,
    "qwen3-moe": _qwen3_moe,
    "deepseek-mla": _deepseek_mla,
    "emulated": _emulated,
}
"""Name -> function that adds the layers' weights and returns the architecture's part of config.json."""


# ---- tokenizer


def _byte_alphabet() -> list[str]:
    """The printable characters by which byte-level tokenizers write the bytes 0..255 (GPT-2's table)."""
    shown = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(256) if byte not in shown]
    table = {byte: chr(byte) for byte in shown} | {byte: chr(256 + i) for i, byte in enumerate(hidden)}
    return [table[byte] for byte in range(256)]


_BYTES = _byte_alphabet()
_MERGES = [(a, b) for a in _LETTERS for b in _LETTERS] + [(_BYTES[0x20], a) for a in _LETTERS]
"""Every pair of small letters, then every small letter after a space; earlier ones go first."""
_TOKENS = [*SPECIAL_TOKENS, *_BYTES, *(a + b for a, b in _MERGES)]
TOKENIZER_SIZE = len(_TOKENS)


def _tokenizer_json() -> bytes:
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    vocabulary = {token: index for index, token in enumerate(_TOKENS)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=_MERGES))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(
        [AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS]
    )
    text: str = tokenizer.to_str(pretty=True)
    return text.encode()


def _never_generated() -> list[int]:
    """Ids whose logit is fixed at 0, so that greedy decoding never picks them.

    They would print as nothing or as broken characters: bytes outside printable ASCII, ids beyond the
    tokenizer, special tokens other than the EOS (which is left as likely as any letter).
    """
    printable = {_BYTES[byte] for byte in (0x0A, *range(0x20, 0x7F))}
    shown = {EOS_TOKEN_ID}
    shown |= {i for i, token in enumerate(_TOKENS) if i > EOS_TOKEN_ID and set(token) <= printable}
    return [i for i in range(VOCAB_SIZE) if i not in shown]


# ---- files


def _marker(spec: ModelSpec, *, complete: bool) -> dict[str, Any]:
    return {"format": _FORMAT, **dataclasses.asdict(spec), "complete": complete}


def _read_marker(marker: Path) -> dict[str, Any] | None:
    """The marker's fields; {} if it is there but unreadable as such; None if there is none."""
    try:
        fields = json.loads(marker.read_text())
    except (FileNotFoundError, NotADirectoryError):
        return None
    except ValueError:
        return {}
    return fields if isinstance(fields, dict) else {}


def _write(file: Path, content: bytes) -> None:
    """Replace a file at once, so that no reader ever sees half of it."""
    partial = file.with_name(f".{file.name}.{os.getpid()}.{threading.get_ident()}")
    try:
        partial.write_bytes(content)
        partial.replace(file)
    finally:
        partial.unlink(missing_ok=True)


def _json(content: dict[str, Any]) -> bytes:
    return (json.dumps(content, indent=2) + "\n").encode()
