"""Waves of equal time: the planner that learns what a wave costs.

A pipeline whose stages take equally long for a wave is a proportionate flow shop. Waves that take t1 ... tn
on each of P stages are through after sum(t) + (P - 1) * max(t), in whatever order: the bubbles of filling and
draining depend on the longest wave alone (Pinedo, Scheduling, section 6.1). Two things follow. Small waves at
the beginning or the end of the work win nothing, so the target is one time for all. And a wave costs
something besides its tokens, c, so n equal waves for work T are through after (n + P - 1) * (T / n + c),
which is least for n = sqrt((P - 1) * T / c). Where stages differ, P is the sum of their times over the
longest.

The target is that number of waves, but not more than the ring R holds: with as many under way no stage waits
for one, even if new work keeps coming, and each more would only cost c (more of this below). T is all work
that is known and not finished, that in flight included, so a ring that is full of large waves is not followed
by crumbs.

A prompt that finds the pipeline empty, and that no other one follows, is cut into more: into n waves as the
formula has it, whatever R is. An empty pipeline says that there is time to spare, so what the waves beyond R
cost is nobody else's. Once another prompt comes, the rest is cut for the ring; what was cut finer before that
is all that the guess can cost, once for each time that the pipeline was empty. Here c includes the prefix
that is read again, on average that at the prompt's middle. Its n is fixed when it begins: anew for each wave,
with the finished ones not counted in T, waves would shrink to the end, for nothing.

Equal times would cut most requests, and a cut makes a wave more, or reads a prefix again. So the target is
taken to the next share that whole requests fill, or equal parts of the next one: to the larger, if with the
smaller there are more waves than the ring holds and with the larger still more than stages, else to the one
with which the work is through earlier. Only where a request that has to be cut anyway comes behind smaller
ones, its first part fills up their wave. And where requests as long as the next one make a wave for each
stage, it is not cut if that costs more than the gap that may be left: a client asks again some part of a
wave's time after its answer, half of it on average, once for as many waves as there are stages.

Whether new work keeps coming is observed: d is how often the pipeline drains for each T. A low estimate of it
decides on more waves than the ring holds, sqrt(d * (P - 1) * T / c) of them: requests that arrive now and
then are through earlier so. A high one decides on fewer: with three more under way than there are stages,
these are busy. If there are requests enough, none longer than such a wave, waves are larger than the ring
would have them, and requests are cut wherever one is full: saturated, small waves only cost.

Otherwise throughput is not traded for latency: waves become smaller only where the formula says that all work
is through earlier. Before a stage has been observed often enough, waves are static.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Sequence
from itertools import islice
from typing import Any

from sglang_wavepp.mpu.packing import Pending, pack
from sglang_wavepp.mpu.planner import NOTHING, Load, WaveLimits, load_of
from sglang_wavepp.mpu.stage_time import Observations, StageTime

_NOBODY = (-1, 0.0)
_DRAINS = 0.5
"""How often the pipeline drains once the known work is through: else new work has come by then. Assumed."""
_DOUBT = 12.0
"""Of so much known work it is assumed that the pipeline did not drain with it."""
_RINGS = 3.0
"""As many waves as this times the ring at most: what a wave costs may have been underestimated."""
_GAP = 0.5
"""For so much of a wave's time stages wait, on average, until a request comes for one that is through."""
_CRUMB = 0.1
"""So much of a wave does not become one of its own: those before it are a little longer instead."""
_MORE = 3.0
"""With so many waves more than stages none of these waits for one, while requests come for those answered."""
_MEMORY = 16.0
"""Of so much known work, about, it is remembered how often the pipeline drained."""
_RECENT = 8
"""Requests begun last: the longest of them is taken to be like those in flight."""


