"""What went wrong for users of pipeline parallelism elsewhere, as scenarios on simulated clusters.

The names say which of the field's cases a test is. The others are where they show best: T2 `soak`, T12
`test_faults`, T18 and T20 `test_parity`, T19 and T23 `test_pipeline_model`, T24 `test_hint_index`; of T1 the
times are those of `benchmarks.admission`.
"""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
from cluster import Cluster
from model_tree import Request
from sim_stage import SimStage

from sglang_wavepp.messages import Held, Hold, HoldItem, Prefill, Release

MOST = 50_000
"""Steps, within which every one of these clusters comes to rest."""


def _rest(cluster: Cluster) -> None:
    for _ in range(MOST):
        moved = cluster.step()
        cluster.check()
        if not moved:
            cluster.check_quiet()
            return
    raise AssertionError("the cluster did not come to rest")


def _until(cluster: Cluster, condition: object) -> None:
    """Step until `condition()`."""
    assert callable(condition)
    for _ in range(MOST):
        if condition():
            return
        assert cluster.step(), "the cluster came to rest before that"
        cluster.check()
    raise AssertionError("it did not happen")


def _nothing_held(stage: SimStage) -> bool:
    s = stage.member.statistics()
    return (s.offered, s.leases, s.committed, s.escrow_tokens, s.escrow_rows) == (0, 0, 0, 0, 0)


@pytest.mark.parametrize("stages", [2, 8, 16])
def test_t1_admission_takes_two_rounds_while_no_loop_moves(stages: int) -> None:
    """One of hints, one of holds, whatever the number of stages and requests."""
    cluster = Cluster(1, stages=stages, pools=[3000] * stages, rows=64, budget=3000)
    for seq in range(64):
        cluster.submit(seq, tuple(range(100 * seq, 100 * seq + 20)), 2)
    cluster.ready()
    cluster.deliver_all()
    assert [event.seq for event in cluster.committed] == list(range(64))
    assert {event.rounds for event in cluster.committed} == {2}
    assert all(stage.log.position == 0 for stage in cluster.stages)
    _rest(cluster)


def test_t3_an_abort_at_any_step_has_one_outcome() -> None:
    """From before the hints to after the last token; a request that shares its prefix goes on."""
    outcomes = set()
    for step in itertools.count():
        cluster = Cluster(7, stages=3, pools=[200, 180, 220], budget=16)
        cluster.sample = lambda: 1
        prompt = tuple(range(40))
        cluster.submit(0, prompt, 4)
        cluster.submit(1, (*prompt[:30], 99), 4)
        over = False
        for _ in range(step):
            over = not cluster.step()
        cluster.abort(0)
        _rest(cluster)
        assert cluster.stages[0].outputs[1] == [1] * 4
        outcomes.add(0 in cluster.stages[0].outputs)
        if over:
            break
    assert step > 100 and outcomes == {True, False}


def test_t4_after_an_abort_every_count_is_zero_as_soon_as_it_was_heard_of() -> None:
    """Also if the abort overtakes the request itself."""
    for built in (True, False):
        cluster = Cluster(1, stages=4, pools=[100] * 4)
        cluster.submit(0, tuple(range(50)), 3)
        if built:
            cluster.ready()
        cluster.abort(0)
        cluster.deliver_all()
        assert all(map(_nothing_held, cluster.stages)) and cluster.leader.idle
        assert not any(stage.building for stage in cluster.stages)


@pytest.mark.parametrize("slot", range(8))
def test_t5_an_abort_finds_its_request_in_every_place_of_the_ring(slot: int) -> None:
    cluster = Cluster(3, stages=4, pools=[3000] * 4, budget=10, rows=16)
    cluster.takes_its_time = lambda rank: rank == 3  # type: ignore[method-assign]
    for seq in range(12):
        cluster.submit(seq, tuple(range(100 * seq, 100 * seq + 10)), 3)
    _until(cluster, lambda: cluster.sequencer.in_flight == 8)
    (victim,) = (span.seq for span in cluster.waves[slot].spans)  # type: ignore[union-attr]
    cluster.abort(victim)
    cluster.takes_its_time = lambda rank: False  # type: ignore[method-assign]
    _rest(cluster)
    assert set(cluster.stages[0].outputs) == set(range(12)) - {victim}


