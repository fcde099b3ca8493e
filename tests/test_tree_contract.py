"""What leases and escrow rely on, on every tree: the model tree and SGLang's with both cores."""

from __future__ import annotations

import random
import threading
import time
from array import array
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from trees import ALL, CORES, FakeTree, Make, RealTree, Tree, fake, hybrid, plain

from sglang_wavepp.errors import LeaseError
from sglang_wavepp.member import Member
from sglang_wavepp.messages import Held, HeldItem, Hold, HoldItem
from sglang_wavepp.radix.lease import Lease, LeaseTable
from sglang_wavepp.radix.ledger import Ledger
from sglang_wavepp.radix.protocol import Match

PAGES = (1, 16, 64)


def _fake(page: int, pages: int) -> FakeTree:
    return fake(page, page * pages)


def _plain(core: str, page: int, pages: int) -> RealTree:
    return plain(core, page, page * pages, block=64)


def _hybrid(core: str, page: int, pages: int, states: int = 12) -> RealTree:
    return hybrid(core, page, page * pages, block=64, states=states)


MODELS = {f"model-{page}": partial(_fake, page) for page in PAGES}
PLAIN = {f"{core}-{page}": partial(_plain, core, page) for core in CORES for page in PAGES}
HYBRID = {f"{core}-{page}": partial(_hybrid, core, page) for core in CORES for page in PAGES}


