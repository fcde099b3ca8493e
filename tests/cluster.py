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
from functools import partial
from typing import Any

from sglang_wavepp.hint_index import Hints, chain
from sglang_wavepp.leader import Committed, GrowthGranted, Leader, Limits, Rejected
from sglang_wavepp.log import DecisionLog
from sglang_wavepp.member import Member
from sglang_wavepp.messages import (
    Commit,
    Control,
    ControlDone,
    Decode,
    Drop,
    HintQuery,
    Log,
    Output,
    Prefill,
    WaveDone,
    decode_from_leader,
    decode_from_member,
    encode,
)
from sglang_wavepp.mpu import PLANNERS, WaveLimits
from sglang_wavepp.radix.protocol import LockedPrefix, Match
from sglang_wavepp.sequencer import Sequencer


class Request:
    """A request on one stage, and its `Prefix`."""

    def __init__(self, seq: int, tokens: tuple[int, ...], max_new: int) -> None:
        self.seq, self.prompt, self.max_new = seq, tokens, max_new
        self.output: list[int] = []
        self.lock: Any = None
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


class _Node:
    """One cached page after all those before it."""

    __slots__ = ("children", "depth", "hash", "key", "locks", "parent")

    def __init__(self, parent: _Node | None, key: tuple[int, ...]) -> None:
        self.parent, self.key = parent, key
        self.depth: int = 0 if parent is None else parent.depth + len(key)
        self.children: dict[tuple[int, ...], _Node] = {}
        self.locks = 0
        """Locks that end here or further on."""
        self.hash: array[int] | None = None
        """Of the block that ends here, if one does."""