def test_t6_no_clock_but_that_of_stage_0_is_looked_at_and_no_decision_hangs_on_it() -> None:
    """A clock that jumps about changes nothing: waits are ended by what happens, or end the server."""
    logs = set()
    for hours in (0.0, 3600.0, -3600.0):
        cluster = Cluster(11, stages=4, pools=[200, 190, 180, 210], budget=16)
        for seq in range(6):
            cluster.submit(seq, tuple(range(20 * seq, 20 * seq + 50)), 8)
        for step in itertools.count():
            if not cluster.step():
                break
            cluster.now += hours * (step % 7 == 3)
            if step == 200:
                cluster.abort(5)
        cluster.check_quiet()
        logs.add((cluster.stages[0].log.position, cluster.stages[0].log.digest))
    assert len(logs) == 1
    root = Path(__file__).parents[1]
    for name in ("member", "log"):
        assert "import time" not in (root / "sglang_wavepp" / f"{name}.py").read_text()
    for source in (root / "radix").glob("*.py"):
        assert "import time" not in source.read_text()


def test_t7_nobody_is_admitted_before_all_stages_are_ready() -> None:
    for late in range(3):
        cluster = Cluster(1, stages=3, pools=[100] * 3)
        cluster.submit(0, tuple(range(20)), 2)
        for rank in (1, 2):
            cluster._deliver_offer(rank)
        for rank in {0, 1, 2} - {late}:
            cluster.build(0, rank)
        cluster.settle()
        cluster.deliver_all()
        assert not cluster.committed
        cluster.build(0, late)
        cluster.settle()
        cluster.deliver_all()
        assert [event.seq for event in cluster.committed] == [0]


def test_t8_the_smallest_stage_decides_what_fits() -> None:
    """Pools that differ by a twentieth; two requests that the others could hold together do not fit there."""
    cluster = Cluster(1, stages=3, pools=[100, 95, 100], reserve=4, budget=100)
    cluster.submit(0, tuple(range(44)), 4)
    cluster.submit(1, tuple(range(100, 144)), 4)
    most = 0
    for _ in range(MOST):
        moved = cluster.step()
        cluster.check()
        most = max(most, cluster.sequencer.live)
        if not moved:
            break
    cluster.check_quiet()
    assert most == 1 and set(cluster.stages[0].outputs) == {0, 1}


@pytest.mark.parametrize("order", list(itertools.permutations(range(4))))
def test_t9_the_agreed_prefix_does_not_depend_on_who_answers_first(order: tuple[int, ...]) -> None:
    cached = (176, 180, 164, 172)
    cluster = Cluster(1, stages=4, pools=[400] * 4, budget=400)
    prompt = tuple(range(200))
    for stage, tokens in zip(cluster.stages, cached, strict=True):
        stage.tree.insert(prompt[:tokens])
    cluster.submit(0, prompt, 1)
    cluster.ready()
    for _ in range(20):
        for rank in order:
            while rank and cluster.to_member[rank].frames:
                cluster._deliver_to_member(rank)
            while cluster.to_leader[rank].frames:
                cluster._deliver_to_leader(rank)
        cluster.settle()
    assert [event.boundary for event in cluster.committed] == [164]
    assert [stage.member.leases.tokens for stage in cluster.stages] == [164] * 4
    _rest(cluster)


def test_t10_a_stage_that_knows_nothing_of_a_request_answers_the_round() -> None:
    cluster = Cluster(1, stages=2, pools=[100] * 2)
    answers: list[object] = []
    member = cluster.stages[1].member
    member._send = answers.append
    member.on_message(Hold(0, 5, [HoldItem(77, 0, 10)]))
    (held,) = answers
    assert isinstance(held, Held) and held.round == 5 and [item.granted for item in held.items] == [False]
    member.on_message(Release(0, [77]))
    assert _nothing_held(cluster.stages[1])


def test_t11_one_running_request_and_tiny_chunks_make_progress() -> None:
    cluster = Cluster(1, stages=2, pools=[400] * 2, rows=1, budget=2)
    for seq in range(3):
        cluster.submit(seq, tuple(range(1000 * seq, 1000 * seq + 101)), 5)
    _rest(cluster)
    assert set(cluster.stages[0].outputs) == {0, 1, 2}


def test_t13_small_requests_do_not_starve_a_large_one() -> None:
    for seed in range(10):
        cluster = Cluster(seed, stages=2, pools=[300] * 2, rows=20, budget=50)
        for seq in range(4):
            cluster.submit(seq, tuple(range(100 * seq, 100 * seq + 50)), 10)
        _until(cluster, lambda c=cluster: c.sequencer.live == 4)  # type: ignore[misc]
        cluster.submit(4, tuple(range(1000, 1250)), 5)
        cluster.ready()
        for seq in range(5, 25):
            cluster.submit(seq, tuple(range(2000 + 10 * seq, 2000 + 10 * seq + 5)), 3)
        _rest(cluster)
        assert cluster.order.index(4) == 4, "the large one is the next that was committed"


