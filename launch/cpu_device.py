"""The platform class behind `wavepp-cpu`, and what a scheduler process on it needs besides.

Imported by SGLang itself, once `cpu_platform.activate` has named the class.
"""

from __future__ import annotations

import importlib.util
import sys
from typing import Any

import torch
from sglang.srt.platforms.cpu import CpuSRTPlatform
from sglang.srt.platforms.interface import PlatformCapabilities

from .cpu_platform import is_active


class CpuPlatform(CpuSRTPlatform):
    """CPU tensors on an out-of-tree device: torch-native kernels, no `sgl_kernel`, gloo between stages."""

    capabilities = PlatformCapabilities(graph_capture=False, supports_pynccl=False)

    def is_out_of_tree(self) -> bool:
        return True

    def get_default_attention_backend(self) -> str:
        return "torch_native"

    def support_mamba_cache_extra_buffer(self) -> bool:
        return True

    def get_compile_backend(self, mode: str | None = None) -> str:
        """Eager: inductor would want a C++ compiler, and tiny models gain nothing from it."""
        return "eager"

    def apply_server_args_defaults(self, server_args: Any) -> None:
        # For device "cpu" SGLang itself falls back to intel_amx, which is a part of sgl_kernel.
        if server_args.attention_backend is None:
            server_args.attention_backend = self.get_default_attention_backend()
        if server_args.lora_backend == "csgmv":  # SGLang's default, a set of Triton kernels
            server_args.lora_backend = "torch_native"

    def get_torch_distributed_backend_str(self) -> str:
        # Not only an answer: of the platform's calls this is the last one before threads are bound.
        _skip_thread_binding_without_sgl_kernel()
        return "gloo"

    def get_torch_profiler_activity_str(self) -> str:
        return "CPU"

    def get_torch_profiler_activity(self) -> torch.profiler.ProfilerActivity:
        return torch.profiler.ProfilerActivity.CPU

    def post_load_model(self, model: Any) -> None:
        prepare_scheduler()


def prepare_scheduler() -> None:
    """Make this scheduler process ready for the CPU. Idempotent; does nothing on another platform.

    The platform class does this by itself in time, so nobody has to call it. What it does:

    * MLA models on `torch_native` attention: SGLang's default sends an extend without cached prefix
      through plain multi-head attention, which `torch_native` cannot do on an MLA pool. The absorbed form
      serves every extend and decoding.
    * arm64 hosts: no thread binding through `sgl_kernel`, if that is absent.
    * LoRA: no pinned host memory, which torch refuses to give where there is no accelerator to pin it for.
    """
    if not is_active():
        return
    from sglang.srt.models.deepseek_common import attention_backend_handler as handler

    handler.AttentionBackendRegistry.register("torch_native", handler._dispatch_mla_subtype)
    _skip_thread_binding_without_sgl_kernel()
    if not torch.accelerator.is_available():
        _give_lora_ordinary_memory()


class _UnpinnedTorch:
    """The module `torch`, but `tensor` and `zeros` ignore `pin_memory`."""

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    def tensor(self, *args: Any, pin_memory: bool = False, **kwargs: Any) -> torch.Tensor:
        return torch.tensor(*args, **kwargs)

    def zeros(self, *args: Any, pin_memory: bool = False, **kwargs: Any) -> torch.Tensor:
        return torch.zeros(*args, **kwargs)


def _give_lora_ordinary_memory() -> None:
    """SGLang's LoRA layers and their torch backend pin host tensors without asking the platform."""
    from sglang.srt.lora import layers
    from sglang.srt.lora.backend import torch_backend

    for module in (layers, torch_backend):
        module.torch = _UnpinnedTorch()
    torch.Tensor.pin_memory = lambda tensor, *_: tensor  # type: ignore[method-assign]


def _skip_thread_binding_without_sgl_kernel() -> None:
    """On arm64 SGLang binds threads through `sgl_kernel` unconditionally; on x86 only if it has it."""
    bootstrap = sys.modules.get("sglang.srt.distributed.bootstrap")
    if bootstrap is not None and importlib.util.find_spec("sgl_kernel") is None:
        bootstrap._is_cpu_arm64 = False  # type: ignore[attr-defined]
