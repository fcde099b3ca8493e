"""Frames of the rounds plane and decisions of the log: typed, versioned by the handshake, never pickle.

Two families, both msgspec structs (array-like, tagged by class name):

* *messages* cross the rounds plane once and are gone (offer, hint, hold, held, ...);
* *decisions* are entries of stage 0's log. Every stage applies each exactly once, in order.

Requests are named by `seq`, a number that stage 0 gives out on arrival: clients may reuse a rid.
Lengths are tokens, times are microseconds where the field name ends in `_us`.
"""

from __future__ import annotations

import msgspec


class Message(msgspec.Struct, frozen=True, array_like=True, tag=True, gc=False):
    """Base of everything that crosses the rounds plane."""


class Decision(msgspec.Struct, frozen=True, array_like=True, tag=True, gc=False):
    """Base of the entries of the decision log."""


# --- handshake -------------------------------------------------------------------------------


class Hello(Message, frozen=True):
    """A member's proof that it runs the same thing as stage 0, and its own capacity."""

    rank: int
    pid: int
    host: str
    """Equal on two stages only if a pid means the same process on both."""
    identity: dict[str, str]
    """Must be equal on every stage: versions, hook set, configuration digest, page and block size."""
    capacity: dict[str, int]
    """May differ: KV tokens, request rows, running requests, lengths. The minimum is agreed."""


class Welcome(Message, frozen=True):
    """Stage 0's answer when all stages agree."""

    pids: list[int]
    hosts: list[str]
    capacity: dict[str, int]
    pools: list[int]
    """KV tokens of each stage."""
    seed: int
    """Of the prompt hashes: drawn for this server, so that nobody outside can make two prompts collide."""
    instance: str
    """Name of this server, for files that the stages write."""


class Refuse(Message, frozen=True):
    """Stage 0's answer when they do not."""

    reason: str


# --- admission: leader to members ------------------------------------------------------------


class Offer(Message, frozen=True):
    """A new request. Two more frames of the same multipart message follow: its payload, and the chained
    hashes of its prompt's full blocks as raw uint64 (none where nothing is ever reused). `digest` covers
    both. A stage hints once it has applied the log up to `position`, from where on it has in its tree what
    the prompt continues.
    """

    seq: int
    digest: int
    position: int = 0


class HintQuery(Message, frozen=True):
    """Ask again for the reusable prefix of requests that were offered before.

    A stage answers once it has applied the log up to `position`, so that the answer counts what the waves
    up to there have inserted.
    """

    epoch: int
    position: int
    seqs: list[int]