def test_t14_the_longest_request_is_admitted_however_much_is_leased() -> None:
    """Many with long cached prefixes wait when a request comes that needs almost the whole pool."""
    for seed in range(10):
        cluster = Cluster(seed, stages=3, pools=[210, 200, 220], rows=6, budget=40)
        cached = [tuple(range(1000 * k, 1000 * k + 60)) for k in range(3)]
        for stage in cluster.stages:
            for tokens in cached:
                stage.tree.insert(tokens)
        for seq in range(12):
            cluster.submit(seq, (*cached[seq % 3], 5000 + seq), 4)
        cluster.submit(12, tuple(range(7000, 7000 + cluster.longest - 2)), 2)
        for seq in range(13, 20):
            cluster.submit(seq, (*cached[seq % 3], 5000 + seq), 4)
        _rest(cluster)
        assert set(cluster.stages[0].outputs) == set(range(20))


def test_t15_short_suffixes_share_a_wave() -> None:
    cluster = Cluster(1, stages=2, pools=[3000] * 2, rows=32, budget=64)
    for seq in range(16):
        cluster.submit(seq, tuple(range(100 * seq, 100 * seq + 8)), 1)
    cluster.ready()
    cluster.deliver_all()
    while cluster.inbox or cluster.stages[0].busy:
        cluster._loop0(0)  # as the real loop: first all that came in, then the plan
    _rest(cluster)
    first = cluster.waves[0]
    assert isinstance(first, Prefill) and len(first.spans) == 8


def test_t16_hybrid_stages_agree_on_a_state_that_all_of_them_have() -> None:
    """States are sparse, and others on each stage: what is common is found below what each has."""
    prompt = tuple(range(60))
    kept = ((8, 24, 40), (8, 16, 24, 48), (8, 24, 32))
    cluster = Cluster(1, stages=3, pools=[300] * 3, states=[20] * 3, budget=100)
    for stage, states in zip(cluster.stages, kept, strict=True):
        for end in states:
            stage.tree.private_states += 1
            stage.tree.insert(prompt[:end])
    cluster.submit(0, prompt, 2)
    _rest(cluster)
    (event,) = cluster.committed
    assert event.boundary == 24


def test_t17_the_index_forgets_states_that_were_evicted() -> None:
    cluster = Cluster(5, stages=2, pools=[150] * 2, states=[10] * 2, budget=16)
    for seq in range(30):
        cluster.submit(seq, tuple(range(seq % 3, seq % 3 + 40 + seq)), 3)
        _rest(cluster)
        for stage in cluster.stages:
            snapshots = stage.tree.hints.snapshots
            assert snapshots is not None
            aligned = [node for node in stage.tree._states if node.depth % stage.tree.hints.block == 0]
            assert len(snapshots) == len(aligned) <= 10
            stage.tree.evict_some(cluster.rng)


@pytest.mark.parametrize("ahead", [1, 2, 4])
def test_t21_outputs_do_not_depend_on_how_far_stage_0_runs_ahead(ahead: int) -> None:
    cluster = Cluster(1, stages=4, pools=[200] * 4, budget=16)
    cluster.sequencer._run_ahead = ahead
    most = 0
    for seq in range(6):
        cluster.submit(seq, tuple(range(30 * seq, 30 * seq + 40)), 6)
    for _ in range(MOST):
        if not cluster.step():
            break
        most = max(most, cluster.sequencer.in_flight)
    cluster.check_quiet()
    assert most == ahead
    assert {seq: len(tokens) for seq, tokens in cluster.stages[0].outputs.items()} == dict.fromkeys(
        range(6), 6
    )


def test_t25_a_victim_that_finds_another_owner_is_spared_and_another_one_goes() -> None:
    """Escrow counts on what is cached; before the loop allocates, a part of that is leased."""
    cluster = Cluster(1, stages=2, pools=[100] * 2)
    tree, member, answers = cluster.stages[1].tree, cluster.stages[1].member, []
    tree.insert(tuple(range(40)))
    tree.insert(tuple(range(50, 90)))
    member._send = answers.append
    cold, warm = Request(0, tuple(range(200, 245)), 1), Request(1, tuple(range(50, 95)), 1)
    member.offered(0, cold)
    member.offered(1, warm)
    member.on_message(Hold(0, 1, [HoldItem(0, 0, 45), HoldItem(1, 40, 45)]))
    held = answers[-1]
    assert isinstance(held, Held) and [(i.boundary, i.granted) for i in held.items] == [(0, True), (40, True)]
    tree.allocate(45, cluster.rng)
    assert tree.match(warm, 44).boundary == 40
    assert tree.match(Request(2, tuple(range(40)), 1), 40).boundary < 40, "the other one went"
