"""The escrow ledger: room that is promised, not allocated.

One ledger a stage. An entry promises KV room up to a length (`covered`, in tokens, page rounded, one
page of slack) to one request, and a request row and the recurrent slots of a hybrid model until the request
binds them. `taken` follows what the request already owns or leases; the difference is what is outstanding.
At every grant

    free + evictable - outstanding >= 0

holds on the stage for tokens, for rows (of which none is evictable) and for recurrent slots, evaluated after
the request's own lease was taken. The ledger never allocates and
never evicts: cached tokens that the promise counts on stay reusable until the loop really needs them.
"""

from __future__ import annotations

import dataclasses

from sglang_wavepp.errors import LedgerError
from sglang_wavepp.radix.protocol import PrefixTree


@dataclasses.dataclass(slots=True)
class _Entry:
    covered: int
    taken: int
    bound: bool = False
    """It has its request row and its recurrent slots."""

    @property
    def outstanding(self) -> int:
        return max(0, self.covered - self.taken)


@dataclasses.dataclass(frozen=True, slots=True)
class LedgerStatistics:
    """Totals of one ledger."""

    owners: int
    """Requests with an entry."""
    tokens: int
    """KV tokens promised and not yet taken."""
    rows: int
    """Request rows promised and not yet bound, each with the recurrent slots of a request."""
    refused: int
    """Grants and growths refused since the start."""


class Ledger:
    """Escrow of one stage. Not thread safe: callers hold the stage's guard."""

    def __init__(self, tree: PrefixTree) -> None:
        self._tree = tree
        self._page = tree.page_size
        self._entries: dict[int, _Entry] = {}
        self._tokens = 0
        self._rows = 0
        self._refused = 0
        self._wanted: int | None = None
        """The smallest number of tokens that was refused since `relieved` was true the last time."""

    def _cover(self, until: int) -> int:
        return -(-until // self._page) * self._page + self._page

    def room(self) -> int:
        """Tokens that could still be promised now."""
        return self._tree.free_tokens() + self._tree.evictable_tokens() - self._tokens

    def grant(self, owner: int, boundary: int, until: int) -> bool:
        """Promise room for KV positions [boundary, until), a row and recurrent slots.

        Replaces an earlier grant. Call it after the lease at `boundary` was taken: a lease moves tokens out
        of what is evictable. On refusal nothing is promised to `owner` any more. O(1).
        """
        self.close(owner)
        covered = self._cover(until)
        need = max(0, covered - boundary)
        states = self._tree.states_per_request
        if (
            self.room() < need
            or self._tree.free_rows() - self._rows < 1
            or (states and self._tree.free_states() - self._rows * states < states)
        ):
            self._refuse(need)
            return False
        self._entries[owner] = _Entry(covered, boundary)
        self._tokens += need
        self._rows += 1
        return True

    def grow(self, owner: int, until: int) -> bool:
        """Extend a promise up to KV length `until`. False changes nothing. O(1)."""
        entry = self._entry(owner)
        covered = max(entry.covered, self._cover(until))
        if self.room() < covered - entry.covered:
            self._refuse(covered - entry.covered)
            return False
        self._set(entry, covered, entry.taken)
        return True

    def _refuse(self, need: int) -> None:
        self._refused += 1
        self._wanted = need if self._wanted is None else min(self._wanted, need)

    def relieved(self, anyhow: bool) -> bool:
        """Something was refused, and now there may be room for it: true once for each refusal. O(1).

        With `anyhow` even if there is not yet. May be true too early, since a grant needs its lease besides.
        """
        if self._wanted is None or not (anyhow or self.room() >= self._wanted):
            return False
        self._wanted = None
        return True

    def owns(self, owner: int) -> bool:
        """Is anything promised to `owner`?"""
        return owner in self._entries

    def shrink(self, owner: int, until: int) -> None:
        """Take a growth back: promise no more than KV length `until`; nothing if `owner` has ended. O(1)."""
        entry = self._entries.get(owner)
        if entry is not None:
            self._set(entry, min(entry.covered, self._cover(until)), entry.taken)

    def take(self, owner: int, length: int) -> None:
        """The loop allocates up to KV length `length`, and binds the row and the recurrent slots.

        Raises `LedgerError` beyond the grant. O(1).
        """
        entry = self._entry(owner)
        if length > entry.covered:
            raise LedgerError(
                f"request {owner} takes KV up to {length} tokens, but {entry.covered} were promised"
            )
        if not entry.bound:
            entry.bound = True
            self._rows -= 1
        self._set(entry, entry.covered, max(entry.taken, -(-length // self._page) * self._page))

    def close(self, owner: int) -> None:
        """Forget a promise: the request ended, was retracted or was never committed. O(1)."""
        entry = self._entries.pop(owner, None)
        if entry is not None:
            self._tokens -= entry.outstanding
            self._rows -= not entry.bound

    def statistics(self) -> LedgerStatistics:
        """A snapshot of the totals."""
        return LedgerStatistics(len(self._entries), self._tokens, self._rows, self._refused)

    def _entry(self, owner: int) -> _Entry:
        entry = self._entries.get(owner)
        if entry is None:
            raise LedgerError(f"request {owner} has no escrow on this stage")
        return entry

    def _set(self, entry: _Entry, covered: int, taken: int) -> None:
        self._tokens -= entry.outstanding
        entry.covered, entry.taken = covered, taken
        self._tokens += entry.outstanding
