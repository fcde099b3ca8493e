"""The leader's side of admission: rounds of hints and holds until every stage holds the same. Pure.

Runs in stage 0's WAVE thread. Inputs are the `arrive`, `on_message`, ... methods; outputs are collected
in `outbox` (messages to members) and `events` (for stage 0's loop and the client side), which the caller
drains. Time is passed in.

One hold round is in flight at a time. Members grant its items in order, and after a refusal everything
behind it in the queue is given back: grants do not cross, and first come is first served. Hints count whole
blocks, so a hold asks for up to a page less than a block more, and the stages answer with what they really
have; if that is equal everywhere, as it is where the caches are alike, it is agreed. From then on a boundary
only shrinks within one admission, so an admission ends after at most as many hold rounds as it has distinct
boundaries. To ask for a hint again takes until every stage's loop has come to the log's end, so that is done
where it may pay: if a wave has computed the block that follows the hinted prefix, or if as many waves were
finished as there are stages. So waiting requests profit from what earlier ones inserted meanwhile, and one
that waited for no more than the round before its own depends on no loop. And a request whose next prompt
block a committed request is just computing waits until all that they share is there, instead of computing it
again; those behind it go on.
"""

from __future__ import annotations

import dataclasses
from bisect import insort
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from sglang_wavepp.admission import (
    Admission,
    Committed,
    Event,
    GrowthGranted,
    GrowthRefused,
    Limits,
    Rejected,
    State,
)
from sglang_wavepp.errors import ProtocolError
from sglang_wavepp.messages import (
    Capacity,
    Forget,
    Grow,
    Grown,
    Held,
    Hint,
    HintQuery,
    Hold,
    HoldItem,
    Message,
    Nack,
    Release,
    Ungrow,
)
from sglang_wavepp.sharing import PromptsInFlight


@dataclasses.dataclass(slots=True)
class _Round:
    number: int
    started: float
    holds: list[Admission]
    grows: list[tuple[int, int]]
    answers: dict[int, list[Any]]


