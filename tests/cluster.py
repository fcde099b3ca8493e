"""A whole WavePP server without SGLang: the real state machines over a model tree and a simulated network.

Every choice (which message arrives next, which loop takes its next step) comes from one seeded random
generator, so a run is replayed by its seed. What the real loops do on SGLang is done here on page counts.
"""

from __future__ import annotations

import random
from array import array
from collections import deque
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

from sglang_wavepp.hint_index import Hints, chain
from sglang_wavepp.leader import Committed, GrowthGranted, Leader, Limits, Rejected
from sglang_wavepp.log import DecisionLog
from sglang_wavepp.member import Member
from sglang_wavepp.messages import (
    Commit,
    Decode,
    Drop,
    HintQuery,
    Output,
    Prefill,
    WaveDone,
    decode_from_leader,
    decode_from_member,
    encode,
)
from sglang_wavepp.radix.protocol import LockedPrefix, Match
from sglang_wavepp.sequencer import Sequencer


class Request:
    """A request on one stage, and its `Prefix`."""

    def __init__(self, seq: int, tokens: tuple[int, ...], max_new: int) -> None:
        self.seq, self.prompt, self.max_new = seq, tokens, max_new
        self.output: list[int] = []
        self.lock: tuple[int, ...] | None = None
        self.lease: Any = None
        self.done = self.boundary = 0
        self.private = 0

    @property
    def tokens(self) -> tuple[int, ...]:
        return self.prompt + tuple(self.output)

    @property
    def length(self) -> int:
        return len(self.tokens)

    @property
    def max_boundary(self) -> int:
        return self.length - 1


SEED = 1
"""Of the prompt hashes."""


