"""The hints of a stage against SGLang's own answers, under random operations on real trees."""

from __future__ import annotations

import random
from array import array
from typing import Any

import pytest
from sglang.srt.mem_cache.base_prefix_cache import EvictParams, MatchPrefixParams
from sglang.srt.mem_cache.unified_cache.components.base import ComponentType
from trees import ALL, CORES, RealTree, hybrid, plain

from sglang_wavepp.radix.tree import RequestPrefix

OPERATIONS = 8400
"""Changes and comparisons on each of the twelve plain trees: more than 100,000 in all."""
HYBRID_OPERATIONS = 4000
QUERIES = 4
"""Comparisons after each step."""


class Fuzz:
    """Random operations on one tree, of requests that share prefixes and namespaces."""

    def __init__(self, tree: RealTree, seed: int) -> None:
        self.tree, self.rng = tree, random.Random(seed)
        self.known: list[tuple[array[int], str | None, str | None]] = []
        self.locks: list[Any] = []
        self.operations = self.inserted = self.refused = 0

    def step(self) -> None:
        """One operation, or one insert in chunks."""
        operations = {
            self.insert: 45, self.split: 12, self.lock: 10, self.unlock: 10, self.evict: 14, self.allocate: 8
        }  # fmt: skip
        operation = self.rng.choices([*operations, self.reset], [*operations.values(), 0.15])[0]
        operation()
        self.operations += operation != self.insert

    def insert(self) -> None:
        """New tokens, an extension or a branch; in chunks; recomputed in part; from a request or not."""
        rng = self.rng
        if self.known and rng.random() < 0.75:
            tokens, *namespace = rng.choice(self.known)
            tokens = tokens[: rng.choice([len(tokens), rng.randrange(len(tokens) + 1)])]
        else:
            tokens, namespace = (
                array("q"),
                rng.choices([None, "lora", ""], [4, 1, 1]) + rng.choices([None, "salt", ""], [4, 1, 1]),
            )
        tokens = tokens + array("q", rng.choices(range(3), k=rng.randrange(1, 250)))
        prefix = self.tree.prefix(tokens, *namespace)
        chunk = -(-len(tokens) // rng.choice([1, 1, 2, 3, 5]))
        reuse = rng.choice([ALL, rng.randrange(len(tokens) + 1)])
        for end in range(chunk, len(tokens) + chunk, chunk):
            self.checkpoint(prefix, min(end, len(tokens)), reuse)
            reuse = max(reuse, end)
        self.known = [*self.known[-50:], (tokens, *namespace)]

    def checkpoint(self, prefix: RequestPrefix, end: int, reuse: int) -> None:
        fits = self.tree.insert(prefix, end, reuse=reuse, checkpoint=self.rng.random() < 0.5)
        self.operations += 1
        self.inserted += fits
        self.refused += not fits

    def query(self) -> RequestPrefix:
        """What to compare hint and tree for."""
        self.operations += 1
        return self._some()

    def _some(self) -> RequestPrefix:
        """A known request or the beginning of one."""
        tokens, extra_key, cache_salt = self.rng.choice(self.known or [(array("q", [1]), None, None)])
        cut = self.rng.choice([len(tokens), self.rng.randrange(1, len(tokens) + 1)])
        return self.tree.prefix(tokens[:cut], extra_key, cache_salt)

    def split(self) -> None:
        """Matching what ends inside a node splits it."""
        self.tree.cache.match_prefix(MatchPrefixParams(key=self._some().key(ALL)))

    def lock(self) -> None:
        prefix = self._some()
        self.locks.append(self.tree.lock(prefix, self.tree.match(prefix, prefix.length)))
        if len(self.locks) > 6:
            self.unlock()

    def unlock(self) -> None:
        if self.locks:
            self.tree.give_back(self.locks.pop(self.rng.randrange(len(self.locks))))

    def evict(self) -> None:
        self.tree.evict(self.rng.randrange(1, 800))

    def allocate(self) -> None:
        """Evicts for an allocation."""
        pages = self.rng.randrange(self.tree.pool // self.tree.page_size)
        self.tree.allocate(pages * self.tree.page_size)
        self.tree.free()

    def reset(self) -> None:
        self.locks.clear()
        self.known.clear()
        self.tree.reset()

    def end(self) -> None:
        """With everything unlocked nothing is lost, and with everything evicted nothing is left."""
        while self.locks:
            self.unlock()
        tree, index = self.tree, self.tree.hints.index
        assert tree.free_tokens() + tree.evictable_tokens() == tree.pool
        tree.check()
        tree.evict()
        assert index.statistics().duplicates == index.statistics().missing == 0
        assert len(index) == len(tree.cache._owned) == len(tree.cache._states) == 0
        tree.check()


@pytest.mark.parametrize("page, block", [(1, 1), (1, 16), (1, 64), (16, 16), (16, 64), (64, 64)])
@pytest.mark.parametrize("core", CORES)
def test_the_index_knows_each_whole_block_that_is_cached_and_no_other(
    core: str, page: int, block: int
) -> None:
    tree = plain(core, page, 3000 // page * page, block)
    fuzz = Fuzz(tree, seed=1000 * page + block)
    while fuzz.operations < OPERATIONS:
        fuzz.step()
        for _ in range(QUERIES):
            prefix = fuzz.query()
            cached = tree.resident(prefix)
            assert tree.hints.index.probe(prefix.hashes()) * block == cached // block * block
            assert 0 <= tree.match(prefix, prefix.max_boundary).boundary - tree.hint(prefix) < block
    assert fuzz.inserted > OPERATIONS // 10 and fuzz.refused < fuzz.inserted // 4
    assert tree.hints.index.statistics().removed > 0
    fuzz.end()


class HybridFuzz(Fuzz):
    """The same with recurrent states, at block ends and elsewhere, and evictions of states alone."""

    def __init__(self, tree: RealTree, seed: int) -> None:
        super().__init__(tree, seed)
        self.states: set[tuple[str | None, str | None, bytes]] = set()
        """Every position that got a state since the last reset."""
        self.kept: set[tuple[str | None, str | None, bytes]] = set()
        """Of these, the ones that are still in the tree."""

    def checkpoint(self, prefix: RequestPrefix, end: int, reuse: int) -> None:
        tree, rng = self.tree, self.rng
        grid = rng.choice([tree.page_size, tree.hints.block])
        end = end // grid * grid
        if not end:
            return
        before = self.inserted
        super().checkpoint(prefix, end, reuse)
        if self.inserted > before:
            req = prefix.req
            self.states.add((req.extra_key, req.cache_salt, prefix.tokens[:end].tobytes()))
            if rng.random() < 0.2:
                super().checkpoint(prefix, end, ALL)  # another state for the same place

    def evict(self) -> None:
        if self.rng.random() < 0.5:
            super().evict()
        else:
            self.tree.cache.evict(EvictParams(mamba_num=self.rng.randrange(1, 5)))

    def reset(self) -> None:
        super().reset()
        self.states.clear()

    def census(self) -> int:
        """Looks every state up that there ever was; how many at block ends are left."""
        core = self.tree.cache.tree_core
        self.kept = {state for state in self.states if self._has(core, *state)}
        assert len(self.kept) == self.tree.states - self.tree.rows.mamba_allocator.available_size()
        return sum(not len(tokens) // 8 % self.tree.hints.block for *_, tokens in self.kept)

    def _has(self, core: Any, extra_key: str | None, cache_salt: str | None, tokens: bytes) -> bool:
        ids = array("q")
        ids.frombytes(tokens)
        matched, node, pinned = core.match_full_device_prefix(
            self.tree.prefix(ids, extra_key, cache_salt).key(ALL)
        )
        whole = matched == pinned == len(ids)
        return whole and core.get_component_device_value(node, ComponentType.MAMBA) is not None


@pytest.mark.parametrize("page, block", [(1, 16), (16, 64), (64, 64)])
@pytest.mark.parametrize("core", CORES)
def test_hybrid_hints_end_at_the_last_recurrent_state_that_a_block_ends_at(
    core: str, page: int, block: int
) -> None:
    tree = hybrid(core, page, 3000 // page * page, block, states=24)
    assert tree.hints.snapshots is not None
    fuzz = HybridFuzz(tree, seed=1000 * page + block)
    unaligned = 0
    while fuzz.operations < HYBRID_OPERATIONS:
        fuzz.step()
        for _ in range(QUERIES):
            prefix = fuzz.query()
            limit = fuzz.rng.choice([prefix.max_boundary, fuzz.rng.randrange(prefix.length + 1)])
            hint = tree.hints.boundary(prefix.hashes(), limit)
            match = tree.match(prefix, limit)
            truth = tree.cache.match_prefix(MatchPrefixParams(key=prefix.key(limit))).device_prefix_len
            assert match.boundary == truth
            ends = [end for end, _ in match.ends]
            assert ends == sorted(ends, reverse=True) and (truth == 0 or ends[0] == truth)
            if truth % block == 0:
                assert hint == truth
            else:
                unaligned += 1
                assert hint == next((end for end in ends if end % block == 0), 0)
        if fuzz.rng.random() < 0.03:
            assert len(tree.hints.snapshots) == fuzz.census()
    assert len(tree.hints.snapshots) == fuzz.census()
    assert (unaligned > 0) == (page < block)
    assert fuzz.inserted > HYBRID_OPERATIONS // 10
    fuzz.end()
    assert len(tree.hints.snapshots) == 0 and tree.rows.mamba_allocator.available_size() == tree.states
