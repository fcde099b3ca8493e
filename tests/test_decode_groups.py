"""Decode groups: which one finished prompts join, and what is learned of rows."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_wavepp.decode_groups import DecodeGroups
from sglang_wavepp.launch.pipeline_server import PipelineServer
from sglang_wavepp.launch.workload import Offered, ServerOptions
from sglang_wavepp.mpu.profile import Profile


def filled(sizes: Sequence[int], rows: int = 64) -> DecodeGroups:
    """Groups of these sizes."""
    groups = DecodeGroups(len(sizes), rows)
    seq = 0
    for group, size in enumerate(sizes):
        for _ in range(size):
            groups.join(group, seq)
            seq += 1
    return groups


def learned(wave: float, row: float, token: float, sizes: Sequence[int], context: int = 1000) -> DecodeGroups:
    """One group that has had waves of these sizes, which took what the arguments say, in microseconds."""
    groups = DecodeGroups(1, 64)
    for number, size in enumerate(sizes):
        run(groups, number, size, size * context, wave + size * (row + token * context))
    return groups


def run(groups: DecodeGroups, wave: int, size: int, context: int, took: float) -> None:
    """A wave of the only group, of this size from then on."""
    while len(groups) < size:
        groups.join(0, len(groups))
    while len(groups) > size:
        groups.leave(0, len(groups) - 1)
    groups.issued(0, wave, context)
    groups.took(wave, round(took))
    groups.output(0)


def test_finished_prompts_fill_the_fullest_group_with_room() -> None:
    groups = filled([1, 3, 2, 0])
    assert groups.filled == 4
    assert groups.choose(1, prompts_wait=True) == 1
    assert groups.choose(2, prompts_wait=True) == 2
    assert groups.choose(4, prompts_wait=True) == 3  # none of the others has room: a new one


def test_without_prompts_that_wait_there_are_two_groups_and_more_beyond_a_few_rows() -> None:
    assert filled([2, 0, 0]).choose(1, prompts_wait=True) == 0
    assert filled([2, 0, 0]).choose(1, prompts_wait=False) == 1
    assert filled([2, 1, 0]).choose(1, prompts_wait=False) == 0
    groups = filled([5, 4, 0])
    groups.filled = 12
    assert [groups.choose(1, wait) for wait in (True, False)] == [0, 2]


def test_groups_beyond_what_fills_them_grow_evenly() -> None:
    assert filled([6, 5, 7]).choose(1, prompts_wait=True) == 1


@pytest.mark.parametrize(
    ("row", "token", "most"), [(70, 0.0, 8), (0, 0.07, 8), (10_000, 0.0, 1), (0, 0.0, 12), (30, 0.0, 12)]
)
def test_it_learns_how_many_rows_make_a_wave_longer_by_three_percent(
    row: float, token: float, most: int
) -> None:
    """Up to twice the rows of the largest wave, of six."""
    groups = learned(20_000, row, token, [1 + n % 6 for n in range(64)])
    assert groups.filled == pytest.approx(most, abs=1)


@given(st.lists(st.tuples(st.integers(1, 6), st.floats(0.8, 1.2)), min_size=64, max_size=128))
@settings(max_examples=30, deadline=None)
def test_noise_does_not_make_groups_larger_than_was_tried(waves: list[tuple[int, float]]) -> None:
    groups = filled([6])
    for number, (rows, noise) in enumerate(waves):
        run(groups, number, rows, rows * 1000, 20_000 * noise)
    assert 1 <= groups.filled <= 2 * max(4, *(rows for rows, _ in waves))


def test_nothing_is_learned_from_waves_that_are_all_alike_or_long_past() -> None:
    assert learned(20_000, 50, 0.0, [3] * 64).filled == 4
    sizes = [1 + n % 6 for n in range(64)]
    assert learned(20_000, 70, 0.0, sizes + [3] * 400).filled == pytest.approx(8, abs=1)
    assert learned(20_000, 10_000, 0.0, sizes + [1] * 400).filled == 4, "larger groups have to be tried again"
    groups = filled([1])
    for number in range(64):
        groups.issued(0, number, 100)
        groups.took(number - 10, 20_000)
    assert groups.filled == 4


@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 3), st.integers(1, 5), st.booleans()), max_size=60))
def test_no_request_is_lost_and_each_group_has_one_wave_in_flight(
    steps: list[tuple[int, int, bool]],
) -> None:
    groups, inside, wave, seq = DecodeGroups(3, 8), {}, 0, 0
    flying: dict[int, list[int]] = {}
    for kind, count, wait in steps:
        if kind == 0:
            group = groups.choose(count, wait)
            for _ in range(count):
                groups.join(group, seq)
                inside[seq] = group
                seq += 1
        elif kind == 1 and inside:
            gone = sorted(inside)[count % len(inside)]
            groups.leave(inside.pop(gone), gone)
        elif kind == 2:
            for group, seqs in list(groups.ready()):
                assert group not in flying and seqs and all(inside[s] == group for s in seqs)
                groups.issued(group, wave, len(seqs))
                flying[group] = list(seqs)
                wave += 1
        elif flying:
            group = min(flying)
            groups.output(group)
            del flying[group]
        assert len(groups) == len(inside)
    assert {g for g, _ in groups.ready()} == set(inside.values()) - set(flying)


def test_where_decode_only_reads_weights_prefill_gets_the_time_of_the_waves_that_it_saves(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    profile = Profile(
        name="weights",
        flops_per_token=4e-5,
        attention_flops=0.0,
        kv_bytes_per_token=0.0,
        weight_bytes=0.08,
        activation_bytes=0.0,
        flops=1.0,
        bandwidth=1.0,
    )
    offered = [Offered(tokens=4000 + n % 7, output=8) for n in range(256)]

    def served() -> tuple[float, float]:
        server = PipelineServer(profile, ServerOptions(stages=4, budget=4096, page=1, floor=64))
        outcome = server.run(offered, concurrency=64)
        assert all(s.produced == 8 for s in outcome.served)
        return outcome.seconds, max(outcome.busy)

    seconds, busy = served()
    choose = DecodeGroups.choose
    monkeypatch.setattr(DecodeGroups, "choose", lambda groups, rows, _: choose(groups, rows, False))
    spread_seconds, spread_busy = served()
    assert seconds < 0.9 * spread_seconds and busy < 0.9 * spread_busy
