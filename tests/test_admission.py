"""The protocol as a whole, on model trees: random schedules, unequal tiny pools, aborts, evictions."""

from __future__ import annotations

import random

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
