"""Who passes whom while a long prompt is cut into waves, and how late that is decided."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from sglang_wavepp.admission import Committed
from sglang_wavepp.messages import Decode, Prefill
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


@given(loads)
def test_nobody_is_held_up_by_more_than_its_own_length_and_half_a_wave(
    arrivals: list[tuple[int, int]],
) -> None:
    """Once it is the oldest."""
    made = waves(arrivals)
    begun = 0
    for seq, (_, tokens) in enumerate(arrivals):
        flat = [span for wave in made for span in wave]
        last = max(i for i, span in enumerate(flat) if span.seq == seq)
        older = [i for i, span in enumerate(flat) if span.seq < seq]
        begun = max(begun, *older, 0)  # from here on it is the oldest
        passed = sum(s.end - s.begin for s in flat[begun + 1 : last] if s.seq > seq)
        assert passed <= tokens + WAVE // 2
        begun = max(begun, last)


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
