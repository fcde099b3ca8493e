"""`--wavepp-emulate`: a server, with or without WavePP, on devices that are not there.

Everything but the forward pass is SGLang's own: the loops, the cache, the allocators, rows, metadata,
messages. The model (`emulated_model`) computes nothing; a timeline (`emulated_device`) says how long each
wave takes, by a profile. With a dilation of k every such time is k times as long, so that a few cores can
stand for the hosts of many stages: divide what is measured by k.

The values travel as `server_args._wavepp_emulation`, like WavePP's own (see `flags`).
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from sglang_wavepp.config import config_of
from sglang_wavepp.errors import ConfigError
from sglang_wavepp.launch import cpu_platform, flags
from sglang_wavepp.mpu.profile import ProfileError, load_profile

if TYPE_CHECKING:
    from sglang_wavepp.launch.emulated_device import EmulatedDevice

ARCHITECTURE = "EmulatedForCausalLM"
"""Of the model folders that `wavepp make-model --arch emulated` writes."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Emulation:
    """The options `--wavepp-emulate...`."""

    profile: str
    """A name or a file, as `mpu.profile.load_profile` takes it."""
    dilation: float = 1.0
    trace: str = ""
    """Directory to which each stage writes its waves, one JSON object a line; empty means nowhere."""
    check: bool = False
    """Verify on each stage what its KV slots hold; the generated tokens tell. Costs time of the host."""


def emulation_of(server_args: Any) -> Emulation | None:
    """What is emulated on a server, or None."""
    given = getattr(server_args, "_wavepp_emulation", None)
    return Emulation(**given) if given else None


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add the argument group "wavepp-emulate" to SGLang's parser."""
    group = parser.add_argument_group("wavepp-emulate", "Devices that are not there; also without --wavepp.")
    shared: dict[str, Any] = {"default": argparse.SUPPRESS}
    group.add_argument(
        "--wavepp-emulate",
        metavar="PROFILE",
        help="Compute nothing: waves take the time that a profile says, a name as for 'wavepp plan' or a "
        ".toml file. Needs the CPU platform and a model made by 'wavepp make-model --arch emulated'.",
        **shared,
    )
    group.add_argument(
        "--wavepp-emulate-dilation",
        type=flags.factor,
        metavar="FACTOR",
        help="Make all emulated times so many times longer: few cores then stand for many. (default: 1)",
        **shared,
    )
    group.add_argument(
        "--wavepp-emulate-trace",
        type=flags.directory,
        metavar="DIR",
        help="Directory to which each stage writes when its waves ran, one JSON object a line.",
        **shared,
    )
    group.add_argument(
        "--wavepp-emulate-check",
        action="store_true",
        help="Verify on every stage what its KV slots hold; the generated tokens tell. Not for timing.",
        **shared,
    )


def given_options(namespace: argparse.Namespace) -> dict[str, Any] | None:
    """What `_wavepp_emulation` shall hold for a parsed command line, or None where nothing is emulated.

    Raises:
        ConfigError: an option of the emulation was given without `--wavepp-emulate`.
    """
    prefix = "wavepp_emulate"
    options = {name: value for name, value in vars(namespace).items() if name.startswith(prefix)}
    profile = options.pop(prefix, None)
    options = {name.removeprefix(f"{prefix}_"): value for name, value in options.items()}
    if profile is None and options:
        raise ConfigError(f"--wavepp-emulate-{next(iter(options))} has no effect without --wavepp-emulate")
    return None if profile is None else dataclasses.asdict(Emulation(profile=profile, **options))


def check(server_args: Any) -> None:
    """In the launcher: raise `ConfigError` if the emulation cannot run as it was asked for."""
    emulation = emulation_of(server_args)
    if emulation is None:
        return
    if not cpu_platform.is_active():
        raise ConfigError(f"--wavepp-emulate runs on the CPU: set SGLANG_PLATFORM={cpu_platform.NAME}")
    if server_args.tp_size > 1:
        raise ConfigError("--wavepp-emulate has one device for each pipeline stage: leave out --tp-size")
    try:
        load_profile(emulation.profile).stages(server_args.pp_size)
    except ProfileError as error:
        raise ConfigError(f"--wavepp-emulate: {error}") from None
    from sglang.srt.arg_groups.overrides import model_config_of

    found = list(model_config_of(server_args).hf_config.architectures)
    if found != [ARCHITECTURE]:
        raise ConfigError(
            f"--wavepp-emulate needs a model folder made by 'wavepp make-model --arch emulated', "
            f"{server_args.model_path} holds {', '.join(found)}"
        )


def install(server_args: Any, stage: int) -> None:
    """In a scheduler process, before it loads the model: replace the device and the model."""
    emulation = emulation_of(server_args)
    assert emulation is not None
    from sglang.srt.models.registry import ModelRegistry

    from sglang_wavepp.launch import emulated_device, emulated_model

    device = emulated_device.install(emulation, stage, server_args.pp_size)
    emulated_model.EmulatedForCausalLM.checks = emulation.check
    ModelRegistry.models[ARCHITECTURE] = emulated_model.EmulatedForCausalLM
    _follow(device, stock=config_of(server_args) is None)


def _follow(device: EmulatedDevice, stock: bool) -> None:
    """Tell the device what happens to its results and when requests become runnable.

    Only stock SGLang sends outputs round before they are ready; WavePP waits for their event first.
    """
    from sglang.srt.managers.scheduler import Scheduler

    from sglang_wavepp.launch.emulated_device import READY_KEY
    from sglang_wavepp.loop import StageLoop

    def wrap(owner: type, name: str, hook: Callable[..., Any]) -> None:
        original = getattr(owner, name)

        @functools.wraps(original)
        def hooked(*args: Any, **kwargs: Any) -> Any:
            return hook(original, *args, **kwargs)

        setattr(owner, name, hooked)

    def sends_outputs(original: Callable[..., Any], scheduler: Any, result: Any, batch: Any) -> Any:
        tensors = original(scheduler, result, batch)
        tensors[READY_KEY] = device.free_at
        return tensors

    def receives(original: Callable[..., Any], scheduler: Any, *args: Any, **kwargs: Any) -> Any:
        begin = time.monotonic()
        tensors, event = original(scheduler, *args, **kwargs)
        device.waited(begin)
        device.latest = tensors.get(READY_KEY, 0.0)
        return tensors, event

    def skips_outputs(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        device.latest = 0.0
        return original(*args, **kwargs)

    def arrives(original: Callable[..., Any], scheduler: Any, request: Any, *args: Any) -> Any:
        device.runnable[request.rid] = time.monotonic()
        return original(scheduler, request, *args)

    def has_output(
        original: Callable[..., Any], scheduler: Any, batch: Any, *args: Any, **kwargs: Any
    ) -> Any:
        answer = original(scheduler, batch, *args, **kwargs)
        for req in batch.reqs:
            if req.finished():
                device.runnable.pop(req.rid, None)
            elif req.output_ids:
                device.runnable[req.rid] = time.monotonic()
        return answer

    def waits(original: Callable[..., Any], loop: Any) -> None:
        begin = time.monotonic()
        original(loop)
        device.waited(begin)

    if stock:
        wrap(Scheduler, "_pp_prepare_tensor_dict", sends_outputs)
        wrap(Scheduler, "_pp_make_skip_output_result", skips_outputs)
    wrap(Scheduler, "_pp_recv_typed_dict", receives)
    wrap(Scheduler, "handle_generate_request", arrives)
    wrap(Scheduler, "process_batch_result", has_output)
    wrap(StageLoop, "_wait", waits)
