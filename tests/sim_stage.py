"""What a simulated cluster is made of: sockets, the guard, and stages with the loop's work on page counts."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Iterator
from itertools import islice
from typing import TYPE_CHECKING, Any

import msgspec
from model_tree import ModelTree, Request

from sglang_wavepp.log import DecisionLog
from sglang_wavepp.member import Member
from sglang_wavepp.messages import (
    Commit,
    Control,
    ControlDone,
    Decode,
    Drop,
    Output,
    Prefill,
    WaveDone,
    encode,
)
from sglang_wavepp.numbering import Numbering

if TYPE_CHECKING:
    from cluster import Cluster

Steps = Iterator[None]
"""What a loop does, one piece after the other."""
_OVER = object()


class Channel:
    """One direction of one socket: frames in order, with their numbers."""

    def __init__(self) -> None:
        self.frames: deque[tuple[bytes, bytes]] = deque()
        self._sent, self._received = Numbering(), Numbering()

    def send(self, message: Any) -> None:
        self.frames.append((self._sent.stamp(), encode(message)))

    def receive(self) -> bytes | None:
        """The next frame; None if it came before. Raises `ProtocolError` if some were lost."""
        stamp, frame = self.frames.popleft()
        try:
            self._received.accept(stamp)
        except msgspec.DecodeError:
            return None
        return frame

    def lose(self, rng: random.Random) -> bool:
        """One of the frames under way does not arrive. False if it did before, and came again."""
        stamp, _ = rng.choice(self.frames)
        self.frames = deque(frame for frame in self.frames if frame[0] != stamp)
        return int.from_bytes(stamp, "big") >= self._received.count

    def repeat(self, rng: random.Random) -> None:
        """One of the frames under way arrives once more, at some time after the first."""
        at = rng.randrange(len(self.frames))
        self.frames.insert(rng.randrange(at, len(self.frames)) + 1, self.frames[at])

    def keep(self, rng: random.Random) -> None:
        """Only some of the frames still arrive: whoever sent them is dead."""
        self.frames = deque(islice(self.frames, rng.randrange(len(self.frames) + 1)))


class Guard:
    """The guard of a stage. Its loop keeps it over several steps; who waits for it lets the loop go on."""

    def __init__(self, proceed: Callable[[], None]) -> None:
        self._proceed = proceed
        self.loop_runs = False
        """The loop is doing a step: it may enter again what it holds."""
        self.taken = False
        """The loop is between two steps and keeps the guard."""

    def __call__(self) -> Guard:
        return self

    def __enter__(self) -> None:
        while self.taken and not self.loop_runs:
            self._proceed()

    def __exit__(self, *_: object) -> None:
        """The other thread gives it back within its step."""


class SimStage:
    """One stage: member state machine, model tree, log, and what its loop does."""

    def __init__(self, rank: int, cluster: Cluster, tree: ModelTree) -> None:
        self.rank, self.cluster, self.tree = rank, cluster, tree
        self.rows_total = tree.rows
        self.guard = Guard(self.proceed)
        self.member = Member(tree, self.guard, self._send)
        self.log = DecisionLog(rank)
        self.live: dict[int, Request] = {}
        self.groups: dict[int, list[int]] = {}
        self.waves: dict[int, list[tuple[int, bool]]] = {}
        self.computed: dict[int, list[tuple[int, int]]] = {}
        self.prompt_tokens = 0
        """Prompt tokens that were computed, not reused."""
        self.building: dict[int, int] = {}
        """Requests that were offered and are not ready yet: log positions that hints have to count."""
        self.inbox: deque[tuple[int, bytes]] = deque()
        self.outputs: dict[int, list[int]] = {}
        """Every request's sampled tokens: must be equal on all stages in the end."""
        self.busy = False
        """The loop is in the middle of something."""
        self._work: Steps = iter(())

    def _send(self, message: Any) -> None:
        self.cluster.to_leader[self.rank].send(message)

    # --- steps of the loop ---------------------------------------------------------------------

    def begin(self, work: Steps) -> None:
        """The loop starts with something; `proceed` goes on with it."""
        self._work, self.busy = work, True
        self.proceed()

    def proceed(self) -> None:
        """The loop does its next step."""
        self.guard.loop_runs = True
        self.busy = next(self._work, _OVER) is not _OVER
        self.guard.loop_runs = False

    def read(self) -> Steps:
        """A member: apply the next entry of the log."""
        position, entry = self.inbox.popleft()
        d = self.log.read(position, entry)
        assert self.log.digest == self.cluster.position_digests[self.log.position], (
            "another log than stage 0's"
        )
        yield from self.apply(d)
        if isinstance(d, Prefill):
            tokens = sum(span.end - span.begin for span in d.spans)
            self.cluster.sequencer.took(self.rank, d.wave, 20 + (self.rank + 1) * tokens)
        if self.rank == len(self.cluster.stages) - 1 and isinstance(d, Prefill | Decode):
            yield  # the device
            tokens = [self.cluster.sample() for _ in self.waves[d.wave]]
            self._send(WaveDone(d.wave, 1, tokens, b""))

    def apply(self, d: Any) -> Steps:
        self.guard.taken = True
        if isinstance(d, Commit):
            request, lease = self.member.take(d.seq, d.boundary)
            assert request.length == d.length
            request.lease, request.done, request.boundary = lease, d.boundary, d.boundary
            self.live[d.seq] = request
        elif isinstance(d, Prefill):
            for span in d.spans:
                yield from self._span(span)
            self.waves[d.wave] = [(span.seq, span.last) for span in d.spans]
            self.computed[d.wave] = [(span.seq, span.end) for span in d.spans]
            self.prompt_tokens += sum(span.end - span.begin for span in d.spans)
        elif isinstance(d, Decode):
            assert self.groups.get(d.group) == d.seqs, "another group than the log says"
            for seq in d.seqs:
                yield from self._grow(self.live[seq], self.live[seq].done + 1)
            self.waves[d.wave] = [(seq, True) for seq in d.seqs]
        elif isinstance(d, Output):
            yield from self._output(d.wave, d.group, d.tokens, d.finished)
        elif isinstance(d, Drop):
            for seq in d.seqs:
                self._drop(seq, d.retract)
        elif isinstance(d, Control):
            yield from self._control(d)
        if self.member.freed():
            self._send(self.member.capacity())
        if self.rank:
            self.member.applied(self.log.position)
        self.guard.taken = False

    def _control(self, d: Control) -> Steps:
        """A flush where stage 0 is idle, or another operation at a log position, such as new weights."""
        if d.payload == b"flush" and self.may_flush(d):
            assert not self.live, "rule 7: a flush while requests run"
            before = self.member.epoch
            self.tree.reset()
            self.member.reset()
            assert self.member.epoch == before + 1, "4a: a reset begins no new epoch"
            assert not len(self.member.leases), "4a: a reset leaves leases"
        yield
        self._send(ControlDone(self.log.position - 1, self.member.epoch, ""))

    def may_flush(self, d: Control) -> bool:
        """Stage 0 says so, whatever this stage looks like."""
        return d.idle

    def _span(self, span: Any) -> Steps:
        request = self.live[span.seq]
        assert request.done == span.begin, "another position than the log says"
        if request.lease is not None:
            node = request.lease.node
            request.lock = self.member.leases.transfer(request.lease)
            request.lease = None
            assert node.depth == request.done and node.pins, "the prefix is not the one that was agreed"
            assert node.state or not (self.tree.recurrent and node.depth), "no recurrent state to go on from"
            self.tree.rows -= 1
            request.states = self.tree.states_per_request
            self.tree.allocate_states(request.states, self.cluster.rng)
        yield from self._grow(request, span.end)
        if not span.last:
            yield from self._checkpoint(request)

    def _grow(self, request: Request, length: int) -> Steps:
        page = self.tree.page_size
        tokens = (-(-length // page) - -(-request.done // page)) * page
        self.member.ledger.take(request.seq, length)
        yield  # not promised any more, and not taken yet
        self.tree.make_room(tokens, self.cluster.rng)
        yield
        self.tree.private += tokens
        request.private += tokens
        request.done = length

    def _checkpoint(self, request: Request) -> Steps:
        """Publish what was computed, give duplicates back, and lock the longer path."""
        tree = self.tree
        before = request.lock.depth
        tokens = request.tokens[: request.done]
        full = len(tokens) // tree.page_size * tree.page_size
        if tree.recurrent:
            if full < len(tokens) or full == before or request.states < tree.states_per_request:
                return  # there is no state at the end of the last page, or no second slot for one
            request.states -= 1
        tree.insert(tokens)
        yield  # counted twice: in the tree, and as the request's own
        tree.private -= full - before
        request.private -= full - before
        yield  # nobody has locked it yet
        longer = tree.lock(request, tree.match(request, full))
        assert longer.boundary == full, "what was inserted is not there"
        for lock in (request.lock, *longer.rungs):
            tree.unlock(lock)
        request.lock = longer.lock
        self._renew(request)

    def _renew(self, request: Request) -> None:
        """Take a recurrent slot for the next checkpoint in place of the one that the tree has now."""
        promised = self.member.ledger.statistics().rows * self.tree.states_per_request
        missing = self.tree.states_per_request - request.states
        if missing and self.tree.free_states() - promised >= missing:
            self.tree.allocate_states(missing, self.cluster.rng)
            request.states += missing

    def _output(self, wave: int, group: int, tokens: list[int], finished: list[int]) -> Steps:
        for (seq, complete), token in zip(self.waves.pop(wave), tokens, strict=True):
            request = self.live[seq]
            if not complete:
                continue
            request.output.append(token)
            ended = len(request.output) >= request.max_new
            assert ended == (seq in finished), "a request ended on one stage only"
            if ended:
                yield from self._checkpoint(request)
                self._leave(request)
                self.member.finish(seq)
                self.outputs[seq] = request.output
            elif len(request.output) == 1 or seq not in self.groups.get(group, []):
                yield from self._checkpoint(request)
                self.groups.setdefault(group, []).append(seq)

    def _leave(self, request: Request) -> None:
        self.tree.private -= request.private
        self.tree.private_states -= request.states
        request.private = request.states = 0
        if request.lock is not None:
            self.tree.unlock(request.lock)
            request.lock = None
            self.tree.rows += 1
        for seqs in self.groups.values():
            if request.seq in seqs:
                seqs.remove(request.seq)
        del self.live[request.seq]

    def _drop(self, seq: int, retract: bool) -> None:
        request = self.live[seq]
        if request.lease is not None:
            self.member.leases.release(request.lease)
            request.lease = None
        self._leave(request)
        if retract:
            self.member.retract(seq)
        else:
            self.member.finish(seq)
