"""What the `--wavepp-*` flags say, as one frozen record that every stage receives."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from typing import Any

CACHE_BACKEND = "wavepp"
"""Name of WavePP's cache for `--radix-cache-backend`."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class WavePPConfig:
    """Options of a WavePP server. Times are seconds, lengths are tokens."""

    decode_reserve: int = 512
    """KV promised to a request beyond its prompt at admission; it grows by as much while decoding."""
    run_ahead: int = 0
    """Waves that stage 0 may issue ahead of the last stage's acknowledgement; 0 means 2 per stage."""
    planner: str = "timed"
    """How prompts are cut into waves, by a name of `mpu.PLANNERS`."""
    wave_floor: int = 1024
    """The smallest wave that a planner makes on purpose."""
    pool_tokens: str = ""
    """KV tokens of each stage, separated by commas, or `auto`: each stage takes what its own memory holds.
    Empty: all stages take what the smallest can, as without WavePP."""
    block_size: int = 64
    """Tokens per block of the hint index."""
    stall_timeout: float = 120.0
    """The server ends if a stage's loop makes no progress on a logged wave for this long; the first wave may
    take five times as long."""
    heartbeat_timeout: float = 20.0
    """The server ends if a stage's rounds plane is silent for this long."""
    handshake_timeout: float = 120.0
    """The server does not start if the stages have not found each other within this time."""
    allow_untested_sglang: bool = False
    """Serve although the hooked SGLang functions are not the ones that were tested."""
    decision_log: str = ""
    """Directory to which each stage writes the decisions that it applied; empty means nowhere."""
    socket_dir: str = ""
    """Parent directory of the private socket directory; empty means the system's temporary one."""
    bind: str = ""
    """Address on which stage 0 listens for the other stages, encrypted; empty means sockets of the host where
    that is enough, and else the address of `--dist-init-addr`."""

    @property
    def own_pools(self) -> bool:
        """Is each stage's KV pool sized by itself?"""
        return bool(self.pool_tokens)

    def pools(self) -> tuple[int, ...]:
        """The KV tokens that the operator gave for each stage; nothing if he did not."""
        listed = self.pool_tokens not in ("", "auto")
        return tuple(map(int, self.pool_tokens.split(","))) if listed else ()

    def digest(self) -> str:
        """Hex digest of the options: equal on two stages only if they were given the same.

        What concerns a host alone may differ: its directories and interfaces.
        """
        common = dataclasses.replace(self, decision_log="", socket_dir="", bind="")
        text = json.dumps(dataclasses.asdict(common), sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]


def config_of(server_args: Any) -> WavePPConfig | None:
    """The WavePP options that travel with SGLang's `ServerArgs`, or None where `--wavepp` is off."""
    given = getattr(server_args, "_wavepp", None)
    if not given or not given.get("wavepp"):
        return None
    names = {f.name for f in dataclasses.fields(WavePPConfig)}
    return WavePPConfig(**{k: v for k, v in given.items() if k in names})
