"""Planners: worked examples of the published rule, what holds for all, and what the timed one learns."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_wavepp.mpu import PLANNERS, Planner, WaveLimits
from sglang_wavepp.mpu.packing import Pending, pack_whole
from sglang_wavepp.mpu.planner import Load, load_of
from sglang_wavepp.mpu.rule import budgets, choose
from sglang_wavepp.mpu.stage_time import Observations, StageTime, nonnegative_least_squares
from sglang_wavepp.mpu.timed import TimedPlanner

K = 1024
PP4 = WaveLimits(stages=4, ring=8, budget=16 * K, align=64, least=1024)
PP8 = WaveLimits(stages=8, ring=16, budget=16 * K, align=64, least=1024)


def prompts(*suffixes: int, begin: int = 0) -> list[Pending]:
    return [Pending(seq, begin, begin + suffix) for seq, suffix in enumerate(suffixes)]


def rest(pending: Iterable[Pending], spans: Iterable[Pending]) -> list[Pending]:
    """What is left after a wave: checks that it took the requests in order, each from where it stood."""
    left = list(pending)
    for at, span in enumerate(spans):
        assert (span.seq, span.begin) == left[at][:2] and span.begin < span.end <= left[at].end
        left[at] = Pending(span.seq, span.end, left[at].end)
    return [p for p in left if p.begin < p.end]


# --- the published rule ----------------------------------------------------------------------


def test_the_papers_example() -> None:
    """36K tokens, 4 stages. The text stops at 8,192; by its formula n = 4.5 there, below R = 8: 4,096."""
    allowed = budgets(PP4)
    assert allowed == [16 * K, 8 * K, 4 * K, 2 * K, K]
    assert choose([36 * K], allowed, ring=8) == 4 * K
    assert 36 * K / (8 * K) == 4.5 and 36 * K / (4 * K) == 9


def test_the_papers_example_in_static_waves() -> None:
    """16K + 16K + 4K."""
    planner, left, sizes = PLANNERS["static"](PP4), prompts(36 * K), []
    while left:
        spans = planner.spans(left, 8, [])
        sizes.append(spans[0].end - spans[0].begin)
        left = rest(left, spans)
    assert sizes == [16 * K, 16 * K, 4 * K]


@pytest.mark.parametrize(
    ("left", "ring", "budget", "why"),
    [
        ([2 << 20], 16, 16 * K, "128 full waves"),
        ([16 * K] * 16, 16, 16 * K, "W / b = R is enough"),
        ([16 * K] * 15, 16, 8 * K, "one short"),
        ([8 * K + 1] * 16, 16, 16 * K, "no two of them share a wave, though W / b is only 8"),
        ([8 * K] * 16, 16, 8 * K, "two halves do share one"),
        ([4 * K + 1] * 15 + [1], 16, 2 * K, "15 are too few to count, and W / 4K = 15"),
        ([100] * 3, 16, K, "fewer requests than stages and little work: the smallest allowed"),
        ([], 16, K, "no work"),
    ],
)
def test_worked_examples(left: list[int], ring: int, budget: int, why: str) -> None:
    assert choose(left, budgets(PP8), ring) == budget, why


def test_the_smallest_budget_is_whole_pages_and_not_below_the_floor() -> None:
    limits = WaveLimits(stages=2, ring=4, budget=1000, align=48, least=100)
    assert limits.floor == 144
    assert budgets(limits) == [1000, 480, 240]
    assert budgets(WaveLimits(stages=2, ring=4, budget=64, align=64, least=4096)) == [64]


def test_the_rules_packer_does_not_split_what_fits() -> None:
    assert pack_whole(prompts(3000, 2000, 500), 4096, 64) == [Pending(0, 0, 3000)]
    assert pack_whole(prompts(2000, 2000, 500), 4096, 64) == [Pending(0, 0, 2000), Pending(1, 0, 2000)]
    assert pack_whole(prompts(9000), 4100, 64) == [Pending(0, 0, 4096)]
    assert pack_whole(prompts(100, 9000), 4096, 64) == [Pending(0, 0, 100)]


def test_mpu_shrinks_the_budget_with_what_is_left() -> None:
    planner, left, sizes = PLANNERS["mpu"](PP4), prompts(36 * K), []
    while left:
        spans = planner.spans(left, 8, [])
        sizes.append(spans[0].end - spans[0].begin)
        left = rest(left, spans)
    assert sizes == [4 * K] * 2 + [2 * K] * 7 + [K] * 14


# --- all planners ----------------------------------------------------------------------------


def observed(planner: Planner, limits: WaveLimits, seed: int) -> None:
    """The planner sees waves of a linear stage, with noise."""
    draw = random.Random(seed)
    cost = [draw.choice((0.0, draw.random())) for _ in range(5)]
    for _ in range(40):
        spans = [Pending(0, begin := draw.randrange(5000), begin + 1 + draw.randrange(2000))]
        load = load_of(spans)
        time = cost[0] * 1e4 + cost[1] * load.tokens + cost[2] * load.attention / 1e3 + cost[3] * load.prefix
        for stage in range(limits.stages):
            planner.observe(stage, load, int(time * draw.uniform(0.9, 1.1)) + stage)


@given(
    name=st.sampled_from(sorted(PLANNERS)),
    align=st.sampled_from([1, 4, 48]),
    size=st.integers(1, 60),
    least=st.integers(1, 300),
    suffixes=st.lists(st.tuples(st.integers(0, 40), st.integers(1, 3000)), max_size=30),
    rows=st.integers(1, 12),
    seed=st.none() | st.integers(0, 9),
    under_way=st.integers(0, 6),
)
@settings(max_examples=400, deadline=None)
def test_every_token_is_planned_once_and_in_order(
    name: str,
    align: int,
    size: int,
    least: int,
    suffixes: list[tuple[int, int]],
    rows: int,
    seed: int | None,
    under_way: int,
) -> None:
    limits = WaveLimits(stages=3, ring=6, budget=size * align + align // 2, align=align, least=least)
    planner = PLANNERS[name](limits)
    if seed is not None:
        observed(planner, limits, seed)
    left = [Pending(seq, begin * align, begin * align + n) for seq, (begin, n) in enumerate(suffixes)]
    most = sum(math.ceil(n / limits.floor) for _, n in suffixes)
    ring: list[Load] = []
    waves = 0
    while left:
        spans = planner.spans(iter(left), rows, ring)
        assert 0 < len(spans) <= rows
        assert sum(end - begin for _, begin, end in spans) <= limits.budget
        for span, p in zip(spans, left, strict=False):
            assert span.end == p.end or span.end % align == 0
        left = rest(left, spans)
        ring = [*ring, load_of(spans)][-under_way:] if under_way else []
        waves += 1
    assert waves <= most
    assert planner.spans([], rows, ring) == []


@pytest.mark.parametrize("name", PLANNERS)
def test_cuts_lie_at_recurrent_checkpoints(name: str) -> None:
    """A begin may lie elsewhere, if it was agreed on there; the cut does not."""
    limits = WaveLimits(stages=2, ring=4, budget=8192, align=2048, least=1)
    planner = PLANNERS[name](limits)
    observed(planner, limits, 3)
    left, cuts = [Pending(0, 100, 30_000)], []
    while left:
        spans = planner.spans(left, 1, [])
        cuts.append(spans[-1].end)
        left = rest(left, spans)
    assert len(cuts) >= 4 and all(cut % 2048 == 0 for cut in cuts[:-1])


# --- what a stage takes ----------------------------------------------------------------------


@given(seed=st.integers(0, 1000))
@settings(max_examples=50, deadline=None)
def test_least_squares_are_nonnegative_and_best(seed: int) -> None:
    draw = np.random.default_rng(seed)
    rows = draw.random((20, 4))
    values = rows @ np.array([1.0, 0.0, -2.0, 0.5]) + draw.random(20)
    found = nonnegative_least_squares(rows, values, np.full(4, 1e-9), np.zeros(4))
    assert (found >= 0).all()
    best = float(((rows @ found - values) ** 2).sum())
    for _ in range(50):
        other = np.maximum(0, found + draw.normal(0, 0.1, 4))
        assert best <= float(((rows @ other - values) ** 2).sum()) * (1 + 1e-4)


DEAR = StageTime(wave=18_000.0, token=11.0, attention=0.0, prefix=0.0, span=0.0)
"""Weights of many experts are read for each wave."""
TRUE = StageTime(wave=20_000, token=16.0, attention=1.4e-4, prefix=0.2, span=300)


def mixed(draw: random.Random) -> list[Pending]:
    """A wave of one to four spans."""
    return [
        Pending(seq, begin, begin + draw.randrange(64, 8192))
        for seq in range(draw.randrange(1, 5))
        for begin in [draw.randrange(0, 250_000)]
    ]


def test_stage_times_are_found_in_spite_of_outliers() -> None:
    draw, seen = random.Random(1), Observations()
    for i in range(256):
        load = load_of(mixed(draw))
        disturbed = 10.0 if i % 9 == 5 else draw.uniform(0.97, 1.03)
        seen.add(load, round(TRUE.of(load) * disturbed))
    assert seen.time is not None
    for _ in range(50):
        load = load_of(mixed(draw))
        assert seen.time.of(load) == pytest.approx(TRUE.of(load), rel=0.05)


def test_what_alike_waves_took_is_put_down_to_their_tokens() -> None:
    """Nothing can tell the cost of a wave from that of its tokens then. Smaller waves would."""
    seen = Observations()
    for i in range(8):
        load = load_of([Pending(0, i * 16384, (i + 1) * 16384)])
        seen.add(load, round(TRUE.of(load)))
    assert seen.time is not None
    assert seen.time.wave + seen.time.span < 0.3 * (TRUE.wave + TRUE.span)
    assert seen.time.of(load) == pytest.approx(TRUE.of(load), rel=0.02)


def test_old_observations_are_forgotten() -> None:
    draw, seen = random.Random(1), Observations()
    for factor in (1.0, 3.0):
        for _ in range(288):
            load = load_of(mixed(draw))
            seen.add(load, round(TRUE.of(load) * factor))
    assert seen.time is not None
    assert seen.time.of(load) == pytest.approx(3 * TRUE.of(load), rel=0.02)


def test_what_later_waves_do_not_tell_is_not_forgotten() -> None:
    """All of them alike, a tenth slower than before: what a wave costs besides its tokens is still known."""
    draw, seen = random.Random(1), Observations()
    for _ in range(256):
        load = load_of(mixed(draw))
        seen.add(load, round(TRUE.of(load)))
    load = load_of([Pending(0, 14_720, 16_384)])
    for _ in range(512):
        seen.add(load, round(1.1 * TRUE.of(load)))
    assert seen.time is not None
    assert seen.time.of(load) == pytest.approx(1.1 * TRUE.of(load), rel=0.01)
    assert seen.time.wave == pytest.approx(TRUE.wave, rel=0.2)


@given(time=st.floats(1, 1e7), prefix=st.integers(0, 10**6))
def test_tokens_in_a_time_take_that_time(time: float, prefix: int) -> None:
    tokens = TRUE.tokens_in(time, prefix)
    spans = TRUE.begin(prefix)
    took = TRUE.work(load_of([Pending(0, prefix, prefix + tokens)])) - spans
    more = TRUE.work(load_of([Pending(0, prefix, prefix + tokens + 2)])) - spans
    assert took <= time * (1 + 1e-9) and more >= time * (1 - 1e-9)


# --- the timed planner -----------------------------------------------------------------------


def taught(limits: WaveLimits, times: list[StageTime], seed: int = 1) -> TimedPlanner:
    draw, planner = random.Random(seed), TimedPlanner(limits)
    for _ in range(128):
        load = load_of(mixed(draw))
        for stage, time in enumerate(times):
            planner.observe(stage, load, round(time.of(load)))
    return planner


def waves_of(planner: Planner, left: list[Pending], most: int = 16) -> list[Load]:
    """Plan all; up to `most` waves are under way."""
    waves: list[Load] = []
    while left:
        spans = planner.spans(left, 64, waves[-most:])
        left = rest(left, spans)
        waves.append(load_of(spans))
    return waves


def test_it_is_static_before_it_has_seen_enough() -> None:
    planner, static = TimedPlanner(PP8), PLANNERS["static"](PP8)
    left = prompts(50_000, 3000)
    for _ in range(7):
        planner.observe(0, load_of(left), 100_000)
        assert planner.spans(left, 8, []) == static.spans(left, 8, [])


def test_waves_late_in_a_prompt_have_fewer_tokens_and_take_as_long() -> None:
    planner = taught(PP8, [TRUE] * 8)
    waves = waves_of(planner, [Pending(0, 0, 120_000), Pending(1, 0, 1000)])
    times = [TRUE.of(wave) for wave in waves]
    assert 14 <= len(waves) <= 18, "a ring full"
    assert waves[0].tokens > 1.4 * waves[-1].tokens
    assert max(times[:-2]) < 1.1 * times[0] and min(times) > 0.6 * times[0]
    assert max(times) < 1.4 * times[0], "the end is not cut once more for a part of a wave"


def test_many_waves_of_work_are_cut_by_the_budget() -> None:
    planner = taught(PP8, [TRUE] * 8)
    spans = planner.spans(prompts(*[100_000] * 40), 64, [])
    assert sum(end - begin for _, begin, end in spans) == PP8.budget


def test_little_work_is_cut_as_its_overhead_allows() -> None:
    """Of n equal waves, (n + P - 1) * (T / n + c) is least for n = sqrt((P - 1) * T / c)."""
    planner = taught(PP8, [TRUE] * 8)
    waves = waves_of(planner, prompts(4096), 0)
    work = TRUE.work(load_of(prompts(4096)))
    best = min(range(1, 17), key=lambda n: (n + 7) * (work / n + TRUE.wave))
    assert abs(len(waves) - best) <= 1 and best < 8


def test_as_many_requests_as_stages_are_not_cut_where_a_wave_is_dear() -> None:
    """Four of 4K tokens on four stages: the ring would have eight waves of half of them, at eight costs."""
    left = prompts(*[4 * K] * 4)
    assert [wave.tokens for wave in waves_of(taught(PP4, [DEAR] * 4), left)] == [4 * K] * 4
    (cut,) = taught(PP4, [DEAR._replace(wave=200.0)] * 4).spans(left, 8, [])
    assert cut.end <= 2 * K + 64, "here a cut costs next to nothing"


@pytest.mark.parametrize("share, others, cut", [(0.12, 7, False), (0.12, 6, True), (0.03, 7, True)])
def test_a_request_is_cut_to_fill_a_gap_only_if_that_costs_less(share: float, others: int, cut: bool) -> None:
    """With seven others on eight stages half a wave of eight may be missing: 6 % of the time."""
    tokens = StageTime(0.0, 10.0, 0.0, 0.0, 0.0)
    request = prompts(4 * K)
    planner = taught(PP8, [tokens._replace(wave=share * tokens.work(load_of(request)))] * 8)
    (span,) = planner.spans(request, 8, [load_of(request)] * others)
    assert (span.end < 4 * K) == cut


def served(planner: Planner, tokens: int, clients: int, answers: int, replaced: bool) -> list[Load]:
    """Waves of a loop with eleven under way at most, in which another request follows an answer, or none."""
    waiting, waves = prompts(*[tokens] * clients), []
    ring: list[tuple[Load, int]] = []
    seqs = itertools.count(clients)
    while waiting or ring:
        while waiting and len(ring) < 11:
            spans = planner.spans(waiting, 64, [load for load, _ in ring])
            left = rest(waiting, spans)
            ring.append((load_of(spans), len(waiting) - len(left)))
            waves.append(ring[-1][0])
            waiting = left
        _, ended = ring.pop(0)
        if replaced:
            waiting += [Pending(next(seqs), 0, tokens) for _ in range(min(ended, answers))]
            answers -= ended
    return waves


def test_requests_that_keep_coming_are_cut_where_a_wave_is_full() -> None:
    """Of sixteen on eight stages one and a half make a wave, not one: eleven waves of these are enough."""
    tokens = StageTime(0.0, 10.0, 0.0, 0.0, 0.0)
    dear = tokens._replace(wave=0.25 * tokens.work(load_of(prompts(2 * K))))
    waves = served(taught(PP8, [dear] * 8), 2 * K, 16, 200, replaced=True)
    assert 2.6 * K < sum(wave.tokens for wave in waves[50:-11]) / len(waves[50:-11]) < 3.2 * K


def test_a_burst_that_nothing_follows_is_not() -> None:
    """It is through earlier with a wave for each request."""
    tokens = StageTime(0.0, 10.0, 0.0, 0.0, 0.0)
    planner = taught(PP8, [tokens._replace(wave=0.25 * tokens.work(load_of(prompts(2 * K))))] * 8)
    for _ in range(8):
        waves = served(planner, 2 * K, 16, 0, replaced=False)
        assert [wave.tokens for wave in waves] == [2 * K] * 16


def test_where_the_pipeline_drains_again_and_again_waves_are_more_than_the_ring() -> None:
    """Four requests that come at once, and nothing for a while: nobody waits for what more waves cost."""
    tokens = StageTime(0.0, 10.0, 0.0, 0.0, 0.0)
    planner = taught(PP8, [tokens._replace(wave=0.01 * tokens.work(load_of(prompts(16 * K))))] * 8)
    waves = [len(served(planner, 16 * K, 4, 0, replaced=False)) for _ in range(24)]
    assert waves[0] <= 18, "the ring: little speaks for more"
    assert 35 < waves[-1] < 45, "sqrt(d * 7 * 4 / 0.01) with d = 16 / (16 + 12): 40"


def test_a_request_that_was_cut_goes_on_in_such_parts() -> None:
    """What is left of it is less than what others have under way, but was not meant for one wave."""
    tokens = StageTime(0.0, 10.0, 0.0, 0.0, 0.0)
    planner = taught(PP8, [tokens._replace(wave=0.12 * tokens.work(load_of(prompts(4 * K))))] * 8)
    waves = waves_of(planner, prompts(*[8 * K] * 4))
    assert [wave.tokens for wave in waves] == [2 * K] * 16


def test_a_full_ring_is_not_followed_by_crumbs() -> None:
    """MPU ends in waves of the floor. A small wave behind large ones wins nothing."""
    left = prompts(*[26_214] * 32, begin=236_000)
    planner = taught(PP8, [TRUE] * 8)
    timed, mpu = waves_of(planner, left), waves_of(PLANNERS["mpu"](PP8), left)
    assert sum(wave.tokens <= 2048 for wave in mpu) > 20
    assert sum(wave.tokens <= 2048 for wave in timed) <= 2
    assert sum(map(TRUE.of, timed)) < 0.95 * sum(map(TRUE.of, mpu))


def test_the_slowest_stage_counts_and_the_ring_is_as_deep_as_the_others_are_slow() -> None:
    """One stage that takes twice as long as seven others: 4.5 waves keep it busy, not 8."""
    slow = StageTime(*(2 * x for x in TRUE))
    waves = waves_of(taught(PP8, [TRUE] * 5 + [slow] + [TRUE] * 2), prompts(30_000, 30_000))
    assert 8 <= len(waves) <= 10
    assert 14 <= len(waves_of(taught(PP8, [slow] * 8), prompts(30_000, 30_000))) <= 18


def through(waves: list[Load]) -> float:
    """When eight equal stages are through with them."""
    times = [TRUE.of(wave) for wave in waves]
    return sum(times) + 7 * max(times)


def test_a_prompt_alone_in_the_pipeline_is_cut_as_finely_as_pays() -> None:
    """More than a ring full, all of one time, and through earlier than MPU's waves or a ring full of them."""
    left = prompts(200_000)
    waves = waves_of(taught(PP8, [TRUE] * 8), left)
    work, again = TRUE.work(load_of(left)), TRUE.prefix * 100_000
    best = min(range(1, 100), key=lambda n: (n + 7) * (work / n + TRUE.wave + again))
    assert best > 1.5 * PP8.ring and abs(len(waves) - best) <= 0.1 * best
    times = [TRUE.of(wave) for wave in waves]
    assert max(times) < 1.1 * times[0] and min(times) > 0.6 * times[0]
    assert through(waves) < 0.98 * 23 * (work / 16 + TRUE.wave + again)
    assert through(waves) < 0.98 * through(waves_of(PLANNERS["mpu"](PP8), left))


