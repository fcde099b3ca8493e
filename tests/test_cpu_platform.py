"""The CPU platform: absent unless named, cheap to ask, and enough for every SGLang process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.metadata import entry_points
from importlib.util import find_spec

import pytest

from sglang_wavepp.errors import ConfigError
from sglang_wavepp.launch import cpu_platform


def run_python(code: str, **environment: str) -> str:
    """Standard output of `code` in a fresh interpreter."""
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("named", [None, "", "cpu", "wavepp", "WAVEPP-CPU", "wavepp-cpu2"])
def test_stays_out_of_the_way_unless_named(named: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SGLANG_PLATFORM", raising=False)
    if named is not None:
        monkeypatch.setenv("SGLANG_PLATFORM", named)
    monkeypatch.setattr(cpu_platform, "declare_torchvision_ops", lambda: pytest.fail("touched torchvision"))
    assert cpu_platform.activate() is None
    assert not cpu_platform.is_active()


def test_activates_when_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SGLANG_PLATFORM", "wavepp-cpu")
    monkeypatch.setattr(cpu_platform, "declare_torchvision_ops", lambda: False)
    assert cpu_platform.activate() == "sglang_wavepp.launch.cpu_device.CpuPlatform"
    assert cpu_platform.is_active()


def test_is_registered_under_its_name() -> None:
    (point,) = entry_points(group="sglang.srt.platforms", name=cpu_platform.NAME)
    assert point.load() is cpu_platform.activate


def test_asking_imports_neither_torch_nor_sglang() -> None:
    code = """
import sys
from sglang_wavepp.launch.cpu_platform import activate
assert activate() is None
print([name for name in ("torch", "sglang", "numpy", "torchvision") if name in sys.modules])
"""
    assert run_python(code, SGLANG_PLATFORM="").strip() == "[]"


@pytest.mark.parametrize(
    ("cores", "pp_size", "bound"),
    [
        ({0, 1}, 1, "0"),
        ({0, 1}, 2, "0|1"),
        ({5, 7}, 4, "5|5|7|7"),
        ({3}, 3, "3|3|3"),
        (set(range(8)), 2, "0|4"),
        ({0, 1, 2}, 2, "0|1"),
    ],
)
def test_one_core_a_stage(cores: set[int], pp_size: int, bound: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_platform, "_usable_cores", lambda: sorted(cores))
    environment = cpu_platform.default_environment(pp_size)
    assert environment["SGLANG_CPU_OMP_THREADS_BIND"] == bound
    assert environment["SGLANG_PLATFORM"] == cpu_platform.NAME
    assert environment["OMP_NUM_THREADS"] == "1"
    assert environment["SGLANG_USE_CPU_ENGINE"] == "0"
    assert environment["CUDA_VISIBLE_DEVICES"] == ""


@pytest.mark.parametrize("pp_size", [0, -1])
def test_no_stages(pp_size: int) -> None:
    with pytest.raises(ConfigError, match=f"pp_size must be at least 1, got {pp_size}"):
        cpu_platform.default_environment(pp_size)


def test_torchvision_is_left_alone_once_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torchvision", object())
    assert cpu_platform.declare_torchvision_ops() is False


@pytest.mark.skipif(find_spec("sglang") is None, reason="sglang is not installed")
def test_an_sglang_process_on_this_platform() -> None:
    """What a launcher, a scheduler and a detokenizer import, in one process."""
    code = """
import json, sys
import sglang.launch_server, sglang.srt.managers.scheduler, sglang.srt.managers.detokenizer_manager
import sglang.srt.multimodal.internvl_utils
from sglang.srt.distributed import bootstrap, parallel_state
from sglang.srt.models.deepseek_common import attention_backend_handler as mla
from sglang.srt.platforms import current_platform
from sglang_wavepp.launch.cpu_device import CpuPlatform, prepare_scheduler
bootstrap._is_cpu_arm64 = True
backend = parallel_state.get_default_distributed_backend("cpu")
threads_through_sgl_kernel = bootstrap._is_cpu_arm64
prepare_scheduler()
prepare_scheduler()
from sglang.srt.lora import layers
from sglang.srt.lora.backend import torch_backend
print(json.dumps({
    "class": type(current_platform) is CpuPlatform,
    "out of tree": current_platform.is_out_of_tree(),
    "attention": current_platform.get_default_attention_backend(),
    "device": str(current_platform.get_device()),
    "torchvision": "torchvision" in sys.modules,
    "sgl_kernel": "sgl_kernel" in sys.modules,
    "mla": mla.AttentionBackendRegistry.get_handler("torch_native") is mla._dispatch_mla_subtype,
    "backend": backend,
    "threads through sgl_kernel": threads_through_sgl_kernel,
    "lora": layers.torch.tensor([1, 2], pin_memory=True).pin_memory().tolist(),
    "lora backend": torch_backend.torch.zeros((2,), pin_memory=True).tolist(),
}))
"""
    report = json.loads(run_python(code, **cpu_platform.default_environment(2)).splitlines()[-1])
    assert report == {
        "class": True,
        "out of tree": True,
        "attention": "torch_native",
        "device": "cpu",
        "torchvision": True,
        "sgl_kernel": False,
        "mla": True,
        "backend": "gloo",
        "threads through sgl_kernel": False,
        "lora": [1, 2],
        "lora backend": [0.0, 0.0],
    }
