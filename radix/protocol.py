"""What leases and escrow need from a prefix tree and its pools."""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol


class Prefix(Protocol):
    """A request's tokens in their cache namespace, as the tree of this stage understands them."""

    @property
    def length(self) -> int:
        """Tokens to compute or reuse: the prompt, and after a retraction the output so far."""

    @property
    def max_boundary(self) -> int:
        """The longest prefix that may be reused: one token less than `length`, less for input logprobs."""


class Match(NamedTuple):
    """A cached prefix that was found by comparing tokens. It holds nothing and may be gone by now."""

    boundary: int
    """Tokens, page aligned; with recurrent layers also the position of a recurrent state."""
    ends: tuple[tuple[int, Any], ...] = ()
    """Reusable boundaries that are the end of a tree node, with the node, the longest first. One at most
    for a plain model, and none if `boundary` is inside a node."""


class LockedPrefix(NamedTuple):
    """A locked tree path that ends exactly at `boundary` tokens."""

    boundary: int
    node: Any
    lock: Any
    rungs: tuple[Any, ...] = ()
    """Locks on the recurrent states before it: a shorter boundary may fall back to each of them."""


class PrefixTree(Protocol):
    """The tree, the KV pool, the request rows and the recurrent slots of one stage.

    Callers hold the stage's guard, except for `hint` and `match`.
    """

    page_size: int
    states_per_request: int
    """Recurrent slots that a running request needs; 0 for a plain model."""

    def hint(self, prefix: Any) -> int:
        """Tokens of `prefix` that seem reusable, page aligned. Any thread, without the guard."""

    def match(self, prefix: Any, limit: int) -> Match:
        """The longest cached prefix of at most `limit` tokens. Compares tokens, changes nothing.

        Any thread, without the guard.
        """

    def lock(self, prefix: Any, match: Match) -> LockedPrefix:
        """Lock what was found, or what is left of it. O(1) where the boundary is the end of a node."""

    def unlock(self, lock: Any) -> None:
        """Give a lock back. Twice is fatal: only the lease table may call this."""

    def free_tokens(self) -> int:
        """KV tokens that can be allocated without evicting."""

    def evictable_tokens(self) -> int:
        """KV tokens that eviction could free now."""

    def free_rows(self) -> int:
        """Request rows that can be bound."""

    def free_states(self) -> int:
        """Recurrent slots that are free, or that eviction could free now."""