class Leader:
    """Admission over all stages. `outbox` holds (rank or None for all ranks, message)."""

    MAX_ROUND = 32
    """Items in one hold round: bounds how long the guard is taken in one go on a member."""
    LEASED_SHARE = 0.5
    """Of the smallest pool: what requests that are not committed yet may have leased, besides the first of
    them."""
    MAX_ASKED = 4
    """How often the hint of a request that waits for another's blocks is refreshed, at most."""

    def __init__(self, limits: Limits, now: Callable[[], float]) -> None:
        self.limits = limits
        self.outbox: list[tuple[int | None, Message]] = []
        self.events: list[Event] = []
        self.epoch = 0
        self._now = now
        self._new: dict[int, Admission] = {}
        self._queue: list[Admission] = []
        self._running: dict[int, int] = {}
        """seq -> escrowed KV length of committed requests."""
        self._round: _Round | None = None
        self._round_number = 0
        self._order = 0
        self._growth: dict[int, int] = {}
        self._growth_blocked = False
        self._blocked: Admission | None = None
        """The request that waits for room; nobody behind it is held."""
        self._freed = False
        """Room became free since the open round began: a refusal in it may be outdated."""
        self._short: set[int] = set()
        """Stages that refused what the queue, or a growth, waits for, and did not report room since."""
        self._relieved: set[int] = set()
        """Stages that reported room since the open round began."""
        self._barrier = False
        self._holds_nothing = False
        self._prompts = PromptsInFlight(limits.block, limits.page)
        self._ranks: dict[int, int] = {}
        self._retractions: dict[int, int] = {}
        """seq -> how often the request had to give its room back while it ran."""
        self._position = 0
        """Log position of the latest output."""
        self._unplanned: dict[int, int] = {}
        """Prompt tokens of committed requests that no wave was planned for yet."""
        self._started: set[int] = set()
        """Committed requests that a wave was planned for."""
        self._finished_waves = 0

    # --- state, for the caller ---------------------------------------------------------------

    @property
    def idle(self) -> bool:
        """No request is known to the leader."""
        return not self._new and not self._queue and not self._running

    @property
    def settled(self) -> bool:
        """No request runs, and nothing is held for the waiting ones."""
        return not self._running and self._round is None and not any(a.until for a in self._queue)

    # --- inputs ------------------------------------------------------------------------------

    def arrive(
        self, seq: int, tokens: Sequence[int], remaining: int, chain: Sequence[int] = (), rank: int = 0
    ) -> int:
        """A request came in and is offered to every stage; the log position that their hints have to count.

        `tokens` is its prompt, `chain` the hashes of its full blocks (none if its KV is not to be shared),
        `remaining` the output tokens that it may produce. Requests of a lower `rank` go first.
        """
        self._prompts.add(seq, tokens, chain)
        self._ranks[seq] = rank
        self._new[seq] = Admission(seq, len(tokens), remaining, self._now(), rank)
        return self._prompts.continued(seq)

    def retracted(self, seq: int, length: int, remaining: int, position: int) -> None:
        """A committed request gave its room back: it returns to the head of the queue.

        `position` is the log position after that; before it other stages know nothing of it. If it ran
        already, it is admitted with twice the reserve of the last time.
        """
        if seq in self._started:
            self._retractions[seq] = self._retractions.get(seq, 0) + 1
        self._leave(seq)
        self._position = max(self._position, position)
        rank = self._ranks[seq]
        again = Admission(seq, length, remaining, self._now(), rank, State.HINTED, since=position)
        place = sum(a.retracted for a in self._queue)
        self._queue.insert(place, again)
        # A growth that was refused waits for the stages themselves: they may be behind in the log, and would
        # refuse again, at the cost of one more request.
        self._blocked = None
        self._freed = self._freed or self._round is None or not self._round.grows

    def finished(self, seqs: Iterable[int]) -> None:
        """Committed requests ended."""
        for seq in seqs:
            self._prompts.ended(seq, self._position)
            self._leave(seq)
            self._forget(seq)
            self._unblock()

    def planned(self, spans: Iterable[tuple[int, int]]) -> None:
        """Stage 0 planned prompt tokens of committed requests: (seq, tokens)."""
        for seq, tokens in spans:
            if seq in self._unplanned:
                self._unplanned[seq] -= tokens
                self._started.add(seq)

    def wave_finished(self, position: int, computed: Iterable[tuple[int, int]] = ()) -> None:
        """A wave's output is in the log before `position`: earlier hints may be too short now.

        `computed` says how much of their prompts the wave's requests have computed: (seq, tokens).
        """
        self._finished_waves += 1
        self._position = position
        fresh = [a for a in self._queue if a.fresh_until > self._finished_waves]
        for seq, tokens in computed:
            self._prompts.advance(seq, tokens)
            for a in fresh:
                if self._prompts.continues(a.seq, a.reusable, seq, tokens):
                    a.fresh_until = 0

    def want_growth(self, seq: int, until: int) -> None:
        """A running request needs room up to KV length `until`. Goes before new admissions."""
        if seq in self._running:
            self._growth[seq] = until

    def cancel(self, seq: int) -> bool:
        """Drop an uncommitted request on every stage. False if it is committed or unknown."""
        found = self._new.pop(seq, None)
        if found is None:
            found = next((a for a in self._queue if a.seq == seq), None)
            if found is None:
                return False
            self._queue.remove(found)
        self._forget(seq)
        self._send(Forget(found.since, [seq]))
        self._unblock()
        return True

    def barrier(self, on: bool, *, give_back: bool = False) -> None:
        """While a barrier is up nothing is committed and no hold is sent.

        With `give_back` waiting requests also hold nothing meanwhile.
        """
        self._barrier = on
        self._holds_nothing = on and give_back

    def new_epoch(self) -> None:
        """Every stage applied a tree reset. Nothing may be held or committed at this point."""
        if self._running or self._round is not None:
            raise ProtocolError("the tree was reset while requests were held or running")
        self.epoch += 1
        for admission in self._queue:
            admission.state, admission.asked, admission.fresh_until = State.HINTED, 0, 0
        self._unblock()

    def on_message(self, rank: int, message: Message) -> None:
        """One answer of a member. Stale answers are dropped."""
        if isinstance(message, Hint):
            self._on_hint(rank, message)
        elif isinstance(message, Held | Grown | Nack):
            self._on_answer(rank, message)
        elif isinstance(message, Capacity):
            self._relieved.add(rank)
            if rank in self._short:
                self._short.discard(rank)
                if not self._short:
                    self._unblock()
        else:
            raise ProtocolError(f"stage {rank} sent {type(message).__name__} to the leader")

    # --- rounds ------------------------------------------------------------------------------

    def step(self) -> None:
        """Commit what is agreed and start the next round, if there is anything to do."""
        if self._barrier:
            if self._holds_nothing and self._round is None:
                self._give_back(self._queue)
                if self._growth and not self._growth_blocked:
                    self._start_growth()  # those that run go on until they end
            return
        self._commit()
        if self._round is not None:
            return
        if self._growth and not self._growth_blocked:
            self._start_growth()
        elif not self._growth:
            self._start_hold()

    def check(self) -> None:
        """Raises `ProtocolError` if a round is open for longer than its bound."""
        r = self._round
        if r is not None and self._now() - r.started > self.limits.round_bound:
            missing = [rank for rank in range(self.limits.stages) if rank not in r.answers]
            raise ProtocolError(
                f"stage {', '.join(map(str, missing))} did not answer round {r.number} "
                f"within {self.limits.round_bound:.0f} s"
            )

    def _commit(self) -> None:
        for a in list(self._queue):
            if a.awaits:
                continue
            if a.state is not State.AGREED or len(self._running) >= self.limits.running:
                return
            self._queue.remove(a)
            self._running[a.seq] = a.until
            self._unplanned[a.seq] = a.length - a.candidate
            self._prompts.begin(a.seq, a.candidate)
            waited = self._now() - a.arrived
            self.events.append(
                Committed(
                    seq=a.seq,
                    order=self._order,
                    boundary=a.candidate,
                    length=a.length,
                    until=a.until,
                    again=a.retracted,
                    rank=a.rank,
                    rounds=a.rounds,
                    waited=waited,
                )
            )
            self._order += 1

    def _start_hold(self) -> None:
        room = self.limits.running - len(self._running)
        most = max(self.limits.wave, self.limits.ahead // 4)
        ahead = self.limits.ahead - sum([min(tokens, most) for tokens in self._unplanned.values()])
        items: list[Admission] = []
        stale: list[Admission] = []
        held: list[tuple[int, int]] = []
        leased = 0
        for a in self._queue:
            if room <= 0 or ahead <= 0 or len(items) >= self.MAX_ROUND:
                break
            if a is self._blocked or a.state is State.OFFERED:
                break
            if a.state is State.HINTED and not a.until:
                a.awaits = self._prompts.awaited(a.seq, a.reusable, a.awaits, held)
            if a.awaits:
                a.asked, a.shares = 0, True
                if all(a.awaits.seq != s.seq for s in stale):
                    continue
                a.awaits = None  # what that one reuses is to be asked: ask for both at once
            leased += a.candidate if held else 0
            if leased > self.limits.pool * self.LEASED_SHARE:
                break
            room -= 1
            if a.state is State.HINTED:
                items.append(a)
            held.append((a.seq, a.reusable))
            if self._is_stale(a):
                stale.append(a)
            else:
                ahead -= min(a.length - a.candidate, most)
        if stale:
            self._ask_again(stale)
        elif items:
            for a in items:
                a.state = State.HOLDING
                a.rounds += 1
                a.until = self._until(a)
            self._open_round(items, [])
            holds = [HoldItem(a.seq, a.candidate, a.until) for a in items]
            self._send(Hold(self.epoch, self._round_number, holds))

    def _is_stale(self, a: Admission) -> bool:
        """Shall its hint be refreshed before it is held?"""
        return (
            a.state is State.HINTED
            and not a.until
            and a.fresh_until <= self._finished_waves
            and a.asked < (self.MAX_ASKED if a.shares else 1)
        )

    def _ask_again(self, stale: list[Admission]) -> None:
        for a in stale:
            a.hints.clear()
            a.state = State.OFFERED
            a.asked += 1
            a.fresh_until = self._finished_waves + self.limits.stages
            a.rounds += 1
        self._send(HintQuery(self.epoch, self._position, [a.seq for a in stale]))

    def _until(self, a: Admission) -> int:
        most = self.limits.pool - self.limits.page
        reserve = self.limits.reserve << self._retractions.get(a.seq, 0)
        return max(a.length, min(a.length + min(a.remaining, reserve), most))

    def _start_growth(self) -> None:
        items = list(self._growth.items())
        self._open_round([], items)
        self._send(Grow(self.epoch, self._round_number, items))

    def _open_round(self, holds: list[Admission], grows: list[tuple[int, int]]) -> None:
        self._round_number += 1
        self._freed = False
        self._relieved = set()
        self._round = _Round(self._round_number, self._now(), holds, grows, {})

    def _on_hint(self, rank: int, message: Hint) -> None:
        # Of whatever epoch: a hint holds nothing, and the lease compares tokens.
        for item in message.items:
            a = self._new.get(item.seq)
            if a is None:
                a = next((q for q in self._queue if q.seq == item.seq), None)
            if a is None or a.state is not State.OFFERED:
                continue
            if item.error:
                self.cancel(item.seq)
                self.events.append(Rejected(item.seq, f"stage {rank}: {item.error}"))
                continue
            if not 0 <= item.boundary < a.length:
                raise ProtocolError(f"stage {rank} hints {item.boundary} of {a.length} tokens of {item.seq}")
            a.hints[rank] = item.boundary
            if len(a.hints) < self.limits.stages:
                continue
            a.reusable = min(a.hints.values())
            most = a.reusable + self.limits.block - self.limits.page
            a.candidate = min(most, (a.length - 1) // self.limits.page * self.limits.page)
            a.state = State.HINTED
            if self._new.pop(item.seq, None) is not None:
                a.rounds += 1
                a.fresh_until = self._finished_waves + self.limits.stages
                insort(self._queue, a, key=lambda q: (not q.retracted, q.rank))

    def _on_answer(self, rank: int, message: Held | Grown | Nack) -> None:
        r = self._round
        if r is None or message.round != r.number:
            return
        if isinstance(message, Nack):
            raise ProtocolError(f"stage {rank} is in epoch {message.epoch}, the leader in {self.epoch}")
        if not self._fits(r, message):
            raise ProtocolError(f"stage {rank} answered round {r.number} with {message}")
        r.answers[rank] = message.items
        if len(r.answers) < self.limits.stages:
            return
        self._round = None
        columns = list(zip(*(r.answers[k] for k in range(self.limits.stages)), strict=True))
        if r.grows:
            self._end_growth(r, columns)
        else:
            self._end_hold(r, columns)

    def _fits(self, r: _Round, message: Held | Grown) -> bool:
        """Is this an answer to what was asked?"""
        if isinstance(message, Grown):
            return len(message.items) == len(r.grows)
        return len(message.items) == len(r.holds) and all(
            item.seq == a.seq and 0 <= item.boundary <= a.candidate
            for item, a in zip(message.items, r.holds, strict=True)
        )

    def _end_hold(self, r: _Round, columns: list[tuple[Any, ...]]) -> None:
        for a, column in zip(r.holds, columns, strict=True):
            if a not in self._queue:
                continue  # cancelled meanwhile: FORGET is on its way behind the hold
            if not all(item.granted for item in column):
                self._fall_short({rank for rank, item in enumerate(column) if not item.granted})
                self._refused(a, [rank for rank, item in enumerate(column) if item.hopeless])
                return
            a.candidate = a.reusable = min(item.boundary for item in column)
            agreed = all(item.boundary == a.candidate for item in column)
            a.state = State.AGREED if agreed else State.HINTED

    def _fall_short(self, ranks: set[int]) -> None:
        """These stages refused. What was refused is tried again once all of them have reported room."""
        self._short = ranks - self._relieved
        self._freed = self._freed or not self._short

    def _refused(self, refused: Admission, hopeless: list[int]) -> None:
        """No room for `refused`: everything from it on is given back, and the queue waits for room."""
        if hopeless and not self._running:
            self.cancel(refused.seq)
            self.events.append(
                Rejected(
                    refused.seq,
                    f"stage {hopeless[0]} has no room for {refused.until} tokens although it is idle",
                )
            )
        waiting = refused in self._queue
        self._give_back(self._queue[self._queue.index(refused) :] if waiting else self._queue)
        self._blocked = refused if waiting and not self._freed else None

    def _give_back(self, queue: list[Admission]) -> bool:
        """Release what is held for these waiting requests. False if nothing is."""
        given = [a for a in queue if a.until]
        for a in given:
            a.state, a.until, a.asked = State.HINTED, 0, 0
        if given:
            self._send(Release(self.epoch, [a.seq for a in given]))
        return bool(given)

    def _end_growth(self, r: _Round, columns: list[tuple[Any, ...]]) -> None:
        granted: list[tuple[int, int]] = []
        back: list[tuple[int, int]] = []
        short: set[int] = set()
        refusal: GrowthRefused | None = None
        for (seq, until), column in zip(r.grows, columns, strict=True):
            if seq not in self._running:
                continue
            if all(item.granted for item in column):
                self._running[seq] = until
                granted.append((seq, until))
                if self._growth.get(seq, 0) <= until:
                    self._growth.pop(seq, None)
            else:
                short |= {rank for rank, item in enumerate(column) if not item.granted}
                back.append((seq, self._running[seq]))
                refusal = refusal or GrowthRefused(seq, any(item.hopeless for item in column))
        if granted:
            self.events.append(GrowthGranted(tuple(granted)))
        if refusal is not None:
            self._send(Ungrow(self.epoch, back))
            if not self._give_back(self._queue):
                self._fall_short(short)
                self._growth_blocked = not self._freed
                self.events.append(refusal)

    def _leave(self, seq: int) -> None:
        for table in (self._running, self._growth, self._unplanned):
            table.pop(seq, None)
        self._started.discard(seq)
        self._prompts.leave(seq)

    def _forget(self, seq: int) -> None:
        self._prompts.forget(seq)
        self._ranks.pop(seq, None)
        self._retractions.pop(seq, None)

    def _unblock(self) -> None:
        self._blocked = None
        self._growth_blocked = False
        self._freed = True
        self._short = set()

    def _send(self, message: Message) -> None:
        self.outbox.append((None, message))
