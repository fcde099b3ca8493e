"""SGLang's prefix tree and pools behind the `PrefixTree` protocol: the only module here that knows SGLang."""

from __future__ import annotations

from array import array
from collections.abc import Callable
from typing import Any

from sglang.srt.environ import envs
from sglang.srt.mem_cache.base_prefix_cache import InsertParams, InsertResult, MatchPrefixParams
from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.srt.mem_cache.unified_cache.cache_action import FreeComponentDeviceSlot
from sglang.srt.mem_cache.unified_cache.components.base import ComponentType
from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache

from sglang_wavepp.hint_index import Hints, Snapshot, chain, seed_of
from sglang_wavepp.radix.protocol import LockedPrefix, Match

_ATTEMPTS = 3
"""Matches of a hybrid prefix that are tried while the loop evicts what was just found."""


class RequestPrefix:
    """The tokens of an SGLang request in their cache namespace. Length and limit follow the request.

    Args:
        req: SGLang's request; it gets to know this object as `wavepp_prefix`.
        digest: of the payload that the request was built from, equal on all stages.
        hashes: array('Q'), chain of the prompt.
        hints: this stage's; None where nothing is ever reused.
    """

    __slots__ = ("_block", "_hashes", "_seed", "digest", "req")

    def __init__(self, req: Any, digest: int, hashes: array[int], hints: Hints | None) -> None:
        self.req = req
        self.digest = digest
        self._hashes = hashes
        self._block = 0 if hints is None else hints.block
        self._seed = 0 if hints is None else seed_of(hints.seed, req.extra_key, req.cache_salt)
        req.wavepp_prefix = self

    @property
    def length(self) -> int:
        return len(self.req.origin_input_ids) + len(self.req.output_ids)

    @property
    def max_boundary(self) -> int:
        # Overridden embeddings share token ids with other inputs: such KV is never reused.
        if self.req.positional_embed_overrides is not None or envs.SGLANG_RADIX_FORCE_MISS.get():
            return 0
        return max(0, int(self.req._compute_max_prefix_len(self.length)))

    @property
    def tokens(self) -> array[int]:
        """array('q'), int64: the prompt, and after a retraction the output so far."""
        ids: array[int] = self.req.origin_input_ids
        return ids + self.req.output_ids if self.req.output_ids else ids

    def hashes(self, tokens: array[int] | memoryview[int] | None = None) -> array[int]:
        """The chain of all full blocks of `tokens` (by default of all the request has), or a longer one.

        What was generated since the last call is hashed, nothing else.
        """
        hashes = self._hashes
        length = self.length if tokens is None else len(tokens)
        if len(hashes) < length // self._block:
            tokens = self.tokens if tokens is None else tokens
            hashes = self._hashes = chain(tokens, self._block, self._seed, have=hashes)
        return hashes

    def key(self, limit: int) -> RadixKey:
        """The radix key of at most `limit` tokens."""
        return RadixKey(
            token_ids=self.tokens,
            extra_key=self.req.extra_key,
            limit=limit,
            cache_salt=self.req.cache_salt,
        )