def test_a_prompt_is_no_longer_alone_once_another_one_comes() -> None:
    planner, left, ring = taught(PP8, [TRUE] * 8), prompts(200_000), []
    for _ in range(3):
        spans = planner.spans(left, 64, ring)
        left, ring = rest(left, spans), [*ring, load_of(spans)]
    fine = TRUE.of(ring[-1])
    (coarse,) = planner.spans([*left, Pending(1, 0, 64)], 64, ring)
    assert TRUE.of(load_of([coarse])) > 1.3 * fine
    (again,) = planner.spans(rest(left, [coarse]), 64, [*ring, load_of([coarse])])
    assert TRUE.of(load_of([again])) > 1.3 * fine, "nor when that one has gone"
    (late,) = taught(PP8, [TRUE] * 8).spans(left, 64, ring)
    assert TRUE.of(load_of([late])) > 1.3 * fine, "nor if it has found other work"


def test_waves_that_cost_nothing_but_their_tokens_are_not_smaller_than_allowed() -> None:
    planner = taught(PP8, [StageTime(wave=0, token=16.0, attention=0, prefix=0, span=0)] * 8)
    waves = waves_of(planner, prompts(200_000))
    assert min(wave.tokens for wave in waves[:-1]) >= 1024


def test_a_prefix_is_not_read_twice_to_fill_up_a_wave() -> None:
    """A wave of 12K is left as it is where filling it up would cut a request behind 240K tokens."""
    dear = StageTime(wave=10_000, token=16.0, attention=1e-6, prefix=1.0, span=0)
    planner = taught(PP8, [dear] * 8)
    spans = planner.spans(prompts(*[12_000] * 40, begin=240_000), 64, [Load(16 * K, 0, 0, 1)] * 15)
    assert spans == [Pending(0, 240_000, 252_000)]
    cheap = StageTime(wave=50_000, token=16.0, attention=1e-6, prefix=0.0, span=0)
    spans = taught(PP8, [cheap] * 8).spans(prompts(*[12_000] * 40), 64, [Load(16 * K, 0, 0, 1)] * 15)
    assert [end - begin for _, begin, end in spans] == [12_000, 4352]


