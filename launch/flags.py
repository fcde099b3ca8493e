"""The `--wavepp` flags: how they are declared, checked and carried to every process.

SGLang's `ServerArgs` is a closed record, so the values travel beside its fields: as `server_args._wavepp`, a
plain dict of primitives that the record pickles into every child process. It is there only where `--wavepp`
is on; `sglang_wavepp.config.config_of` reads it back.
"""

from __future__ import annotations

import argparse
import dataclasses
import ipaddress
import math
import os
import sys
from collections.abc import Callable, Mapping
from importlib.metadata import entry_points
from typing import Any, NoReturn

from sglang_wavepp.config import WavePPConfig
from sglang_wavepp.errors import ConfigError, WavePPError
from sglang_wavepp.mpu import PLANNERS

PLUGIN_NAME = "wavepp"
"""Name of this plugin among SGLang's; `SGLANG_PLUGINS` selects by it."""


def _whole(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"must be a whole number, not {text!r}") from None


def positive_int(text: str) -> int:
    """A whole number from 1 on; `argparse.ArgumentTypeError` otherwise."""
    value = _whole(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, not {value}")
    return value


def natural_int(text: str) -> int:
    """A whole number from 0 on; `argparse.ArgumentTypeError` otherwise."""
    value = _whole(text)
    if value < 0:
        raise argparse.ArgumentTypeError(f"must not be negative, not {value}")
    return value


def pool_tokens(text: str) -> str:
    """`auto`, or whole numbers from 1 on separated by commas; `argparse.ArgumentTypeError` otherwise."""
    if text in ("", "auto"):
        return text
    return ",".join(str(positive_int(part.strip())) for part in text.split(","))


def planner(text: str) -> str:
    """The name of a planner; `argparse.ArgumentTypeError` otherwise."""
    if text not in PLANNERS:
        raise argparse.ArgumentTypeError(f"must be one of {', '.join(PLANNERS)}, not {text!r}")
    return text


def _positive(text: str, what: str) -> float:
    try:
        value = float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"must be a {what}, not {text!r}") from None
    if not (math.isfinite(value) and value > 0):
        raise argparse.ArgumentTypeError(f"must be a {what} above 0, not {text}")
    return value


def seconds(text: str) -> float:
    """A finite number of seconds above 0; `argparse.ArgumentTypeError` otherwise."""
    return _positive(text, "number of seconds")


def factor(text: str) -> float:
    """A finite number above 0; `argparse.ArgumentTypeError` otherwise."""
    return _positive(text, "number")


def directory(text: str) -> str:
    """An existing, writable directory, or nothing; `argparse.ArgumentTypeError` otherwise."""
    if text and not (os.path.isdir(text) and os.access(text, os.W_OK | os.X_OK)):
        raise argparse.ArgumentTypeError(f"{text!r} is not a directory that can be written to")
    return text


def interface(text: str) -> str:
    """The IP address of one interface, or nothing; `argparse.ArgumentTypeError` otherwise."""
    if not text:
        return text
    try:
        address = ipaddress.ip_address(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"must be an IP address, not {text!r}") from None
    if address.is_unspecified or address.is_multicast:
        raise argparse.ArgumentTypeError(f"must be the address of one interface, not {text}")
    return text


@dataclasses.dataclass(frozen=True, slots=True)
class Option:
    """How one field of `WavePPConfig` appears on the command line. No `parse` means a switch."""

    help: str
    parse: Callable[[str], Any] | None = None
    metavar: str | None = None