class WaveRadixCache(UnifiedRadixCache):
    """SGLang's unified radix cache, which keeps a stage's hints and tells when it is reset.

    Whatever its core (Rust or Python), three methods see all that becomes or ceases to be resident: `insert`,
    `_evict_device_leaf` and `_reset_full`; and a recurrent state leaves by a `FreeComponentDeviceSlot`.
    Each node's own block hashes are kept here, 8 bytes a block and some 250 bytes a node, so that an
    evicted leaf takes exactly its blocks out of the index.
    """

    def __init__(self, params: Any) -> None:
        self.on_reset: Callable[[], None] | None = None
        self.hints: Hints | None = None
        self._checkpointed: RequestPrefix | None = None
        """The request whose tokens are being inserted."""
        self._owned: dict[int, tuple[int, array[int]]] = {}
        """Node -> (first block, hashes) of the blocks that end in it, or that ended in it before a split."""
        self._states: dict[int, Snapshot] = {}
        """Address of a recurrent state's slot number -> where the state is."""
        super().__init__(params)

    def keep_hints(self, block: int, seed: int) -> Hints:
        """Keep hints from now on. The tree must be empty."""
        self.hints = Hints(block, seed, recurrent=self.supports_mamba())
        return self.hints

    def insert(self, params: InsertParams) -> InsertResult:
        result = super().insert(params)
        if self.hints is not None and result.last_device_node is not None:
            self._inserted(self.hints, params, result)
        return result

    def _inserted(self, hints: Hints, params: InsertParams, result: InsertResult) -> None:
        block = hints.block
        length = len(params.key) // self.page_size * self.page_size
        first, last = result.prefix_len // block, length // block
        state = params.mamba_value is not None and not result.mamba_exist
        if first >= last and not state:
            return
        tokens = memoryview(params.key.raw_token_ids())[:length]
        if self._checkpointed is not None:
            hashes = self._checkpointed.hashes(tokens)
        else:
            key = params.key
            hashes = chain(tokens, block, seed_of(hints.seed, key.extra_key, key.cache_salt))
        if first < last:
            hints.index.add(hashes, first, last)
            self._owned[result.last_device_node] = (first, hashes[first:last])
        if state and hints.snapshots is not None:
            if length % block:
                hints.snapshots.unaligned += 1
            else:
                self._states[params.mamba_value.data_ptr()] = hints.snapshots.add(hashes, last)

    def checkpoint_into_tree(self, req: Any, *, up_to: int, **kwargs: Any) -> None:
        self._checkpointed = getattr(req, "wavepp_prefix", None)
        try:
            super().checkpoint_into_tree(req, up_to=up_to, **kwargs)
        finally:
            self._checkpointed = None

    def _evict_device_leaf(self, node_id: int, tracker: Any) -> Any:
        owned = self._owned.pop(node_id, None)
        path: Any = self.tree_core.collect_path_info([node_id])[0] if owned is not None else None
        backup = super()._evict_device_leaf(node_id, tracker)
        if owned is not None and self.hints is not None:
            first, hashes = owned
            start = max(path[-1].path_start // self.hints.block - first, 0)
            self.hints.index.remove(hashes, start, len(hashes))
            if start:
                # The node was split: these blocks end in nodes before it now, none of which knows its own.
                self._owned[path[-2].node_id] = (first, hashes[:start])
        return backup

    def _apply_cache_action(self, action: Any) -> None:
        if isinstance(action, FreeComponentDeviceSlot) and action.component_type == ComponentType.MAMBA:
            for slot in action.indices:
                state = self._states.pop(slot.data_ptr(), None)
                if state is not None and self.hints is not None and self.hints.snapshots is not None:
                    self.hints.snapshots.remove(state)
        super()._apply_cache_action(action)

    def _reset_full(self, *args: Any, **kwargs: Any) -> Any:
        result = super()._reset_full(*args, **kwargs)
        self._owned.clear()
        self._states.clear()
        if self.hints is not None:
            self.hints.clear()
        if self.on_reset is not None:
            self.on_reset()
        return result


class SGLangTree:
    """`PrefixTree` over a `WaveRadixCache`, its KV allocator and the request rows.

    `hint` and `match` are read only and may run without the guard: the Rust core serialises single calls, and
    compares tokens without the GIL. Everything else splits nodes or moves counters.
    """

    def __init__(self, cache: WaveRadixCache, allocator: Any, rows: Any) -> None:
        self._cache, self._allocator, self._rows = cache, allocator, rows
        self._recurrent: bool = cache.supports_mamba()
        self.page_size: int = cache.page_size
        # A slot to compute in and, with extra buffers, those that SGLang tracks checkpoints in.
        self.states_per_request = 1 + getattr(rows, "mamba_ping_pong_track_buffer_size", 0)
        if not self._recurrent:
            self.states_per_request = 0

    def hint(self, prefix: RequestPrefix) -> int:
        hints = self._cache.hints
        if hints is None:
            return 0
        return hints.boundary(prefix.hashes(), prefix.max_boundary) // self.page_size * self.page_size

    def match(self, prefix: RequestPrefix, limit: int) -> Match:
        if limit <= 0 or self._cache.disable:
            return Match(0)
        core, key = self._cache.tree_core, prefix.key(limit)
        matched, node, pinned = core.match_full_device_prefix(key)
        if not self._recurrent:
            return Match(matched, ((matched, node),) if pinned == matched else ())
        for _ in range(_ATTEMPTS):
            try:
                path = core.collect_path_info([node])[0]
                ends = [(info.path_end, info.node_id) for info in reversed(path)]
                ends = [end for end in ends if 0 < end[0] <= matched and self._has_state(end[1])]
            except KeyError:
                matched, node, _ = core.match_full_device_prefix(key)
            else:
                return Match(ends[0][0], tuple(ends)) if ends else Match(0)
        return Match(0)

    def _has_state(self, node: int) -> bool:
        state = self._cache.tree_core.get_component_device_value(node, ComponentType.MAMBA)
        return state is not None

    def lock(self, prefix: RequestPrefix, match: Match) -> LockedPrefix:
        cache = self._cache
        locked = self._lock_ends(match)
        if not locked and self._recurrent:
            # Others may be there by now; while the guard is held they stay.
            match = self.match(prefix, match.boundary)
            locked = self._lock_ends(match)
        if locked:
            end, node, lock = locked[0]
            return LockedPrefix(end, node, lock, tuple(rung for *_, rung in locked[1:]))
        found = cache.match_prefix(MatchPrefixParams(key=prefix.key(match.boundary)))
        node = found.last_device_node
        return LockedPrefix(found.device_prefix_len, node, cache.lock(node))

    def _lock_ends(self, match: Match) -> list[tuple[int, Any, Any]]:
        """Lock those ends of a match that are still there, as (tokens, node, lock)."""
        locked = []
        for end, node in match.ends:
            try:
                if not self._recurrent or self._has_state(node):
                    locked.append((end, node, self._cache.lock(node)))
            except KeyError:
                continue  # evicted since it was found
        return locked

    def unlock(self, lock: Any) -> None:
        self._cache.unlock(lock)

    def free_tokens(self) -> int:
        return int(self._allocator.available_size())

    def evictable_tokens(self) -> int:
        return int(self._cache.full_evictable_size())

    def free_rows(self) -> int:
        return int(self._rows.available_size())

    def free_states(self) -> int:
        if not self._recurrent:
            return 0
        return int(self._rows.mamba_allocator.available_size() + self._cache.mamba_evictable_size())
