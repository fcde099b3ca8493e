"""Leases: locks on cached prefixes, held for requests that do not run yet.

A lease is a receipt. It names its owner and its epoch, and it is given back exactly once: by `release`,
or by `transfer` to the running request, which then owns the lock. After a reset of the tree (a new
epoch) all receipts are dropped, not released, since their nodes are gone.

SGLang's Rust tree is poisoned for good by a second unlock, so misuse is caught here, in Python.

Taking one is two steps, so that the long one does not keep the loop waiting: `find` compares tokens, without
the guard; `acquire` locks what was found, under the guard, and says what it really got.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from sglang_wavepp.errors import LeaseError
from sglang_wavepp.radix.protocol import Match, PrefixTree


@dataclasses.dataclass(slots=True, eq=False)
class Lease:
    """A receipt for a locked path of exactly `boundary` tokens."""

    owner: int
    epoch: int
    boundary: int
    node: Any
    _lock: Any
    _rungs: tuple[Any, ...] = ()
    _open: bool = True


class LeaseTable:
    """Leases of one stage, at most one for each owner. Callers hold the stage's guard, except for `find`."""

    def __init__(self, tree: PrefixTree) -> None:
        self._tree = tree
        self._leases: dict[int, Lease] = {}
        self.epoch = 0

    def __len__(self) -> int:
        return len(self._leases)

    @property
    def tokens(self) -> int:
        """Sum of the leased boundaries; what several leases share counts for each."""
        return sum(lease.boundary for lease in self._leases.values())

    def get(self, owner: int) -> Lease | None:
        """The lease of `owner`, if it holds one."""
        return self._leases.get(owner)

    def find(self, owner: int, prefix: Any, limit: int) -> Match | None:
        """The longest cached prefix of at most `limit` tokens; None if the owner's lease is short enough.

        Without the guard, in the thread that leases and releases for `owner`. O(limit).
        """
        held = self._leases.get(owner)
        if held is not None and held.boundary <= limit:
            return None
        return self._tree.match(prefix, limit)

    def acquire(self, owner: int, prefix: Any, found: Match | None) -> Lease:
        """Lease what `find` found; an owner that has a lease shrinks it.

        The boundary of the answer may be shorter than the found one, where that was evicted meanwhile. When
        shrinking, the shorter path is locked before the longer one is unlocked, so nothing between them is
        ever unprotected.
        """
        held = self._leases.get(owner)
        if found is None:
            if held is not None:
                return held
            found = Match(0)
        path = self._tree.lock(prefix, found)
        lease = Lease(owner, self.epoch, path.boundary, path.node, path.lock, path.rungs)
        if held is not None:
            self.release(held)
        self._leases[owner] = lease
        return lease

    def release(self, lease: Lease) -> None:
        """Unlock the path. Raises `LeaseError` if the receipt was used before or is of another epoch."""
        self._tree.unlock(self.transfer(lease))

    def transfer(self, lease: Lease) -> Any:
        """Hand the lock over to the caller, who now owes the unlock. Raises like `release`."""
        if lease.epoch != self.epoch:
            raise LeaseError(f"lease of request {lease.owner} is of epoch {lease.epoch}, now is {self.epoch}")
        if not lease._open:
            raise LeaseError(
                f"lease of request {lease.owner} at {lease.boundary} tokens was given back twice"
            )
        if self._leases.get(lease.owner) is not lease:
            raise LeaseError(f"request {lease.owner} gives back a lease that the table does not know")
        lease._open = False
        del self._leases[lease.owner]
        lock, lease._lock = lease._lock, None
        self.thin(lease)
        return lock

    def thin(self, lease: Lease) -> bool:
        """Give up what it could fall back to: recurrent slots are short. False if there is nothing."""
        rungs, lease._rungs = lease._rungs, ()
        for rung in rungs:
            self._tree.unlock(rung)
        return bool(rungs)

    def reset(self) -> None:
        """The tree was reset: drop every receipt and start a new epoch."""
        for lease in self._leases.values():
            lease._open = False
        self._leases.clear()
        self.epoch += 1
