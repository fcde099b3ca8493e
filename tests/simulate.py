"""Whole servers under random schedules: the real state machines, model trees, a simulated network.

    python -m tests.simulate --seeds 2000                # random servers and loads, one for each seed
    python -m tests.simulate --seed 17 --trace           # one of them again, step by step
    python -m tests.simulate --seeds 2000 --break NAME   # with a bug put in: which seed sees it first

A seed decides everything: how many stages, pools, pages, what arrives, which message is delivered next,
which stage stands still for a while, what is evicted, aborted and flushed when. After each step the named
invariants hold, and in the end everything is back where it was. A failure is replayed by its seed.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

sys.path.insert(0, str(Path(__file__).parent))

from cluster import Cluster

from sglang_wavepp.errors import WavePPError
from sglang_wavepp.leader import Committed, Leader, State
from sglang_wavepp.member import Member
from sglang_wavepp.messages import Commit, ControlDone, Drop, Forget, Held, Hold, Message, Output, Release
from sglang_wavepp.radix.lease import LeaseTable
from sglang_wavepp.radix.ledger import Ledger
from sglang_wavepp.sequencer import Sequencer

REST = 60_000
"""Steps within which every server comes to rest."""
TRACED = 80
"""Steps that are printed of a run that fails."""


class Simulation(Cluster):
    """A server with its load, all drawn from one seed."""

    def __init__(self, seed: int) -> None:
        draw = random.Random(seed)
        stages = draw.choice((2, 2, 3, 3, 4, 4, 4, 5, 8, 16))
        page = draw.choice((1, 1, 1, 4))
        low = draw.choice((60, 60, 120, 300))
        super().__init__(
            seed,
            stages=stages,
            pools=[draw.randrange(low, 2 * low) // page * page for _ in range(stages)],
            page=page,
            rows=draw.choice((2, 4, 8)),
            budget=draw.choice((8, 32, 64)) * page,
            reserve=draw.choice((1, 8, 8, 20)),
            interval=draw.choice((0, 0, 2)),
            planner=("static", "mpu", "timed")[seed % 3],
        )
        self.seed = seed
        self.trace: deque[tuple[float, str, tuple[Any, ...]]] = deque(maxlen=TRACED)
        self._aborts = draw.choice((0.0, 0.0, 0.01))
        self._evictions = draw.choice((0.0, 0.01, 0.1))
        self._pauses = draw.choice((0.0, 0.0, 0.01))
        self._flushes = draw.choice((0.0, 0.002, 0.02))
        self._flushes_left, self._pauses_left = 6, 6
        self._slow = [draw.choice((0.0, 0.0, 0.0, 0.5, 0.9)) for _ in range(stages)]
        """How often each stage does nothing."""
        self._busy = draw.choice((0.0, 0.0, 0.9, 0.99))
        """How often the loop of a member is not done yet with what it does."""
        self._away = [0.0] * stages
        """Until when each stage is cut off from everything."""
        words = draw.choice((2, 3, 50))
        base = tuple(draw.randrange(words) for _ in range(40))
        self._arrivals = [self._prompt(draw, base, words, seq) for seq in range(draw.randrange(2, 11))]
        self._rate = draw.choice((0.02, 0.1, 1.0))
        self._boundaries: dict[int, int] = {}
        """Request -> the boundary of its latest hold in this admission."""
        self._orders: dict[int, int] = {}
        """Committed request -> its place in the order of commits."""

    def _prompt(
        self, draw: random.Random, base: tuple[int, ...], words: int, seq: int
    ) -> tuple[int, tuple[int, ...], int]:
        tokens = base[: draw.randrange(1, 40)]
        tokens += tuple(draw.randrange(words) for _ in range(draw.randrange(1, 12)))
        return seq, tokens[: self.longest - 8], draw.randrange(1, draw.choice((4, 30)))

    # --- running -----------------------------------------------------------------------------

    def run(self) -> int:
        """Until all is over; the number of steps. Raises what was found to be wrong."""
        for step in range(REST):
            self._happen()
            moved = self.step()
            self.check()
            if not moved and not self._arrivals:
                self.check_quiet()
                return step
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
        if self._arrivals and rng.random() < self._rate:
            self.submit(*self._arrivals.pop(0))
        if rng.random() < self._aborts and self.payloads:
            seq = rng.choice(list(self.payloads))
            if seq not in self.aborted:
                self._note("abort of {}", seq)
                self.abort(seq)
        if rng.random() < self._evictions:
            rng.choice(self.stages).tree.evict_some(rng)
        if self._flushes_left and rng.random() < self._flushes:
            self._flushes_left -= 1
            self.flushes += 1
        if self._pauses_left and rng.random() < self._pauses:
            self._pauses_left -= 1
            rank = rng.randrange(len(self.stages))
            self._away[rank] = self.now + rng.choice((10, 100, 300))
            self._note("stage {} stands still until {:.0f}", rank, self._away[rank])

    def stands_still(self, rank: int) -> bool:
        return self._away[rank] > self.now or self.rng.random() < self._slow[rank]

    def loop_is_busy(self, rank: int) -> bool:
        return self.rng.random() < self._busy

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
            assert message.epoch == self.leader.epoch + 1, f"4a: stage {rank} has no new epoch after a reset"
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

    def check(self) -> None:
        epochs = [stage.member.epoch for stage in self.stages]
        assert max(epochs) - min(epochs) <= 1, "4a: a stage is two epochs behind"
        assert self.leader.epoch <= min(epochs), "4a: the leader is ahead of a stage's epoch"
        assert self.sequencer.in_flight <= 2 * len(self.stages), "4a: too many waves in flight"
        for stage in self.stages:
            tree, ledger = stage.tree, stage.member.ledger
            room = tree.free_tokens() + tree.evictable_tokens()
            assert room - ledger.statistics().tokens >= 0, f"rule 5: stage {stage.rank} promised too much"
            assert tree.rows - ledger.statistics().rows >= 0, f"rule 5: stage {stage.rank} promised rows"
            private = sum(request.private for request in stage.live.values())
            assert tree.free_tokens() >= 0 and tree.private == private, f"stage {stage.rank} lost tokens"
            if self.leader._round is None and not self.to_member[stage.rank] and not stage.inbox:
                for seq, until in self.leader._running.items():
                    promised = ledger._entries.get(seq)
                    same = promised is None or promised.covered == ledger._cover(until)
                    assert same, f"rule 5: stage {stage.rank} promised {seq} something else than was agreed"


# --- bugs that are put in, to see that they are seen ---------------------------------------------

Patch = tuple[Any, str, Callable[..., Any]]
"""(class, method, replacement that takes the method first)."""


def _skip(original: Callable[..., Any], *args: Any) -> None:
    """Do nothing."""


def _yes(original: Callable[..., Any], *args: Any) -> bool:
    return True


def _unlock_nothing(release: Callable[..., Any], table: LeaseTable, lease: Any) -> None:
    table.transfer(lease)


def _each_alone(hold: Callable[..., Any], member: Member, message: Hold) -> None:
    """A grant may follow a refusal."""
    answers = []
    send, member._send = member._send, answers.append
    for item in message.items:
        hold(member, Hold(message.epoch, message.round, [item]))
    member._send = send
    send(Held(message.epoch, message.round, [item for answer in answers for item in answer.items]))


def _most(end_hold: Callable[..., Any], leader: Leader, r: Any, columns: list[tuple[Any, ...]]) -> None:
    """The longest boundary is taken, not the shortest."""
    for a, column in zip(r.holds, columns, strict=True):
        most = max(item.boundary for item in column)
        if a in leader._queue and all(item.granted for item in column):
            a.candidate, a.state = most, State.AGREED


def _last_is_not_asked(on_answer: Callable[..., Any], leader: Leader, rank: int, message: Any) -> None:
    """A round is over when all stages but one have answered."""
    r = leader._round
    on_answer(leader, rank, message)
    if r is not None and r is leader._round and len(r.answers) == leader.limits.stages - 1:
        for silent in set(range(leader.limits.stages)) - r.answers.keys():
            on_answer(leader, silent, message)


def _commit_twice(commit: Callable[..., Any], leader: Leader) -> None:
    commit(leader)
    leader.events += [event for event in leader.events if isinstance(event, Committed)]


def _promise_all(room: Callable[..., Any], ledger: Ledger) -> int:
    """What is promised to others counts as free."""
    return int(room(ledger)) + ledger.statistics().tokens


def _free_rows(grant: Callable[..., Any], ledger: Ledger, *args: int) -> bool:
    """Rows that are promised to others count as free."""
    ledger._rows, rows = 0, ledger._rows
    granted = bool(grant(ledger, *args))
    ledger._rows += rows
    return granted


def _no_slack(cover: Callable[..., Any], ledger: Ledger, until: int) -> int:
    return max(0, int(cover(ledger, until)) - 2 * ledger._page)


def _oldest(refused: Callable[..., Any], sequencer: Sequencer, seq: int, hopeless: bool) -> None:
    """The oldest request gives its room back, not the youngest."""
    if seq in sequencer._live and len(sequencer._live) > 1 and not hopeless:
        min(sequencer._live.values(), key=lambda r: r.order).drop = "retract"
    else:
        refused(sequencer, seq, hopeless)


def _position_forgotten(retracted: Callable[..., Any], leader: Leader, *args: int) -> None:
    """Nobody waits until the stages have applied a retraction."""
    retracted(leader, *args[:-1], 0)


def _keep_epoch(reset: Callable[..., Any], table: LeaseTable) -> None:
    reset(table)
    table.epoch -= 1


BUGS: dict[str, Patch] = {
    "a release unlocks nothing": (LeaseTable, "release", _unlock_nothing),
    "a grant may follow a refusal": (Member, "_hold", _each_alone),
    "the longest boundary is agreed on": (Leader, "_end_hold", _most),
    "a round does not wait for the last answer": (Leader, "_on_answer", _last_is_not_asked),
    "a request is committed twice": (Leader, "_commit", _commit_twice),
    "what is promised to others counts as free": (Ledger, "room", _promise_all),
    "rows that are promised to others count as free": (Ledger, "grant", _free_rows),
    "escrow is not given back": (Ledger, "close", _skip),
    "escrow is two pages short": (Ledger, "_cover", _no_slack),
    "the oldest request is retracted": (Sequencer, "growth_refused", _oldest),
    "a row decodes without room": (Sequencer, "_has_room", _yes),
    "a request that ended stays in the leader's books": (Leader, "finished", _skip),
    "nobody waits for a retraction to be applied": (Leader, "retracted", _position_forgotten),
    "a flush keeps the epoch": (LeaseTable, "reset", _keep_epoch),
    "a flush forgets no lease": (LeaseTable, "reset", _skip),
    "nobody is told of room": (Member, "freed", _skip),
    "a growth is not taken back where another stage refused": (Ledger, "shrink", _skip),
}


@contextmanager
def broken(bug: str) -> Iterator[None]:
    """Runs in this context have the bug."""
    where, name, replacement = BUGS[bug]
    original = getattr(where, name)
    with mock.patch.object(where, name, lambda *args: replacement(original, *args)):
        yield


def find(bug: str, seeds: int) -> int | None:
    """The first seed of so many that sees a bug; None if none does."""
    with broken(bug):
        for seed in range(seeds):
            try:
                Simulation(seed).finish()
            except AssertionError:
                return seed
    return None


def main() -> int:
    parser = argparse.ArgumentParser(description="Simulate WavePP servers.")
    parser.add_argument("--seeds", type=int, default=1000, help="how many, from --seed on")
    parser.add_argument("--seed", type=int, help="the first one; without --seeds the only one")
    parser.add_argument("--trace", action="store_true", help="print all steps of the (last) run")
    parser.add_argument("--break", dest="bug", metavar="BUG", help=f"one of: {', '.join(BUGS)}")
    args = parser.parse_args()
    if args.bug is not None and args.bug not in BUGS:
        parser.error(f"--break {args.bug!r} is not one of: {', '.join(BUGS)}")
    first = args.seed or 0
    seeds = 1 if args.seed is not None and "--seeds" not in sys.argv else args.seeds
    began, steps = time.monotonic(), 0
    with broken(args.bug) if args.bug else nullcontext():
        for seed in range(first, first + seeds):
            try:
                simulation = Simulation(seed)
                if args.trace:
                    simulation.trace = deque()
                steps += simulation.finish()
            except AssertionError as failure:
                print(failure, file=sys.stderr)
                return 1
    if args.trace:
        print(simulation.steps())
    took = time.monotonic() - began
    print(f"{seeds} seeds, {steps} steps, {seeds / took * 60:.0f} seeds a minute: nothing found")
    return 0


if __name__ == "__main__":
    sys.exit(main())