OPTIONS: Mapping[str, Option] = {
    "decode_reserve": Option(
        "KV tokens promised to a request beyond its prompt at admission; grows by as much while it decodes.",
        positive_int,
        "TOKENS",
    ),
    "run_ahead": Option(
        "Waves that stage 0 may issue ahead of the last stage's acknowledgement; 0 means 2 for each stage.",
        natural_int,
        "WAVES",
    ),
    "planner": Option(
        "How prompts are cut into prefill waves: --chunked-prefill-size each (static), smaller ones while "
        "there are too few to fill the pipeline, by tokens (mpu) or by the time that stages take (timed).",
        planner,
        "|".join(PLANNERS),
    ),
    "wave_floor": Option(
        "Prompt tokens of a wave below which mpu and timed do not go.", positive_int, "TOKENS"
    ),
    "pool_tokens": Option(
        "KV tokens of each stage, separated by commas, or 'auto': each stage sizes its pool by its own free "
        "memory and layers. Empty: every stage takes as many as the smallest has room for.",
        pool_tokens,
        "N,N,...|auto",
    ),
    "block_size": Option("Tokens in a block of the index of reusable prefixes.", positive_int, "TOKENS"),
    "stall_timeout": Option(
        "End the server if a stage makes no progress on a wave for this long. Waiting for activations may "
        "take as long for each stage before it, and the first wave, for which kernels may be compiled, five "
        "times as long.",
        seconds,
        "SECONDS",
    ),
    "heartbeat_timeout": Option(
        "End the server if nothing is heard from a stage for this long.", seconds, "SECONDS"
    ),
    "handshake_timeout": Option(
        "Do not start if the stages have not found each other within this time.", seconds, "SECONDS"
    ),
    "allow_untested_sglang": Option(
        "Serve although the SGLang functions that WavePP hooks are not the ones that it was tested with."
    ),
    "decision_log": Option(
        "Directory to which each stage writes the decisions that it applied, sampled tokens included, to be "
        "read with 'wavepp log'. Empty means nowhere.",
        directory,
        "DIR",
    ),
    "socket_dir": Option(
        "Directory in which the stages' private socket directory is made; empty means the temporary one.",
        directory,
        "DIR",
    ),
    "bind": Option(
        "IP address on which stage 0 listens for the other stages, encrypted and for them alone. Empty: the "
        "host of --dist-init-addr with --nnodes 2 or more, and no network at all with one node.",
        interface,
        "ADDRESS",
    ),
}
"""One entry for each field of `WavePPConfig`."""


def flag_of(field: str) -> str:
    """The flag of a field of `WavePPConfig`."""
    return "--wavepp-" + field.replace("_", "-")


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add the argument group "wavepp" to SGLang's parser (and with that to its YAML files)."""
    group = parser.add_argument_group("wavepp", "Pipeline parallelism with admission off the execution path.")
    group.add_argument("--wavepp", action="store_true", help="Serve with WavePP. Needs --pp-size 2 or more.")
    for field in dataclasses.fields(WavePPConfig):
        option = OPTIONS[field.name]
        # Without a default on the namespace, an option that was given can be told from one that was not.
        shared: dict[str, Any] = {"dest": f"wavepp_{field.name}", "default": argparse.SUPPRESS}
        if option.parse is None:
            group.add_argument(flag_of(field.name), action="store_true", help=option.help, **shared)
        else:
            shown = "empty" if field.default == "" else field.default
            text = f"{option.help} (default: {shown})"
            group.add_argument(
                flag_of(field.name), type=option.parse, metavar=option.metavar, help=text, **shared
            )


def given_options(namespace: argparse.Namespace) -> dict[str, Any] | None:
    """What `_wavepp` shall hold for a parsed command line, or None where WavePP is off.

    Raises:
        ConfigError: an option of WavePP was given without `--wavepp`.
    """
    given = {f: getattr(namespace, f"wavepp_{f}") for f in OPTIONS if hasattr(namespace, f"wavepp_{f}")}
    if getattr(namespace, "wavepp", False):
        return carried(given, from_command_line=True)
    if given:
        raise ConfigError(f"{flag_of(next(iter(given)))} has no effect without --wavepp")
    return None


def carried(given: Mapping[str, Any], *, from_command_line: bool) -> dict[str, Any]:
    """The dict for `server_args._wavepp`: all options, and how to report an error (see `fail`)."""
    options = dataclasses.asdict(WavePPConfig(**given))
    return {"wavepp": True, "from_command_line": from_command_line, **options}


