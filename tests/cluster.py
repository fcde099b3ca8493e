"""A whole WavePP server without SGLang: the real state machines over a model tree and a simulated network.

Every choice (which message arrives next, which loop takes its next step) comes from one seeded random
generator, so a run is replayed by its seed. What the real loops do on SGLang is done here on page counts, in
steps: between them the other thread of the stage goes on, and inside an operation that the guard covers the
counters lie as SGLang's do.
"""

from __future__ import annotations

import random
from array import array
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any

from model_tree import SEED, ModelTree, Request
from sim_stage import Channel, SimStage, Steps

from sglang_wavepp.admission import Committed, GrowthGranted, Limits, Rejected
from sglang_wavepp.hint_index import chain
from sglang_wavepp.leader import Leader
from sglang_wavepp.messages import (
    Beat,
    Commit,
    Control,
    ControlDone,
    Decode,
    Drop,
    Forget,
    HintQuery,
    Log,
    Offer,
    Output,
    Prefill,
    WaveDone,
    decode_from_leader,
    decode_from_member,
)
from sglang_wavepp.mpu import PLANNERS, WaveLimits
from sglang_wavepp.sequencer import LEAD, Sequencer


class Cluster:
    """P stages, their network and stage 0's planner, stepped in random order.

    pools: KV tokens of each stage. states: its recurrent slots, for a hybrid model. ahead: how much more than
    fills the ring may be committed before it is planned.
    """

    def __init__(
        self,
        seed: int,
        *,
        stages: int,
        pools: list[int],
        states: list[int] | None = None,
        page: int = 1,
        rows: int = 8,
        budget: int = 32,
        reserve: int = 8,
        interval: int = 0,
        ahead: int = 1,
        planner: str = "static",
    ) -> None:
        self.rng = random.Random(seed)
        self.now = 0.0
        """Stage 0's clock. Nobody else looks at one."""
        self.to_leader = [Channel() for _ in range(stages)]
        self.to_member = [Channel() for _ in range(stages)]
        self.bulk = [Channel() for _ in range(stages)]
        """Offers: they take another socket than what is decided about them."""
        trees = [ModelTree(pools[r], rows, page, states and states[r]) for r in range(stages)]
        self.stages = [SimStage(rank, self, tree) for rank, tree in enumerate(trees)]
        waves = WaveLimits(stages=stages, ring=2 * stages, budget=budget, align=page, least=budget // 4)
        self.planner = PLANNERS[planner](waves)
        limits = Limits(
            stages=stages,
            pool=min(pools),
            running=rows,
            page=page,
            reserve=reserve,
            block=4 * page,
            ahead=ahead * waves.ahead,
            wave=budget,
            round_bound=1e9,
        )
        self.leader = Leader(limits, lambda: self.now)
        self.sequencer = Sequencer(
            planner=self.planner,
            run_ahead=2 * stages,
            groups=stages,
            growth=reserve,
            rows=rows,
            wave=budget,
            interval=interval,
        )
        self.longest = min(pools) - page
        self.mail: deque[Callable[[], None]] = deque()
        """What stage 0's loop posts to its other thread."""
        self.inbox: deque[Callable[[], Steps]] = deque()
        """What its other thread posts to stage 0's loop."""
        self.payloads: dict[int, tuple[tuple[int, ...], int]] = {}
        self.known: set[int] = set()
        """Requests from their offer to their end, as stage 0's other thread sees it."""
        self.rejected: dict[int, str] = {}
        self.aborted: set[int] = set()
        self.controls: deque[bytes] = deque()
        """Operations that wait for their turn; a flush also for an idle server."""
        self._control_runs = False
        self._acks: dict[int, int] = {}
        """Stage -> its epoch after the operation."""
        self.position_digests: dict[int, int] = {}
        self.sample: Callable[[], int] = lambda: self.rng.randrange(3)
        """What the model says."""
        self.moved = -1
        """The stage that has just done something."""
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
        self.known.add(seq)
        self.payloads[seq] = (tokens, min(max_new, self.longest - len(tokens)))
        hashes = chain(array("q", tokens), self.leader.limits.block, SEED)
        position = self.leader.arrive(seq, tokens, self.payloads[seq][1], hashes, rank)
        for channel in self.bulk[1:]:
            channel.send(Offer(seq, 0, position))
        self.stages[0].member.arrives(seq)
        self.stages[0].building[seq] = position
        self.settle()

    def abort(self, seq: int) -> None:
        self.aborted.add(seq)
        if seq not in self.known:
            return
        if self.leader.cancel(seq):
            self.known.discard(seq)
            self.stages[0].building.pop(seq, None)
        else:
            self.inbox.append(partial(self._abort, seq))
        self.settle()

    # --- one random step ---------------------------------------------------------------------

    def step(self) -> bool:
        """One stage does one thing, `moved`. False if nobody can do anything, now or later."""
        self.now += 1.0
        first = self.rng.randrange(len(self.stages))
        slow = []
        for rank in (*range(first, len(self.stages)), *range(first)):
            if self.is_slow(rank):
                slow.append(rank)
            elif not self.stands_still(rank) and self._move(rank, 0.5):
                return True
        for rank in slow:  # nobody else has anything to do
            if not self.stands_still(rank) and self._move(rank, 1.0):
                return True
        if not self.stands_still(0) and self._plan():
            self._moved(0)
            return True
        for rank, stage in enumerate(self.stages):
            if rank and not self.stands_still(rank) and (stage.inbox or stage.busy):
                self._loop(rank)  # although it takes its time
                self._moved(rank)
                return True
        self.moved = -1
        return self.wakes_up()

    def _move(self, rank: int, plans: float) -> bool:
        if not rank and self.rng.random() < plans and self._plan():
            self._moved(rank)
            return True
        able = self._actions(rank)
        if able:
            action, about = self.rng.choice(able)
            if action(about):
                self._moved(rank)
                return True
        return False

    def _moved(self, rank: int) -> None:
        self.moved = rank
        if not rank:
            self.settle()

    def _actions(self, rank: int) -> list[tuple[Callable[[int], bool], int]]:
        """What this stage can do now, with what about. An action that answers False cannot be done yet."""
        stage = self.stages[rank]
        actions: list[tuple[Callable[[int], bool], int]] = []
        if rank:
            if self.to_member[rank].frames:
                actions.append((self._deliver_to_member, rank))
            if self.bulk[rank].frames:
                actions.append((self._deliver_offer, rank))
            if (stage.inbox or stage.busy) and not self.takes_its_time(rank):
                actions.append((self._loop, rank))
        else:
            for source, channel in enumerate(self.to_leader):
                if channel.frames:
                    actions.append((self._deliver_to_leader, source))
            if self.mail:
                actions.append((self._read_mail, 0))
            if self.inbox or stage.busy:
                actions.append((self._loop0, 0))
        if stage.building:
            actions.append((self._build_one, rank))
        return actions

    def fails(self, rank: int) -> bool:
        """Is a request not valid on this stage?"""
        return False

    def has_waves_enough(self) -> bool:
        """Has stage 0's device enough to do, so that decode waves alone go before what it has?"""
        return False

    def is_slow(self, rank: int) -> bool:
        """Does this stage do something only if nobody else can, for now?"""
        return False

    def stands_still(self, rank: int) -> bool:
        """Does this stage do nothing at the moment?"""
        return False

    def wakes_up(self) -> bool:
        """Nobody can do anything. Could somebody later? Then it is later."""
        return False

    def takes_its_time(self, rank: int) -> bool:
        """Does a member's loop still run a wave, while its other thread goes on?"""
        return False

    def arrives(self, source: int, target: int) -> bool:
        """Do frames from one stage to another one arrive at the moment?"""
        return True

    def ready(self) -> None:
        """Every stage gets its offers and has the requests ready, and stage 0 hears of it."""
        for rank, stage in enumerate(self.stages):
            while self.bulk[rank].frames:
                self._deliver_offer(rank)
            for seq in list(stage.building):
                self.build(seq, rank)
            while self.to_leader[rank].frames:
                self._deliver_to_leader(rank)
        self.settle()

    def deliver_all(self) -> None:
        """Deliver everything that is on its way and the answers, while the loops stand still."""
        ways = (
            (self.to_member, self._deliver_to_member),
            (self.bulk, self._deliver_offer),
            (self.to_leader, self._deliver_to_leader),
        )
        for _ in range(5000):
            able = [
                (deliver, rank)
                for channels, deliver in ways
                for rank, channel in enumerate(channels)
                if channel.frames
            ]
            if not able:
                return
            deliver, rank = able[0]
            deliver(rank)
            self.settle()
        raise AssertionError("the rounds do not come to rest")

    def build(self, seq: int, rank: int) -> None:
        """A request is ready on a stage, or cannot be served there."""
        stage = self.stages[rank]
        position = stage.building.pop(seq)
        if self.fails(rank):
            stage.member.failed(seq, "it is not valid here")
        else:
            stage.member.offered(seq, Request(seq, *self.payloads[seq]), position)

    def _build_one(self, rank: int) -> bool:
        self.build(self.rng.choice(list(self.stages[rank].building)), rank)
        return True

    def _deliver_offer(self, rank: int) -> bool:
        if not self.arrives(0, rank):
            return False
        self.delivered += 1
        frame = self.bulk[rank].receive()
        if frame is not None:
            offer = decode_from_leader(frame)
            if isinstance(offer, Offer) and self.stages[rank].member.arrives(offer.seq):
                self.stages[rank].building[offer.seq] = offer.position
        return True

    def _deliver_to_member(self, rank: int) -> bool:
        if not self.arrives(0, rank):
            return False
        self.delivered += 1
        frame = self.to_member[rank].receive()
        if frame is None:
            return True
        message, stage = decode_from_leader(frame), self.stages[rank]
        if isinstance(message, Log):
            stage.inbox += enumerate(message.entries, message.first)
        elif not isinstance(message, Beat):
            if isinstance(message, Forget):
                for seq in message.seqs:
                    stage.building.pop(seq, None)
            stage.member.on_message(message)
        return True

    def _deliver_to_leader(self, rank: int) -> bool:
        if not self.arrives(rank, 0):
            return False
        self.delivered += 1
        frame = self.to_leader[rank].receive()
        if frame is None:
            return True
        message = decode_from_member(frame)
        self.on_answer(rank, message)
        if isinstance(message, WaveDone):
            self.inbox.append(partial(self._output, message))
        elif isinstance(message, ControlDone):
            self._acks[rank] = message.epoch
            self._end_control()
        elif not isinstance(message, Beat):
            self.leader.on_message(rank, message)
        return True

    def settle(self) -> None:
        """Stage 0's other thread ends its turn: what the leader wants is done."""
        self.leader.step()
        self._start_control()
        outbox, self.leader.outbox = self.leader.outbox, []
        events, self.leader.events = self.leader.events, []
        for event in events:
            if isinstance(event, Rejected):
                self.rejected[event.seq] = event.reason
                self.known.discard(event.seq)
                self.stages[0].building.pop(event.seq, None)
            else:
                self.inbox.append(partial(self._event, event))
            if isinstance(event, Committed):
                self.committed.append(event)
        for rank, message in outbox:
            self.on_sent(rank, message)
            self.queries += isinstance(message, HintQuery)
            for r in range(1, len(self.stages)) if rank is None else (rank,):
                self.to_member[r].send(message)
            if rank in (None, 0):
                self.stages[0].member.on_message(message)  # it runs in the same thread

    def _start_control(self) -> None:
        if self._control_runs:
            return
        for what in self.controls:
            if what != b"flush" or self.leader.idle:
                break
        else:
            return
        self.controls.remove(what)
        self._control_runs = True
        self.leader.barrier(True)
        self.inbox.append(partial(self._control, Control(what.removesuffix(b" now"), self.leader.idle)))

    def _end_control(self) -> None:
        if len(self._acks) == len(self.stages):
            (epoch,) = set(self._acks.values())
            self._acks.clear()
            while self.leader.epoch < epoch:
                self.leader.new_epoch()
            self.leader.barrier(False)
            self._control_runs = False

    # --- stage 0's loop ------------------------------------------------------------------------

    def _read_mail(self, _: int) -> bool:
        self.mail.popleft()()
        return True

    def _loop0(self, _: int) -> bool:
        stage = self.stages[0]
        if stage.busy:
            stage.proceed()
        else:
            stage.begin(self.inbox.popleft()())
        return True

    def _loop(self, rank: int) -> bool:
        stage = self.stages[rank]
        if stage.busy:
            stage.proceed()
        else:
            stage.begin(stage.read())
        return True

    def _publish(self, d: Any) -> None:
        self.on_decision(d)
        stage0 = self.stages[0]
        position, entry = stage0.log.position, stage0.log.append(d)
        self.position_digests[stage0.log.position] = stage0.log.digest
        stage0.member.applied(stage0.log.position)
        for channel in self.to_member[1:]:
            channel.send(Log(position, [entry]))

    def _abort(self, seq: int) -> Steps:
        if not self.sequencer.drop(seq):
            # It has ended, or it was retracted meanwhile and waits.
            self.mail.append(partial(self.abort, seq))
        yield

    def _control(self, d: Control) -> Steps:
        self._publish(d)
        yield from self.stages[0].apply(d)

    def _event(self, event: Any) -> Steps:
        if isinstance(event, Committed):
            d = Commit(event.seq, event.order, event.boundary, event.length, event.until, 0)
            self._publish(d)
            yield from self.stages[0].apply(d)
            self.order.append(event.seq)
            tokens, max_new = self.payloads[event.seq]
            most = min(len(tokens) + max_new, self.longest)
            self.sequencer.commit(event, most)
        elif isinstance(event, GrowthGranted):
            self.sequencer.grown(event.items)
        else:
            self.sequencer.growth_refused(event.seq, event.hopeless)

    def _output(self, done: WaveDone) -> Steps:
        stage0 = self.stages[0]
        group = self.sequencer.join_group(done.wave)
        rows = stage0.waves[done.wave]
        finished = [
            s for s, complete in rows if complete and len(stage0.live[s].output) + 1 >= stage0.live[s].max_new
        ]
        d = Output(done.wave, group, done.tokens, finished, b"")
        yield from stage0.apply(d)
        self._publish(d)
        self.sequencer.output(done.wave, group, finished)
        if finished:
            self.sequencer.reconsider(stage0.member.reusable, self.leader.limits.block)
        computed = stage0.computed.pop(done.wave, [])
        self.mail.append(partial(self._finished, stage0.log.position, computed, finished))

    def _finished(self, position: int, computed: list[tuple[int, int]], finished: list[int]) -> None:
        self.leader.wave_finished(position, computed)
        self._over(finished)

    def _over(self, seqs: list[int]) -> None:
        self.leader.finished(seqs)
        self.known.difference_update(seqs)

    def _plan(self) -> bool:
        """Stage 0's loop logs what is next. False if there is nothing, or it is busy."""
        if self.stages[0].busy:
            return False
        digest = self.stages[0].log.digest
        d = self.sequencer.next(digest, LEAD if self.has_waves_enough() else 0)
        if d is None and self.sequencer.held_back:  # until the device of stage 0 comes to it
            d = self.sequencer.next(digest)
        for seq, until in self.sequencer.growth_requests:
            self.mail.append(partial(self.leader.want_growth, seq, until))
        self.sequencer.growth_requests = []
        if d is None:
            return False
        self._publish(d)
        self.stages[0].begin(self._planned(d))
        return True

    def _planned(self, d: Any) -> Steps:
        live = self.stages[0].live
        if isinstance(d, Prefill):
            self.mail.append(partial(self.leader.planned, [(s.seq, s.end - s.begin) for s in d.spans]))
        dropped = [live[seq] for seq in d.seqs] if isinstance(d, Drop) else []
        if isinstance(d, Prefill | Decode):
            self.waves.append(d)
        yield from self.stages[0].apply(d)
        if isinstance(d, Drop) and d.retract:
            self.readmitted += sum(not r.output and r.done == r.boundary for r in dropped)
            self.mail.append(partial(self._retracted, self.stages[0].log.position, dropped))
        elif isinstance(d, Drop):
            self.mail.append(partial(self._over, d.seqs))

    def _retracted(self, position: int, requests: list[Request]) -> None:
        for r in requests:
            self.leader.retracted(r.seq, r.length, r.max_new - len(r.output), position)

    # --- for those who watch -------------------------------------------------------------------

    def on_sent(self, rank: int | None, message: Any) -> None:
        """The leader sends to one stage, or to all."""

    def on_answer(self, rank: int, message: Any) -> None:
        """A stage's message arrives at the leader."""

    def on_decision(self, d: Any) -> None:
        """Stage 0 logs a decision, and has not applied it (of outputs: not logged it) yet."""

    # --- invariants --------------------------------------------------------------------------

    def check(self) -> None:
        """What must hold after every step, wherever the guard is free."""
        for stage in self.stages:
            self.check_stage(stage)

    def check_stage(self, stage: SimStage) -> None:
        """Rule 5, and that nothing is lost."""
        if stage.guard.taken:
            return
        tree, promised = stage.tree, stage.member.ledger.statistics()
        free = tree.free_tokens()
        room = free + tree.evictable_tokens() - promised.tokens
        assert room >= 0, f"rule 5: stage {stage.rank} promised {-room} tokens too much"
        assert tree.rows >= promised.rows, f"rule 5: stage {stage.rank} promised rows that it has not"
        if tree.recurrent:
            states = tree.free_states() - promised.rows * tree.states_per_request
            assert states >= 0, f"rule 5: stage {stage.rank} promised {-states} recurrent slots too much"
            own = sum(request.states for request in stage.live.values())
            assert tree.private_states == own, f"stage {stage.rank} lost recurrent slots"
        private = sum(request.private for request in stage.live.values())
        assert free >= 0 and tree.private == private, f"stage {stage.rank} lost tokens"

    def check_quiet(self) -> None:
        """What must hold when nothing is left to do."""
        assert self.leader.idle and self.sequencer.live == 0 and self.sequencer.in_flight == 0
        digests = {stage.log.digest for stage in self.stages}
        assert len(digests) == 1, "the stages applied different logs"
        outcomes = self.stages[0].outputs
        for stage in self.stages:
            assert stage.outputs == outcomes
            s = stage.member.statistics()
            assert (s.offered, s.leases, s.committed, s.escrow_tokens, s.escrow_rows) == (0, 0, 0, 0, 0)
            tree = stage.tree
            assert tree.locked == tree.private == tree.pinned == tree.private_states == 0
            assert tree.rows == stage.rows_total
        for seq, (_, max_new) in self.payloads.items():
            ended = (seq in outcomes) + (seq in self.rejected)
            assert ended == 1 or (seq in self.aborted and ended == 0), f"request {seq} ended {ended} times"
            if seq in outcomes:
                assert len(outcomes[seq]) == max_new
