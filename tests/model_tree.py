"""A radix tree as an obvious model: every cached page is a node. Pages are counted, not stored."""

from __future__ import annotations

import random
from array import array
from typing import Any

from sglang_wavepp.hint_index import Hints, chain
from sglang_wavepp.hint_index.snapshots import Snapshot
from sglang_wavepp.radix.protocol import LockedPrefix, Match

SEED = 1
"""Of the prompt hashes."""


class Request:
    """A request on one stage, and its `Prefix`."""

    def __init__(self, seq: int, tokens: tuple[int, ...], max_new: int) -> None:
        self.seq, self.prompt, self.max_new = seq, tokens, max_new
        self.output: list[int] = []
        self.lock: Any = None
        self.lease: Any = None
        self.done = self.boundary = 0
        self.private = self.states = 0

    @property
    def tokens(self) -> tuple[int, ...]:
        return self.prompt + tuple(self.output)

    @property
    def length(self) -> int:
        return len(self.prompt) + len(self.output)

    @property
    def max_boundary(self) -> int:
        return self.length - 1


class Node:
    """One cached page after all those before it."""

    __slots__ = ("children", "depth", "hash", "key", "locks", "parent", "pins", "snapshot", "state")

    def __init__(self, parent: Node | None, key: tuple[int, ...]) -> None:
        self.parent, self.key = parent, key
        self.depth: int = 0 if parent is None else parent.depth + len(key)
        self.children: dict[tuple[int, ...], Node] = {}
        self.locks = 0
        """Locks that end here or further on."""
        self.hash: array[int] | None = None
        """Of the block that ends here, if one does."""
        self.state = False
        """There is a recurrent state after this page."""
        self.pins = 0
        """Locks that end here: they keep the state, too."""
        self.snapshot: Snapshot | None = None