class ModelTree:
    """A radix tree as an obvious model: the set of cached prefixes, one page longer than the next."""

    states_per_request = 0

    def __init__(self, pool: int, rows: int, page: int) -> None:
        self.page_size, self._pool, self.rows = page, pool, rows
        self.hints = Hints(4 * page, SEED)
        self._blocks: dict[tuple[int, ...], array[int]] = {}
        """Prefix of whole blocks -> the hash of its last one."""
        self._nodes: dict[tuple[int, ...], int] = {(): 0}
        """prefix -> locks that end at or below it."""
        self.private = 0

    def _longest(self, tokens: tuple[int, ...], limit: int) -> tuple[int, ...]:
        page, at = self.page_size, ()
        while len(at) + page <= min(limit, len(tokens)) and tokens[: len(at) + page] in self._nodes:
            at = tokens[: len(at) + page]
        return at

    def _chain(self, node: tuple[int, ...]) -> list[tuple[int, ...]]:
        return [node[:n] for n in range(self.page_size, len(node) + 1, self.page_size)]

    def hint(self, prefix: Request) -> int:
        hashes = chain(array("q", prefix.tokens), self.hints.block, SEED)
        return self.hints.boundary(hashes, prefix.max_boundary) // self.page_size * self.page_size

    def match(self, prefix: Request, limit: int) -> Match:
        node = self._longest(prefix.tokens, limit)
        return Match(len(node), ((len(node), node),))

    def lock(self, prefix: Request, match: Match) -> LockedPrefix:
        node = self._longest(prefix.tokens, match.boundary)
        for n in self._chain(node):
            self._nodes[n] += 1
        return LockedPrefix(len(node), node, node)

    def unlock(self, lock: tuple[int, ...]) -> None:
        for n in self._chain(lock):
            assert self._nodes[n] > 0, "unlocked twice"
            self._nodes[n] -= 1

    @property
    def cached(self) -> int:
        return (len(self._nodes) - 1) * self.page_size

    @property
    def locked(self) -> int:
        return sum(1 for n, locks in self._nodes.items() if n and locks) * self.page_size

    def free_tokens(self) -> int:
        return self._pool - self.cached - self.private

    def evictable_tokens(self) -> int:
        return self.cached - self.locked

    def free_rows(self) -> int:
        return self.rows

    def free_states(self) -> int:
        return 0

    def allocate(self, tokens: int, rng: random.Random) -> None:
        """Take private pages, evicting unlocked leaves in any order. What was escrowed must be there."""
        while self.free_tokens() < tokens:
            inner = {n[: -self.page_size] for n in self._nodes if n}
            leaves = [n for n, locks in self._nodes.items() if n and not locks and n not in inner]
            assert leaves, f"no room for {tokens} tokens that were promised"
            self._evict(rng.choice(leaves))
        self.private += tokens

    def insert(self, tokens: tuple[int, ...]) -> int:
        """Cache the full pages of `tokens`; returns how many tokens became cached with it."""
        full = tokens[: len(tokens) // self.page_size * self.page_size]
        new = [n for n in self._chain(full) if n not in self._nodes]
        hashes = chain(array("q", full), self.hints.block, SEED)
        for n in new:
            self._nodes[n] = 0
            blocks, rest = divmod(len(n), self.hints.block)
            if not rest:
                self.hints.index.add(hashes, blocks - 1, blocks)
                self._blocks[n] = hashes[blocks - 1 : blocks]
        return len(new) * self.page_size

    def evict_some(self, rng: random.Random) -> None:
        """Something else on this stage evicts: caches of stages drift apart."""
        inner = {n[: -self.page_size] for n in self._nodes if n}
        leaves = [n for n, locks in self._nodes.items() if n and not locks and n not in inner]
        for n in rng.sample(leaves, rng.randrange(len(leaves) + 1)):
            self._evict(n)

    def _evict(self, leaf: tuple[int, ...]) -> None:
        del self._nodes[leaf]
        if leaf in self._blocks:
            self.hints.index.remove(self._blocks.pop(leaf), 0, 1)


class SimStage:
    """One stage: member state machine, model tree, log, and what its loop does."""

    def __init__(self, rank: int, cluster: Cluster, pool: int, rows: int, page: int) -> None:
        self.rank, self.cluster = rank, cluster
        self.tree = ModelTree(pool, rows, page)
        self.rows_total = rows
        self.member = Member(self.tree, nullcontext, self._send)
        self.log = DecisionLog(rank)
        self.live: dict[int, Request] = {}
        self.groups: dict[int, list[int]] = {}
        self.waves: dict[int, list[tuple[int, bool]]] = {}
        self.computed: dict[int, list[tuple[int, int]]] = {}
        self.prompt_tokens = 0
        """Prompt tokens that were computed, not reused."""
        self.inbox: deque[tuple[int, bytes]] = deque()
        self.outputs: dict[int, list[int]] = {}
        """Every request's sampled tokens: must be equal on all stages in the end."""

    def _send(self, message: Any) -> None:
        self.cluster.to_leader[self.rank].append(encode(message))

    def apply(self, d: Any) -> None:
        if isinstance(d, Commit):
            request, lease = self.member.take(d.seq, d.boundary)
            assert request.length == d.length
            request.lease, request.done, request.boundary = lease, d.boundary, d.boundary
            self.live[d.seq] = request
        elif isinstance(d, Prefill):
            for span in d.spans:
                self._span(span)
            self.waves[d.wave] = [(span.seq, span.last) for span in d.spans]
            self.computed[d.wave] = [(span.seq, span.end) for span in d.spans]
            self.prompt_tokens += sum(span.end - span.begin for span in d.spans)
        elif isinstance(d, Decode):
            assert self.groups.get(d.group) == d.seqs, "another group than the log says"
            for seq in d.seqs:
                self._grow(self.live[seq], self.live[seq].done + 1, seq)
            self.waves[d.wave] = [(seq, True) for seq in d.seqs]
        elif isinstance(d, Output):
            self.output(d.wave, d.group, d.tokens, d.finished)
        elif isinstance(d, Drop):
            for seq in d.seqs:
                self._drop(seq, d.retract)
        if self.member.freed():
            self._send(self.member.capacity())
        if self.rank:
            self.member.applied(self.log.position)

    def _span(self, span: Any) -> None:
        request = self.live[span.seq]
        assert request.done == span.begin, "another position than the log says"
        if request.lease is not None:
            request.lock = self.member.leases.transfer(request.lease)
            request.lease = None
            self.tree.rows -= 1
        self._grow(request, span.end, span.seq)
        if not span.last:
            self._checkpoint(request)

    def _grow(self, request: Request, length: int, seq: int) -> None:
        page = self.tree.page_size
        self.member.ledger.take(seq, length)
        pages = -(-length // page) - -(-max(request.done, 0) // page)
        self.tree.allocate(pages * page, self.cluster.rng)
        request.private += pages * page
        request.done = length

    def _checkpoint(self, request: Request) -> None:
        """Publish what was computed, give duplicates back, and lock the longer path."""
        before = len(request.lock or ())
        tokens = request.tokens[: request.done]
        self.tree.insert(tokens)
        moved = len(tokens) // self.tree.page_size * self.tree.page_size - before
        self.tree.private -= moved
        request.private -= moved
        longer = self.tree.lock(request, self.tree.match(request, len(tokens))).lock
        self.tree.unlock(request.lock or ())
        request.lock = longer

    def output(self, wave: int, group: int, tokens: list[int], finished: list[int]) -> None:
        for (seq, complete), token in zip(self.waves.pop(wave), tokens, strict=True):
            request = self.live[seq]
            if not complete:
                continue
            request.output.append(token)
            ended = len(request.output) >= request.max_new
            assert ended == (seq in finished), "a request ended on one stage only"
            if ended:
                self._checkpoint(request)
                self._leave(request)
                self.member.finish(seq)
                self.outputs[seq] = request.output
            elif len(request.output) == 1 or seq not in self.groups.get(group, []):
                self._checkpoint(request)
                self.groups.setdefault(group, []).append(seq)

    def _leave(self, request: Request) -> None:
        self.tree.private -= request.private
        request.private = 0
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


class Cluster:
    """P stages, their network and stage 0's planner, stepped in random order."""

    def __init__(
        self,
        seed: int,
        *,
        stages: int,
        pools: list[int],
        page: int = 1,
        rows: int = 8,
        budget: int = 32,
        reserve: int = 8,
        interval: int = 0,
    ) -> None:
        self.rng = random.Random(seed)
        self.now = 0.0
        self.to_leader: list[deque[bytes]] = [deque() for _ in range(stages)]
        self.to_member: list[deque[bytes]] = [deque() for _ in range(stages)]
        self.stages = [SimStage(r, self, pools[r], rows, page) for r in range(stages)]
        self.leader = Leader(
            Limits(
                stages=stages,
                pool=min(pools),
                running=rows,
                page=page,
                reserve=reserve,
                block=4 * page,
                ahead=2 * budget,
                round_bound=1e9,
            ),
            lambda: self.now,
        )
        self.sequencer = Sequencer(
            budget=budget,
            page=page,
            run_ahead=2 * stages,
            groups=stages,
            growth=reserve,
            rows=rows,
            interval=interval,
        )
        self.longest = min(pools) - page
        self.inbox: deque[Any] = deque()
        self.payloads: dict[int, tuple[tuple[int, ...], int]] = {}
        self.rejected: dict[int, str] = {}
        self.aborted: set[int] = set()
        self.built: set[tuple[int, int]] = set()
        self.position_digests: dict[int, int] = {}
        self.sample: Callable[[], int] = lambda: self.rng.randrange(3)
        """What the model says."""
        self.waves: list[Prefill | Decode] = []
        self.committed: list[Committed] = []
        self.order: list[int] = []
        """Requests in the order in which they were committed."""
        self.delivered = 0
        """Messages that arrived."""
        self.queries = 0
        """Times that the leader asked for hints again."""
        self.readmitted = 0
        """Requests that went back to admission before a wave was planned for them."""

    # --- the outside world -------------------------------------------------------------------

    def submit(self, seq: int, tokens: tuple[int, ...], max_new: int, rank: int = 0) -> None:
        self.payloads[seq] = (tokens, min(max_new, self.longest - len(tokens)))
        hashes = chain(array("q", tokens), self.leader.limits.block, SEED)
        self.leader.arrive(seq, tokens, self.payloads[seq][1], hashes, rank)

    def abort(self, seq: int) -> None:
        self.aborted.add(seq)
        if not self.leader.cancel(seq):
            self.inbox.append(("abort", seq))

    # --- one random step ---------------------------------------------------------------------

    def step(self) -> bool:
        """Do one thing that can be done. False if nothing can."""
        self.now += 1.0
        actions = [
            *(lambda r=r: self._deliver_to_member(r) for r, q in enumerate(self.to_member) if q),
            *(lambda r=r: self._deliver_to_leader(r) for r, q in enumerate(self.to_leader) if q),
            *(lambda r=r: self._loop(r) for r in range(1, len(self.stages)) if self.stages[r].inbox),
            *(
                lambda s=s, r=r: self.build(s, r)
                for s in self.payloads
                for r in range(len(self.stages))
                if (s, r) not in self.built and s not in self.aborted
            ),
        ]
        if self.inbox:
            actions.append(self._loop0)
        if actions and self.rng.random() < 0.9:
            self.rng.choice(actions)()
            self.settle()
            return True
        if self._plan():
            self.settle()
            return True
        if actions:
            self.rng.choice(actions)()
            self.settle()
            return True
        return False

    def deliver(self) -> bool:
        """Deliver one message, if there is any, and let the leader act on it."""
        for deliver, queues in (
            (self._deliver_to_member, self.to_member),
            (self._deliver_to_leader, self.to_leader),
        ):
            for rank, queue in enumerate(queues):
                if queue:
                    deliver(rank)
                    self.settle()
                    return True
        return False

    def build(self, seq: int, rank: int) -> None:
        self.built.add((seq, rank))
        tokens, max_new = self.payloads[seq]
        self.stages[rank].member.offered(seq, Request(seq, tokens, max_new))

    def _deliver_to_member(self, rank: int) -> None:
        self.delivered += 1
        self.stages[rank].member.on_message(decode_from_leader(self.to_member[rank].popleft()))

    def _deliver_to_leader(self, rank: int) -> None:
        self.delivered += 1
        message = decode_from_member(self.to_leader[rank].popleft())
        if isinstance(message, WaveDone):
            self.inbox.append(("done", message))
        else:
            self.leader.on_message(rank, message)

    def settle(self) -> None:
        self.leader.step()
        outbox, self.leader.outbox = self.leader.outbox, []
        events, self.leader.events = self.leader.events, []
        for event in events:
            if isinstance(event, Rejected):
                self.rejected[event.seq] = event.reason
            else:
                self.inbox.append(("event", event))
            if isinstance(event, Committed):
                self.committed.append(event)
        for rank, message in outbox:
            self.queries += isinstance(message, HintQuery)
            for r in range(len(self.stages)) if rank is None else (rank,):
                self.to_member[r].append(encode(message))

    def _publish(self, d: Any) -> None:
        stage0 = self.stages[0]
        position, entry = stage0.log.position, stage0.log.append(d)
        self.position_digests[stage0.log.position] = stage0.log.digest
        stage0.member.applied(stage0.log.position)
        for stage in self.stages[1:]:
            stage.inbox.append((position, entry))

    def _loop0(self) -> None:
        kind, item = self.inbox.popleft()
        if kind == "abort":
            self.sequencer.drop(item)
        elif kind == "done":
            self._output(item)
        elif isinstance(item, Committed):
            d = Commit(item.seq, item.order, item.boundary, item.length, item.until, 0)
            self._publish(d)
            self.stages[0].apply(d)
            self.order.append(item.seq)
            tokens, max_new = self.payloads[item.seq]
            most = min(len(tokens) + max_new, self.longest)
            self.sequencer.commit(
                item.seq, item.order, item.boundary, item.length, item.until, most, item.again
            )
        elif isinstance(item, GrowthGranted):
            self.sequencer.grown(item.items)
        else:
            self.sequencer.growth_refused(item.seq, item.hopeless)

    def _output(self, done: WaveDone) -> None:
        stage0 = self.stages[0]
        group = self.sequencer.join_group(done.wave)
        rows = stage0.waves[done.wave]
        finished = [
            s for s, complete in rows if complete and len(stage0.live[s].output) + 1 >= stage0.live[s].max_new
        ]
        d = Output(done.wave, group, done.tokens, finished, b"")
        stage0.apply(d)
        self._publish(d)
        self.sequencer.output(done.wave, group, finished)
        if finished:
            self.sequencer.reconsider(stage0.member.reusable, self.leader.limits.block)
        self.leader.wave_finished(stage0.log.position, stage0.computed.pop(done.wave, []))
        self.leader.finished(finished)

    def _loop(self, rank: int) -> None:
        stage = self.stages[rank]
        position, entry = stage.inbox.popleft()
        d = stage.log.read(position, entry)
        assert stage.log.digest == self.position_digests[stage.log.position]
        stage.apply(d)
        if rank == len(self.stages) - 1 and isinstance(d, Prefill | Decode):
            tokens = [self.sample() for _ in stage.waves[d.wave]]
            self.to_leader[rank].append(encode(WaveDone(d.wave, 1, tokens, b"")))

    def _plan(self) -> bool:
        d = self.sequencer.next(self.stages[0].log.digest)
        for seq, until in self.sequencer.growth_requests:
            self.leader.want_growth(seq, until)
        self.sequencer.growth_requests = []
        if d is None:
            return False
        self._publish(d)
        if isinstance(d, Prefill):
            self.leader.planned([(s.seq, s.end - s.begin) for s in d.spans])
        reqs = [self.stages[0].live[s] for s in d.seqs] if isinstance(d, Drop) else []
        if isinstance(d, Prefill | Decode):
            self.waves.append(d)
        self.stages[0].apply(d)
        if isinstance(d, Drop) and d.retract:
            self.readmitted += sum(not r.output and r.done == r.boundary for r in reqs)
            for r in reqs:
                self.leader.retracted(r.seq, r.length, r.max_new - len(r.output))
        elif isinstance(d, Drop):
            self.leader.finished(d.seqs)
        return True

    # --- invariants --------------------------------------------------------------------------

    def check(self) -> None:
        """What must hold after every step."""
        for stage in self.stages:
            tree = stage.tree
            assert tree.free_tokens() >= 0
            outstanding = stage.member.ledger.statistics()
            assert tree.free_tokens() + tree.evictable_tokens() - outstanding.tokens >= 0
            assert tree.rows - outstanding.rows >= 0

    def check_quiet(self) -> None:
        """What must hold when nothing is left to do."""
        assert self.leader.idle and self.sequencer.live == 0 and self.sequencer.in_flight == 0
        digests = {stage.log.digest for stage in self.stages}
        assert len(digests) == 1, "the stages applied different logs"
        outcomes = self.stages[0].outputs
        for stage in self.stages:
            assert stage.outputs == outcomes
            s = stage.member.statistics()
            assert (s.leases, s.committed, s.escrow_tokens, s.escrow_rows) == (0, 0, 0, 0)
            assert stage.tree.locked == 0 and stage.tree.private == 0
            assert stage.tree.rows == stage.rows_total
        for seq, (_, max_new) in self.payloads.items():
            ended = (seq in outcomes) + (seq in self.rejected)
            assert ended == 1 or (seq in self.aborted and ended == 0), f"request {seq} ended {ended} times"
            if seq in outcomes:
                assert len(outcomes[seq]) == max_new
