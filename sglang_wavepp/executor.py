"""Applies the decisions of the log on one stage of SGLang: requests, batches, KV, outputs.

Runs in the LOOP thread. Nothing here decides anything: what a decision says is checked against what the
stage holds, and a difference is a `DivergenceError`. Every method but `launch` is called under the guard.
"""

from __future__ import annotations

import dataclasses
import time
from collections import deque
from typing import Any

import torch
from sglang.srt.managers.schedule_batch import FINISH_ABORT, ScheduleBatch
from sglang.srt.managers.scheduler_components.metrics_reporter import PrefillStats, QueueCount
from sglang.srt.mem_cache.common import checkpoint_kv_cache, release_kv_cache
from sglang.srt.model_executor.forward_batch_info import PPProxyTensors
from sglang.srt.observability.req_time_stats import set_time_batch
from sglang.srt.utils.common import async_h2d

from sglang_wavepp.codec import decode_outputs, encode_outputs
from sglang_wavepp.errors import DivergenceError, ProtocolError
from sglang_wavepp.member import Member
from sglang_wavepp.messages import Commit, Decode, Drop, Output, Prefill, WaveDone
from sglang_wavepp.radix.lease import Lease

WAVE_KEY = "__wavepp_wave__"
"""Key of the wave id in the activations' dictionary."""


@dataclasses.dataclass(slots=True, eq=False)
class _Live:
    """A committed request on this stage."""

    seq: int
    req: Any
    boundary: int
    lease: Lease | None
    """The lease until the first span; from then on the request holds the lock itself."""


@dataclasses.dataclass(slots=True, eq=False)
class _Group:
    """A decode group: the batch that runs, and prompts that finished since and join with the next wave."""

    batch: ScheduleBatch | None = None
    joining: list[ScheduleBatch] = dataclasses.field(default_factory=list)

    def batches(self) -> list[ScheduleBatch]:
        return ([self.batch] if self.batch is not None else []) + self.joining


@dataclasses.dataclass(slots=True, eq=False)
class _Wave:
    """A wave that was prepared and whose outputs were not applied yet."""

    batch: ScheduleBatch
    unfinished: list[Any]
    """Requests whose prompt it does not complete."""
    computed: list[tuple[int, int]]
    """Prompt tokens that its requests have computed with it: (seq, tokens)."""
    proxy: PPProxyTensors | None = None
    """Its input activations: kept until the device is through, which reads them on another stream."""
    launched: Any = None
    """The event behind it on the device."""