class ModelTree:
    """Prefix tree, KV pool, request rows and, for a hybrid model, the recurrent slots of one stage.

    states: recurrent slots; None for a plain model. A running request has two: one to compute in, and one
    that it gives to the tree at its next checkpoint. What a hybrid tree caches ends at a recurrent state.
    """

    def __init__(self, pool: int, rows: int, page: int, states: int | None = None) -> None:
        self.page_size, self._pool, self.rows = page, pool, rows
        self.recurrent = states is not None
        self.states_per_request = 2 if self.recurrent else 0
        self.states = states or 0
        self.lies = 0.0
        """How often a hint is any number: it may be wrong in either direction."""
        self.rng = random.Random()
        self.hints = Hints(4 * page, SEED, recurrent=self.recurrent)
        self.reset()

    def reset(self) -> None:
        self._root = Node(None, ())
        self._nodes: dict[Node, None] = {}
        """All but the root, the oldest first."""
        self._states: dict[Node, None] = {}
        """Those with a recurrent state."""
        self.locked = self.pinned = 0
        """Tokens, and recurrent states, that cannot be evicted."""
        self.private = self.private_states = 0
        """What running requests have besides."""
        self.hints.clear()

    # --- what leases and escrow need -----------------------------------------------------------

    def _longest(self, tokens: tuple[int, ...], limit: int) -> Node:
        page, node = self.page_size, self._root
        limit = min(limit, len(tokens)) - page
        while node.depth <= limit:
            longer = node.children.get(tokens[node.depth : node.depth + page])
            if longer is None:
                break
            node = longer
        return node

    def hint(self, prefix: Request) -> int:
        if self.lies and self.rng.random() < self.lies:
            return self.rng.randrange(prefix.length) // self.page_size * self.page_size
        hashes = chain(array("q", prefix.tokens), self.hints.block, SEED)
        return self.hints.boundary(hashes, prefix.max_boundary) // self.page_size * self.page_size

    def match(self, prefix: Request, limit: int) -> Match:
        node: Node | None = self._longest(prefix.tokens, limit)
        assert node is not None
        if not self.recurrent:
            return Match(node.depth, ((node.depth, node),))
        ends = []
        while node is not None and node.depth:
            if node.state:
                ends.append((node.depth, node))
            node = node.parent
        return Match(ends[0][0], tuple(ends)) if ends else Match(0)

    def lock(self, prefix: Request, match: Match) -> LockedPrefix:
        if not self.recurrent:
            node = self._longest(prefix.tokens, match.boundary)
            return LockedPrefix(node.depth, node, self._lock(node))
        ends = [node for _, node in match.ends if node in self._states]
        if not ends:
            ends = [node for _, node in self.match(prefix, match.boundary).ends]
        node, *rungs = ends or [self._root]
        return LockedPrefix(node.depth, node, self._lock(node), tuple(map(self._lock, rungs)))

    def _lock(self, node: Node) -> Node:
        self.pinned += node.state and not node.pins
        node.pins += 1
        at = node
        while at.parent is not None:
            self.locked += 0 if at.locks else self.page_size
            at.locks += 1
            at = at.parent
        return node

    def unlock(self, lock: Node) -> None:
        assert lock.pins > 0, "unlocked twice"
        lock.pins -= 1
        self.pinned -= lock.state and not lock.pins
        node = lock
        while node.parent is not None:
            node.locks -= 1
            self.locked -= 0 if node.locks else self.page_size
            node = node.parent

    @property
    def cached(self) -> int:
        return len(self._nodes) * self.page_size

    def free_tokens(self) -> int:
        return self._pool - self.cached - self.private

    def evictable_tokens(self) -> int:
        return self.cached - self.locked

    def free_rows(self) -> int:
        return self.rows

    def free_states(self) -> int:
        return self.states - self.private_states - self.pinned

    # --- what the loop does --------------------------------------------------------------------

    def make_room(self, tokens: int, rng: random.Random) -> None:
        """Evict unlocked leaves, any of them, until so much is free. What was escrowed must be there."""
        leaves = self._leaves() if self.free_tokens() < tokens else []
        while self.free_tokens() < tokens:
            assert leaves, f"no room for {tokens} tokens that were promised"
            at = rng.randrange(len(leaves))
            leaves[at], leaves[-1] = leaves[-1], leaves[at]
            parent = self._evict(leaves.pop())
            if parent.parent is not None and not parent.children and not parent.locks:
                leaves.append(parent)

    def allocate(self, tokens: int, rng: random.Random) -> None:
        """Take private pages."""
        self.make_room(tokens, rng)
        self.private += tokens

    def allocate_states(self, count: int, rng: random.Random) -> None:
        """Take private recurrent slots, evicting states that nobody has locked."""
        while self.states - self.private_states - len(self._states) < count:
            free = [node for node in self._states if not node.pins]
            assert free, f"no room for {count} recurrent states that were promised"
            self._evict_state(rng.choice(free))
        self.private_states += count

    def insert(self, tokens: tuple[int, ...]) -> int:
        """Cache the full pages of `tokens`; returns how many tokens became cached with it.

        In a hybrid tree a private recurrent state goes with them; it is freed if there is one already.
        """
        full = tokens[: len(tokens) // self.page_size * self.page_size]
        node = self._longest(full, len(full))
        new = len(full) - node.depth
        hashes = chain(array("q", full), self.hints.block, SEED) if new or self.recurrent else array("Q")
        while node.depth < len(full):
            key = full[node.depth : node.depth + self.page_size]
            node.children[key] = longer = Node(node, key)
            node = longer
            self._nodes[node] = None
            blocks, rest = divmod(node.depth, self.hints.block)
            if not rest:
                self.hints.index.add(hashes, blocks - 1, blocks)
                node.hash = hashes[blocks - 1 : blocks]
        self.private_states -= self.recurrent
        if self.recurrent and full and not node.state:
            node.state = True
            self._states[node] = None
            blocks, rest = divmod(node.depth, self.hints.block)
            if not rest and self.hints.snapshots is not None:
                node.snapshot = self.hints.snapshots.add(hashes, blocks)
        return new

    # --- eviction ------------------------------------------------------------------------------

    def evict_some(self, rng: random.Random) -> None:
        """Something else on this stage evicts: caches of stages drift apart."""
        states = [node for node in self._states if not node.pins]
        for node in rng.sample(states, rng.randrange(len(states) + 1)):
            if node in self._states:
                self._evict_state(node)
        leaves = self._leaves()
        for leaf in rng.sample(leaves, rng.randrange(len(leaves) + 1)):
            if leaf in self._nodes:
                self._evict(leaf)

    def _leaves(self) -> list[Node]:
        return [node for node in self._nodes if not node.locks and not node.children]

    def _evict(self, leaf: Node) -> Node:
        """Evict a leaf, and in a hybrid tree the pages before it up to a state; returns what it hung on."""
        assert leaf.parent is not None
        self._remove_state(leaf)
        del self._nodes[leaf], leaf.parent.children[leaf.key]
        if leaf.hash is not None:
            self.hints.index.remove(leaf.hash, 0, 1)
        parent = leaf.parent
        useless = self.recurrent and not (parent.state or parent.children or parent.locks)
        return self._evict(parent) if useless and parent.parent is not None else parent

    def _evict_state(self, node: Node) -> None:
        self._remove_state(node)
        if not node.children and not node.locks:
            self._evict(node)

    def _remove_state(self, node: Node) -> None:
        if node.state:
            assert not node.pins, "a state that is locked was evicted"
            node.state = False
            del self._states[node]
            if node.snapshot is not None and self.hints.snapshots is not None:
                self.hints.snapshots.remove(node.snapshot)
                node.snapshot = None
