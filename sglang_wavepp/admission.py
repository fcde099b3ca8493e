"""What the leader knows of a request on its way in, what it may use, and what comes of it. Pure."""

from __future__ import annotations

import dataclasses
import enum

from sglang_wavepp.sharing import Awaited


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What admission may use, agreed over all stages. Lengths are tokens."""

    stages: int
    pool: int
    """KV tokens of the smallest stage."""
    running: int
    """Committed requests at a time."""
    page: int
    reserve: int
    """KV room promised beyond the prompt at admission, and at each growth."""
    block: int
    """Tokens of a block of the chained prompt hashes."""
    ahead: int
    """Committed prompt tokens that no wave was planned for yet, beyond which admission waits. Of a long
    prompt a quarter of this counts, or `wave`: behind up to three of them short ones, which may pass
    (`mpu.turns`), are still admitted."""
    wave: int
    """The largest prefill wave."""
    round_bound: float
    """Seconds after which an unanswered round is an error."""


class State(enum.Enum):
    OFFERED = "waiting for hints"
    HINTED = "in the queue"
    HOLDING = "in a hold round"
    AGREED = "held by every stage"


@dataclasses.dataclass(slots=True, eq=False)
class Admission:
    """One request on its way in."""

    seq: int
    length: int
    remaining: int
    """Output tokens that it may still produce."""
    arrived: float
    rank: int = 0
    """Lower ranks go first; within a rank, first come, first served."""
    state: State = State.OFFERED
    candidate: int = 0
    """Tokens that it may reuse at most; once agreed, exactly those."""
    until: int = 0
    hints: dict[int, int] = dataclasses.field(default_factory=dict)
    fresh_until: int = 0
    """Its hint is asked for again, before it is held, once so many waves were finished."""
    asked: int = 0
    """How often its hint was refreshed for this attempt."""
    shares: bool = False
    """It has waited for another's prompt blocks: its hint may be refreshed several times."""
    awaits: Awaited | None = None
    """It waits until another request has computed their common prompt; those behind it may pass."""
    rounds: int = 0
    since: int = 0
    """Log position after its retraction; 0 if it was not committed before."""
    reusable: int = 0
    """Tokens that it certainly reuses, as far as is known."""

    @property
    def retracted(self) -> bool:
        """It was committed before, and came back."""
        return self.since > 0


@dataclasses.dataclass(frozen=True, slots=True)
class Committed:
    """Event: every stage holds the request; the loop logs it."""

    seq: int
    order: int
    boundary: int
    length: int
    until: int
    again: bool
    """It was committed before, and came back."""
    rank: int
    """Lower ranks go first."""
    rounds: int
    waited: float
    """Seconds from arrival (or from coming back) to this event."""


@dataclasses.dataclass(frozen=True, slots=True)
class Rejected:
    """Event: the request cannot be served; the client is told why."""

    seq: int
    reason: str


@dataclasses.dataclass(frozen=True, slots=True)
class GrowthGranted:
    """Event: every stage escrowed room for these running requests: (seq, KV length)."""

    items: tuple[tuple[int, int], ...]


@dataclasses.dataclass(frozen=True, slots=True)
class GrowthRefused:
    """Event: some stage has no room for a running request; the loop must retract somebody."""

    seq: int
    hopeless: bool
    """The refusing stage promised nothing to anybody else: retracting others cannot help."""


Event = Committed | Rejected | GrowthGranted | GrowthRefused
