"""Whole servers under random schedules: the real state machines, model trees, a simulated network.

    python -m tests.simulate --seeds 2000                # random servers and loads, one for each seed
    python -m tests.simulate --seed 17 --trace           # one of them again, step by step
    python -m tests.simulate --seeds 2000 --break NAME   # with a bug put in: which seed sees it first

A seed decides everything: how many stages, pools, pages, whether the model is hybrid, what arrives, which
message is delivered next, which stage stands still or is cut off for a while, what is evicted, aborted and
flushed when, whether a frame is lost or repeated and a stage dies. After each step the named invariants hold,
and in the end everything is back where it was, or a fault has ended the server. A failure is replayed by its
seed.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections import deque
from concurrent.futures import ProcessPoolExecutor
from contextlib import nullcontext
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from bugs import BUGS, broken
from cluster import Cluster
from sim_stage import Channel, SimStage

from sglang_wavepp.errors import ProtocolError, WavePPError
from sglang_wavepp.messages import (
    Beat,
    Commit,
    ControlDone,
    Drop,
    Forget,
    Held,
    Hold,
    Message,
    Output,
    Release,
)

REST = 120_000
"""Steps within which every server comes to rest."""
TRACED = 80
"""Steps that are printed of a run that fails."""
SILENCE = 200.0
"""Time after which a dead stage is noticed."""


class Simulation(Cluster):
    """A server with its load, all drawn from one seed."""

    def __init__(self, seed: int) -> None:
        draw = random.Random(seed)
        stages = draw.choice((2, 2, 3, 3, 4, 4, 4, 5, 8, 16))
        page = draw.choice((1, 1, 1, 4))
        low = draw.choice((60, 60, 120, 300))
        rows = draw.choice((2, 4, 8))
        hybrid = draw.random() < 0.3
        super().__init__(
            seed,
            stages=stages,
            pools=[draw.randrange(low, 2 * low) // page * page for _ in range(stages)],
            states=[draw.randrange(2, 4 * rows) for _ in range(stages)] if hybrid else None,
            page=page,
            rows=rows,
            budget=draw.choice((8, 8, 16) if hybrid else (8, 32, 64)) * page,
            reserve=draw.choice((1, 8, 8, 20)),
            interval=draw.choice((0, 0, 2)),
            ahead=draw.choice((1, 1, 10)),
            planner=draw.choice(("static", "mpu", "timed")),
        )
        self.seed = seed
        self.trace: deque[tuple[float, str, tuple[Any, ...]]] = deque(maxlen=TRACED)
        self._aborts = draw.choice((0.0, 0.0, 0.01))
        self._evictions = draw.choice((0.0, 0.01, 0.1))
        self._pauses = draw.choice((0.0, 0.0, 0.01))
        self._controls = draw.choice((0.0, 0.002, 0.02))
        self._controls_left, self._pauses_left = 6, 6
        self._slow = [draw.choice((0.0, 0.0, 0.0, 0.5, 0.9)) for _ in range(stages)]
        """How often each stage does nothing."""
        self._busy = draw.choice((0.0, 0.0, 0.9, 0.99))
        """How often the loop of a member is not done yet with what it does."""
        self._away = [0.0] * stages
        """Until when each stage stands still."""
        self._cut = [0.0] * stages
        """Until when nothing that is sent to or from each stage arrives."""
        words = draw.choice((2, 3, 50))
        base = tuple(draw.randrange(words) for _ in range(40))
        self._arrivals: list[tuple[int, tuple[int, ...], int]] = []
        for seq in range(draw.randrange(2, 11)):
            self._arrivals.append(self._prompt(draw, base, words, seq))
        self._fails = draw.choice((0.0, 0.0, 0.0, 0.02))
        self._rate = draw.choice((0.02, 0.1, 1.0))
        self._repeats = draw.choice((0.0, 0.0, 0.0, 0.01))
        """How often a frame that is under way arrives twice."""
        self._queues = draw.choice((0.0, 0.5))
        """How often stage 0's device has waves enough before it."""
        self._loses = draw.choice((0.0,) * 9 + (0.01,))
        """How often one is lost, until the first one was."""
        lies = draw.choice((0.0, 0.0, 0.0, 0.5))
        for stage in self.stages:
            stage.tree.lies, stage.tree.rng = lies, self.rng
        self._dies = draw.choice((0.0,) * 9 + (0.001,))
        """How likely it is that a stage dies now."""
        self.lost = self._beaten = False
        self.dead = -1
        """The stage that died, and when."""
        self._died = 0.0
        self._boundaries: dict[int, int] = {}
        """Request -> the boundary of its latest hold in this admission."""
        self._orders: dict[int, int] = {}
        """Committed request -> its place in the order of commits."""

    def _prompt(
        self, draw: random.Random, base: tuple[int, ...], words: int, seq: int
    ) -> tuple[int, tuple[int, ...], int]:
        tokens = base[: draw.randrange(1, 40)]
        if self._arrivals and draw.random() < 0.3:  # the next turn of a session, whatever was said
            tokens = draw.choice(self._arrivals)[1]
        tokens += tuple(draw.randrange(words) for _ in range(draw.randrange(1, 12)))
        return seq, tokens[: self.longest - 8], draw.randrange(1, draw.choice((4, 30)))

    # --- running -----------------------------------------------------------------------------

    def run(self) -> int:
        """Until all is over; the number of steps. Raises what was found to be wrong."""
        for step in range(REST):
            self._happen()
            try:
                moved = self.step()
            except ProtocolError as error:
                if not (self.lost and "lost on the rounds plane" in str(error)):
                    raise
                self.check_survivors()
                return step
            if self.moved >= 0:
                self.check_stage(self.stages[self.moved])
                self.check_stage(self.stages[0])
                self.check_leader(self.stages[self.moved])
            if self.dead >= 0 and (self.now - self._died > SILENCE or not moved):
                self.check_survivors()
                return step
            if not moved and not self._arrivals:
                if not self.lost:
                    self.check_quiet()
                    return step
                assert not self._beaten, "rule 10: nobody has noticed that a frame was lost"
                self._beat()
        raise AssertionError(f"rule 10: after {REST} steps it is not over")

    def finish(self) -> int:
        """Like `run`, but what is found to be wrong comes with the seed and the steps before it."""
        try:
            return self.run()
        except (AssertionError, WavePPError, LookupError, ValueError) as error:
            raise AssertionError(
                f"{self.steps()}\nseed {self.seed}: {type(error).__name__}: {error}"
            ) from error

    def _happen(self) -> None:
        """What comes from outside."""
        rng = self.rng
        if not self.stands_still(0):
            if self._arrivals and (self.moved < 0 or rng.random() < self._rate):
                self.submit(*self._arrivals.pop(0))
            if self._aborts and rng.random() < self._aborts and self.payloads:
                seq = rng.choice(list(self.payloads))
                if seq not in self.aborted:
                    self._note("abort of {}", seq)
                    self.abort(seq)
            if self._controls_left and rng.random() < self._controls:
                self._controls_left -= 1
                self.controls.append(rng.choice((b"flush", b"flush", b"flush now", b"weights")))
                self.settle()
        if self._evictions and rng.random() < self._evictions:
            stage = rng.choice(self.stages)
            if not stage.guard.taken:  # its own loop evicts, and nobody else
                stage.tree.evict_some(rng)
        if self._pauses_left and rng.random() < self._pauses:
            self._pauses_left -= 1
            rank, until = rng.randrange(len(self.stages)), self.now + rng.choice((10, 100, 300))
            cut = rng.random() < 0.5
            (self._cut if cut else self._away)[rank] = until
            self._note("stage {} {} until {:.0f}", rank, "is cut off" if cut else "stands still", until)
        self._fault()

    def _fault(self) -> None:
        rng = self.rng
        if self._repeats and rng.random() < self._repeats and (channel := self._any_frames()):
            self._note("a frame is repeated")
            channel.repeat(rng)
        if self._loses and not self.lost and rng.random() < self._loses and (channel := self._any_frames()):
            self._note("a frame is lost")
            self.lost = channel.lose(rng)
        if self._dies and self.dead < 0 and rng.random() < self._dies:
            self.dead, self._died = rng.randrange(len(self.stages)), self.now
            self._note("stage {} dies", self.dead)
            mine = (self.to_member[1:], self.bulk[1:]) if self.dead == 0 else ([self.to_leader[self.dead]],)
            for channels in mine:
                for channel in channels:
                    channel.keep(rng)

    def _any_frames(self) -> Channel | None:
        channels = [c for c in (*self.to_leader[1:], *self.to_member, *self.bulk) if c.frames]
        return self.rng.choice(channels) if channels else None

    def _beat(self) -> None:
        """Everybody says that it lives, which everybody hears before anything else happens."""
        self._beaten = True
        for rank in range(1, len(self.stages)):
            self.to_member[rank].send(Beat(0, ""))
            self.bulk[rank].send(Beat(0, ""))
            self.to_leader[rank].send(Beat(0, ""))

    def fails(self, rank: int) -> bool:
        return self._fails > 0 and self.rng.random() < self._fails

    def has_waves_enough(self) -> bool:
        return self.rng.random() < self._queues

    def is_slow(self, rank: int) -> bool:
        slow = self._slow[rank]
        return slow > 0 and self.rng.random() < slow

    def stands_still(self, rank: int) -> bool:
        return self._away[rank] > self.now or rank == self.dead

    def wakes_up(self) -> bool:
        later = [time for time in (*self._away, *self._cut) if time > self.now]
        if later:
            self.now = min(later)
        return bool(later)

    def takes_its_time(self, rank: int) -> bool:
        return self._busy > 0 and self.rng.random() < self._busy

    def arrives(self, source: int, target: int) -> bool:
        return source == target or max(self._cut[source], self._cut[target]) <= self.now

    def _note(self, what: str, *about: Any) -> None:
        """Formatted only where it is read: most runs end well."""
        self.trace.append((self.now, what, about))

    def steps(self) -> str:
        """The trace, a line a step."""
        return "\n".join(f"{now:6.0f}  {what.format(*about)}" for now, what, about in self.trace)

    # --- what is seen on the way ---------------------------------------------------------------

    def on_sent(self, rank: int | None, message: Message) -> None:
        self._note("leader to {}: {}", "all" if rank is None else rank, message)
        if isinstance(message, Hold):
            for item in message.items:
                before = self._boundaries.get(item.seq, item.boundary)
                assert item.boundary <= before, f"rule 3: the boundary of {item.seq} grew within an admission"
                self._boundaries[item.seq] = item.boundary
        elif isinstance(message, Release | Forget):
            for seq in message.seqs:
                self._boundaries.pop(seq, None)

    def on_answer(self, rank: int, message: Message) -> None:
        self._note("stage {} to leader: {}", rank, message)
        if isinstance(message, ControlDone):
            assert message.epoch - self.leader.epoch in (0, 1), f"4a: stage {rank} skips an epoch"
        elif isinstance(message, Held):
            granted = [item.granted for item in message.items]
            assert granted == sorted(granted, reverse=True), "rule 12: a grant behind a refusal"

    def on_decision(self, d: Any) -> None:
        self._note("log: {}", d)
        if isinstance(d, Commit):
            assert self._orders.setdefault(d.seq, d.order) == d.order, f"request {d.seq} is committed twice"
            self._boundaries.pop(d.seq, None)
        elif isinstance(d, Drop):
            oldest = min(self._orders, key=self._orders.__getitem__)
            begun = self.stages[0].live[oldest].lease is None
            spared = oldest not in d.seqs or not d.retract or not begun or len(self._orders) == 1
            assert spared, f"rule 6: request {oldest} was retracted, the oldest that ran"
            for seq in d.seqs:
                del self._orders[seq]
        elif isinstance(d, Output):
            for seq in d.finished:
                del self._orders[seq]

    # --- what holds after every step -----------------------------------------------------------

    def check_leader(self, stage: SimStage) -> None:
        """What the leader and a stage believe of each other."""
        epoch = stage.member.epoch
        assert self.leader.epoch <= epoch <= self.leader.epoch + 1, (
            f"4a: stage {stage.rank} is in epoch {epoch}"
        )
        assert self.sequencer.in_flight <= 2 * len(self.stages), "4a: too many waves in flight"
        whole = self.dead < 0 and not self.lost
        at_rest = (
            whole and self.leader._round is None and not self.to_member[stage.rank].frames and not stage.inbox
        )
        if at_rest and not stage.busy and not self.mail and not self.stages[0].busy:
            ledger = stage.member.ledger
            for seq, until in self.leader._running.items():
                promised = ledger._entries.get(seq)
                same = promised is None or promised.covered == ledger._cover(until)
                assert same, f"rule 5: stage {stage.rank} promised {seq} something else than was agreed"

    def check_survivors(self) -> None:
        """A fault ends the server. Until then nobody has done anything that stage 0 did not decide."""
        log = self.stages[0].log
        for stage in self.stages:
            assert stage.log.position <= log.position, f"stage {stage.rank} is ahead of the log"
            if stage.log.position:
                assert stage.log.digest == self.position_digests[stage.log.position], (
                    "another log than stage 0's"
                )
            for seq, tokens in stage.outputs.items():
                known = self.stages[0].outputs.get(seq, tokens)
                assert known == tokens, f"stage {stage.rank} has another output for request {seq}"
            self.check_stage(stage)


