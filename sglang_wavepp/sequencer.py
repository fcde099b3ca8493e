"""Stage 0's planner: which decision comes next in the log. Pure.

It knows every committed request, what was planned for it and which waves are in flight, and answers
`next()` with the next decision or None. Its policy:

* at most `run_ahead` waves are issued that the last stage has not acknowledged, and prefill waves only while
  stage 0's device has fewer than `LEAD` before it: the later they are planned, the more is known, and what
  arrives meanwhile, aborts and decode waves need not wait for them;
* prefill and decode waves alternate while there is work for both; otherwise whichever has work runs. While a
  prefill wave waits for the device, one decode wave of each group may go before it. With
  an `interval` of N (SGLang's `--prefill-decode-interval`), N decode waves have to follow each prefill wave
  before the next one, as long as `interval_rows` requests are decoding;
* a planner (`mpu`) cuts the prompts of committed requests into prefill waves, first come, first served but
  for short ones behind a long one (`mpu.turns`), at most `rows` requests a wave;
* decode rows live in groups, one wave of a group in flight at a time (`decode_groups`);
* a committed request that no wave was planned for goes back to admission, once, if what another one left in
  the tree makes its reusable prefix longer;
* a row whose escrow ends soon asks for more ahead of time. If a stage refuses, the youngest request is
  retracted, never the oldest, so something always finishes.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Iterable

from sglang_wavepp.admission import Committed
from sglang_wavepp.decode_groups import DecodeGroups
from sglang_wavepp.errors import ProtocolError
from sglang_wavepp.messages import Decision, Decode, Drop, Prefill, Span
from sglang_wavepp.mpu import Planner
from sglang_wavepp.mpu.packing import Pending
from sglang_wavepp.mpu.planner import Load, load_of
from sglang_wavepp.mpu.turns import Turns

LEAD = 2
"""Waves that stage 0's device has not begun: these give it enough to do until the next one is planned."""
_REMEMBERED = 256
"""Prefill waves whose load is kept, to be told apart when stages say how long they took."""


@dataclasses.dataclass(slots=True, eq=False)
class Live:
    """A committed request. Lengths are tokens of KV."""

    seq: int
    order: int
    length: int
    """Prompt tokens, and after a retraction the output before it: what prefill has to produce."""
    boundary: int
    """Of them reused."""
    until: int
    """KV length that every stage has promised."""
    most: int
    """KV length at which the request certainly ends."""
    again: bool
    """It was admitted before, and came back."""
    rank: int
    begun: bool = False
    """A wave was planned for it."""
    group: int = -1
    in_flight: int = 0
    asked: int = 0

    @property
    def decoding(self) -> bool:
        return self.group >= 0


