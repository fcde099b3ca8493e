"""Prefix trees for tests, each with the same operations: SGLang's own on both cores, without memory for KV,
and the model tree of the simulated cluster."""

from __future__ import annotations

import os
import random
from array import array
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any
from unittest import mock

os.environ.setdefault("SGLANG_PLATFORM", "wavepp-cpu")

import torch
from model_tree import SEED, ModelTree, Request
from sglang.srt import runtime_context
from sglang.srt.configs.mamba_utils import Mamba2CacheParams, Mamba2StateShape
from sglang.srt.mem_cache.allocator import TokenToKVPoolAllocator
from sglang.srt.mem_cache.allocator.paged import PagedTokenToKVPoolAllocator
from sglang.srt.mem_cache.base_prefix_cache import EvictParams, InsertParams
from sglang.srt.mem_cache.cache_init_params import CacheInitParams
from sglang.srt.mem_cache.memory_pool import HybridReqToTokenPool
from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.srt.mem_cache.unified_cache.components.base import ComponentType

from sglang_wavepp.hint_index import chain, seed_of
from sglang_wavepp.radix.protocol import LockedPrefix
from sglang_wavepp.radix.tree import RequestPrefix, SGLangTree, WaveRadixCache

CORES = ("rust", "python")
ALL = 1 << 40
"""More than there is of anything."""


def text(page: int, letters: str) -> array[int]:
    """One page of tokens for each letter."""
    return array("q", (ord(letter) << 8 | i for letter in letters for i in range(page)))


