"""A whole server in simulated time: real admission, escrow and planners, a modelled cache and pipeline.

`Leader`, `Member`, `Sequencer` and the planners are those of the server. Modelled are the clock, the messages
(a latency), the cache (`PrefixStore`) and the devices (`mpu.pipeline`). All stages have the same pool and
apply the same log, so one member stands for all of them.
"""

from __future__ import annotations

import math
import random
import sys
from array import array
from collections import deque
from collections.abc import Hashable, Iterable, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

from sglang_wavepp.admission import Committed, GrowthGranted, GrowthRefused, Limits, Rejected
from sglang_wavepp.config import WavePPConfig
from sglang_wavepp.launch.bubbles import Bubbles
from sglang_wavepp.launch.prefix_store import ENDLESS, PrefixStore, Prompt
from sglang_wavepp.launch.sim_clock import SimClock
from sglang_wavepp.launch.workload import Offered, Outcome, Served, ServerOptions
from sglang_wavepp.leader import Leader
from sglang_wavepp.member import Member
from sglang_wavepp.messages import Decode, Drop, Prefill
from sglang_wavepp.mpu import PLANNERS, Planner, WaveLimits
from sglang_wavepp.mpu.packing import Pending
from sglang_wavepp.mpu.pipeline import Pipeline
from sglang_wavepp.mpu.planner import Load, load_of
from sglang_wavepp.mpu.profile import Profile
from sglang_wavepp.sequencer import Sequencer


class _Blocks(Sequence[int]):
    """Stands for the block hashes of a prompt: equal where two prompts share a name, distinct elsewhere."""

    def __init__(self, name: Hashable, shared: int, seq: int, length: int, block: int) -> None:
        self._name, self._shared, self._seq = name, shared // block, seq
        self._count = length // block

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, block: Any) -> Any:
        return hash((self._name if block < self._shared else self._seq, block))