class Sequencer:
    """Plans waves.

    Args:
        planner: cuts prompts into waves.
        run_ahead: unacknowledged waves at most.
        groups: decode groups, one for each stage of the pipeline.
        growth: tokens that a growth asks for.
        rows: requests in a prefill wave at most; decode groups have more only if there are too few of them.
        wave: tokens of the largest prefill wave. Prompts with more left let short ones pass.
        interval: decode waves that follow a prefill wave before the next one; 0: alternate where possible.
        interval_rows: with fewer requests decoding, the interval does not count.
    """

    def __init__(
        self,
        *,
        planner: Planner,
        run_ahead: int,
        groups: int,
        growth: int,
        rows: int,
        wave: int = sys.maxsize,
        interval: int = 0,
        interval_rows: int = 0,
    ) -> None:
        self._planner, self._rows = planner, rows
        self._interval, self._interval_rows = interval, interval_rows
        self._owed = 0
        """Decode waves that have to come before the next prefill wave."""
        self._run_ahead, self._growth = run_ahead, growth
        self._live: dict[int, Live] = {}
        self._unplanned: dict[int, Pending] = {}
        """What no wave was planned for yet, by request, first come first."""
        self._turns = Turns(wave, lambda seq: self._live[seq].rank)
        self._leaving: dict[int, str] = {}
        """Requests that go when none of their waves is in flight: "abort" or "retract"."""
        self._makes_room: tuple[int, int] | None = None
        """One that leaves only because another one, the second, has to grow."""
        # Decode waves that a prefill wave has to wait for are over soonest in as many groups as there are.
        self._groups = DecodeGroups(groups, 1 if interval else rows)
        self._waves: dict[int, tuple[int, list[tuple[int, bool]]]] = {}
        """wave -> (group or -1, rows as (seq, is the prompt complete with it))."""
        self._loads: dict[int, Load] = {}
        """The latest prefill waves."""
        self._next_wave = 0
        self._last_was_prefill = False
        self.paused = False
        self.held_back = False
        """The next prefill wave waits for stage 0's device."""
        self._went_first = 0
        """Decode waves that were issued meanwhile."""
        self.growth_requests: list[tuple[int, int]] = []

    @property
    def live(self) -> int:
        """Committed requests."""
        return len(self._live)

    @property
    def in_flight(self) -> int:
        """Waves that the last stage has not acknowledged."""
        return len(self._waves)

    # --- inputs ------------------------------------------------------------------------------

    def commit(self, c: Committed, most: int) -> None:
        """A request was committed. It certainly ends at a KV length of `most`."""
        self._live[c.seq] = Live(c.seq, c.order, c.length, c.boundary, c.until, most, c.again, c.rank)
        self._unplanned[c.seq] = Pending(c.seq, c.boundary, c.length)

    def reconsider(self, reusable: Callable[[int], int], least: int) -> None:
        """The tree of stage 0 has grown: send those back to admission who now reuse `least` tokens more.

        `reusable` gives the tokens of a request that stage 0 could reuse.
        """
        for request in self._live.values():
            waits = not (request.begun or request.again or request.seq in self._leaving)
            if waits and reusable(request.seq) >= request.boundary + least:
                self._leaving[request.seq] = "retract"

    def grown(self, items: Iterable[tuple[int, int]]) -> None:
        """Every stage promised more room: (seq, KV length)."""
        for seq, until in items:
            if seq in self._live:
                self._live[seq].until = until

    def growth_refused(self, seq: int, hopeless: bool) -> None:
        """Some stage has no room for `seq`: the youngest request gives its room back, if there is another.

        With `hopeless` the stage has promised nothing to anybody else, so `seq` itself must go.
        """
        if seq not in self._live or self._leaving:
            return  # it ended meanwhile, or room is being made already
        if hopeless:
            self._leaving[seq] = "abort"
        else:
            self._make_room(seq)

    def drop(self, seq: int, retract: bool = False) -> bool:
        """Take a request out as soon as none of its waves is in flight. False if it is unknown."""
        if seq not in self._live:
            return False
        self._leaving[seq] = "retract" if retract and self._leaving.get(seq) != "abort" else "abort"
        if self._makes_room and self._makes_room[0] == seq:
            self._makes_room = None
        return True

    def retract_all(self) -> None:
        """Plan no more waves, and take every request out to be admitted again later."""
        self.paused = True
        for seq in self._live:
            self.drop(seq, retract=True)

    def took(self, stage: int, wave: int, elapsed_us: int) -> None:
        """A stage says how long it took for a wave; of decode waves only what stage 0 says counts.

        Of an old wave, or where no time was measured, nothing is learned.
        """
        if elapsed_us <= 0:
            return
        load = self._loads.get(wave)
        if load is not None:
            self._planner.observe(stage, load, elapsed_us)
        elif stage == 0:
            self._groups.took(wave, elapsed_us)

    def join_group(self, wave: int) -> int:
        """The group that the rows of `wave` go on in: their own, or the one they join after prefill.

        Raises `ProtocolError` if the wave is not in flight.
        """
        if wave not in self._waves:
            raise ProtocolError(f"wave {wave} was acknowledged, but it is not in flight")
        group, rows = self._waves[wave]
        if group >= 0:
            return group
        return self._groups.choose(sum(complete for _, complete in rows), bool(self._unplanned))

    def output(self, wave: int, group: int, finished: Iterable[int]) -> None:
        """The last stage acknowledged `wave`; `finished` requests ended with it."""
        was, rows = self._waves.pop(wave)
        self._groups.output(was)
        ended = set(finished)
        for seq, complete in rows:
            request = self._live[seq]
            request.in_flight -= 1
            if seq in ended:
                self._remove(request)
            elif complete and not request.decoding:
                request.group = group
                self._groups.join(group, seq)

    # --- output ------------------------------------------------------------------------------

    def next(self, digest: int, queued: int = 0) -> Decision | None:
        """The next decision to log, or None while there is nothing to do.

        `digest` is the log's so far. `queued` waves wait for stage 0's device: see `held_back`.
        """
        self.held_back = False
        self._review_retraction()
        drop = self._drop()
        if drop is not None:
            return drop
        if self.paused or len(self._waves) >= self._run_ahead:
            return None
        if self._owed and len(self._groups) < max(1, self._interval_rows):
            self._owed = 0
        waits = queued >= LEAD and self._went_first < self._groups.count
        self.held_back = waits and bool(self._unplanned) and not self._owed
        kinds = (self._decode, self._prefill) if self._last_was_prefill else (self._prefill, self._decode)
        for kind in (self._decode,) if self._owed or self.held_back else kinds:
            decision = kind(digest)
            if decision is not None:
                self._last_was_prefill = isinstance(decision, Prefill)
                self._owed = self._interval if self._last_was_prefill else max(0, self._owed - 1)
                self._went_first = self._went_first + 1 if self.held_back else 0
                return decision
        return None

    def _drop(self) -> Drop | None:
        """Those that leave the same way as the first of them."""
        if not self._leaving:
            return None
        ready = [r for r in self._live.values() if r.seq in self._leaving and not r.in_flight]
        if not ready:
            return None
        way = self._leaving[ready[0].seq]
        gone = [r for r in ready if self._leaving[r.seq] == way]
        for request in gone:
            self._remove(request)
        return Drop([r.seq for r in gone], way == "retract")

    def _make_room(self, needy: int) -> None:
        """The youngest goes, if it is not alone and does not leave anyway."""
        victim = self._youngest().seq
        if len(self._live) > 1 and victim not in self._leaving:
            self._leaving[victim] = "retract"
            self._makes_room = (victim, needy)

    def _review_retraction(self) -> None:
        """While the waves of the youngest were in flight, others may have ended or come."""
        if self._makes_room is None:
            return
        victim, needy = self._makes_room
        self._makes_room = None
        del self._leaving[victim]
        if needy in self._live:
            self._make_room(needy)

    def _youngest(self) -> Live:
        return max(self._live.values(), key=lambda r: r.order)

    def _prefill(self, digest: int) -> Prefill | None:
        pending: Iterable[Pending] = self._unplanned.values()
        if self._leaving:
            pending = [p for p in pending if p.seq not in self._leaving]
        ring = [self._loads[wave] for wave, (group, _) in self._waves.items() if group < 0]
        spans = self._planner.spans(self._turns.order(pending), self._rows, ring)
        if not spans:
            return None
        self._turns.planned(spans)
        rows = []
        for seq, _, end in spans:
            request = self._live[seq]
            request.begun = True
            request.in_flight += 1
            complete = end == request.length
            rows.append((seq, complete))
            if complete:
                del self._unplanned[seq]
            else:
                self._unplanned[seq] = Pending(seq, end, request.length)
        wave = self._issue(-1, rows)
        self._loads[wave] = load_of(spans)
        if len(self._loads) > max(_REMEMBERED, 2 * self._run_ahead):
            del self._loads[next(iter(self._loads))]
        return Prefill(
            wave,
            digest,
            [Span(p.seq, p.begin, p.end, last) for p, (_, last) in zip(spans, rows, strict=True)],
        )

    def _decode(self, digest: int) -> Decode | None:
        ready = [
            (group, list(seqs))
            for group, seqs in self._groups.ready()
            if all([self._has_room(self._live[s]) for s in seqs])
        ]
        if not ready:
            return None
        group, seqs = ready[0]
        context = 0
        for seq in seqs:
            request = self._live[seq]
            request.length += 1
            request.in_flight += 1
            context += request.length
        wave = self._issue(group, [(seq, True) for seq in seqs])
        self._groups.issued(group, wave, context)
        return Decode(wave, digest, group, seqs)

    def _has_room(self, request: Live) -> bool:
        """Ask for more escrow ahead of time. False if the next token has no room yet."""
        need = request.length + 1
        margin = 2 * self._run_ahead
        if need + margin > request.until and request.until < request.most:
            until = min(request.most, max(request.until, need) + self._growth)
            if until > request.asked:
                request.asked = until
                self.growth_requests.append((request.seq, until))
        return need <= request.until

    def _issue(self, group: int, rows: list[tuple[int, bool]]) -> int:
        wave = self._next_wave
        self._next_wave += 1
        self._waves[wave] = (group, rows)
        return wave

    def _remove(self, request: Live) -> None:
        seq = request.seq
        del self._live[seq]
        self._unplanned.pop(seq, None)
        self._turns.gone(seq)
        self._leaving.pop(seq, None)
        if self._makes_room and self._makes_room[0] == seq:
            self._makes_room = None
        if request.decoding:
            self._groups.leave(request.group, seq)
