"""A stage's cache as the pipeline model sees it: token counts under names, the least recently used go first.

Implements what leases and escrow need of a tree (`radix.protocol.PrefixTree`), so that they run unchanged.
Prompts have no tokens here. What a request shares with others is a length under a name.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable

from sglang_wavepp.radix.protocol import LockedPrefix, Match

ENDLESS = 1 << 60
"""Tokens of a pool that never runs out."""


@dataclasses.dataclass(slots=True, eq=False)
class _Entry:
    name: Hashable
    tokens: int
    locks: list[int] = dataclasses.field(default_factory=list)
    """How many of its first tokens each lock protects."""

    @property
    def locked(self) -> int:
        return max(self.locks, default=0)


Lock = tuple[_Entry, int]
"""A lock on the first tokens of an entry."""


@dataclasses.dataclass(slots=True, eq=False)
class Prompt:
    """A request's prompt on its way through the server; also its `Prefix`."""

    seq: int
    length: int
    name: Hashable
    shared: int
    """Tokens that it has in common with others of that name, or finds in the cache."""
    lock: Lock | None = None
    private: int = 0
    """KV tokens that it alone has."""

    @property
    def max_boundary(self) -> int:
        """One token at least is computed."""
        return self.length - 1


class PrefixStore:
    """Named prefixes in a pool of `pool` tokens, and what running requests have besides."""

    states_per_request = 0

    def __init__(self, pool: int, rows: int, page: int) -> None:
        self.page_size, self._pool, self._rows = page, pool, rows
        self._entries: dict[Hashable, _Entry] = {}
        """The least recently used first."""
        self._cached = self._locked = self._private = 0

    def hint(self, prefix: Prompt) -> int:
        """See `PrefixTree`. O(1)."""
        entry = self._entries.get(prefix.name)
        found = 0 if entry is None else min(entry.tokens, prefix.shared, prefix.max_boundary)
        return found // self.page_size * self.page_size

    def match(self, prefix: Prompt, limit: int) -> Match:
        """See `PrefixTree`. O(1)."""
        return Match(min(self.hint(prefix), limit))

    def lock(self, prefix: Prompt, match: Match) -> LockedPrefix:
        """See `PrefixTree`. O(1)."""
        boundary = min(match.boundary, self.hint(prefix))
        if not boundary:
            return LockedPrefix(0, None, None)
        lock = self._lock(self._entries[prefix.name], boundary)
        return LockedPrefix(boundary, lock[0], lock)

    def unlock(self, lock: Lock | None) -> None:
        """See `PrefixTree`. O(locks of the entry)."""
        if lock is not None:
            entry, tokens = lock
            before = entry.locked
            entry.locks.remove(tokens)
            self._locked -= before - entry.locked

    def free_tokens(self) -> int:
        """See `PrefixTree`."""
        return self._pool - self._cached - self._private

    def evictable_tokens(self) -> int:
        """See `PrefixTree`."""
        return self._cached - self._locked

    def free_rows(self) -> int:
        """See `PrefixTree`."""
        return self._rows

    def free_states(self) -> int:
        """See `PrefixTree`: there are no recurrent layers."""
        return 0

    # --- what the loop does ------------------------------------------------------------------

    def seed(self, name: Hashable, tokens: int) -> None:
        """Others left `tokens` tokens under a name before. Where there is no room for them they are lost."""
        tokens = tokens // self.page_size * self.page_size
        if tokens <= self.free_tokens() + self.evictable_tokens():
            self._make_room(tokens)
            self._entries[name] = _Entry(name, tokens)
            self._cached += tokens

    def bind(self, prompt: Prompt, lock: Lock | None) -> None:
        """A request starts: it takes its lease over, and a row."""
        prompt.lock = lock
        self._rows -= 1

    def allocate(self, prompt: Prompt, tokens: int) -> None:
        """Take pages for a request, which were promised. O(evicted entries)."""
        self._make_room(tokens)
        self._private += tokens
        prompt.private += tokens

    def publish(self, prompt: Prompt, computed: int) -> None:
        """What a request has computed so far can be reused by others of its name.

        What was there already it gives back. O(locks of the entry).
        """
        before = 0 if prompt.lock is None else prompt.lock[1]
        moved = computed // self.page_size * self.page_size - before
        if moved <= 0:
            return
        entry = self._entries.get(prompt.name)
        if entry is None:
            entry = self._entries[prompt.name] = _Entry(prompt.name, 0)
        new = max(0, before + moved - entry.tokens)
        entry.tokens += new
        self._cached += new
        prompt.private -= moved
        self._private -= moved
        longer = self._lock(entry, before + moved)
        self.unlock(prompt.lock)
        prompt.lock = longer

    def leave(self, prompt: Prompt, keep: bool) -> None:
        """A request ends, or gives its room back. With `keep` what it had stays until somebody needs room."""
        self.unlock(prompt.lock)
        prompt.lock = None
        self._private -= prompt.private
        if keep and prompt.private:
            name = ("rest", prompt.seq)
            self._entries[name] = _Entry(name, prompt.private)
            self._cached += prompt.private
        prompt.private = 0
        self._rows += 1

    def _lock(self, entry: _Entry, tokens: int) -> Lock:
        self._locked += max(0, tokens - entry.locked)
        entry.locks.append(tokens)
        self._entries[entry.name] = self._entries.pop(entry.name)
        return entry, tokens

    def _make_room(self, tokens: int) -> None:
        short = tokens - self.free_tokens()
        if short <= 0:
            return
        for entry in [e for e in self._entries.values() if e.tokens > e.locked]:
            gone = min(entry.tokens - entry.locked, -(-short // self.page_size) * self.page_size)
            entry.tokens -= gone
            self._cached -= gone
            short -= gone
            if not entry.tokens:
                del self._entries[entry.name]
            if short <= 0:
                return
        raise AssertionError(f"no room for {tokens} tokens that were promised")