def over(trees: dict[str, Any]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("make", trees.values(), ids=trees)


on_all = over(MODELS | PLAIN)
on_real = over(PLAIN)
on_hybrid = over(HYBRID)


def lease_of(table: LeaseTable, owner: int, prefix: Any, limit: int = ALL) -> Lease:
    return table.acquire(owner, prefix, table.find(owner, prefix, limit))


def no_walk(*_: Any) -> None:
    raise AssertionError("the tree was walked")


# ------------------------------------------------------------------------------------------- leases


@on_all
def test_a_lease_answers_with_what_is_really_cached(make: Make) -> None:
    tree = make(12)
    page, table = tree.page_size, LeaseTable(tree)
    assert tree.insert(tree.text("abcdef"))
    asked = {"abcdef": (5 * page - 1, 4), "abcxyz": (ALL, 3), "xyz": (ALL, 0)}
    for owner, (letters, (limit, pages)) in enumerate(asked.items()):
        assert lease_of(table, owner, tree.text(letters), limit).boundary == pages * page
        tree.check()
    assert tree.protected() == 4 * page and table.tokens == 7 * page


@on_real
def test_a_lease_at_a_node_end_neither_splits_nor_walks(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    tree = make(12)
    assert isinstance(tree, RealTree)
    page, table, prefix = tree.page_size, LeaseTable(tree), tree.text("abcdef")
    for pages in (3, 6):
        assert tree.insert(prefix, pages * page)
    monkeypatch.setattr(tree.cache, "match_prefix", no_walk)
    for owner, pages in enumerate((6, 3)):
        assert lease_of(table, owner, prefix, pages * page).boundary == pages * page
    assert tree.ends(prefix) == [3 * page, 6 * page]
    tree.check()


@on_real
def test_a_lease_inside_a_node_splits_it_once(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    tree = make(12)
    assert isinstance(tree, RealTree)
    page, table, prefix = tree.page_size, LeaseTable(tree), tree.text("abcdef")
    assert tree.insert(prefix)
    assert lease_of(table, 1, prefix, 4 * page).boundary == tree.protected() == 4 * page
    assert tree.ends(prefix) == [4 * page, 6 * page]
    monkeypatch.setattr(tree.cache, "match_prefix", no_walk)
    assert lease_of(table, 2, prefix, 4 * page).boundary == 4 * page
    assert tree.ends(prefix) == [4 * page, 6 * page]


@on_all
def test_what_is_leased_survives_and_shrinking_never_uncovers_the_shorter_part(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    tree = make(12)
    page, table, prefix, unlock = tree.page_size, LeaseTable(tree), tree.text("abcdef"), tree.unlock
    assert tree.insert(prefix)
    lease = lease_of(table, 1, prefix, 5 * page)
    shorter = lease.boundary

    def evict_around(lock: Any) -> None:
        tree.evict()
        unlock(lock)
        tree.evict()
        assert tree.resident(prefix) == shorter

    monkeypatch.setattr(tree, "unlock", evict_around)
    tree.evict()
    assert tree.resident(prefix) == tree.protected() == 5 * page
    for pages in (4, 2, 2, 0):
        shorter = pages * page
        lease = lease_of(table, 1, prefix, shorter)
        assert lease.boundary == tree.resident(prefix) == tree.protected() == shorter
        tree.check()
    table.release(lease)
    assert len(table) == table.tokens == 0


@on_all
@pytest.mark.parametrize("left", [0, 2])
def test_what_was_evicted_between_find_and_acquire_makes_the_lease_shorter(make: Make, left: int) -> None:
    tree = make(12)
    page, table, prefix = tree.page_size, LeaseTable(tree), tree.text("abcdef")
    assert tree.insert(prefix)
    lease_of(table, 2, prefix, left * page)
    found = table.find(1, prefix, ALL)
    assert found is not None and found.boundary == 6 * page
    tree.evict()
    lease = table.acquire(1, prefix, found)
    assert lease.boundary == tree.protected() == left * page
    table.release(lease)
    tree.check()


@on_all
def test_a_found_node_that_is_split_meanwhile_still_leases_exactly(make: Make) -> None:
    tree = make(12)
    page, table, prefix = tree.page_size, LeaseTable(tree), tree.text("abcdef")
    assert tree.insert(prefix)
    found = table.find(1, prefix, ALL)
    assert tree.insert(tree.text("abcxyz"))
    assert table.acquire(1, prefix, found).boundary == 6 * page
    tree.evict()
    assert tree.resident(prefix) == tree.protected() == 6 * page
    assert tree.resident(tree.text("abcxyz")) == 3 * page
    tree.check()


@on_all
def test_a_receipt_is_good_once_and_misuse_does_not_harm_the_tree(make: Make) -> None:
    tree = make(12)
    page, table, prefix = tree.page_size, LeaseTable(tree), tree.text("abcdef")
    assert tree.insert(prefix)

    def misuse(lease: Lease, why: str) -> None:
        for use in (table.release, table.transfer):
            with pytest.raises(LeaseError, match=why):
                use(lease)
        tree.check()

    released, shrunk = lease_of(table, 1, prefix), lease_of(table, 2, prefix)
    table.release(released)
    misuse(released, "twice")
    assert lease_of(table, 2, prefix, 3 * page).boundary == 3 * page
    misuse(shrunk, "twice")
    foreign = lease_of(LeaseTable(tree), 3, prefix)
    misuse(foreign, "does not know")

    old, found = lease_of(table, 4, prefix), table.find(5, prefix, ALL)
    tree.reset()
    table.reset()
    misuse(old, "epoch")
    assert len(table) == 0 and table.acquire(5, prefix, found).boundary == 0
    assert tree.insert(prefix)
    assert lease_of(table, 4, prefix).boundary == tree.protected() == 6 * page


@on_all
def test_a_transferred_lock_is_unlocked_once_by_its_new_owner(make: Make) -> None:
    tree = make(12)
    page, table, prefix = tree.page_size, LeaseTable(tree), tree.text("abcdef")
    assert tree.insert(prefix)
    lock = table.transfer(lease_of(table, 1, prefix, 4 * page))
    assert len(table) == 0 and tree.protected() == 4 * page
    tree.evict()
    assert tree.resident(prefix) == 4 * page
    tree.unlock(lock)
    assert tree.protected() == 0
    tree.check()


# ------------------------------------------------------------------------------------------- escrow


@on_all
@pytest.mark.parametrize("pages", [1, 2, 3, 5])
def test_grants_end_where_free_and_evictable_less_outstanding_would(make: Make, pages: int) -> None:
    tree = make(pages)
    page, ledger = tree.page_size, Ledger(tree)
    assert tree.insert(tree.text("abcdef"[: pages // 2]))
    assert not ledger.grant(0, 0, (pages - 1) * page + 1), "its last page and the one of slack"
    for owner in range(pages):
        assert ledger.grant(owner, 0, 0), "one page of slack each"
        assert ledger.room() == (pages - 1 - owner) * page >= 0
    assert not ledger.grant(pages, 0, 0)
    assert not any([ledger.grow(owner, 1) for owner in range(pages)])
    for owner in range(pages):
        ledger.close(owner)
    assert ledger.grant(0, 0, (pages - 1) * page) and ledger.room() == 0
    assert tree.allocate((pages - 1) * page), "what was promised is there"
    ledger.take(0, (pages - 1) * page)
    assert ledger.room() == 0 and ledger.statistics().tokens == page
    tree.check()


@on_all
def test_a_grant_neither_allocates_nor_evicts(make: Make) -> None:
    tree = make(8)
    page, table, ledger = tree.page_size, LeaseTable(tree), Ledger(tree)
    for letters in ("abcd", "wxyz"):
        assert tree.insert(tree.text(letters))
    lease = lease_of(table, 1, tree.text("abcd"), 3 * page)
    before = tree.free_tokens(), tree.evictable_tokens()
    assert before == (0, 5 * page)
    assert ledger.grant(1, lease.boundary, 7 * page) and ledger.room() == 0
    assert not ledger.grow(1, 8 * page) and not ledger.grant(2, 0, 1)
    assert (tree.free_tokens(), tree.evictable_tokens()) == before
    assert tree.resident(tree.text("abcd")) == tree.resident(tree.text("wxyz")) == 4 * page
    tree.check()


@on_all
def test_victims_stay_reusable_until_the_loop_allocates_and_another_goes_if_one_is_leased(make: Make) -> None:
    tree = make(8)
    page, table, ledger = tree.page_size, LeaseTable(tree), Ledger(tree)
    first, second = tree.text("abcd"), tree.text("wxyz")
    assert tree.insert(first) and tree.insert(second)
    assert ledger.grant(1, 0, 3 * page)
    assert lease_of(table, 2, first).boundary == tree.resident(second) == 4 * page, "both may be the victim"
    assert ledger.room() == 0
    assert tree.allocate(3 * page)
    ledger.take(1, 3 * page)
    assert tree.resident(first) == 4 * page > tree.resident(second)
    tree.check()


# -------------------------------------------------------------------------- any sequence of all of it


class Sequence(RuleBasedStateMachine):
    """Requests come, are leased and granted room, run and end; others fill and evict the cache."""

    def __init__(self, make: Make) -> None:
        super().__init__()
        self.make = make

    @initialize(pages=st.integers(1, 12))
    def start(self, pages: int) -> None:
        self.tree: Tree = self.make(pages)
        self.page = self.tree.page_size
        self.table, self.ledger = LeaseTable(self.tree), Ledger(self.tree)
        self.waiting: dict[int, tuple[str, Lease, int]] = {}
        """Owner -> (prompt, lease, granted length)."""
        self.ladders: dict[int, list[int]] = {}
        """Owner -> where its lease may shrink to, of hybrid trees."""
        self.running: list[tuple[str, Any, int]] = []
        """(locked prefix, lock, owner)"""
        self.next = 0

    letters = st.text("ab", min_size=1, max_size=9)
    tokens = st.integers(0, 9 * 64)

    @rule(letters=letters, reuse=tokens)
    def insert(self, letters: str, reuse: int) -> None:
        prefix = self.tree.text(letters)
        before = self.tree.free_tokens() + self.tree.evictable_tokens()
        if self.tree.insert(prefix, reuse=reuse % (prefix.length + 1)):
            assert self.tree.resident(prefix) == prefix.length
        assert self.tree.free_tokens() + self.tree.evictable_tokens() == before

    @rule(tokens=tokens, states=st.integers(0, 3))
    def evict(self, tokens: int, states: int) -> None:
        self.tree.evict(tokens, states)

    @rule(letters=letters, limit=tokens, more=tokens, evict=st.booleans())
    def admit(self, letters: str, limit: int, more: int, evict: bool) -> None:
        self.next += 1
        self._hold(self.next, letters, limit, len(letters) * self.page + more % (3 * self.page), evict)

    @precondition(lambda self: self.waiting)
    @rule(data=st.data(), limit=tokens, evict=st.booleans())
    def shrink(self, data: st.DataObject, limit: int, evict: bool) -> None:
        owner = data.draw(st.sampled_from(sorted(self.waiting)))
        letters, lease, until = self.waiting.pop(owner)
        longest = least = min(lease.boundary, limit // self.page * self.page)
        if self.tree.states_per_request:
            least = max((end for end in self.ladders[owner] if end <= limit), default=0)
        assert least <= self._hold(owner, letters, limit, until, evict) <= longest, "it was protected"

    def _hold(self, owner: int, letters: str, limit: int, until: int, evict: bool) -> int:
        """What a member does for HOLD. The loop may evict in the middle."""
        prefix = self.tree.text(letters)
        found = self.table.find(owner, prefix, limit)
        if evict:
            self.tree.evict()
        left = self.tree.match(prefix, limit).boundary
        lease = self.table.acquire(owner, prefix, found)
        assert lease.boundary == left if found is not None else lease.boundary <= left
        self.ladders[owner] = [end for end, _ in self.tree.match(prefix, lease.boundary).ends]
        room = self.tree.free_tokens() + self.tree.evictable_tokens()
        idle = room, self.tree.free_tokens()
        others = sum(self._promised(o) for o in self.waiting) + len(self.running) * self.page
        self.waiting[owner] = letters, lease, until
        granted = self.ledger.grant(owner, lease.boundary, until)
        rows = len(self.waiting)  # a running request takes none of a test's tree
        states = rows * self.tree.states_per_request
        fits = self._promised(owner) <= room - others and states <= self.tree.free_states()
        assert granted == (fits and rows <= self.tree.free_rows())
        assert (self.tree.free_tokens() + self.tree.evictable_tokens(), self.tree.free_tokens()) == idle
        if not granted:
            self.table.release(lease)
            del self.waiting[owner]
        return lease.boundary

    def _promised(self, owner: int) -> int:
        _, lease, until = self.waiting[owner]
        return max(0, -(-until // self.page) * self.page + self.page - lease.boundary)

    @precondition(lambda self: self.waiting)
    @rule(data=st.data())
    def withdraw(self, data: st.DataObject) -> None:
        _, lease, _ = self.waiting.pop(owner := data.draw(st.sampled_from(sorted(self.waiting))))
        self.table.release(lease)
        self.ledger.close(owner)
        with pytest.raises(LeaseError, match="twice"):
            self.table.release(lease)

    @precondition(lambda self: self.waiting)
    @rule(data=st.data())
    def run(self, data: st.DataObject) -> None:
        """The loop takes over and allocates all that was promised but the slack."""
        owner = data.draw(st.sampled_from(sorted(self.waiting)))
        letters, lease, until = self.waiting.pop(owner)
        lock = self.table.transfer(lease)
        self.running.append((letters[: lease.boundary // self.page], lock, owner))
        self.ledger.take(owner, until)
        assert self.tree.allocate(-(-until // self.page) * self.page - lease.boundary), "it was promised"

    @precondition(lambda self: self.running)
    @rule()
    def finish_all(self) -> None:
        for _, lock, owner in self.running:
            self.tree.unlock(lock)
            self.ledger.close(owner)
        self.running.clear()
        self.tree.free()

    @rule()
    def reset(self) -> None:
        self.tree.reset()
        self.table.reset()
        for _, lease, _ in self.waiting.values():
            with pytest.raises(LeaseError, match="epoch"):
                self.table.release(lease)
        for owner in [*self.waiting, *(owner for *_, owner in self.running)]:
            self.ledger.close(owner)
        self.waiting.clear()
        self.running.clear()

    @invariant()
    def nothing_is_lost_or_promised_twice(self) -> None:
        tree = self.tree
        held = [letters[: lease.boundary // self.page] for letters, lease, _ in self.waiting.values()]
        held += [letters for letters, *_ in self.running]
        assert (
            tree.protected() == len({path[:n] for path in held for n in range(1, len(path) + 1)}) * self.page
        )
        assert tree.free_tokens() + tree.evictable_tokens() + tree.protected() + tree.private == tree.pool
        promised = sum(map(self._promised, self.waiting)) + len(self.running) * self.page
        assert self.ledger.statistics().tokens == promised
        assert self.ledger.room() == tree.free_tokens() + tree.evictable_tokens() - promised >= 0
        assert len(self.table) == len(self.waiting)
        if isinstance(tree, RealTree) and tree.states:
            pinned = {w[0][: end // self.page] for o, w in self.waiting.items() for end in self.ladders[o]}
            pinned |= {letters for letters, *_ in self.running if letters}
            assert tree.cache.mamba_protected_size() == len(pinned)
            assert tree.free_states() >= tree.states_per_request * len(self.waiting)
        tree.check()


@over(MODELS | PLAIN | {f"hybrid-{name}": make for name, make in HYBRID.items()})
def test_any_sequence_keeps_the_conservation_laws(make: Make) -> None:
    run_state_machine_as_test(
        lambda: Sequence(make),
        settings=settings(max_examples=60, stateful_step_count=30, deadline=None),
    )


# ------------------------------------------------------------------------------------- hybrid models


def with_states(tree: RealTree, letters: str, *pages: int) -> Any:
    """A cached request with recurrent states after so many pages."""
    prefix = tree.text(letters)
    for end in pages:
        assert tree.insert(prefix, end * tree.page_size)
    return prefix


@on_hybrid
def test_a_lease_pins_its_recurrent_state_and_all_earlier_ones(make: Any) -> None:
    tree = make(12)
    page, table, prefix = tree.page_size, LeaseTable(tree), with_states(tree, "abcdef", 2, 4, 6)
    for limit, pages, pinned in ((ALL, 6, 3), (6 * page - 1, 4, 2), (3 * page, 2, 1), (page, 0, 0)):
        assert lease_of(table, 1, prefix, limit).boundary == pages * page
        assert tree.cache.mamba_protected_size() == pinned
        tree.evict(0, states=ALL)
        assert tree.cache.mamba_evictable_size() == 0
        tree.check()
    assert tree.protected() == 0


@on_hybrid
@pytest.mark.parametrize("how", ["release", "transfer"])
def test_giving_a_lease_back_frees_its_earlier_states(make: Any, how: str) -> None:
    tree = make(12)
    page, table, prefix = tree.page_size, LeaseTable(tree), with_states(tree, "abcdef", 2, 4, 6)
    lock = getattr(table, how)(lease_of(table, 1, prefix))
    kept = 1 if how == "transfer" else 0
    assert tree.cache.mamba_protected_size() == kept and tree.protected() == kept * 6 * page
    tree.evict(0, states=ALL)
    assert tree.match(prefix, ALL).boundary == kept * 6 * page
    assert [end for end, _ in tree.match(prefix, ALL).ends] == [6 * page] * kept
    if kept:
        tree.unlock(lock)
    tree.check()
    tree.evict()
    assert tree.free_tokens() == tree.pool and tree.free_states() == tree.states


@on_hybrid
@pytest.mark.parametrize("interior", [False, True], ids=["leaf evicted", "state evicted"])
@pytest.mark.parametrize("left", [0, 2])
def test_a_state_evicted_between_find_and_acquire_makes_the_lease_fall_back(
    make: Any, left: int, interior: bool
) -> None:
    tree = make(16)
    page, table, prefix = tree.page_size, LeaseTable(tree), with_states(tree, "abcd", 2, 4)
    if interior:
        longer = tree.match(with_states(tree, "abcdxy", 6), ALL)
        tree.lock(prefix, Match(longer.boundary, longer.ends[:1]))  # with its last state alone
    lease_of(table, 2, prefix, left * page)
    found = table.find(1, prefix, ALL)
    assert found is not None and [end for end, _ in found.ends] == [4 * page, 2 * page]
    tree.evict(0, states=ALL)
    assert tree.resident(prefix) == (4 if interior else 2) * page, "KV without a state stays"
    lease = table.acquire(1, prefix, found)
    assert lease.boundary == left * page
    table.release(lease)
    tree.check()


@on_hybrid
def test_a_lease_gives_up_earlier_states_where_slots_are_short(make: Any) -> None:
    tree = make(64, states=6)
    page, answers = tree.page_size, list[Any]()
    prefix = with_states(tree, "abcdef", 1, 2, 3, 4, 5, 6)
    member = Member(tree, nullcontext, answers.append)
    member.offered(1, prefix)
    member.on_message(Hold(0, 1, [HoldItem(1, 5 * page, 7 * page)]))
    assert answers[-1] == Held(0, 1, [HeldItem(1, 5 * page, True)])
    assert tree.cache.mamba_protected_size() == 1
    tree.check()


@on_hybrid
def test_grants_end_where_recurrent_slots_do(make: Any) -> None:
    tree = make(64, states=11)
    each, table, ledger = tree.states_per_request, LeaseTable(tree), Ledger(tree)
    assert each == 3
    prefix = with_states(tree, "abcdef", 2, 4, 6)
    assert tree.free_states() == 11, "what could be evicted counts"
    assert [ledger.grant(owner, 0, 1) for owner in range(4)] == [True, True, True, False]
    ledger.close(2)
    lease = lease_of(table, 3, prefix)
    assert tree.free_states() == 8, "what is leased does not"
    assert not ledger.grant(3, lease.boundary, 1)
    table.release(lease)
    assert ledger.grant(3, 0, 1)
    tree.check()


# ------------------------------------------------------------------------------------------- threads


def hammer(operations: int) -> float:
    """WAVE and LOOP on one tree until both did `operations`; LOOP's longest wait for the guard in seconds."""
    page = 16
    tree, guard = plain("rust", page, 4096 * page, block=64), threading.RLock()
    table = LeaseTable(tree)
    tree.cache.on_reset = table.reset
    rng = random.Random(1)
    prompts = [tree.prefix(rng.choices(range(9), k=256 * page)) for _ in range(12)]
    prompts += [tree.prefix(p.tokens[: 100 * page] + array("q", [9] * 60 * page)) for p in prompts]
    done, failures, longest = [0, 0], list[BaseException](), 0.0

    def wave_steps() -> Any:
        rng = random.Random(2)
        while True:
            owner = rng.randrange(len(prompts))
            prefix = prompts[owner]
            limit = rng.randrange(prefix.length)
            if rng.random() < 0.7:
                found = table.find(owner, prefix, limit)
                with guard:
                    assert table.acquire(owner, prefix, found).boundary <= limit
            else:
                with guard:
                    lease = table.get(owner)
                    if lease is not None:
                        table.release(lease)
            yield

    def loop_steps() -> Any:
        nonlocal longest
        rng = random.Random(3)
        while True:
            prefix, end, kind = rng.choice(prompts), rng.randrange(256 * page), rng.random()
            asked = time.perf_counter()
            with guard:
                longest = max(longest, time.perf_counter() - asked)
                if kind < 0.6:
                    tree.insert(prefix, end)
                elif kind < 0.8:
                    tree.evict(rng.randrange(512 * page))
                elif kind < 0.998:
                    tree.allocate(rng.randrange(512) * page)
                    tree.free()
                else:
                    tree.reset()
            yield

    def work(me: int, steps: Any) -> None:
        try:
            while min(done) < operations and not failures:
                next(steps)
                done[me] += 1
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=a) for a in ((0, wave_steps()), (1, loop_steps()))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures, failures
    print(f"{done[0]} operations of WAVE, {done[1]} of LOOP, {len(table)} leases at the end")
    for owner in range(len(prompts)):
        if (lease := table.get(owner)) is not None:
            table.release(lease)
    assert tree.protected() == 0
    tree.check()
    assert all(tree.hints.index.probe(p.hashes()) == tree.resident(p) // tree.hints.block for p in prompts), (
        "hints out of step"
    )
    tree.evict()
    assert len(tree.hints.index) == 0 and tree.free_tokens() == tree.pool
    assert min(done) >= operations
    return longest


def test_two_threads_neither_fail_nor_leak_nor_stop_each_other() -> None:
    assert hammer(3000) > 0
