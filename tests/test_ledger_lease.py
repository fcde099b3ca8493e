"""The ledger against its inequality, the lease table against its receipts."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from model_tree import ModelTree, Request

from sglang_wavepp.errors import LeaseError, LedgerError
from sglang_wavepp.mpu.packing import Pending, pack
from sglang_wavepp.radix.lease import Lease, LeaseTable
from sglang_wavepp.radix.ledger import Ledger

OPERATIONS = st.lists(
    st.tuples(
        st.sampled_from(["grant", "grow", "shrink", "take", "close"]),
        st.integers(0, 4),
        st.integers(0, 60),
        st.integers(0, 60),
    ),
    max_size=60,
)


@given(OPERATIONS, st.sampled_from([1, 4, 16]))
def test_ledger_never_promises_more_than_there_is(operations: list, page: int) -> None:
    tree = ModelTree(pool=128, rows=3, page=page)
    ledger = Ledger(tree)
    covered: dict[int, int] = {}
    taken: dict[int, int] = {}
    rows: set[int] = set()
    for name, owner, a, b in operations:
        boundary, until = min(a, b) // page * page, max(a, b)
        cover = -(-until // page) * page + page
        if name == "grant" and owner not in taken:
            fits = (
                128 - sum(covered[o] - taken.get(o, 0) for o in covered if o != owner) - sum(taken.values())
            )
            covered.pop(owner, None)
            rows.discard(owner)
            ok = ledger.grant(owner, 0, until)
            assert ok == (cover <= fits and len(rows) < tree.rows)
            if ok:
                covered[owner] = cover
                rows.add(owner)
        elif name == "grow" and ledger.owns(owner):
            before = ledger.room()
            extra = max(0, cover - covered[owner])
            assert ledger.grow(owner, until) == (extra <= before)
            if extra <= before:
                covered[owner] += extra
        elif name == "shrink" and ledger.owns(owner) and cover >= taken.get(owner, 0):
            ledger.shrink(owner, until)
            covered[owner] = min(covered[owner], cover)
        elif name == "take" and ledger.owns(owner):
            if until > covered[owner]:
                with pytest.raises(LedgerError):
                    ledger.take(owner, until)
                continue
            ledger.take(owner, until)
            new = max(taken.get(owner, 0), -(-until // page) * page)
            tree.private += new - taken.get(owner, 0)
            if owner in rows:
                rows.discard(owner)
                tree.rows -= 1
            taken[owner] = new
        elif name == "close":
            ledger.close(owner)
            if owner in taken:
                tree.private -= taken.pop(owner)
                tree.rows += 1
            covered.pop(owner, None)
            rows.discard(owner)
        promised = sum(covered[o] - taken.get(o, 0) for o in covered)
        assert ledger.statistics().tokens == promised
        assert ledger.statistics().rows == len(rows)
        assert ledger.room() >= 0
        del boundary


def _acquire(table: LeaseTable, owner: int, request: Request, limit: int) -> Lease:
    return table.acquire(owner, request, table.find(owner, request, limit))


def _leased(tokens: int = 12) -> tuple[ModelTree, LeaseTable, Request]:
    tree = ModelTree(pool=64, rows=4, page=1)
    request = Request(1, tuple(range(tokens)), 1)
    tree.insert(request.tokens)
    return tree, LeaseTable(tree), request


def test_lease_shrinks_to_the_shorter_prefix_and_protects_it() -> None:
    tree, table, request = _leased()
    assert _acquire(table, 1, request, 10).boundary == 10
    lease = _acquire(table, 1, request, 4)
    assert lease.boundary == 4 and tree.locked == 4
    for seed in range(5):
        tree.evict_some(random.Random(seed))
    assert tree.match(request, 12).boundary >= 4
    table.release(lease)
    assert tree.locked == 0 and len(table) == 0


def test_lease_answers_with_what_is_really_cached() -> None:
    tree, table, _ = _leased(6)
    other = Request(2, (0, 1, 2, 99, 98), 1)
    assert _acquire(table, 2, other, 5).boundary == 3
    assert tree.locked == 3


@pytest.mark.parametrize("how", ["release", "transfer"])
def test_a_receipt_is_good_once(how: str) -> None:
    tree, table, request = _leased()
    lease = _acquire(table, 1, request, 8)
    getattr(table, how)(lease)
    for again in (table.release, table.transfer):
        with pytest.raises(LeaseError, match="twice"):
            again(lease)
    assert tree.locked == (8 if how == "transfer" else 0)


def test_a_receipt_of_an_earlier_epoch_is_void() -> None:
    _, table, request = _leased()
    lease = _acquire(table, 1, request, 8)
    table.reset()
    with pytest.raises(LeaseError, match="epoch"):
        table.release(lease)
    assert len(table) == 0 and table.epoch == 1


@given(st.lists(st.integers(1, 50), min_size=1, max_size=12), st.integers(1, 8), st.integers(1, 6))
def test_packing_covers_every_prompt_once_in_order(lengths: list[int], pages: int, page: int) -> None:
    budget = pages * page
    done = dict.fromkeys(range(len(lengths)), 0)
    for _ in range(sum(lengths) + len(lengths)):
        pending = [Pending(i, done[i], n) for i, n in enumerate(lengths) if done[i] < n]
        if not pending:
            break
        spans = pack(pending, budget, page)
        assert spans and sum(s.end - s.begin for s in spans) <= budget
        assert [s.seq for s in spans] == [p.seq for p in pending[: len(spans)]]
        for span in spans:
            assert span.begin == done[span.seq]
            assert span.end == lengths[span.seq] or span.end % page == 0
            done[span.seq] = span.end
        assert all(s.end == lengths[s.seq] for s in spans[:-1]), "only the last span may be cut"
    assert [done[i] for i in range(len(lengths))] == lengths
