"""LoRA adapters for the tests' model, and models that have one merged into their weights."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file, save_file

ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
PLACES = {"a": (*ATTENTION, "gate_proj", "up_proj", "down_proj"), "b": ATTENTION}
"""Adapter -> linear layers that it changes."""
RANKS = {"a": 4, "b": 8}
SCALE = 2
"""`lora_alpha` over the rank."""


def make_adapters(model: Path, folder: Path) -> dict[str, Path]:
    """Random adapters in PEFT's format, large enough to change greedy outputs: name -> folder."""
    for seed, name in enumerate(RANKS):
        _make_adapter(model, folder / name, rank=RANKS[name], places=PLACES[name], seed=seed)
    return {name: folder / name for name in RANKS}


def _make_adapter(model: Path, folder: Path, *, rank: int, places: tuple[str, ...], seed: int) -> None:
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
    config = {
        "peft_type": "LORA",
        "r": rank,
        "lora_alpha": SCALE * rank,
        "target_modules": list(places),
    }
    folder.mkdir()
    (folder / "adapter_config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "adapter_model.safetensors")


def merge(model: Path, adapter: Path, folder: Path) -> Path:
    """A model whose own weights do what `model` does under `adapter`."""
    shutil.copytree(model, folder)
    weights = load_file(model / "model.safetensors")
    parts = load_file(adapter / "adapter_model.safetensors")
    for name in weights:
        lora = f"base_model.model.{name.removesuffix('.weight')}.lora_"
        if f"{lora}A.weight" in parts:
            weights[name] += SCALE * parts[f"{lora}B.weight"] @ parts[f"{lora}A.weight"]
    save_file(weights, folder / "model.safetensors")
    return folder
