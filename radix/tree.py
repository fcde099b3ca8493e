"""SGLang's prefix tree and pools behind the `PrefixTree` protocol: the only module here that knows SGLang."""

from __future__ import annotations

from array import array
from collections.abc import Callable
from typing import Any

from sglang.srt.environ import envs
from sglang.srt.mem_cache.base_prefix_cache import MatchPrefixParams
from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache

from sglang_wavepp.radix.protocol import LockedPrefix


class WaveRadixCache(UnifiedRadixCache):
    """SGLang's unified radix cache that tells when it is reset: leases are void from then on."""

    def __init__(self, params: Any) -> None:
        self.on_reset: Callable[[], None] | None = None
        super().__init__(params)

    def _reset_full(self, *args: Any, **kwargs: Any) -> Any:
        result = super()._reset_full(*args, **kwargs)
        if self.on_reset is not None:
            self.on_reset()
        return result


class RequestPrefix:
    """The tokens of an SGLang request in their cache namespace. Length and limit follow the request."""

    __slots__ = ("digest", "req")

    def __init__(self, req: Any, digest: int) -> None:
        self.req = req
        self.digest = digest
        """Digest of the payload that the request was built from, equal on all stages."""

    @property
    def length(self) -> int:
        return len(self.req.origin_input_ids) + len(self.req.output_ids)

    @property
    def max_boundary(self) -> int:
        # Overridden embeddings share token ids with other inputs: such KV is never reused.
        if self.req.positional_embed_overrides is not None or envs.SGLANG_RADIX_FORCE_MISS.get():
            return 0
        return int(self.req._compute_max_prefix_len(self.length))

    def key(self, limit: int) -> RadixKey:
        """The radix key of at most `limit` tokens."""
        ids: array[int] = self.req.origin_input_ids
        if self.req.output_ids:
            ids = ids + self.req.output_ids
        return RadixKey(
            token_ids=ids, extra_key=self.req.extra_key, limit=limit, cache_salt=self.req.cache_salt
        )


class SGLangTree:
    """`PrefixTree` over `UnifiedRadixCache`, its KV allocator and the request rows.

    `probe` is read only and may run without the guard: the Rust core serialises single calls. Everything
    else splits nodes or moves counters, and is called under the guard.
    """

    def __init__(self, cache: UnifiedRadixCache, allocator: Any, rows: Any) -> None:
        self._cache, self._allocator, self._rows = cache, allocator, rows
        self.page_size: int = cache.page_size

    def probe(self, prefix: RequestPrefix, limit: int) -> int:
        if limit <= 0 or self._cache.disable:
            return 0
        matched, _, _ = self._cache.tree_core.match_full_device_prefix(prefix.key(limit))
        return int(matched)

    def lock_prefix(self, prefix: RequestPrefix, limit: int) -> LockedPrefix:
        found = self._cache.match_prefix(MatchPrefixParams(key=prefix.key(max(limit, 0))))
        node = found.last_device_node
        return LockedPrefix(found.device_prefix_len, node, self._cache.lock(node))

    def unlock(self, lock: Any) -> None:
        self._cache.unlock(lock)

    def free_tokens(self) -> int:
        return int(self._allocator.available_size())

    def evictable_tokens(self) -> int:
        return int(self._cache.evictable_size())

    def free_rows(self) -> int:
        return int(self._rows.available_size())