def fail(server_args: Any, error: WavePPError, code: int = 2) -> NoReturn:
    """Report an error in the way of whoever made the record.

    A command line gets one line on stderr and the exit code; Python code gets the exception.
    """
    if (getattr(server_args, "_wavepp", None) or {}).get("from_command_line"):
        exit_with(error, code)
    raise error


def exit_with(error: Exception, code: int = 2) -> NoReturn:
    """One line `error: ...` on stderr, then `SystemExit(code)`."""
    print(f"error: {' '.join(str(error).split())}", file=sys.stderr, flush=True)
    raise SystemExit(code)


def engine_args(*, wavepp: bool = True, **kwargs: Any) -> Any:
    """A `ServerArgs` for the offline engine, which does not know the keywords of WavePP itself.

        sglang.Engine(server_args=engine_args(model_path="...", pp_size=2, wavepp_decode_reserve=256))

    Takes the keywords of `sglang.Engine`, and the fields of `WavePPConfig` as `wavepp_<field>`.

    Raises:
        ConfigError: an unknown or invalid option of WavePP, one without `wavepp`, or SGLang would not load
            this plugin (`SGLANG_PLUGINS`, `SGLANG_PLATFORM`).
        TypeError: an unknown keyword of `ServerArgs`.
    """
    from sglang.srt.server_args import ServerArgs

    given = {name: kwargs.pop(name) for name in list(kwargs) if name.startswith("wavepp_")}
    options = {}
    for name, value in given.items():
        field = name.removeprefix("wavepp_")
        if field not in OPTIONS:
            known = ", ".join(f"wavepp_{f}" for f in OPTIONS)
            raise ConfigError(f"unknown option {name}; WavePP has {known}")
        options[field] = _checked(name, OPTIONS[field], value)
    if given and not wavepp:
        raise ConfigError(f"{next(iter(given))} has no effect with wavepp=False")
    # As the engine does where it makes the record itself.
    kwargs.setdefault("log_level", "error")
    record = ServerArgs(**kwargs)
    if wavepp:
        require_plugin()
        record._wavepp = carried(options, from_command_line=False)
    return record


def _checked(name: str, option: Option, value: Any) -> Any:
    """Check a Python value by the rules of the command line, but without taking "1" for 1."""
    if option.parse is None:
        if not isinstance(value, bool):
            raise ConfigError(f"{name} must be True or False, not {value!r}")
        return value
    wants: tuple[type, ...] = (int, float)
    if option.parse in (directory, interface, planner, pool_tokens):
        wants = (str, os.PathLike)
    if isinstance(value, bool) or not isinstance(value, wants):
        raise ConfigError(f"{name} has the wrong type: {value!r}")
    try:
        return option.parse(str(value))
    except argparse.ArgumentTypeError as error:
        raise ConfigError(f"{name} {error}") from None


def require_plugin() -> None:
    """Make sure that SGLang's processes will load this plugin; without it they would serve without WavePP.

    The command line needs no such check: there the flag itself would be unknown.

    Raises:
        ConfigError: they would not.
    """
    chosen = {name.strip() for name in os.environ.get("SGLANG_PLUGINS", "").split(",") if name.strip()}
    if chosen and PLUGIN_NAME not in chosen:
        raise ConfigError(f"SGLANG_PLUGINS leaves out {PLUGIN_NAME!r}, so SGLang would not load WavePP")
    plugin = next(iter(entry_points(group="sglang.srt.plugins", name=PLUGIN_NAME)), None)
    if plugin is None or plugin.dist is None:
        raise ConfigError("WavePP is not installed as an SGLang plugin; install the package sglang-wavepp")
    # SGLang skips the plugins of every distribution that brings another platform than the selected one.
    platform = os.environ.get("SGLANG_PLATFORM", "")
    own = {p.name for p in entry_points(group="sglang.srt.platforms") if _same(p.dist, plugin.dist)}
    if platform and own - {platform}:
        raise ConfigError(f"SGLANG_PLATFORM={platform} makes SGLang leave out WavePP")


def _same(one: Any, other: Any) -> bool:
    return one is not None and one.name == other.name