class HoldItem(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Lease at most `boundary` tokens of a request and escrow the room up to KV length `until`."""

    seq: int
    boundary: int
    until: int


class Hold(Message, frozen=True):
    """One hold round: the items are granted in this order, or from the first refusal on not at all."""

    epoch: int
    round: int
    items: list[HoldItem]


class Release(Message, frozen=True):
    """Give back the leases and the escrow of requests that were not committed. They stay offered."""

    epoch: int
    seqs: list[int]


class Forget(Message, frozen=True):
    """Drop uncommitted requests altogether: cancelled or refused.

    A stage does so once it has applied the log up to `position`, where those were retracted that had been
    committed.
    """

    position: int
    seqs: list[int]


class Grow(Message, frozen=True):
    """Escrow more room for running requests: items are (seq, new KV length)."""

    epoch: int
    round: int
    items: list[tuple[int, int]]


class Ungrow(Message, frozen=True):
    """Take back what was granted in a growth round that another stage refused: (seq, old KV length)."""

    epoch: int
    items: list[tuple[int, int]]


class Log(Message, frozen=True):
    """Consecutive decisions of the log, the first at position `first`, each as its encoded bytes."""

    first: int
    entries: list[bytes]


# --- admission: members to leader ------------------------------------------------------------


class HintItem(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A stage's estimate of its reusable prefix, or why it cannot serve the request."""

    seq: int
    boundary: int
    error: str = ""


class Hint(Message, frozen=True):
    epoch: int
    items: list[HintItem]


class HeldItem(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The boundary that is really leased (tokens compared), and whether there was room."""

    seq: int
    boundary: int
    granted: bool
    hopeless: bool = False
    """Refused although nothing runs on the stage: waiting cannot help."""


class Held(Message, frozen=True):
    epoch: int
    round: int
    items: list[HeldItem]


class GrownItem(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Was there room for the growth? `hopeless`: no, although nothing else is promised on the stage."""

    granted: bool
    hopeless: bool = False


class Grown(Message, frozen=True):
    epoch: int
    round: int
    items: list[GrownItem]


class Nack(Message, frozen=True):
    """The frame belongs to another epoch than the one this stage is in."""

    epoch: int
    round: int


class Capacity(Message, frozen=True):
    """Room became free on a stage that had refused a hold or a growth."""

    epoch: int


class WaveDone(Message, frozen=True):
    """The last stage's acknowledgement of a wave, with what it sampled.

    `elapsed_us` is from the start of the launch until the outputs were seen on the host.
    `tokens` has one id a row of the wave, or is empty where no row finished its prompt. `extra` is the
    encoded remainder of SGLang's output dictionary (logprobs, sampling masks), empty mostly.
    """

    wave: int
    elapsed_us: int
    tokens: list[int]
    extra: bytes


class ControlDone(Message, frozen=True):
    """A stage applied the control decision at `position` and is in `epoch` now.

    `error` is empty, or says why it failed.
    """

    position: int
    epoch: int
    error: str


class Beat(Message, frozen=True):
    """A stage lives. `doing` says what its loop is at, `applied` how far it is in the log.

    `taken` is the number of offers that a member has received so far, `took` how long it took for its latest
    prefill waves: (wave, microseconds), empty if nobody learns.
    """

    applied: int
    doing: str
    taken: int = 0
    took: tuple[tuple[int, int], ...] = ()


# --- decisions -------------------------------------------------------------------------------


class Commit(Decision, frozen=True):
    """The request is admitted: every stage holds `boundary` tokens and the room up to `until`."""

    seq: int
    order: int
    boundary: int
    length: int
    until: int
    digest: int


class Span(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Prompt tokens [begin, end) of one request in a prefill wave."""

    seq: int
    begin: int
    end: int
    last: bool


class Prefill(Decision, frozen=True):
    """A wave of prompt spans. `digest` covers the log before this entry."""

    wave: int
    digest: int
    spans: list[Span]


class Decode(Decision, frozen=True):
    """A wave of one decode step for every row of a group. `digest` covers the log before this entry."""

    wave: int
    digest: int
    group: int
    seqs: list[int]


class Output(Decision, frozen=True):
    """What the last stage sampled in `wave`; `finished` are the requests that ended with it.

    The rows of a prefill wave that go on decoding join `group`.
    """

    wave: int
    group: int
    tokens: list[int]
    finished: list[int]
    extra: bytes


class Drop(Decision, frozen=True):
    """Take committed requests out while none of their waves is in flight.

    `retract` gives their room back and queues them again; otherwise they were aborted and are gone.
    """

    seqs: list[int]
    retract: bool


class Control(Decision, frozen=True):
    """A control request of SGLang (flush, weights, pause, profile, ...), encoded by SGLang's own codec.

    `idle` is stage 0's answer to whether the server was fully idle: members do not judge for themselves.
    """

    payload: bytes
    idle: bool


MEMBER_TO_LEADER = Hello | Hint | Held | Grown | Nack | Capacity | WaveDone | ControlDone | Beat
LEADER_TO_MEMBER = Welcome | Refuse | Offer | HintQuery | Hold | Release | Forget | Grow | Ungrow | Log | Beat
DECISIONS = Commit | Prefill | Decode | Output | Drop | Control

_encoder = msgspec.msgpack.Encoder()
_from_member = msgspec.msgpack.Decoder(MEMBER_TO_LEADER)
_from_leader = msgspec.msgpack.Decoder(LEADER_TO_MEMBER)
_decision = msgspec.msgpack.Decoder(DECISIONS)


def encode(message: Message | Decision) -> bytes:
    """Encode one frame."""
    return _encoder.encode(message)


def decode_from_member(frame: bytes | memoryview) -> Message:
    """Decode what a member sent. Raises `msgspec.DecodeError` (or its subclass) on anything else."""
    return _from_member.decode(frame)


def decode_from_leader(frame: bytes | memoryview) -> Message:
    """Decode what stage 0 sent. Raises `msgspec.DecodeError` (or its subclass) on anything else."""
    return _from_leader.decode(frame)


def decode_decision(entry: bytes) -> Decision:
    """Decode one log entry. Raises `msgspec.DecodeError` (or its subclass) on anything else."""
    return _decision.decode(entry)
