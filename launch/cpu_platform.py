"""The platform `wavepp-cpu`: unmodified SGLang on a CPU, without `sgl_kernel`.

SGLang calls `activate` from the entry-point group `sglang.srt.platforms`, in every process, while
`import sglang` is still running. So this module imports nothing heavy, and stays out of the way (None)
unless `SGLANG_PLATFORM=wavepp-cpu` asks for it by name: an install with a GPU never notices it.

It is an *out-of-tree* platform on purpose. SGLang's own CPU engine (`SGLANG_USE_CPU_ENGINE=1`) imports
`sgl_kernel`; an out-of-tree platform gets the plain torch implementations instead.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from importlib.machinery import PathFinder
from typing import Any

from sglang_wavepp.errors import ConfigError

NAME = "wavepp-cpu"
"""The entry point's name, and the value of `SGLANG_PLATFORM` that selects it."""

_PLATFORM_CLASS = "sglang_wavepp.launch.cpu_device.CpuPlatform"

_torchvision_ops: Any = None
"""The torch library that holds the declared operators; they vanish when it is collected."""


def is_active() -> bool:
    """Whether this process was asked to run on the CPU platform."""
    return os.environ.get("SGLANG_PLATFORM") == NAME


def activate() -> str | None:
    """Dotted path of the platform class, or None unless `SGLANG_PLATFORM` names this platform.

    Also makes `import torchvision` work (`declare_torchvision_ops`). Nothing later would do: SGLang resolves
    its platform before its first import of torchvision, and no other hook of ours runs before that import.
    """
    if not is_active():
        return None
    declare_torchvision_ops()
    return _PLATFORM_CLASS


def default_environment(pp_size: int) -> dict[str, str]:
    """Environment variables for a CPU server with `pp_size` stages, to be laid over the caller's own.

    One thread a stage, and the stages spread evenly over the cores that this process may use (several
    stages share a core where there are fewer cores than stages).

    Raises:
        ConfigError: `pp_size` is below 1.
    """
    if pp_size < 1:
        raise ConfigError(f"pp_size must be at least 1, got {pp_size}")
    cores = _usable_cores()
    bound = [cores[stage * len(cores) // pp_size] for stage in range(pp_size)]
    return {
        "SGLANG_PLATFORM": NAME,
        # The in-tree CPU engine needs sgl_kernel, and a visible GPU makes SGLang take its CUDA imports.
        "SGLANG_USE_CPU_ENGINE": "0",
        "CUDA_VISIBLE_DEVICES": "",
        # SGLang insists on one entry for each rank as soon as there are more ranks than NUMA nodes.
        "SGLANG_CPU_OMP_THREADS_BIND": "|".join(map(str, bound)),
        "OMP_NUM_THREADS": "1",
    }


def declare_torchvision_ops() -> bool:
    """Declare the operators that `import torchvision` expects its native library to have declared.

    SGLang imports torchvision although a text model never uses it, and its common wheels are CUDA builds.
    Beside a CPU build of torch their native library does not load, and the import dies on a missing
    `torchvision::nms`. With the two names declared it succeeds; calling them still fails.

    Returns whether anything was declared: not if the native library loads, if torch is a CUDA build, or if
    torchvision is absent or already imported.
    """
    global _torchvision_ops
    if _torchvision_ops is not None or "torchvision" in sys.modules:
        return False
    spec = importlib.util.find_spec("torchvision")
    if spec is None or not spec.submodule_search_locations:
        return False
    import torch

    if torch.version.cuda is not None:
        return False
    native = PathFinder.find_spec("_C", list(spec.submodule_search_locations))
    if native is not None and native.origin is not None:
        try:
            torch.ops.load_library(native.origin)
        except OSError:
            pass
        else:
            return False
    _torchvision_ops = torch.library.Library("torchvision", "DEF")
    for name in ("nms", "qnms"):
        _torchvision_ops.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    return True


def _usable_cores() -> list[int]:
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))
