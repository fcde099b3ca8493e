"""Admission on whole clusters of model trees, for loads that are made for one thing each."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable

import pytest
from cluster import Cluster

from sglang_wavepp.admission import Limits
from sglang_wavepp.leader import Leader
from sglang_wavepp.messages import Decode, Held, HeldItem, Hint, HintItem, HintQuery, Hold, Prefill


def _rest(cluster: Cluster, after: int = 0, then: Callable[[], None] | None = None) -> None:
    """Step until nothing is left to do; call `then` once after `after` steps."""
    for step in range(100_000):
        if step == after and then is not None:
            then()
        moved = cluster.step()
        cluster.check()
        if not moved and step > after:
            cluster.check_quiet()
            return
    raise AssertionError("the cluster did not come to rest")


PREFIX, SUFFIX, FOLLOWERS, BUDGET = 203, 5, 15, 32


def _together(seed: int, stages: int, branches: int = 1, **options: int) -> Cluster:
    """Requests with one long cold prefix, all arriving at once; its second half differs between branches."""
    cluster = Cluster(seed, stages=stages, pools=[3000] * stages, rows=20, budget=BUDGET, **options)
    rng = random.Random(seed)
    trunk = tuple(rng.randrange(50) for _ in range(PREFIX // 2))
    limbs = [(100 + b, *(rng.randrange(50) for _ in range(PREFIX - len(trunk) - 1))) for b in range(branches)]
    for seq in range(FOLLOWERS + 1):
        own = (1000 + seq, *range(2000, 2000 + SUFFIX - 1))
        cluster.submit(seq, (*trunk, *limbs[seq % branches], *own), 3)
    return cluster


@pytest.mark.parametrize("stages", [2, 4])
@pytest.mark.parametrize("branches", [1, 3])
def test_a_cold_prefix_that_arrives_many_times_is_computed_once(stages: int, branches: int) -> None:
    for seed in range(6):
        cluster = _together(seed, stages, branches)
        _rest(cluster)
        trunk = PREFIX // 2
        assert cluster.stages[0].prompt_tokens == (
            trunk + branches * (PREFIX - trunk) + (FOLLOWERS + 1) * SUFFIX
        )


@pytest.mark.parametrize("stages", [2, 4])
def test_the_prefix_goes_on_when_its_first_request_is_aborted(stages: int) -> None:
    for seed in range(6):
        cluster = _together(seed, stages)
        _rest(cluster, after=600, then=lambda c=cluster: c.abort(0))  # type: ignore[misc]
        # What was in flight for the first one may have to be computed again.
        most = PREFIX + (FOLLOWERS + 1) * SUFFIX + 2 * stages * BUDGET
        assert cluster.stages[0].prompt_tokens <= most


def test_a_prefix_that_was_finished_before_the_last_ones_came_is_reused() -> None:
    for seed in range(6):
        cluster = _together(seed, 2)
        late = cluster.payloads[0][0][:PREFIX]
        _rest(cluster, after=5000, then=lambda c=cluster, p=late: c.submit(99, (*p, 7), 3))  # type: ignore[misc]
        assert cluster.stages[0].prompt_tokens == PREFIX + (FOLLOWERS + 1) * SUFFIX + 1


def test_a_committed_request_comes_back_for_a_longer_prefix() -> None:
    """The one ahead of it leaves its output in the tree, which the waiting one's prompt begins with."""
    readmitted = 0
    for seed in range(20):
        cluster = Cluster(seed, stages=2, pools=[3000] * 2, rows=20, budget=BUDGET, ahead=10)
        cluster.sample = lambda: 5
        cluster.submit(0, (1, 2, 3), 8)
        between = BUDGET * (6 + seed // 2)
        cluster.submit(1, tuple(range(100, 100 + between)), 1)
        cluster.submit(2, (1, 2, 3, *([5] * 7), 9), 1, rank=1)  # so it does not pass
        _rest(cluster)
        readmitted += cluster.readmitted
        assert cluster.stages[0].outputs[2] == [5]
        assert cluster.stages[0].prompt_tokens <= 3 + between + 11
    assert readmitted > 0


@pytest.mark.parametrize("ranks", [(0, 0), (0, 1), (1, 0)])
def test_short_prompts_pass_a_long_one_unless_their_rank_is_higher(ranks: tuple[int, int]) -> None:
    """The long one has more tokens than may be committed ahead of their waves."""
    for seed in range(6):
        cluster = Cluster(seed, stages=2, pools=[3000] * 2, rows=20, budget=BUDGET)
        long = tuple(range(10 * BUDGET))
        assert len(long) > cluster.leader.limits.ahead
        cluster.submit(0, long, 1, ranks[0])
        cluster.ready()
        for seq in range(1, 4):
            cluster.submit(seq, (1000 * seq, *range(BUDGET // 4)), 1, ranks[1])
        cluster.ready()
        _rest(cluster)
        ends = {s.seq: w.wave for w in cluster.waves if isinstance(w, Prefill) for s in w.spans if s.last}
        passed = [seq for seq in range(1, 4) if ends[seq] < ends[0]]
        assert passed == ([] if ranks == (0, 1) else [1, 2, 3])


def test_lower_ranks_go_first() -> None:
    for seed in range(6):
        cluster = Cluster(seed, stages=2, pools=[3000] * 2, rows=1, budget=BUDGET)
        for seq in range(6):
            cluster.submit(seq, tuple(range(seq * 100, seq * 100 + 50)), 3, rank=-(seq // 2))
        cluster.ready()
        _rest(cluster)
        # Who came first is on its way before the others were heard of.
        assert sorted(cluster.order) == list(range(6))
        assert [s // 2 for s in cluster.order if s != cluster.order[0]] == sorted(
            (s // 2 for s in cluster.order if s != cluster.order[0]), reverse=True
        )


@pytest.mark.parametrize("interval", [0, 3])
def test_decode_waves_between_prefill_waves(interval: int) -> None:
    """While somebody decodes, each wave of prompts is followed by `interval` decode waves."""
    cluster = Cluster(3, stages=2, pools=[3000] * 2, budget=BUDGET, interval=interval)
    cluster.submit(0, (1, 2, 3), 200)
    cluster.submit(1, tuple(range(100, 100 + 12 * BUDGET)), 1)
    _rest(cluster)
    kinds = "".join("p" if isinstance(d, Prefill) else "d" for d in cluster.waves)
    between = [len(run) for run in kinds[kinds.index("d") : kinds.rindex("p")].split("p")]
    assert len(between) >= 10 and kinds.count("d") > 190
    if interval:
        assert set(between[1:]) == {interval}
    else:
        assert max(between) == 1


def test_decode_waves_that_prompts_wait_for_are_under_way_at_the_same_time() -> None:
    cluster = Cluster(3, stages=4, pools=[3000] * 4, budget=BUDGET, interval=4)
    for request in range(4):
        cluster.submit(request, (request, 1, 2), 60)
    cluster.submit(4, tuple(range(100, 100 + 12 * BUDGET)), 1)
    _rest(cluster)
    groups = [d.group for d in cluster.waves if isinstance(d, Decode)]
    assert set(groups) == {0, 1, 2, 3}


def test_stages_that_lack_room_for_different_requests_are_left_alone() -> None:
    """The large pool refuses what is behind in the queue, the small one the head: only this one counts."""
    cluster = Cluster(1, stages=2, pools=[500, 300], rows=20, budget=400)
    cluster.submit(0, tuple(range(200)), 60)
    cluster.ready()
    cluster.deliver_all()
    for seq in (1, 2):
        cluster.submit(seq, tuple(range(1000 * seq, 1000 * seq + 200)), 5)
    before = cluster.delivered
    cluster.ready()
    cluster.deliver_all()
    assert cluster.delivered - before < 100
    _rest(cluster)
    assert set(cluster.stages[0].outputs) == {0, 1, 2}


def test_running_requests_grow_while_the_queue_gives_everything_back() -> None:
    """Before memory is released nobody is admitted, and those that run end, also if they need more room."""
    cluster = Cluster(2, stages=2, pools=[500, 500], rows=20, reserve=8)
    cluster.submit(0, tuple(range(20)), 60)
    while not cluster.sequencer.live:
        cluster.step()
    cluster.submit(1, tuple(range(100, 120)), 5)
    cluster.leader.barrier(True, give_back=True)
    while cluster.step():
        cluster.check()
    assert len(cluster.stages[0].outputs[0]) == 60 and cluster.leader.settled
    cluster.leader.barrier(False)
    cluster.settle()
    _rest(cluster)
    assert set(cluster.stages[0].outputs) == {0, 1}


def test_followers_are_asked_for_their_prefix_together() -> None:
    """Once a common prompt is there, all who waited for it are hinted in a few queries."""
    cluster = _together(4, 2)
    _rest(cluster)
    assert cluster.queries <= 8


@pytest.mark.parametrize(("shorter", "boundary", "rounds"), [(0, 10, 2), (2, 8, 3), (3, 7, 2)])
def test_alike_caches_agree_in_one_hold_on_a_boundary_inside_a_block(
    shorter: int, boundary: int, rounds: int
) -> None:
    cluster = Cluster(1, stages=3, pools=[100] * 3)
    cached = tuple(range(10))  # two and a half blocks
    for stage in cluster.stages:
        stage.tree.insert(cached[: len(cached) - shorter * (stage.rank == 2)])
    cluster.submit(0, (*cached, 98, 99), 2)
    _rest(cluster)
    (event,) = cluster.committed
    assert (event.boundary, event.rounds) == (boundary, rounds)


def test_requests_behind_the_first_lease_no_more_than_their_share() -> None:
    cached, seen = tuple(range(40)), 0
    for seed in range(20):
        cluster = Cluster(seed, stages=2, pools=[200, 300], budget=1000)
        for stage in cluster.stages:
            stage.tree.insert(cached)
        for seq in range(6):
            cluster.submit(seq, (*cached, 1000 + seq), 2)
        most = 0
        while cluster.step():
            most = max(most, sum(a.candidate for a in cluster.leader._queue if a.until))
        cluster.check_quiet()
        seen = max(seen, most)
    assert seen == (1 + 200 * cluster.leader.LEASED_SHARE // len(cached)) * len(cached)


@pytest.mark.parametrize(("shared", "waves", "again"), [(False, 1, False), (False, 2, True), (True, 1, True)])
def test_a_hint_is_asked_for_again_only_where_that_may_pay(shared: bool, waves: int, again: bool) -> None:
    """While one request's round is open another is hinted, and waves of a third are finished."""
    limits = Limits(
        stages=2, pool=1000, running=8, page=1, reserve=4, block=4, ahead=100, wave=100, round_bound=9.0
    )
    leader = Leader(limits, lambda: 0.0)

    def arrive(seq: int, chain: list[int]) -> None:
        leader.arrive(seq, range(8), 4, chain)
        for rank in range(limits.stages):
            leader.on_message(rank, Hint(0, [HintItem(seq, 0)]))
        leader.step()

    def held(seq: int) -> None:
        for rank in range(limits.stages):
            leader.on_message(rank, Held(0, seq + 1, [HeldItem(seq, 3, True)]))

    arrive(0, [10, 11])
    held(0)
    leader.step()
    arrive(1, [20, 21])
    arrive(2, [10, 12] if shared else [30, 31])
    for wave in range(waves):
        leader.wave_finished(wave, [(0, 8)] if wave == 0 else [])
    held(1)
    leader.outbox.clear()
    leader.step()
    (sent,) = (message for _, message in leader.outbox)
    assert isinstance(sent, HintQuery if again else Hold)
    assert [event.seq for event in leader.events] == [0, 1]  # type: ignore[union-attr]


def test_the_next_turn_reuses_all_of_the_turn_before_also_on_stages_that_lag_behind() -> None:
    """It arrives when stage 0 has just ended the turn before; the others have still to apply that."""
    for seed, length in itertools.product(range(4), (3, 30)):  # less than a block, and several
        cluster = Cluster(seed, stages=3, pools=[300] * 3, budget=BUDGET)
        cluster.submit(0, tuple(range(length)), 6)
        while 0 not in cluster.stages[0].outputs or cluster.mail:
            cluster.step()
        # The others hear of the new request, but their loops do nothing yet.
        cluster.takes_its_time = lambda rank: True  # type: ignore[method-assign]
        said = (*range(length), *cluster.stages[0].outputs[0])
        cluster.submit(1, (*said, 97, 98, 99), 2)
        cluster.ready()
        cluster.deliver_all()
        _rest(cluster)
        assert cluster.committed[-1].boundary == len(said) - 1, "all but the last token, which has no KV"
