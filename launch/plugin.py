"""What SGLang runs of WavePP: `register`, in every process, before that process does anything else.

| process | what happens there |
|---|---|
| launcher (command line or engine) | flags, refusals, a check that no scheduler came up without WavePP |
| scheduler with `--wavepp` | the hooks of the runtime |
| every other one | nothing that acts without `--wavepp` |

SGLang logs an error of a plugin and goes on without it. For a scheduler that would mean a stage which decides
for itself among stages that do not, so everything here that can fail ends the process or the server instead.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import pkgutil
import signal
import sys
import traceback
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any, NoReturn

from sglang_wavepp.config import CACHE_BACKEND, config_of
from sglang_wavepp.errors import ConfigError, HandshakeError
from sglang_wavepp.launch import emulation, flags

_SERVER_ARGS = "sglang.srt.server_args.ServerArgs"
_READY = "sglang.srt.entrypoints.engine._wait_for_scheduler_ready"
_CONTROL = "sglang.srt.managers.tokenizer_control_mixin.TokenizerControlMixin"
_LORA_UPDATES = ("load_lora_adapter", "load_lora_adapter_from_tensors", "unload_lora_adapter")

_engine_hooked = False


def register() -> None:
    """Entry point of the group `sglang.srt.plugins`."""
    scheduler = scheduler_arguments()
    if scheduler is None:
        _register_launcher()
    else:
        _install(scheduler["server_args"], scheduler["pp_rank"])


def scheduler_arguments() -> dict[str, Any] | None:
    """The arguments with which this scheduler process was started, or None in any other process.

    SGLang loads plugins as the first thing in `run_scheduler_process`, before it publishes the `ServerArgs`
    anywhere. So the only place to find them is that function's frame.
    """
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        if (
            frame.f_code.co_name == "run_scheduler_process"
            and frame.f_globals.get("__name__") == "sglang.srt.managers.scheduler"
        ):
            return frame.f_locals
        frame = frame.f_back
    return None


def _install(server_args: Any, stage: int) -> None:
    try:
        if emulation.emulation_of(server_args) is not None:
            emulation.install(server_args, stage)
        if config_of(server_args) is not None:
            from sglang_wavepp import hooks

            hooks.install(server_args)
    except BaseException as error:
        _end_scheduler(error)


def _end_scheduler(error: BaseException) -> NoReturn:
    """Say why on one line, tell the launcher, which ends the server, and leave without any more output."""
    place = traceback.extract_tb(error.__traceback__)[-1]
    text = " ".join(f"{type(error).__name__}: {error}".split())
    with contextlib.suppress(OSError):  # a full disk must not keep the launcher from being told
        print(
            f"error: WavePP could not be installed in scheduler process {os.getpid()}, so the server ends: "
            f"{text} ({os.path.basename(place.filename)}:{place.lineno})",
            file=sys.stderr,
            flush=True,
        )
    os.kill(os.getppid(), signal.SIGQUIT)
    os._exit(1)


def _register_launcher() -> None:
    from sglang.srt.arg_groups.resolution_hooks import register_resolution_hook
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    # The flags come last: if anything before them fails, --wavepp is unknown instead of unchecked.
    register_resolution_hook("handle_deprecated_dp_attention")(_before_resolution)
    register_resolution_hook("handle_other_validations")(_late_in_resolution)
    HookRegistry.register(f"{_SERVER_ARGS}.check_server_args", _before_launch, HookType.BEFORE)
    HookRegistry.register(f"{_SERVER_ARGS}.from_cli_args", _from_cli_args, HookType.AROUND)
    HookRegistry.register(f"{_SERVER_ARGS}.add_cli_args", _add_cli_args, HookType.AFTER)


def _add_cli_args(result: None, parser: argparse.ArgumentParser) -> None:
    flags.add_flags(parser)
    emulation.add_flags(parser)


def _from_cli_args(original: Callable[..., Any], cls: type, namespace: argparse.Namespace) -> Any:
    record = original(cls, namespace)
    try:
        options = flags.given_options(namespace)
        emulated = emulation.given_options(namespace)
    except ConfigError as error:
        flags.exit_with(error)
    if emulated is not None:
        record._wavepp_emulation = emulated
    if options is not None:
        record._wavepp = options
    elif record.radix_cache_backend == CACHE_BACKEND:
        flags.exit_with(ConfigError(f"--radix-cache-backend {CACHE_BACKEND} needs --wavepp"))
    return record


def _checked(server_args: Any, check: Callable[[Any], None]) -> None:
    """Run a check where WavePP is on, and report its error in the way of whoever made the record."""
    if config_of(server_args) is None:
        return
    try:
        check(server_args)
    except (ConfigError, HandshakeError) as error:
        flags.fail(server_args, error)


def _before_resolution(server_args: Any, previous: Callable[[Any], None]) -> None:
    """First step of resolution: refuse flags before SGLang reads the model, or trips over them itself."""
    from sglang_wavepp.launch.refusals import check_given

    _checked(server_args, check_given)
    _set_cpu_environment(server_args.pp_size * server_args.tp_size)
    previous(server_args)


def _late_in_resolution(server_args: Any, previous: Callable[[Any], None]) -> None:
    from sglang_wavepp.launch.refusals import check_resolved

    previous(server_args)
    _checked(server_args, check_resolved)


def _before_launch(server_args: Any) -> None:
    """Last look, right before SGLang starts processes: some steps of resolution come after the hook above."""
    from sglang_wavepp.launch.refusals import check_given, check_resolved

    try:
        emulation.check(server_args)
    except ConfigError as error:
        flags.exit_with(error)
    if config_of(server_args) is not None and os.environ.get("CUDA_ENABLE_USER_TRIGGERED_COREDUMP") != "1":
        # SGLang waits a minute for core dumps before it ends a server, whether or not there will be any.
        os.environ.setdefault("SGLANG_CUDA_COREDUMP_BEFORE_CRASH", "0")
    # Python code may have resolved the record before the engine loaded this plugin.
    for check in (check_given, check_resolved, _check_sglang, _hook_engine):
        _checked(server_args, check)


def _check_sglang(server_args: Any) -> None:
    """Refuse an SGLang that was not tested; the schedulers do so, too, but only when they have loaded all."""
    from sglang_wavepp import hooks

    config = config_of(server_args)
    assert config is not None
    hooks.check_sources(config.allow_untested_sglang)


def _set_cpu_environment(processes: int) -> None:
    """On our CPU platform, give each scheduler its core: SGLang refuses several of them without that."""
    from sglang_wavepp.launch import cpu_platform

    if cpu_platform.is_active() and "SGLANG_CPU_OMP_THREADS_BIND" not in os.environ:
        for name, value in cpu_platform.default_environment(processes).items():
            os.environ.setdefault(name, value)


def _hook_engine(server_args: Any) -> None:
    """Have the engine check its schedulers as soon as they are ready, refuse what it cannot pass on, and take
    only progress for health.

    Only now: at registration the engine is not imported yet, and a hook on it would import it for `--help`.

    Raises:
        ConfigError: another plugin has hooked the same function before.
    """
    global _engine_hooked
    if _engine_hooked:
        return
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    from sglang_wavepp.launch import health

    hooks: dict[str, Callable[..., Any]] = {
        _READY: _wait_for_schedulers,
        health.RECEIVE: health.note_message,
    }
    hooks |= {f"{_CONTROL}.{name}": _refuse_lora_update for name in _LORA_UPDATES}
    before = {target: pkgutil.resolve_name(target) for target in hooks}
    for target, hook in hooks.items():
        HookRegistry.register(target, hook, HookType.AROUND)
    HookRegistry.apply_hooks()
    for target, function in before.items():
        if pkgutil.resolve_name(target) is function:
            raise ConfigError(f"another plugin hooks {target}, which WavePP needs")
    health.install()
    _engine_hooked = True


async def _refuse_lora_update(
    original: Callable[..., Any], manager: Any, request: Any, http_request: Any = None
) -> Any:
    """Adapters cannot come or go at run time yet.

    Here and not on stage 0: before SGLang asks its schedulers to unload an adapter it takes it out of
    service, and does not put it back if they refuse.
    """
    if config_of(manager.server_args) is None:
        return await original(manager, request, http_request)
    from sglang.srt.managers.io_struct import LoRAUpdateOutput

    text = "WavePP does not load or unload LoRA adapters at run time yet: name them with --lora-paths"
    return LoRAUpdateOutput(success=False, error_message=text)


def _wait_for_schedulers(
    original: Callable[..., Any], readers: Sequence[Any], processes: Sequence[Any]
) -> Any:
    """Wait until the schedulers are ready, and end them if one of them is so without WavePP.

    Raises:
        HandshakeError: one of them is; from the command line it is `SystemExit(1)` with the line on stderr.
    """
    from sglang.srt.runtime_context import get_server_args

    infos = original(readers, processes)
    server_args = get_server_args()
    if config_of(server_args) is None:
        return infos
    first = server_args.pp_size // server_args.nnodes * server_args.node_rank
    without = [str(stage) for stage, info in enumerate(infos, first) if "wavepp" not in info]
    if without:
        for process in processes:
            process.kill()
        error = HandshakeError(
            f"the server does not start: WavePP was not loaded in the scheduler of stage {', '.join(without)}"
        )
        flags.fail(server_args, error, code=1)
    return infos
