"""The model of emulated devices: no weights, no computation, tokens that follow from what they follow on.

With `checks` each stage keeps a number for each KV slot, made from the token and its position, and written
and read through the slots that SGLang hands out. The sum over a sequence decides the next token, and has to
be the same on every stage. A wrong slot, a stale prefix or a slot that was overwritten on any of them shows
in the output. `expected` computes from the tokens alone what a server has to answer.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from sglang.srt.layers.logits_processor import LogitsProcessorOutput
from sglang.srt.model_executor.forward_batch_info import PPProxyTensors
from sglang.srt.model_executor.forward_context import get_forward_context
from sglang.srt.runtime_context import get_parallel

from sglang_wavepp.launch.emulated_device import READY_KEY, installed

_PRIME = 2147483629
_LOWEST = 16
"""Smaller ids are special tokens."""
WRONG = 3
"""The token that says that stages disagreed."""


def mark(tokens: Any, positions: Any) -> Any:
    """The number of a token at a position. Integers or int64 tensors."""
    return (tokens * 1000003 + positions * 7919 + 12345) % _PRIME


def next_token(total: Any, length: Any, vocab: int) -> Any:
    """The token that follows `length` tokens whose numbers have this sum, modulo the prime."""
    return _LOWEST + (total * 48271 + length) % (vocab - _LOWEST)


def expected(prompt: Sequence[int], count: int, vocab: int) -> list[int]:
    """What a server with `checks` has to generate behind a prompt."""
    total, length = sum(mark(token, i) for i, token in enumerate(prompt)) % _PRIME, len(prompt)
    made: list[int] = []
    for _ in range(count):
        made.append(next_token(total, length, vocab))
        total = (total + mark(made[-1], length)) % _PRIME
        length += 1
    return made


class EmulatedForCausalLM(torch.nn.Module):
    """Stands for a stage of any model. Its class name is that of the model folder's architecture."""

    checks = False

    def __init__(self, config: Any, quant_config: Any = None, prefix: str = "") -> None:
        super().__init__()
        self.config = config
        group = get_parallel().pp_group
        rank, stages, layers = group.rank_in_group, group.world_size, config.num_hidden_layers
        self._last = group.is_last_rank
        self.start_layer, self.end_layer = rank * layers // stages, (rank + 1) * layers // stages
        self._unused = torch.nn.Parameter(torch.zeros(1), requires_grad=False)  # SGLang asks for a dtype
        self._marks: torch.Tensor | None = None

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """There are none."""

    @torch.no_grad()
    def forward(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        forward_batch: Any,
        input_embeds: torch.Tensor | None = None,
        get_embedding: bool = False,
        pp_proxy_tensors: PPProxyTensors | None = None,
    ) -> LogitsProcessorOutput | PPProxyTensors:
        """Launch the wave. Returns what goes to the next stage, or one-hot logits on the last."""
        lengths = forward_batch.seq_lens_cpu
        extend = forward_batch.forward_mode.is_extend()
        if extend:
            prefixes, new = forward_batch.extend_prefix_lens_cpu, forward_batch.extend_seq_lens_cpu
            spans = list(zip(map(int, prefixes), map(int, new), strict=True))
        else:
            spans = [(length - 1, 1) for length in lengths.tolist()]
        before = {} if pp_proxy_tensors is None else pp_proxy_tensors.tensors
        tokens = before.get("hidden_states", input_ids)
        totals = self._totals(tokens.view(-1), positions, forward_batch) if self.checks else None
        if totals is None:
            totals = torch.zeros(len(spans), dtype=torch.int64)
            tokens = tokens[:0]  # activations go from device to device and cost the host next to nothing
        elif before:
            totals = torch.where(totals == before["totals"], totals, -1)
        else:
            tokens = tokens.clone()  # out of a buffer that the next wave is written to
        sent = installed().launch(forward_batch.rids, spans, extend, before.get(READY_KEY, 0.0))
        if not self._last:
            return PPProxyTensors({"hidden_states": tokens.view(-1, 1), "totals": totals, READY_KEY: sent})
        vocab = self.config.vocab_size
        tokens = torch.where(totals < 0, WRONG, next_token(totals, lengths.to(torch.int64), vocab))
        logits = torch.zeros(len(spans), vocab).scatter_(1, tokens.view(-1, 1), 1.0)
        return LogitsProcessorOutput(next_token_logits=logits)

    def _totals(self, tokens: torch.Tensor, positions: torch.Tensor, forward_batch: Any) -> torch.Tensor:
        """The sums over whole sequences, from what the KV slots of this stage hold."""
        backend = get_forward_context().attn_backend
        if self._marks is None:
            pool = backend.token_to_kv_pool
            self._marks = torch.zeros(pool.size + pool.page_size, dtype=torch.int64)
        self._marks[forward_batch.out_cache_loc] = mark(tokens.to(torch.int64), positions)
        rows = backend.req_to_token_pool.req_to_token
        sums = [
            self._marks[rows[row, :length].to(torch.int64)].sum() % _PRIME
            for row, length in zip(
                forward_batch.req_pool_indices.tolist(), forward_batch.seq_lens_cpu.tolist(), strict=True
            )
        ]
        return torch.stack(sums)


EntryClass = EmulatedForCausalLM
