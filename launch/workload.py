"""What the modelled server of `pipeline_server` is given, and what it answers."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Offered:
    """A request as the model sees it. Lengths are tokens, times seconds."""

    arrival: float = 0.0
    tokens: int
    """Of the prompt, cached ones included."""
    cached: int = 0
    """That it has in common with others of its `prefix`; without one, that are cached when it arrives."""
    output: int = 1
    prefix: str = ""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ServerOptions:
    """How the modelled server is set up. Lengths are tokens, times seconds."""

    stages: int = 8
    planner: str = "static"
    budget: int = 16384
    floor: int = 1024
    page: int = 64
    ring: int = 0
    """Waves under way at most; 0: 2 for each stage."""
    rows: int = 128
    """Requests in a wave at most."""
    running: int = 4096
    """Requests at a time at most."""
    reserve: int = 512
    message_s: float = 1e-4
    """Latency of a message between the stages' admission threads."""
    front_s: float = 0.0
    """Time of the HTTP front for a token of a prompt; it takes one request after the other."""
    client_s: float = 0.0
    """So long a client takes to ask again, from half to one and a half times of it; the first requests of a
    closed loop are as far apart."""
    prepare_s: float = 0.0
    """Host time of stage 0 for a wave; it overlaps with the device."""
    wave_s: float = 0.0
    """Host time for a wave during which every stage waits."""
    request_s: float = 0.0
    """Host time for a request that is admitted on the execution path, during which stage 0 waits."""
    match_s: float = 0.0
    """The same for a request that reuses a prefix, besides."""
    late: bool = False
    """A wave is planned, and requests for it are admitted, when stage 0 is free: as schedulers without leases
    do. Otherwise stage 0 plans ahead until the ring is full."""


@dataclasses.dataclass(slots=True, eq=False)
class Served:
    """What became of a request. Seconds."""

    offered: Offered
    arrived: float
    committed: float = 0.0
    prefilled: float = 0.0
    done: float = 0.0
    reused: int = 0
    produced: int = 0
    rejected: str = ""


@dataclasses.dataclass(frozen=True, slots=True)
class Outcome:
    """What a run has shown."""

    served: list[Served]
    seconds: float
    """From the first arrival to the last output."""
    waves: int
    """Prefill waves."""
    bubbles: dict[str, float]
    """Seconds in which the slowest stage did nothing, by cause."""
    busy: list[float]
    """Seconds of work of each stage."""

    @property
    def throughput(self) -> float:
        """Prompt tokens per second, cached ones included."""
        return sum(s.offered.tokens for s in self.served if not s.rejected) / self.seconds

    def completion(self, share: float) -> float:
        """Seconds from arrival until the prompt is complete, that a share of the requests does not exceed.

        Between two requests it is interpolated, as numpy does.
        """
        times = sorted(s.prefilled - s.arrived for s in self.served if not s.rejected)
        at = share * (len(times) - 1)
        low = int(at)
        high = min(low + 1, len(times) - 1)
        return times[low] + (at - low) * (times[high] - times[low])
