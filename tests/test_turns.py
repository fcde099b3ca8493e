"""Who passes whom while a long prompt is cut into waves, and how late that is decided."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_wavepp.admission import Committed
from sglang_wavepp.loop import LeaderLoop
from sglang_wavepp.messages import Decode, Drop, Prefill
from sglang_wavepp.mpu import PLANNERS, WaveLimits
from sglang_wavepp.mpu.packing import Pending, pack
from sglang_wavepp.mpu.turns import Turns
from sglang_wavepp.sequencer import LEAD, Sequencer

WAVE = 16


def waves(arrivals: Sequence[tuple[int, int]], ranks: Sequence[int] | None = None) -> list[list[Pending]]:
    """The waves for requests of (wave before which it comes, tokens), numbered in this order."""
    turns = Turns(WAVE, ranks.__getitem__) if ranks else Turns(WAVE)
    pending: dict[int, Pending] = {}
    made: list[list[Pending]] = []
    coming = list(enumerate(arrivals))
    while coming or pending:
        while coming and (coming[0][1][0] <= len(made) or not pending):
            seq, (_, tokens) = coming.pop(0)
            pending[seq] = Pending(seq, 0, tokens)
        spans = pack(turns.order(pending.values()), WAVE, 1)
        turns.planned(spans)
        for seq, _, end in spans:
            whole = pending.pop(seq)
            if end < whole.end:
                pending[seq] = Pending(seq, end, whole.end)
                pending = dict(sorted(pending.items()))
        made.append(spans)
    return made


def order(made: Sequence[Sequence[Pending]]) -> list[int]:
    """Requests in the order of their last spans."""
    ends = {span.seq: number for number, span in enumerate(span for wave in made for span in wave)}
    return sorted(ends, key=lambda seq: ends[seq])


loads = st.lists(st.tuples(st.integers(0, 12), st.integers(1, 12 * WAVE)), min_size=1, max_size=12).map(
    sorted
)


@given(loads)
def test_every_token_is_planned_once_in_full_waves(arrivals: list[tuple[int, int]]) -> None:
    made = waves(arrivals)
    for seq, (_, tokens) in enumerate(arrivals):
        spans = [span for wave in made for span in wave if span.seq == seq]
        assert [span.begin for span in spans] == [0, *(span.end for span in spans[:-1])]
        assert spans[-1].end == tokens
    for number, wave in enumerate(made):
        later = [span for more in made[number + 1 :] for span in more]
        full = sum(span.end - span.begin for span in wave) == WAVE
        assert full or all(arrivals[span.seq][0] > number for span in later)


def passed(made: Sequence[Sequence[Pending]], seq: int) -> int:
    """Tokens of later requests that were planned before a request's last ones, once it was the oldest."""
    flat = [span for wave in made for span in wave]
    last = max(i for i, span in enumerate(flat) if span.seq == seq)
    oldest = max((i + 1 for i, span in enumerate(flat) if span.seq < seq), default=0)
    return sum(span.end - span.begin for span in flat[oldest:last] if span.seq > seq)


