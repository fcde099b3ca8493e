"""The hint index against obvious models: a recomputed hash chain, a linear probe, a set of prefixes."""

from __future__ import annotations

import struct
import sys
import threading
from array import array
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from sglang_wavepp.hint_index import (
    HintIndex,
    HintIndexStatistics,
    Hints,
    KnownChains,
    Snapshot,
    SnapshotIndex,
    chain,
    seed_of,
)
from sglang_wavepp.hint_index.known import STRIDE
from sglang_wavepp.hint_index.snapshots import SEGMENT

SEED = seed_of(0x1234_5678_9ABC_DEF0, None, None)

token_ids = st.integers(min_value=-(2**63), max_value=2**63 - 1)
token_lists = st.lists(token_ids, max_size=80)
blocks = st.integers(min_value=1, max_value=9)
namespaces = st.tuples(st.none() | st.text(max_size=6), st.none() | st.text(max_size=6))


def model_chain(tokens: Sequence[int], block: int, seed: int) -> list[int]:
    """The definition, spelled out."""
    hashes: list[int] = []
    for k in range(len(tokens) // block):
        data = struct.pack(f"={block}q", *tokens[k * block : (k + 1) * block])
        hashes.append(xxhash.xxh3_64_intdigest(data, hashes[-1] if hashes else seed))
    return hashes


def linear_probe(present: set[int], hashes: Sequence[int]) -> int:
    for k, h in enumerate(hashes):
        if h not in present:
            return k
    return len(hashes)


def chain_of_length(n: int, start: int = 0) -> array[int]:
    return chain(array("q", range(start, start + n)), 1, SEED)


class WatchedChain(Sequence[int]):
    """A chain that runs `on_access` before each read, so that a test decides what happens in mid-call."""

    def __init__(self, hashes: Sequence[int], on_access: Callable[[], None]) -> None:
        self._hashes = hashes
        self._on_access = on_access

    def __len__(self) -> int:
        return len(self._hashes)

    def __getitem__(self, k):  # type: ignore[no-untyped-def]
        if isinstance(k, slice):
            return WatchedChain(self._hashes[k], self._on_access)
        self._on_access()
        return self._hashes[k]


# ---------------------------------------------------------------------------------------------- chain


@given(token_lists, blocks, st.integers(min_value=0, max_value=2**64 - 1))
def test_chain_is_its_definition(tokens: list[int], block: int, seed: int) -> None:
    result = chain(array("q", tokens), block, seed)
    assert result.typecode == "Q"
    assert result.tolist() == model_chain(tokens, block, seed)


@given(token_lists, blocks, st.data())
def test_incremental_chain_equals_full_chain(tokens: list[int], block: int, data: st.DataObject) -> None:
    full = chain(array("q", tokens), block, SEED)
    grown: array[int] | None = None
    for cut in [*sorted(data.draw(st.lists(st.integers(0, len(tokens)), max_size=4))), len(tokens)]:
        before = grown[:] if grown is not None else None
        known = grown
        grown = chain(array("q", tokens[:cut]), block, SEED, have=known)
        assert known == before, "have must not be modified"
        assert grown == full[: cut // block]
    assert grown == full


def test_longer_known_chain_is_cut_to_the_tokens() -> None:
    tokens = array("q", range(40))
    full = chain(tokens, 4, SEED)
    for n in range(41):
        assert chain(tokens[:n], 4, SEED, have=full) == full[: n // 4]


def test_only_the_tokens_after_the_known_part_are_hashed() -> None:
    known = array("Q", [7, 8])  # trusted, not verified
    tokens = array("q", range(12))
    assert chain(tokens, 4, SEED, have=known).tolist() == [7, 8, *model_chain(tokens[8:], 4, 8)]


@given(st.lists(token_ids, min_size=1, max_size=60), blocks, st.data())
def test_a_changed_token_changes_its_block_and_all_later_ones(
    tokens: list[int], block: int, data: st.DataObject
) -> None:
    position = data.draw(st.integers(0, len(tokens) - 1))
    other = list(tokens)
    other[position] = data.draw(token_ids.filter(lambda t: t != tokens[position]))
    a = chain(array("q", tokens), block, SEED)
    b = chain(array("q", other), block, SEED)
    same = [x == y for x, y in zip(a, b, strict=True)]
    assert same == [k < position // block for k in range(len(a))]


@pytest.mark.parametrize("make", [np.array, lambda a: memoryview(a), lambda a: memoryview(a)[0:]])
def test_any_int64_buffer_gives_the_same_chain(make: Callable[[array[int]], memoryview[int]]) -> None:
    tokens = array("q", range(50))
    assert chain(make(tokens), 8, SEED) == chain(tokens, 8, SEED)
    assert chain(make(array("q", range(3))), 8, SEED) == array("Q")


def test_the_tokens_may_grow_again_after_the_call() -> None:
    tokens = array("q", range(8))
    chain(tokens, 4, SEED)
    tokens.append(8)  # BufferError if the call had kept the buffer
    with pytest.raises(ValueError, match="block"):
        chain(tokens, 0, SEED)
    tokens.append(9)


@pytest.mark.parametrize(
    "tokens",
    [
        array("i", range(8)),
        array("d", range(8)),
        array("Q", range(8)),
        bytes(64),
        np.arange(16)[::2],
        np.arange(16).reshape(4, 4),
        np.arange(8).astype(">i8"),
    ],
    ids=["int32", "float64", "uint64", "bytes", "strided", "two-dimensional", "big-endian"],
)
def test_other_buffers_are_refused(tokens: object) -> None:
    with pytest.raises(TypeError, match="int64"):
        chain(tokens, 4, SEED)  # type: ignore[arg-type]


def test_bad_arguments_are_refused() -> None:
    tokens = array("q", range(8))
    for block in (0, -1):
        with pytest.raises(ValueError, match="block"):
            chain(tokens, block, SEED)
    for seed in (-1, 2**64):
        with pytest.raises(ValueError, match="seed"):
            chain(tokens, 4, seed)
        with pytest.raises(ValueError, match="seed"):
            seed_of(seed, None, None)
    with pytest.raises(TypeError, match="have"):
        chain(tokens, 4, SEED, have=array("q", [1]))


# ----------------------------------------------------------------------------------------- namespaces


@given(namespaces, namespaces)
def test_namespaces_differ_exactly_as_radix_keys_do(
    a: tuple[str | None, str | None], b: tuple[str | None, str | None]
) -> None:
    same = (a[0], a[1] or None) == (b[0], b[1] or None)
    assert (seed_of(1, *a) == seed_of(1, *b)) is same
    tokens = array("q", range(12))
    shared = set(chain(tokens, 4, seed_of(1, *a))) & set(chain(tokens, 4, seed_of(1, *b)))
    assert len(shared) == (3 if same else 0)


def test_namespace_parts_do_not_run_together() -> None:
    pairs = [
        ("ab", "c"), ("a", "bc"), ("a+b", None), ("a", "b-"), ("abc", None), (None, "abc"), ("", "abc"),
        ("abc-", None), ("-", None), ("+", None), ("\ud800", None), ("?", None), (None, None), ("", None),
    ]  # fmt: skip
    assert len({seed_of(5, *pair) for pair in pairs}) == len(pairs)
    assert seed_of(5, "a", "") == seed_of(5, "a", None)


def test_seeds_belong_to_one_server() -> None:
    assert len({seed_of(base, "lora", "salt") for base in (0, 1, 2, 2**64 - 1)}) == 4
    assert seed_of(9, "lora", "salt") == seed_of(9, "lora", "salt")


# -------------------------------------------------------------------------------------- add and remove


def test_statistics_count_blocks_and_show_a_broken_discipline() -> None:
    index, hashes = HintIndex(), chain_of_length(10)
    index.add(hashes, 0, len(hashes))
    index.remove(hashes, 6, 10)
    assert index.statistics() == HintIndexStatistics(
        blocks=6, added=10, removed=4, duplicates=0, missing=0, clears=0
    )
    index.add(hashes, 4, len(hashes))  # blocks 4 and 5 are there: idempotent, but counted
    index.remove(hashes, 9, 10)
    index.remove(hashes, 8, 10)  # block 9 is gone already
    assert index.probe(hashes) == len(index) == 8
    index.clear()
    assert index.statistics() == HintIndexStatistics(
        blocks=0, added=14, removed=6, duplicates=2, missing=1, clears=1
    )
    with pytest.raises(AttributeError):
        index.statistics().blocks = 1  # type: ignore[misc]


@pytest.mark.parametrize("start, end", [(-1, 2), (2, 1), (0, 5), (5, 5)])
def test_ranges_outside_the_chain_change_nothing(start: int, end: int) -> None:
    index, hashes = HintIndex(), chain_of_length(4)
    index.add(hashes, 0, len(hashes))
    with pytest.raises(ValueError, match="chain of 4 blocks"):
        index.remove(hashes, start, end)
    if not 0 <= start <= 4:
        with pytest.raises(ValueError, match="chain of 4 blocks"):
            index.add(hashes, start, len(hashes))
    assert index.probe(hashes) == len(index) == 4


def test_exactly_the_named_blocks_change() -> None:
    index, hashes = HintIndex(), chain_of_length(10)
    index.add(hashes, 7, len(hashes))  # beside the discipline: the index adds no more than it is told
    assert len(index) == 3
    index.add(hashes, 0, 7)
    index.remove(hashes, 2, 5)
    assert len(index) == 7
    assert index.probe(hashes[:5]) == 2


def test_received_buffers_serve_as_chains() -> None:
    index, hashes = HintIndex(), chain_of_length(20)
    frame = memoryview(hashes.tobytes()).cast("Q")
    index.add(frame, 0, len(frame))
    assert index.probe(frame) == index.probe(hashes) == 20
    index.remove(frame, 5, 20)
    assert index.probe(frame) == index.probe(hashes) == 5


# ---------------------------------------------------------------------------------------------- probe


def test_probe_equals_linear_scan_for_every_length_and_boundary() -> None:
    for n in range(66):
        hashes = chain_of_length(n)
        index = HintIndex()
        index.add(chain_of_length(40, start=1000), 0, 40)  # somebody else's
        for resident in range(n + 1):
            assert index.probe(hashes) == resident
            if resident < n:
                index.add(hashes, resident, resident + 1)


@given(
    st.lists(st.lists(st.integers(0, 1), max_size=24), max_size=8), st.lists(st.integers(0, 1), max_size=40)
)
def test_probe_equals_linear_scan_on_prefix_closed_sets(residents: list[list[int]], query: list[int]) -> None:
    index, present = HintIndex(), set[int]()
    for tokens in residents:
        hashes = chain(array("q", tokens), 2, SEED)
        index.add(hashes, linear_probe(present, hashes), len(hashes))
        present.update(hashes)
    asked = chain(array("q", query), 2, SEED)
    assert index.probe(asked) == linear_probe(present, asked)
    assert len(index) == len(present)
    assert index.statistics().duplicates == 0


@given(st.lists(st.booleans(), max_size=70))
def test_probe_ends_at_a_present_block_even_in_a_set_with_holes(present: list[bool]) -> None:
    index, hashes = HintIndex(), chain_of_length(len(present))
    for k, there in enumerate(present):
        if there:
            index.add(hashes, k, k + 1)
    answer = index.probe(hashes)
    assert 0 <= answer <= len(hashes)
    assert answer == 0 or present[answer - 1]
    assert answer == len(hashes) or not present[answer]


def test_probe_takes_logarithmically_many_lookups() -> None:
    reads = 0

    def count() -> None:
        nonlocal reads
        reads += 1

    for n in (1, 2, 3, 64, 1000, 3125):
        index, hashes = HintIndex(), chain_of_length(n)
        for resident in {0, 1, n // 3, n // 2, n - 1, n}:
            index.clear()
            index.add(hashes, 0, resident)
            reads = 0
            assert index.probe(WatchedChain(hashes, count)) == resident
            assert reads <= 2 * n.bit_length() + 2
            assert reads <= 2 * (resident + 1).bit_length() + 2, "short answers are cheaper"


# ----------------------------------------------------------------------------------- against a tree


class TreeInStep(RuleBasedStateMachine):
    """The writer's discipline on a model of a paged radix tree: a set of resident page-aligned prefixes.

    Nodes are left out on purpose. Evicting any tail of a leaf, down to where paths part, covers every way
    in which splits may have cut that leaf into nodes. Blocks are two pages, so node boundaries fall inside
    blocks, too.
    """

    PAGE, BLOCK = 2, 4
    Prefix = tuple[str | None, tuple[int, ...]]

    def __init__(self) -> None:
        super().__init__()
        self.index = HintIndex()
        self.resident: set[TreeInStep.Prefix] = set()

    def hashes(self, prefix: Prefix) -> array[int]:
        return chain(array("q", prefix[1]), self.BLOCK, seed_of(3, prefix[0], None))

    def match(self, key: Prefix) -> int:
        """Resident tokens of `key`, by walking page by page."""
        n = 0
        while n + self.PAGE <= len(key[1]) and (key[0], key[1][: n + self.PAGE]) in self.resident:
            n += self.PAGE
        return n

    def children(self, prefix: Prefix) -> list[Prefix]:
        n = len(prefix[1])
        return [
            p
            for p in self.resident
            if p[0] == prefix[0] and len(p[1]) == n + self.PAGE and p[1][:n] == prefix[1]
        ]

    def leaves(self) -> list[Prefix]:
        return sorted((p for p in self.resident if not self.children(p)), key=repr)

    keys = st.tuples(st.sampled_from([None, "lora"]), st.lists(st.integers(0, 1), max_size=22).map(tuple))

    @rule(key=keys)
    def insert(self, key: Prefix) -> None:
        prefix_len = self.match(key)
        for end in range(self.PAGE, len(key[1]) + 1, self.PAGE):
            self.resident.add((key[0], key[1][:end]))
        aligned = key[1][: len(key[1]) // self.PAGE * self.PAGE]
        self.index.add(self.hashes((key[0], aligned)), prefix_len // self.BLOCK, len(aligned) // self.BLOCK)

    @precondition(lambda self: self.resident)
    @rule(data=st.data())
    def evict(self, data: st.DataObject) -> None:
        leaf = data.draw(st.sampled_from(self.leaves()))
        ns, tokens = leaf
        starts = [len(tokens) - self.PAGE]
        while starts[-1] > 0 and len(self.children((ns, tokens[: starts[-1]]))) == 1:
            starts.append(starts[-1] - self.PAGE)
        start = data.draw(st.sampled_from(starts))
        for end in range(start + self.PAGE, len(tokens) + 1, self.PAGE):
            self.resident.remove((ns, tokens[:end]))
        self.index.remove(self.hashes(leaf), start // self.BLOCK, len(tokens) // self.BLOCK)

    @precondition(lambda self: self.resident)
    @rule()
    def reset(self) -> None:
        self.resident.clear()
        self.index.clear()

    @rule(key=keys)
    def probe(self, key: Prefix) -> None:
        assert self.index.probe(self.hashes(key)) == self.match(key) // self.BLOCK

    @invariant()
    def index_holds_the_resident_blocks(self) -> None:
        whole = [p for p in self.resident if len(p[1]) % self.BLOCK == 0]
        assert len(self.index) == len(whole)
        assert all(self.index.probe(self.hashes(p)) == len(p[1]) // self.BLOCK for p in whole)

    @invariant()
    def every_block_has_one_owner(self) -> None:
        statistics = self.index.statistics()
        assert statistics.duplicates == statistics.missing == 0


TestTreeInStep = TreeInStep.TestCase
TestTreeInStep.settings = settings(max_examples=60, stateful_step_count=25, deadline=None)


# ---------------------------------------------------------------------------------------- concurrency


@given(st.integers(1, 60), st.data())
def test_a_probe_overlapped_by_writes_answers_with_a_length_of_its_time(n: int, data: st.DataObject) -> None:
    """Every interleaving at the probe's own granularity: writes happen between two of its lookups."""
    index, hashes = HintIndex(), chain_of_length(n)
    length = data.draw(st.integers(0, n))
    index.add(hashes, 0, length)
    seen = [length]
    targets: Iterator[int] = iter(data.draw(st.lists(st.integers(0, n), max_size=16)))

    def write() -> None:
        nonlocal length
        target = next(targets, length)
        if target > length:
            index.add(hashes, length, target)
        elif target == 0:
            index.clear()
        else:
            index.remove(hashes, target, length)
        length = target
        seen.append(length)

    answer = index.probe(WatchedChain(hashes, write))
    assert min(seen) <= answer <= max(seen)
    assert index.probe(hashes) == length


def test_a_block_takes_no_more_bytes_than_stated() -> None:
    index = HintIndex()
    for blocks in range(0, 400_000, 5_000):
        index.add(array("Q", np.random.default_rng(blocks).integers(0, 2**64, 5_000, np.uint64)), 0, 5_000)
        size = sys.getsizeof(index._present) + sum(map(sys.getsizeof, index._present))
        if len(index) > 100_000:
            assert size / len(index) <= 86


@pytest.mark.parametrize("floor", [0, 700])
def test_reader_and_writer_threads(floor: int) -> None:
    """The first `floor` blocks stay; what the reader sees lies between them and the whole chain."""
    n, rounds = 1500, 400
    index, hashes = HintIndex(), chain_of_length(n)
    index.add(hashes, 0, floor)
    start = threading.Barrier(2)
    failures: list[object] = []

    def write() -> None:
        try:
            start.wait(30)
            for i in range(rounds):
                middle = floor + (i * 37) % (n - floor)
                index.add(hashes, floor, middle)
                index.add(hashes, middle, len(hashes))
                index.remove(hashes, middle, n)
                if floor == 0 and i % 3 == 0:
                    index.clear()
                else:
                    index.remove(hashes, floor, middle)
        except BaseException as error:
            failures.append(error)

    def read() -> None:
        try:
            start.wait(30)
            for _ in range(rounds * 10):
                answer = index.probe(hashes)
                if not floor <= answer <= n:
                    failures.append(answer)
        except BaseException as error:
            failures.append(error)

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)  # switch threads as often as the interpreter can
    try:
        threads = [threading.Thread(target=write), threading.Thread(target=read)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
            assert not thread.is_alive()
    finally:
        sys.setswitchinterval(interval)
    assert failures == []
    assert index.probe(hashes) == len(index) == floor
    assert index.statistics().duplicates == index.statistics().missing == 0


# --------------------------------------------------------------------------------- recurrent states

runs = st.lists(st.tuples(st.integers(0, 1), st.integers(1, 50)), max_size=7).map(
    lambda pieces: tuple(token for token, times in pieces for _ in range(times))
)
"""Prompts of up to 350 tokens that often begin alike, some segments of blocks of one token long."""


def last_state(states: set[tuple[int, ...]], tokens: tuple[int, ...], limit: int) -> int:
    return max((len(s) for s in states if len(s) <= limit and tokens[: len(s)] == s), default=0)


@given(st.lists(st.tuples(runs, st.integers(0, 350), st.integers(0, 9)), max_size=30), st.integers(1, 2))
def test_snapshots_are_a_set_of_prefixes(operations: list, block: int) -> None:
    index = SnapshotIndex()
    states: set[tuple[int, ...]] = set()
    receipts: dict[tuple[int, ...], Snapshot] = {}
    for tokens, at, choice in operations:
        hashes = chain(array("q", tokens), block, SEED)
        assert index.last(hashes, at) * block == last_state(states, tokens, min(at, len(hashes)) * block)
        blocks = min(at, len(hashes))
        state = tokens[: blocks * block]
        if choice == 9:
            index.clear()
            states.clear()
        elif choice >= 6 and states:
            for s in [max(states), state] if state in states else [max(states)]:
                index.remove(receipts[s])
                index.remove(receipts[s])  # idempotent
                states.discard(s)
        elif blocks:
            receipts[state] = index.add(hashes, blocks)
            assert index.add(hashes, blocks) == receipts[state]  # idempotent, whichever path it came from
            states.add(state)
        assert len(index) == len(states)
        assert index.last(hashes, len(hashes)) * block == last_state(states, tokens, len(tokens))
    for s in states:
        index.remove(receipts[s])
    assert len(index) == len(index._segments) == 0, "nothing is left behind"


def test_states_outside_their_chain_are_refused() -> None:
    index, hashes = SnapshotIndex(), chain_of_length(4)
    for blocks in (-1, 0, 5):
        with pytest.raises(ValueError, match="chain of 4 blocks"):
            index.add(hashes, blocks)
    assert len(index) == index.last(hashes, 4) == index.last(hashes, -1) == index.last(array("Q"), 9) == 0


def test_the_scan_for_a_state_takes_one_lookup_a_segment() -> None:
    reads = 0

    def count() -> None:
        nonlocal reads
        reads += 1

    index, hashes = SnapshotIndex(), chain_of_length(50 * SEGMENT)
    other = array("Q", [*hashes[:1], *chain_of_length(9, start=1000)])
    index.add(other, 7)  # on another branch, within the first segment
    assert index.last(WatchedChain(hashes, count), len(hashes)) == 0
    assert reads == 50 + 1
    index.add(hashes, 20 * SEGMENT)
    reads = 0
    assert index.last(WatchedChain(hashes, count), len(hashes)) == 20 * SEGMENT
    assert reads == 31 + 1


# ------------------------------------------------------------------------------------ known chains


@given(
    st.lists(st.tuples(runs, st.integers(0, 1)), max_size=12), st.sampled_from([1, 3]), st.integers(0, 900)
)
def test_known_chains_are_the_chains(prompts: list, block: int, capacity: int) -> None:
    known, reused = KnownChains(block, capacity), 0
    for tokens, seed in prompts:
        ids = array("q", tokens * 2)
        assert known.chain(ids, seed) == chain(ids, block, seed)
        assert ids == array("q", tokens * 2)
        assert reused <= known.reused <= reused + len(ids) // block
        reused = known.reused
        kept = known._prompts.values()
        assert sum(len(prompt.tokens) for prompt in kept) <= capacity or len(known) == 1
        assert known._kept == sum(len(prompt.tokens) for prompt in kept)
        assert len(known._checkpoints) <= sum(len(prompt.hashes) // STRIDE for prompt in kept)
        assert set(known._checkpoints.values()) <= known._prompts.keys()


def test_only_what_is_new_of_a_known_prompt_is_hashed(monkeypatch: pytest.MonkeyPatch) -> None:
    block, hashed = 2, 0

    def count(tokens: array[int], *args: int, have: array[int]) -> array[int]:
        nonlocal hashed
        result = chain(tokens, *args, have=have)
        hashed += len(result) - len(have)
        return result

    monkeypatch.setattr("sglang_wavepp.hint_index.known.chain", count)
    known = KnownChains(block, 100_000)

    def ask(tokens: array[int]) -> tuple[int, int]:
        """Blocks hashed and blocks reused for a prompt."""
        nonlocal hashed
        before, hashed = known.reused, 0
        known.chain(tokens, SEED)
        assert hashed + known.reused - before == len(tokens) // block
        return hashed, known.reused - before

    first = array("q", range(2000))
    turn = first + array("q", range(5000, 5301))
    assert ask(first) == (1000, 0)
    assert ask(turn) == (STRIDE + 150, 1000 - STRIDE)
    assert len(known) == 1, "the longer one has all that the shorter one had"
    assert ask(turn) == (STRIDE, 1150 - STRIDE)
    assert ask(first[:999]) == (STRIDE, 499 - STRIDE)
    branch = first[:801] + array("q", range(9000, 9300))
    assert ask(branch) == (STRIDE + 150, 400 - STRIDE)
    assert ask(turn[:100]) == (50, 0), "too short to be known"
    assert ask(array("q", [7]) + first) == (1000, 0)


# ------------------------------------------------------------------------------------------- hints


@given(runs, st.integers(0, 200), st.lists(st.integers(1, 120), max_size=5), st.integers(0, 400), blocks)
def test_the_boundary_of_a_stage(
    tokens: tuple[int, ...], resident: int, states: list[int], limit: int, block: int
) -> None:
    hashes = chain(array("q", tokens), block, SEED)
    resident, limit = resident % (len(hashes) + 1), limit % (len(tokens) + 1)
    states = [1 + s % len(hashes) for s in states] if hashes else []
    plain, hybrid = Hints(block, SEED), Hints(block, SEED, recurrent=True)
    for hints in (plain, hybrid):
        hints.index.add(hashes, 0, resident)
    assert plain.boundary(hashes, limit) == min(resident * block, limit)
    assert hybrid.boundary(hashes, limit) == 0, "KV alone is of no use to a hybrid model"
    assert plain.snapshots is None and hybrid.snapshots is not None
    for s in states:
        hybrid.snapshots.add(hashes, s)
    reachable = [s * block for s in states if s <= resident and s * block <= limit]
    assert hybrid.boundary(hashes, limit) == max(reachable, default=0)
    for hints in (plain, hybrid):
        hints.clear()
        assert hints.boundary(hashes, limit) == len(hints.index) == 0
    assert len(hybrid.snapshots) == 0