def test_parts_of_a_request_are_equal_although_each_reads_its_prefix() -> None:
    time = StageTime(wave=3000, token=11.0, attention=1e-4, prefix=0.2, span=0)
    ring = [load_of(prompts(2048, begin=36_864))] * 4
    (first,) = taught(PP4, [time] * 4).spans(prompts(4096, begin=36_864), 8, ring)
    assert first.end - first.begin == 2048
    (whole,) = taught(PP4, [time._replace(wave=10_000)] * 4).spans(prompts(4096, begin=36_864), 8, ring)
    assert whole.end - whole.begin == 4096, "with what that costs a part is not worth its wave"


@given(
    costs=st.tuples(*[st.just(0.0) | st.floats(1e-6, high) for high in (5e4, 20.0, 1e-3, 1.0, 1e4)]),
    work=st.lists(
        st.tuples(st.integers(0, 300_000), st.integers(1, 20_000)).map(lambda x: (x[0] // 64 * 64, x[1])),
        min_size=1,
        max_size=6,
    ),
    ring=st.lists(st.integers(1, 16_384), max_size=16),
)
def test_whatever_was_learned_all_is_planned(
    costs: tuple[float, ...], work: list[tuple[int, int]], ring: list[int]
) -> None:
    """Waves of few tokens behind long prefixes teach that tokens cost nothing."""
    left = [Pending(seq, begin, begin + new) for seq, (begin, new) in enumerate(work)]
    planner = taught(PP8, [StageTime(*costs)] * 8)
    planner.spans(left, 64, [load_of(prompts(tokens)) for tokens in ring])
    waves = waves_of(planner, left)
    assert sum(wave.tokens for wave in waves) == sum(new for _, new in work)
    assert all(wave.tokens <= PP8.budget for wave in waves)


def test_a_long_prefix_is_not_read_again_for_every_few_tokens() -> None:
    """That costs 40 ms each time: two or three parts of 8K tokens, not eight of the floor."""
    dear = StageTime(wave=3000, token=11.0, attention=1e-5, prefix=0.2, span=0)
    (first,) = taught(PP8, [dear] * 8).spans(prompts(8 * K, begin=200_000), 8, [load_of(prompts(2048))] * 8)
    assert first.end - first.begin >= 2 * K


def test_what_each_wave_costs_is_told_from_what_each_request_costs_if_all_waves_have_one() -> None:
    """Both columns are equal then. Weights are read for a wave, so joining requests is worth a try."""
    seen, time = Observations(), StageTime(wave=20_000, token=11.0, attention=1e-4, prefix=0, span=0)
    for tokens in (1800, 2300) * 32:
        load = load_of([Pending(0, 36_864, 36_864 + tokens)])
        seen.add(load, round(time.of(load)))
    assert seen.time is not None and seen.time.wave > 5 * seen.time.span


def test_a_small_request_before_a_large_one_does_not_leave_its_wave_empty() -> None:
    """The large one is cut anyway: its first part goes along."""
    ring = [load_of(prompts(8 * K))] * 15
    small, part = taught(PP8, [TRUE] * 8).spans(prompts(1600, 16 * K, 1600, 16 * K), 8, ring)
    assert (small.seq, part.seq) == (0, 1)
    assert TRUE.of(load_of([small, part])) == pytest.approx(TRUE.of(ring[0]), rel=0.2)


def test_statistics_say_what_was_learned() -> None:
    said = taught(PP4, [TRUE] * 3).statistics()
    assert said["observed"] == [128, 128, 128, 0]
    assert [took is None for took in said["stage_us"]] == [False, False, False, True]
    assert said["slowest"]["token"] == pytest.approx(16.0, rel=0.05)
    assert TimedPlanner(PP4).statistics()["slowest"] is None