class TimedPlanner:
    """Learns the stage times online, and cuts prompts into waves of equal time."""

    def __init__(self, limits: WaveLimits) -> None:
        self._limits = limits
        self._stages = [Observations() for _ in range(limits.stages)]
        self._slowest: StageTime | None = None
        self._depth = float(limits.stages)
        """Stages' times for a wave, summed, over the longest of them."""
        self._target_us = 0.0
        self._alone = _NOBODY
        """The request that found the pipeline empty, as long as no other one comes, and its work a wave."""
        self._cut = -1
        """The request that was cut last."""
        self._flows = False
        """Are requests cut wherever a wave is full?"""
        self._recent: deque[float] = deque(maxlen=_RECENT)
        """The work of requests as they began."""
        self._planned_us, self._drained = 0.0, 0.0
        """Work planned, and how often nothing was in flight before it. Both decay."""

    def spans(self, pending: Iterable[Pending], rows: int, ring: Sequence[Load]) -> list[Pending]:
        """See `Planner`. O(ring + pending requests), fewer where the work fills the ring anyway."""
        time = self._slowest
        if time is None:
            return pack(islice(pending, rows), self._limits.budget, self._limits.align)
        under_way = sum(map(time.work, ring))
        seen, work, all_seen = self._known(pending, under_way, time)
        if work <= 0:  # nothing is pending, or the tokens of a wave make no difference
            return pack(seen[:rows], self._limits.budget, self._limits.align)
        share = self._share(seen, all_seen, ring, work + under_way, time)
        if self._alone is not _NOBODY:
            share = work / max(1, math.ceil(work / share - _CRUMB))
        self._target_us = time.wave + share
        spans = self._fill(seen, rows, share, time)
        planned = time.work(load_of(spans))
        kept = max(0.0, 1 - planned / (_MEMORY * (work + under_way)))
        self._planned_us = kept * self._planned_us + planned
        self._drained = kept * self._drained + (not ring)
        return spans

    def observe(self, stage: int, load: Load, elapsed_us: int) -> None:
        """See `Planner`."""
        if self._stages[stage].add(load, elapsed_us):
            self._compare()

    def statistics(self) -> dict[str, Any]:
        """See `Planner`. `stage_us`: what each stage, once observed, takes for a wave like the latest."""
        load = self._load()
        return {
            "planner": "timed",
            "budget": self._limits.budget,
            "floor": self._limits.floor,
            "target_us": round(self._target_us),
            "stage_us": [o.time and round(o.time.of(load)) for o in self._stages],
            "observed": [stage.count for stage in self._stages],
            "slowest": None if self._slowest is None else self._slowest._asdict(),
        }

    # --- what is known -----------------------------------------------------------------------

    def _load(self) -> Load:
        """A wave like the latest ones, as the stage that was observed most often saw them."""
        most = max(self._stages, key=lambda stage: stage.count)
        return most.mean if most.count else NOTHING

    def _compare(self) -> None:
        """Find the slowest stage. One that was not observed is taken to be as slow."""
        load = self._load()
        known = [stage.time for stage in self._stages if stage.time is not None]
        self._slowest = max(known, key=lambda time: time.of(load))
        longest = self._slowest.of(load)
        missing = self._limits.stages - len(known)
        self._depth = missing + sum(time.of(load) for time in known) / longest if longest > 0 else 1.0

    def _known(
        self, pending: Iterable[Pending], under_way: float, time: StageTime
    ) -> tuple[list[Pending], float, bool]:
        """Requests, their work in microseconds, and whether these are all.

        Those behind what fills the ring with waves like the next one at its largest do not matter.
        """
        _, token, attention, prefix, span = time
        seen: list[Pending] = []
        work, left, enough = 0.0, self._limits.budget, math.inf
        for p in pending:
            seen.append(p)
            _, begin, end = p
            new = end - begin
            work += span + prefix * begin + (token + attention * (begin + new / 2)) * new
            if left > 0:
                left -= new
                if left <= 0:
                    enough = self._limits.ring * work - under_way
            if work >= enough:
                return seen, work, False
        return seen, work, True

    def _share(
        self, seen: Sequence[Pending], all_seen: bool, ring: Sequence[Load], work: float, time: StageTime
    ) -> float:
        """Microseconds of work for each wave, of all that is known and not finished."""
        if not all_seen or len(seen) > 1 or (ring and seen[0].seq != self._alone[0]):
            self._alone = _NOBODY
            begin = seen[0].begin
            more = time.wave + time.begin(begin)
            seldom, often = self._drains(work)
            most = self._limits.ring * self._depth / self._limits.stages
            most = max(most, self._waves(seldom * work, more, _RINGS * most))
            fewest = max(self._depth + _MORE, self._waves(often * work, more, most))
            longest = max(time.span_work(begin, seen[0].end), *self._recent, 0.0)
            self._flows = fewest < most and work >= fewest * longest
            if self._flows:
                return work / fewest
            share = work / self._waves(work, more, most)
            return self._whole(seen, share, work, most, time)
        self._flows = False
        seq, begin, end = seen[0]
        if seq != self._alone[0]:
            again = time.begin((begin + end) // 2)
            rest = max(0.0, work - time.begin(begin))
            waves = self._waves(rest, time.wave + again, (end - begin) / self._limits.floor)
            self._alone = (seq, rest / waves + again)
        return self._alone[1]

    def _whole(
        self, seen: Sequence[Pending], share: float, work: float, most: float, time: StageTime
    ) -> float:
        """The next smaller or larger share that whole requests fill, or equal parts of the next one.

        Candidates are (share, waves that the work becomes).
        """
        begin, end = seen[0].begin, seen[0].end
        first, again = time.span_work(begin, end), time.begin(begin)
        if first <= 0:
            return share

        def through(cut: tuple[float, float]) -> float:
            share, waves = cut
            return (waves + _DRAINS * (self._depth - 1)) * (share + time.wave)

        def parts(n: int) -> tuple[float, float]:
            return (first - again) / n + again, work / first * n

        if first > share:
            n = max(1, (end - begin) // self._limits.floor)
            if share > again:
                n = max(1, min(n, int((first - again) / (share - again))))
            while n > 1 and through(parts(n - 1)) < through(parts(n)):
                n -= 1
            if seen[0].seq != self._cut and work / first > self._depth - _GAP:
                least = (1 + _GAP / self._depth) * (first + time.wave)
                if n * (parts(n)[0] + time.wave) > least:
                    return first
            fewer, more = parts(n), parts(n + 1)
        else:
            smaller = larger = first
            for p in seen[1:]:
                if larger >= share:
                    break
                own = time.span_work(p.begin, p.end)
                if own > share:  # it is cut anyway: its first part fills the wave
                    return share
                smaller, larger = larger, larger + own
            if larger < share:  # there is no more
                return share
            fewer, more = (larger, work / larger), (smaller, work / smaller)
        if more[1] > most * (1 + _CRUMB) and fewer[1] > self._depth:
            return fewer[0]

        return min(fewer, more, key=through)[0]

    def _drains(self, work: float) -> tuple[float, float]:
        """How often the pipeline drains with so much work, 1 at most: a low and a high estimate."""
        seen = self._planned_us / work
        return min(1.0, self._drained / (seen + _DOUBT)), min(1.0, (self._drained + _DRAINS) / (seen + 1))

    def _waves(self, work: float, more: float, most: float) -> float:
        """Into how many waves the work is best cut if one more costs so much, in microseconds."""
        best = math.sqrt((self._depth - 1) * work / more) if more > 0 else math.inf
        return max(1.0, min(best, most))

    # --- packing -----------------------------------------------------------------------------

    def _fill(self, seen: Sequence[Pending], rows: int, share: float, time: StageTime) -> list[Pending]:
        """Fill one wave, first come first served, up to the budget and `share` microseconds of work."""
        align, floor = self._limits.align, self._limits.floor
        spans: list[Pending] = []
        tokens, room = self._limits.budget, share
        for p in seen[:rows]:
            seq, begin, end = p
            work = time.span_work(begin, end)
            if seq != self._cut:
                self._recent.append(work)
            if end - begin <= tokens and work <= room + share * _CRUMB:
                spans.append(p)
                tokens -= end - begin
                room -= work
                continue
            new = min(tokens, time.tokens_in(room - time.begin(begin), begin))
            if not spans:
                new = max(new, floor)
            elif not self._worth(p, new, room / share, share, time):
                break
            cut = min((begin + new) // align * align, end)
            if cut > begin:
                spans.append(Pending(seq, begin, cut))
                self._cut = seq
            break
        return spans

    def _worth(self, p: Pending, new: int, unused: float, share: float, time: StageTime) -> bool:
        """Shall `new` tokens of a request fill up a wave of which `unused`, a fraction, is left?

        That saves a part of another wave, but where it cuts the request once more, its prefix is read again.
        """
        _, begin, end = p
        begins = time.begin(begin)
        if self._flows:
            return unused > _CRUMB and begins * (1 - unused) <= unused * time.wave
        most = max(1, min(self._limits.budget, time.tokens_in(share - begins, begin)))
        more = 1 + math.ceil((end - begin - new) / most) - math.ceil((end - begin) / most)
        return new >= self._limits.floor and more * begins <= unused * time.wave