def find(bug: str, seeds: int) -> int | None:
    """The first seed of so many that sees a bug; None if none does."""
    with broken(bug):
        for seed in range(seeds):
            try:
                Simulation(seed).finish()
            except AssertionError:
                return seed
    return None


def _run(seed: int, bug: str | None) -> tuple[int, str]:
    """The steps of a run, and what was wrong with it."""
    with broken(bug) if bug else nullcontext():
        try:
            return Simulation(seed).finish(), ""
        except AssertionError as failure:
            return 0, str(failure)


def main() -> int:
    parser = argparse.ArgumentParser(description="Simulate WavePP servers.")
    parser.add_argument("--seeds", type=int, help="how many, from --seed on (default: 1000)")
    parser.add_argument("--seed", type=int, help="the first one; without --seeds the only one")
    parser.add_argument("--jobs", type=int, default=1, help="processes (default: 1)")
    parser.add_argument("--trace", action="store_true", help="print all steps of the run of --seed")
    parser.add_argument("--break", dest="bug", metavar="BUG", help=f"one of: {', '.join(BUGS)}")
    args = parser.parse_args()
    if args.bug is not None and args.bug not in BUGS:
        parser.error(f"--break {args.bug!r} is not one of: {', '.join(BUGS)}")
    if args.trace:
        return _trace(args.seed or 0, args.bug)
    first = args.seed or 0
    seeds = 1 if args.seed is not None and args.seeds is None else args.seeds or 1000
    began, steps = time.monotonic(), 0
    with ProcessPoolExecutor(args.jobs) as pool:
        for done, failure in pool.map(
            _run, range(first, first + seeds), [args.bug] * seeds, chunksize=min(100, -(-seeds // args.jobs))
        ):
            if failure:
                pool.shutdown(wait=False, cancel_futures=True)
                print(failure, file=sys.stderr)
                return 1
            steps += done
    took = time.monotonic() - began
    print(f"{seeds} seeds, {steps} steps, {seeds / took * 60:.0f} seeds a minute: nothing found")
    return 0


def _trace(seed: int, bug: str | None) -> int:
    simulation = Simulation(seed)
    simulation.trace = deque()
    with broken(bug) if bug else nullcontext():
        try:
            simulation.finish()
        except AssertionError as failure:
            print(failure, file=sys.stderr)
            return 1
    print(simulation.steps())
    return 0


if __name__ == "__main__":
    sys.exit(main())