class PipelineServer:
    """Serves requests in simulated time. One run each."""

    def __init__(self, profile: Profile, options: ServerOptions, planner: Planner | None = None) -> None:
        self.options = options
        self._profile = profile
        stages = options.stages
        ring = options.ring or 2 * stages
        self.pipeline = Pipeline(profile, stages, options.wave_s)
        waves = WaveLimits(
            stages=stages, ring=ring, budget=options.budget, align=options.page, least=options.floor
        )
        self.planner = planner or PLANNERS[options.planner](waves)
        self.sequencer = Sequencer(
            planner=self.planner,
            run_ahead=ring,
            groups=stages,
            growth=options.reserve,
            rows=options.rows,
            wave=sys.maxsize if options.late else options.budget,
        )
        pool = profile.kv_tokens or ENDLESS
        self.store = PrefixStore(pool, options.running, options.page)
        self._longest = pool - options.page
        self._member = Member(self.store, nullcontext, self._answer)
        self._block = math.lcm(WavePPConfig().block_size, options.page)
        limits = Limits(
            stages=1,
            pool=pool,
            running=options.running,
            page=options.page,
            reserve=options.reserve,
            block=self._block,
            ahead=options.budget if options.late else waves.ahead,
            wave=options.budget,
            round_bound=float("inf"),
        )
        self._clock = SimClock()
        self._leader = Leader(limits, lambda: self._clock.now)
        self._ring = ring
        self._learns = options.planner == "timed"
        self._position = 0
        self._host_free = 0.0
        self._front_free = 0.0
        self._draw = random.Random(1)
        self._uncommitted = 0
        """Requests that wait for admission."""
        self._prompts: dict[int, Prompt] = {}
        self._served: list[Served] = []
        self._begun: set[int] = set()
        self._computed: dict[int, int] = {}
        self._queue: deque[Offered] = deque()
        """What comes when another one is done."""
        self._begins: deque[float] = deque()
        """When stage 0 begins the waves that wait for it."""
        self._waves = 0
        self._bubbles = Bubbles()

    def learn(self, requests: Iterable[Offered]) -> None:
        """Let the planner see another load first, on a server of its own. Before `run`."""
        before = PipelineServer(self._profile, self.options, self.planner)
        before.run(requests)

    def run(self, requests: Iterable[Offered], concurrency: int = 0) -> Outcome:
        """Serve the requests: at their arrivals, or so many at a time from the start on."""
        listed = list(requests)
        if concurrency:
            self._queue.extend(listed[concurrency:])
            listed = listed[:concurrency]
        first = min((r.arrival for r in listed), default=0.0)
        at = 0.0
        for request in listed:
            at = at + self._pause() if concurrency else request.arrival - first
            self._clock.at(at, partial(self._send, request))
        before = 0.0
        for now in self._clock.times():
            self._bubbles.waited(max(before, self.pipeline.free), now)
            before = now
            self._settle()
            self._plan()
        seconds = max((s.done for s in self._served), default=0.0)
        self._bubbles.drained(seconds - self.pipeline.ends(self.pipeline.slowest))
        return Outcome(self._served, seconds, self._waves, self._bubbles.seconds, self.pipeline.busy)

    def _pause(self) -> float:
        return self.options.client_s * self._draw.uniform(0.5, 1.5)

    def _send(self, request: Offered) -> None:
        """A client sends a request: it arrives when the front is through with it and those before it."""
        self._front_free = max(self._clock.now, self._front_free) + self.options.front_s * request.tokens
        self._clock.at(self._front_free, partial(self._arrive, request))

    # --- admission -----------------------------------------------------------------------------

    def _arrive(self, request: Offered) -> None:
        seq = len(self._served)
        self._served.append(Served(request, self._clock.now))
        self._uncommitted += 1
        name: Hashable = request.prefix or ("own", seq)
        prompt = Prompt(seq, request.tokens, name, request.cached)
        self._prompts[seq] = prompt
        if request.cached and not request.prefix:
            self.store.seed(name, request.cached)
        chain: Sequence[int] = array("Q")
        if request.prefix:
            chain = _Blocks(name, request.cached, seq, request.tokens, self._block)
        # No two prompts have a token in common, but for their blocks.
        tokens = range(seq << 32, (seq << 32) + request.tokens)
        self._leader.arrive(seq, tokens, request.output, chain)
        self._clock.at(self._clock.now + self.options.message_s, partial(self._member.offered, seq, prompt))

    def _answer(self, message: Any) -> None:
        self._clock.at(self._clock.now + self.options.message_s, partial(self._leader.on_message, 0, message))

    def _settle(self) -> None:
        self._leader.step()
        outbox, self._leader.outbox = self._leader.outbox, []
        events, self._leader.events = self._leader.events, []
        for _, message in outbox:
            self._clock.at(
                self._clock.now + self.options.message_s, partial(self._member.on_message, message)
            )
        for event in events:
            if isinstance(event, Committed):
                self._commit(event)
            elif isinstance(event, Rejected):
                self._served[event.seq].rejected = event.reason
                self._served[event.seq].done = self._clock.now
                self._uncommitted -= 1
                self._next()
            elif isinstance(event, GrowthGranted):
                self.sequencer.grown(event.items)
            elif isinstance(event, GrowthRefused):
                self.sequencer.growth_refused(event.seq, event.hopeless)

    def _commit(self, c: Committed) -> None:
        self._applied()
        self._uncommitted -= 1
        self._member.take(c.seq, c.boundary)
        served = self._served[c.seq]
        if not c.again:
            served.committed, served.reused = self._clock.now, c.boundary
        self._computed[c.seq] = c.boundary
        remaining = served.offered.output - served.produced
        most = min(c.length + remaining, self._longest)
        self.sequencer.commit(c, most)

    def _applied(self) -> None:
        self._position += 1
        self._member.applied(self._position)

    # --- waves ---------------------------------------------------------------------------------

    def _plan(self) -> None:
        while self._clock.now >= self._host_free:
            if self.options.late and self.pipeline.free > self._clock.now:
                self._clock.wake(self.pipeline.free)
                break
            while self._begins and self._begins[0] <= self._clock.now:
                self._begins.popleft()
            d = self.sequencer.next(0, len(self._begins))
            for seq, until in self.sequencer.growth_requests:
                self._leader.want_growth(seq, until)
            self.sequencer.growth_requests = []
            if d is None:
                if self.sequencer.held_back:
                    self._clock.wake(self._begins[0])
                break
            self._applied()
            if isinstance(d, Drop):
                self._drop(d)
            elif isinstance(d, Prefill):
                self._prefill(d)
            elif isinstance(d, Decode):
                self._decode(d)
            self._settle()
        self._bubbles.cause = self._why()

    def _why(self) -> str:
        """Why stage 0 has no other wave at the moment."""
        if self.sequencer.in_flight >= self._ring or self.sequencer.held_back:
            return "run-ahead"
        if self._leader.idle:
            return "idle"
        return "admission" if self._uncommitted else "too few waves"

    def _prefill(self, d: Prefill) -> None:
        self._waves += 1
        waits = 0.0
        for span in d.spans:
            prompt = self._prompts[span.seq]
            if span.seq not in self._begun:
                self._begun.add(span.seq)
                lease = self._member.leases.get(span.seq)
                assert lease is not None
                waits += self.options.request_s + (self.options.match_s if lease.boundary else 0.0)
                self.store.bind(prompt, self._member.leases.transfer(lease))
            self._grow(prompt, span.end)
        self._leader.planned([(span.seq, span.end - span.begin) for span in d.spans])
        load = load_of(Pending(span.seq, span.begin, span.end) for span in d.spans)
        rows = [(span.seq, span.end, span.last) for span in d.spans]
        self._issue(d.wave, load, rows, waits)

    def _decode(self, d: Decode) -> None:
        context = 0
        for seq in d.seqs:
            length = self._computed[seq] + 1
            self._grow(self._prompts[seq], length)
            context += length
        load = Load(float(len(d.seqs)), float(context), float(context), 0.0)
        self._issue(d.wave, load, [(seq, self._computed[seq], True) for seq in d.seqs], 0.0)

    def _grow(self, prompt: Prompt, length: int) -> None:
        page, seq = self.options.page, prompt.seq
        self._member.ledger.take(seq, length)
        pages = -(-length // page) - -(-self._computed[seq] // page)
        self.store.allocate(prompt, pages * page)
        self._computed[seq] = length

    def _issue(self, wave: int, load: Load, rows: list[tuple[int, int, bool]], waits: float) -> None:
        ready = self._clock.now + self.options.prepare_s
        self._host_free = ready
        self._clock.wake(ready)
        passage = self.pipeline.issue(ready, load, waits)
        self._begins.append(passage.begins)
        self._bubbles.issued(passage.gap, self.pipeline.extra_s + (0.0 if self.pipeline.slowest else waits))
        self._clock.at(passage.done + self.options.message_s, partial(self._done, wave, rows, passage.took))

    def _done(self, wave: int, rows: list[tuple[int, int, bool]], took: tuple[float, ...]) -> None:
        for stage, seconds in enumerate(took if self._learns else took[:1]):
            self.sequencer.took(stage, wave, round(seconds * 1e6))
        group = self.sequencer.join_group(wave)
        finished = []
        for seq, computed, complete in rows:
            prompt = self._prompts[seq]
            if isinstance(prompt.name, str):
                self.store.publish(prompt, computed)
            if complete:
                served = self._served[seq]
                served.produced += 1
                served.prefilled = served.prefilled or self._clock.now
                if served.produced >= served.offered.output:
                    finished.append(seq)
        self._applied()
        for seq in finished:
            self._leave(seq, keep=True)
            self._member.finish(seq)
            self._served[seq].done = self._clock.now
            self._next()
        self.sequencer.output(wave, group, finished)
        if finished:
            self.sequencer.reconsider(self._member.reusable, self._block)
        self._leader.wave_finished(self._position, [(seq, computed) for seq, computed, _ in rows])
        self._leader.finished(finished)
        self._tell_room()

    def _leave(self, seq: int, keep: bool) -> None:
        prompt = self._prompts[seq]
        if seq in self._begun:
            self.store.leave(prompt, keep)
            self._begun.discard(seq)
        else:
            lease = self._member.leases.get(seq)
            assert lease is not None
            self._member.leases.release(lease)

    def _drop(self, d: Drop) -> None:
        for seq in d.seqs:
            self._leave(seq, keep=False)
            served = self._served[seq]
            if d.retract:
                self._uncommitted += 1
                self._member.retract(seq)
                length = served.offered.tokens + served.produced
                self._prompts[seq].length = length
                remaining = served.offered.output - served.produced
                self._leader.retracted(seq, length, remaining, self._position)
            else:
                self._member.finish(seq)
                served.rejected, served.done = "no room for another token", self._clock.now
                self._leader.finished([seq])
                self._next()
        self._tell_room()

    def _tell_room(self) -> None:
        if self._member.freed():
            self._answer(self._member.capacity())

    def _next(self) -> None:
        """One is done: who waits outside comes."""
        if self._queue:
            self._clock.at(self._clock.now + self._pause(), partial(self._send, self._queue.popleft()))