class RealTree(SGLangTree):
    """SGLang's tree as `LeaseTable` and `Ledger` see it, and what its loop does to it."""

    def __init__(self, cache: WaveRadixCache, allocator: Any, rows: Any, pool: int, block: int) -> None:
        super().__init__(cache, allocator, rows)
        self.cache, self.allocator, self.rows, self.pool = cache, allocator, rows, pool
        self.hints = cache.keep_hints(block, SEED)
        self.states: int = rows.mamba_allocator.available_size() if self.states_per_request else 0
        self.private = 0
        """Tokens that the loop allocated and that are not in the tree."""
        self._taken: list[torch.Tensor] = []

    def prefix(
        self, tokens: Iterable[int], extra_key: str | None = None, cache_salt: str | None = None
    ) -> RequestPrefix:
        """A request with these tokens."""
        ids = array("q", tokens)
        req = SimpleNamespace(
            origin_input_ids=ids,
            output_ids=array("q"),
            extra_key=extra_key,
            cache_salt=cache_salt,
            positional_embed_overrides=None,
            _compute_max_prefix_len=lambda length: max(0, length - 1),
        )
        seed = seed_of(SEED, extra_key, cache_salt)
        return RequestPrefix(req, 0, chain(ids, self.hints.block, seed), self.hints)

    def text(self, letters: str) -> RequestPrefix:
        return self.prefix(text(self.page_size, letters))

    def insert(
        self,
        prefix: RequestPrefix,
        up_to: int = ALL,
        *,
        reuse: int = ALL,
        checkpoint: bool = True,
    ) -> bool:
        """Cache `up_to` tokens of a request that reused at most `reuse` of them. False: there is no room.

        A hybrid tree gets a recurrent state at the end, too. checkpoint: as `checkpoint_into_tree` does, the
        chain of the request being at hand.
        """
        ids = prefix.tokens[:up_to]
        ids = ids[: len(ids) // self.page_size * self.page_size]
        path = self.lock(prefix, self.match(prefix, min(reuse, len(ids))))
        slots, slot = self._slots(len(ids) - path.boundary), self._slot() if self.states else None
        fits = slots is not None and (slot is not None or not self.states)
        if fits:
            self.cache._checkpointed = prefix if checkpoint else None
            result = self.cache.insert(
                InsertParams(
                    key=RadixKey(ids, prefix.req.extra_key, cache_salt=prefix.req.cache_salt),
                    value=torch.cat([torch.zeros(path.boundary, dtype=torch.int64), slots]),
                    mamba_value=slot,
                    prev_prefix_len=path.boundary,
                    inserted_len=path.boundary,
                )
            )
            self.cache._checkpointed = None
        elif slots is not None:
            self.allocator.free(slots)
        if slot is not None and (not fits or result.mamba_exist):
            self.rows.mamba_allocator.free(slot)
        self.give_back(path)
        return fits

    def give_back(self, path: LockedPrefix) -> None:
        for lock in (path.lock, *path.rungs):
            self.unlock(lock)

    def _slots(self, tokens: int) -> torch.Tensor | None:
        self.allocator.evict_to_free_tokens(self.cache, tokens)
        slots: torch.Tensor | None = self.allocator.alloc(tokens)
        return slots

    def _slot(self) -> torch.Tensor | None:
        slots = self.rows.mamba_allocator
        if not slots.available_size():
            self.cache.evict_for_alloc(EvictParams(mamba_num=1))
        slot: torch.Tensor | None = slots.alloc(1)
        return slot

    def allocate(self, tokens: int) -> bool:
        """Take whole pages for a running request, evicting what is needed."""
        slots = self._slots(tokens)
        if slots is not None:
            self._taken.append(slots)
            self.private += tokens
        return slots is not None

    def free(self) -> None:
        """Give back all that `allocate` took."""
        while self._taken:
            self.allocator.free(self._taken.pop())
        self.private = 0

    def evict(self, tokens: int = ALL, states: int = 0) -> None:
        self.cache.evict(EvictParams(num_tokens=tokens, mamba_num=states))

    def reset(self) -> None:
        self.cache.reset()
        self.allocator.clear()
        self._taken.clear()
        self.private = 0
        if self.states:
            self.rows.mamba_allocator.clear()

    def resident(self, prefix: RequestPrefix, limit: int = ALL) -> int:
        """Tokens of a request that have KV, page aligned."""
        return int(self.cache.tree_core.match_full_device_prefix(prefix.key(limit))[0])

    def ends(self, prefix: RequestPrefix) -> list[int]:
        """Where the nodes end that hold what is cached of a request."""
        core = self.cache.tree_core
        _, node, _ = core.match_full_device_prefix(prefix.key(ALL))
        return [info.path_end for info in core.collect_path_info([node])[0] if info.path_end]

    def protected(self) -> int:
        return int(self.cache.full_protected_size())

    def check(self) -> None:
        """SGLang's own checks, what is idle included."""
        sums = self.free_tokens() + self.evictable_tokens() + self.protected() + self.private
        assert sums == self.pool, "leak"
        if self.states:
            assert self.free_states() + self.cache.mamba_protected_size() == self.states, "leak of states"
        self.cache.sanity_check()


class FakeTree(ModelTree):
    """The model tree with the same operations. Its pages are its nodes."""

    def __init__(self, page: int, pool: int) -> None:
        super().__init__(pool, 8, page)
        self.pool = pool
        self.rng = random.Random(1)

    def prefix(self, tokens: Iterable[int]) -> Request:
        return Request(0, tuple(tokens), 1)

    def text(self, letters: str) -> Request:
        return self.prefix(text(self.page_size, letters))

    def insert(self, prefix: Any, up_to: int = ALL, *, reuse: int = ALL) -> bool:  # type: ignore[override]
        ids = prefix.tokens[:up_to]
        path = self.lock(prefix, self.match(prefix, min(reuse, len(ids))))
        fits = self.allocate(len(ids) // self.page_size * self.page_size - path.boundary)
        if fits:
            self.private -= len(ids) // self.page_size * self.page_size - path.boundary
            super().insert(ids)
        self.unlock(path.lock)
        return fits

    def allocate(self, tokens: int) -> bool:  # type: ignore[override]
        fits = tokens <= self.free_tokens() + self.evictable_tokens()
        if fits:
            super().allocate(tokens, self.rng)
        return fits

    def free(self) -> None:
        self.private = 0

    def evict(self, tokens: int = ALL, states: int = 0) -> None:
        goal = min(self.free_tokens() + tokens, self.free_tokens() + self.evictable_tokens())
        before = self.private
        super().allocate(goal, self.rng)
        self.private = before

    def resident(self, prefix: Request, limit: int = ALL) -> int:
        return self.match(prefix, limit).boundary

    def protected(self) -> int:
        return self.locked

    def check(self) -> None:
        assert self.free_tokens() >= 0


Tree = RealTree | FakeTree
Make = Callable[[int], Tree]
"""Makes a tree over a pool of so many pages."""


def fake(page: int, pool: int) -> FakeTree:
    return FakeTree(page, pool)


def plain(core: str, page: int, pool: int, block: int) -> RealTree:
    """SGLang's tree of a model with attention only. `pool`: tokens."""
    rows = SimpleNamespace(device="cpu", size=8, available_size=lambda: 8)
    return _real(core, page, pool, block, rows, (ComponentType.FULL,))


def hybrid(core: str, page: int, pool: int, block: int, states: int) -> RealTree:
    """SGLang's tree of a model with recurrent layers, of which `states` states fit."""
    shape = Mamba2StateShape.create(
        tp_world_size=1,
        intermediate_size=16,
        n_groups=1,
        num_heads=1,
        head_dim=16,
        state_size=2,
        conv_kernel=4,
    )
    rows = HybridReqToTokenPool(
        size=8,
        mamba_size=states,
        mamba_spec_state_size=8,
        max_context_len=8,
        device="cpu",
        enable_memory_saver=False,
        cache_params=Mamba2CacheParams(shape=shape, layers=[0]),
        mamba_layer_ids=[0],
        enable_mamba_extra_buffer=True,
        speculative_num_draft_tokens=None,
    )
    settings = SimpleNamespace(mamba=SimpleNamespace(mamba_max_states_per_path=-1))
    with ExitStack() as patches:
        # What SGLang knows of the model and its flags while it makes such a tree.
        context = type(runtime_context._CONTEXT)
        patches.enter_context(mock.patch.object(runtime_context, "get_server_args"))
        patches.enter_context(mock.patch.object(context, "config_bag", lambda *_: settings))
        patches.enter_context(
            mock.patch("sglang.srt.arg_groups.overrides.mamba_cache_chunk_size", lambda _: page)
        )
        return _real(core, page, pool, block, rows, (ComponentType.FULL, ComponentType.MAMBA))


def _real(
    core: str, page: int, pool: int, block: int, rows: Any, components: tuple[ComponentType, ...]
) -> RealTree:
    options: dict[str, Any] = {"dtype": torch.bfloat16, "device": "cpu", "need_sort": False}
    options["kvcache"] = SimpleNamespace(device=torch.device("cpu"), register_mapping=lambda *_, **__: None)
    if page == 1:
        allocator = TokenToKVPoolAllocator(pool, **options)
    else:
        allocator = PagedTokenToKVPoolAllocator(pool, page_size=page, **options)
    cache = WaveRadixCache(
        CacheInitParams(
            disable=False,
            req_to_token_pool=rows,
            token_to_kv_pool_allocator=allocator,
            page_size=page,
            tree_components=components,
            enable_mamba_extra_buffer=len(components) > 1,
            tree_core_backend=core,
        )
    )
    assert core in type(cache.tree_core).__name__.lower() or core == "python", "another core than asked for"
    return RealTree(cache, allocator, rows, pool, block)