@given(loads)
def test_nobody_is_passed_by_more_than_its_own_tokens(arrivals: list[tuple[int, int]]) -> None:
    made = waves(arrivals)
    for seq, (_, tokens) in enumerate(arrivals):
        assert passed(made, seq) <= max(0, tokens - WAVE // 2)


@pytest.mark.parametrize("crumb", [1, 4, 7])
def test_many_short_ones_pass_as_long_as_they_may(crumb: int) -> None:
    """For the last wave's tokens nobody passes. The second long one is passed by no more than the first."""
    many = [(0, crumb)] * 300
    assert 3 * WAVE - crumb <= passed(waves([(0, 4 * WAVE), *many]), 0) <= 4 * WAVE - WAVE // 2
    later = [(7, crumb)] * 300
    assert passed(waves([(0, 8 * WAVE), (0, 4 * WAVE), *later]), 1) <= 4 * WAVE - WAVE // 2


def test_waves_of_short_ones_alone_count_as_much_as_those_of_the_long_one() -> None:
    turns = Turns(WAVE)
    long, short = Pending(0, 0, 10 * WAVE), Pending(1, 0, 1)
    assert next(iter(turns.order([long, short]))) == short
    turns.planned([Pending(0, 0, WAVE)])
    left = Pending(0, WAVE, 10 * WAVE)
    alone = 0
    while next(iter(turns.order([left, short]))) == short:
        turns.planned([short])
        alone += 1
    assert alone == 2  # for a whole wave of its own, and for the half that is free


def test_half_as_long_is_short() -> None:
    assert order(waves([(0, 8 * WAVE), (3, 2 * WAVE)])) == [1, 0]
    assert order(waves([(0, 4 * WAVE), (0, 2 * WAVE + 1)])) == [0, 1]


@given(st.integers(1, 12 * WAVE), st.integers(1, 8))
def test_requests_of_one_length_do_not_pass_each_other(tokens: int, count: int) -> None:
    assert order(waves([(0, tokens)] * count)) == list(range(count))


def test_short_ones_pass_a_long_one_and_share_its_waves() -> None:
    made = waves([(0, 4 * WAVE), (0, 4), (0, 4), (0, 4)])
    assert made[0] == [Pending(1, 0, 4), Pending(2, 0, 4), Pending(0, 0, 8)]
    assert made[1] == [Pending(3, 0, 4), Pending(0, 8, 20)]
    assert order(made) == [1, 2, 3, 0]


def test_one_that_is_through_with_the_next_wave_is_not_passed() -> None:
    assert order(waves([(0, WAVE), (0, 4)])) == [0, 1]


def test_one_of_a_lower_rank_is_not_passed_by_one_of_a_higher() -> None:
    arrivals = [(0, 4 * WAVE), (0, 4), (0, 4)]
    assert order(waves(arrivals, ranks=[1, 2, 1])) == [2, 0, 1]
    assert order(waves(arrivals, ranks=[1, 0, 1])) == [1, 2, 0]
    # Nor by one that passes another one.
    assert order(waves([(0, 8 * WAVE), (0, 6 * WAVE), (0, 4)], ranks=[5, 0, 5])) == [0, 1, 2]


def _sequencer() -> Sequencer:
    limits = WaveLimits(stages=2, ring=8, budget=WAVE, align=1)
    planner = PLANNERS["static"](limits)
    return Sequencer(planner=planner, run_ahead=8, groups=2, growth=4, rows=8, wave=WAVE)


def _commit(sequencer: Sequencer, seq: int, tokens: int) -> None:
    committed = Committed(seq, seq, 0, tokens, tokens + 4, again=False, rank=0, rounds=1, waited=0.0)
    sequencer.commit(committed, tokens + 4)


def test_the_device_has_waves_enough_before_it_and_what_comes_meanwhile_is_in_the_next_one() -> None:
    sequencer = _sequencer()
    _commit(sequencer, 0, 6 * WAVE)
    for queued in range(LEAD):
        assert isinstance(sequencer.next(0, queued), Prefill) and not sequencer.held_back
    assert sequencer.next(0, LEAD) is None and sequencer.held_back
    _commit(sequencer, 1, 4)
    wave = sequencer.next(0, LEAD - 1)
    assert isinstance(wave, Prefill) and not sequencer.held_back
    assert [(span.seq, span.last) for span in wave.spans] == [(1, True), (0, False)]


def test_decode_waves_are_not_held_back_by_the_device() -> None:
    sequencer = _sequencer()
    _commit(sequencer, 0, 4)
    first = sequencer.next(0)
    assert isinstance(first, Prefill)
    sequencer.output(first.wave, sequencer.join_group(first.wave), [])
    _commit(sequencer, 1, 6 * WAVE)
    assert isinstance(sequencer.next(0, LEAD), Decode) and sequencer.held_back
    assert sequencer.next(0, LEAD) is None and sequencer.held_back
    assert isinstance(sequencer.next(0, LEAD - 1), Prefill)


def test_a_request_that_comes_back_begins_anew() -> None:
    sequencer = _sequencer()
    _commit(sequencer, 0, 12 * WAVE)
    for _ in range(4):
        wave = sequencer.next(0)
        assert isinstance(wave, Prefill)
        sequencer.output(wave.wave, sequencer.join_group(wave.wave), [])
    sequencer.drop(0, retract=True)
    assert isinstance(sequencer.next(0), Drop)
    _commit(sequencer, 0, 12 * WAVE)
    for seq in range(1, 13):
        _commit(sequencer, seq, 4)
    wave = sequencer.next(0)
    assert isinstance(wave, Prefill)
    assert [(s.seq, s.end - s.begin) for s in wave.spans] == [(1, 4), (2, 4), (0, WAVE // 2)]


def test_decode_waves_do_not_keep_a_prompt_from_being_planned() -> None:
    """Each group may have one wave while it waits for the device, however many wait there."""
    sequencer = _sequencer()
    for seq in range(2):
        _commit(sequencer, seq, 4)
        assert isinstance(sequencer.next(0), Prefill)
    for wave in range(2):
        sequencer.output(wave, wave, [])
    _commit(sequencer, 2, 6 * WAVE)
    kinds = []
    for _ in range(6):
        decision = sequencer.next(0, LEAD)
        kinds.append(type(decision))
        if isinstance(decision, Decode):
            sequencer.output(decision.wave, decision.group, [])
    assert kinds == [Decode, Decode, Prefill] * 2


def test_a_held_back_loop_looks_again_soon() -> None:
    loop = LeaderLoop.__new__(LeaderLoop)
    loop.sequencer = _sequencer()
    assert loop._longest_wait() == 1.0
    _commit(loop.sequencer, 0, WAVE)
    assert loop.sequencer.next(0, LEAD) is None
    assert loop._longest_wait() < 0.01
