"""What a model costs on a device, as a data file, and how long the stages of a pipeline take for a wave.

A profile is a TOML file: `[model]` what a token, its attention, its KV and a wave cost, `[device]` what the
device achieves of it, `[link]` what lies between two stages, `[stages]` how the model is split, if not
evenly. Only the quotients of model and device matter. Emulated devices read the same files.
"""

from __future__ import annotations

import dataclasses
import tomllib
from pathlib import Path
from typing import Any

from sglang_wavepp.mpu.planner import Load
from sglang_wavepp.mpu.stage_time import StageTime

DATA = Path(__file__).parent / "data"
"""Profiles that come with the package: `<name>.toml`."""


class ProfileError(ValueError):
    """A profile that cannot be read, or says nonsense."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """A model on a device. Everything of the model counts all layers; a stage has its share of it."""

    name: str
    flops_per_token: float
    """Of the weights that a token meets."""
    attention_flops: float
    """For a token and one that it attends to."""
    kv_bytes_per_token: float
    """Read once for each span that has the token before it."""
    weight_bytes: float
    """Read once a wave."""
    activation_bytes: float
    """That a token takes from stage to stage."""
    flops: float
    """Per second, achieved by one device in prefill."""
    bandwidth: float
    """Bytes of memory per second, achieved by one device."""
    wave_s: float = 0.0
    """Of a wave on each stage besides: launches, synchronisation."""
    span_s: float = 0.0
    """Of a span on each stage besides."""
    link_bandwidth: float = float("inf")
    """Bytes per second from stage to stage."""
    link_s: float = 0.0
    """Latency of a message from stage to stage."""
    kv_tokens: int = 0
    """Room for KV on each stage; 0: nothing is known, and it does not run out."""
    shares: tuple[float, ...] = ()
    """Of each stage in the model; empty: all have the same."""

    def stages(self, count: int) -> list[StageTime]:
        """What a wave takes on each of `count` stages, in microseconds.

        Raises `ProfileError` if the profile has shares, and of another number of stages.
        """
        if self.shares and len(self.shares) != count:
            raise ProfileError(f"{self.name} has shares of {len(self.shares)} stages, not of {count}")
        total = sum(self.shares)
        shares = [share / total for share in self.shares] or [1 / count] * count
        return [
            StageTime(
                wave=1e6 * (self.wave_s + share * self.weight_bytes / self.bandwidth),
                token=1e6 * share * self.flops_per_token / self.flops,
                attention=1e6 * share * self.attention_flops / self.flops,
                prefix=1e6 * share * self.kv_bytes_per_token / self.bandwidth,
                span=1e6 * self.span_s,
            )
            for share in shares
        ]

    def hop_s(self, load: Load) -> float:
        """Seconds that the activations of a wave take to the next stage."""
        return self.link_s + load.tokens * self.activation_bytes / self.link_bandwidth


_SECTIONS = {
    "model": ("flops_per_token", "attention_flops", "kv_bytes_per_token", "weight_bytes", "activation_bytes"),
    "device": ("flops", "bandwidth", "wave_s", "span_s", "kv_tokens"),
    "link": ("link_bandwidth", "link_s"),
    "stages": ("shares",),
}


def load_profile(source: str | Path) -> Profile:
    """The profile in a file, or one that comes with the package by its name.

    Raises `ProfileError`.
    """
    path = Path(source)
    if path.suffix != ".toml":
        path = DATA / f"profile-{str(source).removeprefix('profile-')}.toml"
        if not path.is_file():
            known = ", ".join(sorted(p.stem.removeprefix("profile-") for p in DATA.glob("profile-*.toml")))
            raise ProfileError(f"there is no profile {str(source)!r}; there are {known}, or a .toml file")
    try:
        content = tomllib.loads(path.read_text())
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ProfileError(f"the profile {path} cannot be read: {error}") from None
    return _profile(path, content)


def _profile(path: Path, content: dict[str, Any]) -> Profile:
    values: dict[str, Any] = {"name": content.pop("name", path.stem)}
    content.pop("source", None)
    for section, entries in content.items():
        names = _SECTIONS.get(section)
        if names is None or not isinstance(entries, dict):
            raise ProfileError(f"{path}: there is nothing called {section!r} in a profile")
        for name, value in entries.items():
            if name not in names:
                raise ProfileError(f"{path}: there is nothing called {name!r} in [{section}]")
            values[name] = _checked(path, name, value)
    missing = {f.name for f in dataclasses.fields(Profile) if f.default is dataclasses.MISSING} - set(values)
    if missing:
        raise ProfileError(f"{path}: {min(missing)} is missing")
    return Profile(**values)


def _checked(path: Path, name: str, value: Any) -> Any:
    positive = name in ("flops", "bandwidth", "link_bandwidth")
    listed = tuple(value) if name == "shares" and isinstance(value, list) else (value,)
    for number in listed:
        good = isinstance(number, int | float) and not isinstance(number, bool) and number >= 0
        if not good or (number == 0 and (positive or name == "shares")):
            wanted = f"not a number {'above' if positive else 'from'} 0"
            raise ProfileError(f"{path}: {name} is {number!r}, {wanted}")
    return listed if name == "shares" else value
