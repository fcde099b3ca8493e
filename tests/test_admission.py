"""The protocol as a whole, on model trees: random schedules, unequal tiny pools, aborts, evictions."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
from cluster import Cluster


def _run(seed: int, *, stages: int, aborts: bool, tight: bool, page: int) -> Cluster:
    rng = random.Random(seed * 7919 + stages)
    low = 60 if tight else 300
    pools = [(low + rng.randrange(low)) // page * page for _ in range(stages)]
    cluster = Cluster(seed, stages=stages, pools=pools, page=page, rows=rng.choice((2, 8)))
    base = tuple(rng.randrange(3) for _ in range(40))
    arrivals = []
    for seq in range(12):
        tokens = base[: rng.randrange(1, 40)] + tuple(rng.randrange(3) for _ in range(rng.randrange(1, 12)))
        arrivals.append((seq, tokens[: cluster.longest - 8], rng.randrange(1, 30)))
    for _ in range(60_000):
        if arrivals and rng.random() < 0.05:
            cluster.submit(*arrivals.pop(0))
        if aborts and rng.random() < 0.004 and cluster.payloads:
            seq = rng.choice(list(cluster.payloads))
            if seq not in cluster.aborted:
                cluster.abort(seq)
        if rng.random() < 0.01:
            rng.choice(cluster.stages).tree.evict_some(rng)
        moved = cluster.step()
        cluster.check()
        if not moved and not arrivals:
            break
    else:
        raise AssertionError("the cluster did not come to rest")
    cluster.check_quiet()
    return cluster


@pytest.mark.parametrize("stages", [2, 3, 5])
@pytest.mark.parametrize("aborts", [False, True])
@pytest.mark.parametrize("tight", [False, True])
def test_random_schedules_end_equal_on_every_stage(stages: int, aborts: bool, tight: bool) -> None:
    for seed in range(12):
        _run(seed, stages=stages, aborts=aborts, tight=tight, page=4 if seed % 3 == 0 else 1)


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


PREFIX, SUFFIX, FOLLOWERS, BUDGET = 200, 5, 15, 32


def _together(seed: int, stages: int) -> Cluster:
    """Requests with one long cold prefix, all arriving at once."""
    cluster = Cluster(seed, stages=stages, pools=[3000] * stages, rows=20, budget=BUDGET)
    rng = random.Random(seed)
    prefix = tuple(rng.randrange(50) for _ in range(PREFIX))
    for seq in range(FOLLOWERS + 1):
        cluster.submit(seq, (*prefix, 1000 + seq, *range(2000, 2000 + SUFFIX - 1)), 3)
    return cluster


@pytest.mark.parametrize("stages", [2, 4])
def test_a_cold_prefix_that_arrives_many_times_is_computed_once(stages: int) -> None:
    for seed in range(6):
        cluster = _together(seed, stages)
        _rest(cluster)
        block = cluster.leader.limits.block
        least = PREFIX + (FOLLOWERS + 1) * SUFFIX
        assert least <= cluster.stages[0].prompt_tokens <= least + FOLLOWERS * block + BUDGET


@pytest.mark.parametrize("stages", [2, 4])
def test_the_prefix_goes_on_when_its_first_request_is_aborted(stages: int) -> None:
    for seed in range(6):
        cluster = _together(seed, stages)
        _rest(cluster, after=600, then=lambda c=cluster: c.abort(0))  # type: ignore[misc]
        block = cluster.leader.limits.block
        most = PREFIX + (FOLLOWERS + 1) * (SUFFIX + block) + 2 * stages * BUDGET
        assert cluster.stages[0].prompt_tokens <= most
