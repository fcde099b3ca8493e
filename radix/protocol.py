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


class LockedPrefix(NamedTuple):
    """A locked tree path that ends exactly at `boundary` tokens."""

    boundary: int
    node: Any
    lock: Any


class PrefixTree(Protocol):
    """The tree, the KV pool and the request rows of one stage. Callers hold the stage's guard."""

    page_size: int

    def probe(self, prefix: Any, limit: int) -> int:
        """Tokens of `prefix` that seem reusable, page aligned, at most `limit`. Changes nothing."""

    def lock_prefix(self, prefix: Any, limit: int) -> LockedPrefix:
        """Compare tokens, then lock the longest cached prefix of at most `limit` tokens."""

    def unlock(self, lock: Any) -> None:
        """Give a lock back. Twice is fatal: only the lease table may call this."""

    def free_tokens(self) -> int:
        """KV tokens that can be allocated without evicting."""

    def evictable_tokens(self) -> int:
        """KV tokens that eviction could free now."""

    def free_rows(self) -> int:
        """Request rows that can be bound."""