class ModelTree:
    """A radix tree as an obvious model: every cached page is a node."""

    states_per_request = 0

    def __init__(self, pool: int, rows: int, page: int) -> None:
        self.page_size, self._pool, self.rows = page, pool, rows
        self.hints = Hints(4 * page, SEED)
        self.reset()

    def reset(self) -> None:
        self._root = _Node(None, ())
        self._nodes: dict[_Node, None] = {}
        """All but the root, the oldest first."""
        self.locked = 0
        """Tokens that cannot be evicted."""
        self.private = 0
        """Tokens that running requests hold besides."""
        self.hints.clear()

    def _longest(self, tokens: tuple[int, ...], limit: int) -> _Node:
        page, node = self.page_size, self._root
        while node.depth + page <= min(limit, len(tokens)):
            longer = node.children.get(tuple(tokens[node.depth : node.depth + page]))
            if longer is None:
                break
            node = longer
        return node

    def hint(self, prefix: Request) -> int:
        hashes = chain(array("q", prefix.tokens), self.hints.block, SEED)
        return self.hints.boundary(hashes, prefix.max_boundary) // self.page_size * self.page_size

    def match(self, prefix: Request, limit: int) -> Match:
        node = self._longest(prefix.tokens, limit)
        return Match(node.depth, ((node.depth, node),))

    def lock(self, prefix: Request, match: Match) -> LockedPrefix:
        end = node = self._longest(prefix.tokens, match.boundary)
        while node.parent is not None:
            self.locked += 0 if node.locks else self.page_size
            node.locks += 1
            node = node.parent
        return LockedPrefix(end.depth, end, end)

    def unlock(self, lock: _Node) -> None:
        node = lock
        while node.parent is not None:
            assert node.locks > 0, "unlocked twice"
            node.locks -= 1
            self.locked -= 0 if node.locks else self.page_size
            node = node.parent

    @property
    def cached(self) -> int:
        return len(self._nodes) * self.page_size

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
        leaves = self._leaves() if self.free_tokens() < tokens else []
        while self.free_tokens() < tokens:
            assert leaves, f"no room for {tokens} tokens that were promised"
            at = rng.randrange(len(leaves))
            leaves[at], leaves[-1] = leaves[-1], leaves[at]
            parent = self._evict(leaves.pop())
            if parent.parent is not None and not parent.children and not parent.locks:
                leaves.append(parent)
        self.private += tokens

    def insert(self, tokens: tuple[int, ...]) -> int:
        """Cache the full pages of `tokens`; returns how many tokens became cached with it."""
        full = tokens[: len(tokens) // self.page_size * self.page_size]
        node = self._longest(full, len(full))
        new = len(full) - node.depth
        hashes = chain(array("q", full), self.hints.block, SEED) if new else array("Q")
        while node.depth < len(full):
            key = tuple(full[node.depth : node.depth + self.page_size])
            node.children[key] = longer = _Node(node, key)
            node = longer
            self._nodes[node] = None
            blocks, rest = divmod(node.depth, self.hints.block)
            if not rest:
                self.hints.index.add(hashes, blocks - 1, blocks)
                node.hash = hashes[blocks - 1 : blocks]
        return new

    def evict_some(self, rng: random.Random) -> None:
        """Something else on this stage evicts: caches of stages drift apart."""
        leaves = self._leaves()
        for leaf in rng.sample(leaves, rng.randrange(len(leaves) + 1)):
            self._evict(leaf)

    def _leaves(self) -> list[_Node]:
        return [node for node in self._nodes if not node.locks and not node.children]

    def _evict(self, leaf: _Node) -> _Node:
        assert leaf.parent is not None
        del self._nodes[leaf], leaf.parent.children[leaf.key]
        if leaf.hash is not None:
            self.hints.index.remove(leaf.hash, 0, 1)
        return leaf.parent


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
        elif isinstance(d, Control):
            self.tree.reset()
            self.member.reset()
            self._send(ControlDone(self.log.position - 1, self.member.epoch, ""))
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
        before = request.lock.depth
        tokens = request.tokens[: request.done]
        self.tree.insert(tokens)
        moved = len(tokens) // self.tree.page_size * self.tree.page_size - before
        self.tree.private -= moved
        request.private -= moved
        longer = self.tree.lock(request, self.tree.match(request, len(tokens))).lock
        self.tree.unlock(request.lock)
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
        planner: str = "static",
    ) -> None:
        self.rng = random.Random(seed)
        self.now = 0.0
        self.to_leader: list[deque[bytes]] = [deque() for _ in range(stages)]
        self.to_member: list[deque[bytes]] = [deque() for _ in range(stages)]
        self.stages = [SimStage(r, self, pools[r], rows, page) for r in range(stages)]
        limits = WaveLimits(stages=stages, ring=2 * stages, budget=budget, align=page)
        self.planner = PLANNERS[planner](limits)
        self.leader = Leader(
            Limits(
                stages=stages,
                pool=min(pools),
                running=rows,
                page=page,
                reserve=reserve,
                block=4 * page,
                ahead=self.planner.ahead,
                round_bound=1e9,
            ),
            lambda: self.now,
        )
        self.sequencer = Sequencer(
            planner=self.planner,
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
        self.offers: dict[tuple[int, int], None] = {}
        """(request, stage) that are under way."""
        self.flushes = 0
        """Flushes that wait for an idle server."""
        self._flushing = False
        self._acks: dict[int, int] = {}
        """Stage -> its epoch after the flush."""
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
        self.offers |= {(seq, rank): None for rank in range(len(self.stages))}
        hashes = chain(array("q", tokens), self.leader.limits.block, SEED)
        self.leader.arrive(seq, tokens, self.payloads[seq][1], hashes, rank)

    def abort(self, seq: int) -> None:
        self.aborted.add(seq)
        for rank in range(len(self.stages)):
            self.offers.pop((seq, rank), None)
        if not self.leader.cancel(seq):
            self.inbox.append(("abort", seq))

    # --- one random step ---------------------------------------------------------------------

    def step(self) -> bool:
        """Do one thing that can be done. False if nothing can."""
        self.now += 1.0
        actions = self._actions()
        able = [act for rank, act in actions if not self.stands_still(rank)]
        if able and self.rng.random() < 0.9:
            self.rng.choice(able)()
        elif self._plan():
            pass
        elif able:
            self.rng.choice(able)()
        elif busy := [rank for rank, stage in enumerate(self.stages) if stage.inbox]:
            self._loop(self.rng.choice(busy))  # at last
        else:
            return bool(actions)
        self.settle()
        return True

    def _actions(self) -> list[tuple[int, Callable[[], None]]]:
        """What can be done now, and the stage that does it."""
        actions: list[tuple[int, Callable[[], None]]] = []
        for rank, stage in enumerate(self.stages):
            if self.to_member[rank]:
                actions.append((rank, partial(self._deliver_to_member, rank)))
            if self.to_leader[rank]:
                actions.append((rank, partial(self._deliver_to_leader, rank)))
            if stage.inbox and not self.loop_is_busy(rank):
                actions.append((rank, partial(self._loop, rank)))
        actions += [(rank, partial(self.build, seq, rank)) for seq, rank in self.offers]
        if self.inbox:
            actions.append((0, self._loop0))
        return actions

    def stands_still(self, rank: int) -> bool:
        """Does this stage do nothing at the moment?"""
        return False

    def loop_is_busy(self, rank: int) -> bool:
        """Does a member's loop still run a wave, while its other thread goes on?"""
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
        self.offers.pop((seq, rank), None)
        tokens, max_new = self.payloads[seq]
        self.stages[rank].member.offered(seq, Request(seq, tokens, max_new))

    def _deliver_to_member(self, rank: int) -> None:
        self.delivered += 1
        message = decode_from_leader(self.to_member[rank].popleft())
        if isinstance(message, Log):
            self.stages[rank].inbox += enumerate(message.entries, message.first)
        else:
            self.stages[rank].member.on_message(message)

    def _deliver_to_leader(self, rank: int) -> None:
        self.delivered += 1
        message = decode_from_member(self.to_leader[rank].popleft())
        self.on_answer(rank, message)
        if isinstance(message, WaveDone):
            self.inbox.append(("done", message))
        elif isinstance(message, ControlDone):
            self._acks[rank] = message.epoch
            self._end_flush()
        else:
            self.leader.on_message(rank, message)

    def settle(self) -> None:
        self.leader.step()
        if self.flushes and not self._flushing and self.leader.idle:
            self.flushes -= 1
            self._flushing = True
            self.leader.barrier(True)
            self.inbox.append(("flush", None))
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
            self.on_sent(rank, message)
            self.queries += isinstance(message, HintQuery)
            for r in range(len(self.stages)) if rank is None else (rank,):
                self.to_member[r].append(encode(message))
            while self.to_member[0]:
                self._deliver_to_member(0)  # it runs in the same thread

    def _publish(self, d: Any) -> None:
        self.on_decision(d)
        stage0 = self.stages[0]
        position, entry = stage0.log.position, stage0.log.append(d)
        self.position_digests[stage0.log.position] = stage0.log.digest
        stage0.member.applied(stage0.log.position)
        for rank in range(1, len(self.stages)):
            self.to_member[rank].append(encode(Log(position, [entry])))

    def _loop0(self) -> None:
        kind, item = self.inbox.popleft()
        if kind == "abort":
            self.sequencer.drop(item)
        elif kind == "flush":
            d = Control(b"", True)
            self._publish(d)
            self.stages[0].apply(d)
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

    def _end_flush(self) -> None:
        if len(self._acks) == len(self.stages):
            (epoch,) = set(self._acks.values())
            self._acks.clear()
            while self.leader.epoch < epoch:
                self.leader.new_epoch()
            self.leader.barrier(False)
            self._flushing = False

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
        if isinstance(d, Prefill):
            tokens = sum(span.end - span.begin for span in d.spans)
            self.sequencer.took(rank, d.wave, 20 + (rank + 1) * tokens)
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
                self.leader.retracted(r.seq, r.length, r.max_new - len(r.output), self.stages[0].log.position)
        elif isinstance(d, Drop):
            self.leader.finished(d.seqs)
        return True

    # --- for those who watch -------------------------------------------------------------------

    def on_sent(self, rank: int | None, message: Any) -> None:
        """The leader sends to one stage, or to all."""

    def on_answer(self, rank: int, message: Any) -> None:
        """A stage's message arrives at the leader."""

    def on_decision(self, d: Any) -> None:
        """Stage 0 logs a decision, and has not applied it (of outputs: not logged it) yet."""

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