class Executor:
    """One stage's requests and waves.

    Args:
        scheduler: SGLang's scheduler of this stage.
        member: this stage's admission state.
        groups: number of decode groups.
    """

    def __init__(self, scheduler: Any, member: Member, groups: int) -> None:
        self._s = scheduler
        self._member = member
        self._groups = [_Group() for _ in range(groups)]
        self._live: dict[int, _Live] = {}
        self._seqs: dict[Any, int] = {}
        self._waves: dict[int, _Wave] = {}
        self._metadata: dict[int, Any] = {}
        self._sampled: deque[Any] = deque()
        """Last stage: (event, output tensors) as SGLang queues them, one for each wave in order."""
        self._sampled_waves: deque[tuple[int, float]] = deque()
        self._view = ScheduleBatch(reqs=[], batch_is_full=False)
        scheduler.running_batch = self._view
        scheduler.running_mbs = [self._view]

    @property
    def live(self) -> int:
        """Requests between COMMIT and their end."""
        return len(self._live)

    def request(self, seq: int) -> Any:
        """The SGLang request behind a number."""
        return self._live[seq].req

    def began(self, seq: int) -> bool:
        """Has a wave run for the request?"""
        return self._live[seq].lease is None

    # --- admission and waves -----------------------------------------------------------------

    def commit(self, d: Commit) -> Any:
        """COMMIT: take the request over from admission. Returns it."""
        prefix, lease = self._member.take(d.seq, d.boundary)
        req = prefix.req
        if (prefix.length, prefix.digest) != (d.length, d.digest):
            raise DivergenceError(
                f"request {req.rid} has {prefix.length} tokens and payload {prefix.digest:016x} here, "
                f"stage 0 committed {d.length} tokens and payload {d.digest:016x}"
            )
        self._live[d.seq] = _Live(d.seq, req, d.boundary, lease)
        self._seqs[req] = d.seq
        self._refresh_view()
        return req

    def prepare_prefill(self, d: Prefill) -> ScheduleBatch:
        """Materialize the spans of a prefill wave: rows, slots, metadata."""
        s = self._s
        reqs, unfinished = [], []
        hits = 0
        for span in d.spans:
            live = self._live[span.seq]
            req = live.req
            req.init_next_round_input()
            if live.lease is not None:
                self._bind_prefix(live)
                hits += live.boundary
            total = len(req.full_untruncated_fill_ids)
            if req.prefix_len != span.begin or (total == span.end) != span.last:
                raise DivergenceError(
                    f"wave {d.wave}: request {req.rid} stands at {req.prefix_len} of {total} tokens here, "
                    f"the log says [{span.begin}, {span.end})"
                )
            req.extend_end = span.end
            self._member.ledger.take(span.seq, span.end)
            if not span.last:
                req.inflight_middle_chunks += 1
                unfinished.append(req)
            reqs.append(req)
        set_time_batch(reqs, "set_forward_entry_time")
        batch = ScheduleBatch.init_new(
            reqs,
            s.req_to_token_pool,
            s.token_to_kv_pool_allocator,
            s.tree_cache,
            s.model_config,
            s.enable_overlap,
            s.spec_algorithm,
            chunked_req=unfinished[-1] if unfinished else None,
        )
        batch.contains_last_prefill_chunk = len(unfinished) < len(reqs)
        batch.prepare_for_extend()
        batch.decoding_reqs = None
        batch.prefill_stats = PrefillStats(
            log_input_tokens=batch.extend_num_tokens,
            log_hit_tokens=hits,
            log_device_hit_tokens=hits,
            new_token_ratio=0.0,
            num_running_reqs=QueueCount.from_reqs(self._view.reqs, s.enable_priority_scheduling),
            num_new_seqs=len(reqs),
        )
        self._waves[d.wave] = _Wave(batch, unfinished, [(span.seq, span.end) for span in d.spans])
        return batch

    def prepare_decode(self, d: Decode) -> ScheduleBatch:
        """Materialize one decode step for every row of a group."""
        group = self._groups[d.group]
        for joining in group.joining:
            if group.batch is None:
                group.batch = joining
            else:
                group.batch.merge_batch(joining)
        group.joining.clear()
        batch = group.batch
        rows = [] if batch is None else [self._seqs[r] for r in batch.reqs]
        if batch is None or rows != d.seqs:
            raise DivergenceError(
                f"wave {d.wave}: group {d.group} has rows {rows} here, the log says {d.seqs}"
            )
        for req, seq in zip(batch.reqs, d.seqs, strict=True):
            self._member.ledger.take(seq, req.kv.kv_allocated_len + 1)
        batch.prepare_for_decode()
        self._waves[d.wave] = _Wave(batch, [], [])
        return batch

    def receive(self, wave: int) -> PPProxyTensors | None:
        """Wait for the activations of a wave from the previous stage; None on stage 0. Without the guard."""
        for run in self._waves.values():
            if run.proxy is not None and run.launched is not None and run.launched.query():
                run.proxy = None
        proxy = self._s._pp_recv_proxy_tensors()
        if proxy is not None:
            got = proxy.tensors.pop(WAVE_KEY, None)
            if got != wave:
                raise DivergenceError(f"activations of wave {got} arrived where wave {wave} was to run")
            self._waves[wave].proxy = proxy
        return proxy

    def launch(self, wave: int, batch: ScheduleBatch, proxy: PPProxyTensors | None) -> Any:
        """Run a wave on the device and return SGLang's result. Without the guard: this is the long part."""
        started = time.perf_counter()
        result, self._s.launch_event = self._s._pp_launch_batch(
            wave, batch, proxy, self._metadata, self._sampled
        )
        self._waves[wave].launched = self._s.launch_event
        if self._s.pp_group.is_last_rank:
            self._sampled_waves.append((wave, started))
        return result

    def send(self, wave: int, result: Any) -> list[Any]:
        """Send the activations on without waiting. Returns the works that own the buffers."""
        tensors = result.pp_hidden_states_proxy_tensors.tensors
        tensors[WAVE_KEY] = wave
        works: list[Any] = self._s._pp_send_dict_to_next_stage(
            tensors, async_send=True, msg_type="proxy", ready_event=self._s.launch_event
        )
        return works

    def after_launch(self, wave: int) -> None:
        """Publish the KV of prompts that go on in a later wave, so that their next span continues from it."""
        for req in self._waves[wave].unfinished:
            checkpoint_kv_cache(req, self._s.tree_cache)

    def computed(self, wave: int) -> list[tuple[int, int]]:
        """How much of their prompts the requests of a prefill wave have computed with it: (seq, tokens)."""
        return self._waves[wave].computed

    # --- outputs -----------------------------------------------------------------------------

    @property
    def awaited(self) -> Any | None:
        """Last stage: the device's event behind the oldest wave whose outputs were not taken yet."""
        return self._sampled[0][0] if self._sampled else None

    def sampled(self) -> WaveDone | None:
        """Last stage: the oldest wave, if its outputs are ready."""
        if not self._sampled or not self._sampled[0][0].query():
            return None
        _, outputs = self._sampled.popleft()
        wave, started = self._sampled_waves.popleft()
        elapsed = int((time.perf_counter() - started) * 1e6)
        run = self._waves[wave]
        tensors = outputs.tensors
        carries_more = any(k != "next_token_ids" for k in tensors)
        if len(run.unfinished) == len(run.batch.reqs) and not carries_more:
            return WaveDone(wave, elapsed, [], b"")
        # The loop's own stream waits for the activations of whatever was launched since.
        with self._s.copy_stream_ctx:
            extra = encode_outputs(tensors) if carries_more else b""
            return WaveDone(wave, elapsed, tensors["next_token_ids"].tolist(), extra)

    def output(self, wave: int, group: int, tokens: list[int], extra: bytes) -> list[int]:
        """Apply what a wave sampled, the same way on every stage. Returns the requests that ended with it."""
        s = self._s
        run = self._waves.pop(wave)
        batch, unfinished = run.batch, run.unfinished
        metadata = self._metadata.pop(wave)
        if not tokens and len(unfinished) == len(batch.reqs):
            tokens = [0] * len(batch.reqs)  # SGLang wants a row each; nobody reads them
        if len(tokens) != len(batch.reqs):
            raise ProtocolError(f"wave {wave} has {len(batch.reqs)} rows, the last stage sent {len(tokens)}")
        outputs = decode_outputs(extra)
        outputs["next_token_ids"] = async_h2d(tokens, dtype=torch.int64, device=s.device)
        result = s._pp_prep_batch_result(batch, metadata, PPProxyTensors(outputs))
        result.next_token_ids = torch.tensor(tokens, dtype=torch.int64)
        if result.logits_output is not None and result.logits_output.sampling_mask_output is not None:
            result.copy_done = s.device_module.Event()
            result.copy_to_cpu(return_logprob=batch.return_logprob, return_hidden_states=False)
            result.copy_done = None  # all of it was here already, and the event behind later waves
        s.process_batch_result(batch, result)
        ended = [r for r in batch.reqs if r.finished()]
        finished = [self._seqs[r] for r in ended]
        batch.filter_batch(reqs_to_exclude=unfinished)
        if batch.forward_mode.is_extend():
            if batch.reqs:
                self._groups[group].joining.append(batch)
        elif not batch.reqs:
            self._groups[group].batch = None
        for seq in finished:
            self._end(seq)
        self._refresh_view()
        return finished

    def apply_output(self, d: Output) -> None:
        """Members: apply an OUTPUT decision and check that the same requests ended as on stage 0."""
        finished = self.output(d.wave, d.group, d.tokens, d.extra)
        if finished != d.finished:
            raise DivergenceError(
                f"wave {d.wave}: requests {finished} ended here, {d.finished} ended on stage 0"
            )

    # --- taking requests out -----------------------------------------------------------------

    def drop(self, d: Drop) -> list[Any]:
        """Take requests out of every batch and give their KV back. Returns them."""
        s = self._s
        reqs = []
        for seq in d.seqs:
            live = self._live[seq]
            req = live.req
            self._leave_groups(req)
            began = self.began(seq)
            if live.lease is not None:
                self._member.leases.release(live.lease)
            elif req.kv.holds_kv:
                release_kv_cache(req, s.tree_cache, checkpoint=False)
            if d.retract:
                if began:
                    req.reset_for_retract()
                    req.time_stats.set_wait_queue_entry_time()
                del self._live[seq], self._seqs[req]
                self._member.retract(seq)
            else:
                if not req.to_finish:
                    req.to_finish = FINISH_ABORT()
                req.update_finish_state()
                self._end(seq)
            reqs.append(req)
        self._refresh_view()
        return reqs

    def _leave_groups(self, req: Any) -> None:
        for group in self._groups:
            for batch in group.batches():
                if req in batch.reqs:
                    batch.filter_batch(reqs_to_exclude=[req])
            group.joining = [b for b in group.joining if b.reqs]
            if group.batch is not None and not group.batch.reqs:
                group.batch = None

    def _end(self, seq: int) -> None:
        live = self._live.pop(seq)
        del self._seqs[live.req]
        self._member.finish(seq)

    def _bind_prefix(self, live: _Live) -> None:
        """The agreed prefix becomes the request's own: stage-local matching never happens."""
        req, lease = live.req, live.lease
        assert lease is not None
        req.prefix_len = req.num_matched_prefix_tokens = req.kv.cache_protected_len = live.boundary
        req.last_node = req.last_host_node = req.best_match_node = lease.node
        req.host_hit_length = 0
        req.lock = self._member.leases.transfer(lease)
        live.lease = None

    def _refresh_view(self) -> None:
        """What SGLang's metrics and load reports see as running."""
        self._view.reqs = [live.req for live in self._live.values()]

    def wait_sent(self, works: list[Any], fence: bool = False) -> None:
        """Wait for sends; immediate for waves that the last stage has acknowledged.

        With `fence` the next forward pass also waits for them on the device.
        """
        self._s._pp_commit_comm_work(works, fence_next_forward=fence)
