"""Stage 0's WAVE thread: SGLang's incoming sockets, the leader's rounds, control requests."""

from __future__ import annotations

import logging
import time
from array import array
from collections import deque
from collections.abc import Container, Iterable, Sequence
from functools import partial
from typing import Any

import zmq
from sglang.srt.constants import GPU_MEMORY_ALL_TYPES
from sglang.srt.managers.io_struct import (
    AbortReq,
    BatchTokenizedEmbeddingReqInput,
    BatchTokenizedGenerateReqInput,
    FlushCacheReqInput,
    GetInternalStateReq,
    OpenSessionReqInput,
    OpenSessionReqOutput,
    ReleaseMemoryOccupationReqInput,
    ResumeMemoryOccupationReqInput,
    ResumeMemoryOccupationReqOutput,
    TokenizedEmbeddingReqInput,
    TokenizedGenerateReqInput,
    sock_recv,
    sock_send,
)
from sglang.srt.managers.scheduler import _make_abort_req
from sglang.srt.managers.utils import is_health_check_generate_req

from sglang_wavepp.admission import Committed, Event, GrowthGranted, Rejected
from sglang_wavepp.codec import (
    CannotCarryError,
    encode_control,
    encode_request,
    strip_unsupported,
)
from sglang_wavepp.errors import ProtocolError
from sglang_wavepp.hint_index import KnownChains, seed_of
from sglang_wavepp.leader import Leader
from sglang_wavepp.messages import (
    Beat,
    ControlDone,
    Log,
    Message,
    Offer,
    WaveDone,
)
from sglang_wavepp.radix.tree import RequestPrefix
from sglang_wavepp.rounds import BULK_AT_A_TIME, LeaderPlane
from sglang_wavepp.wave import Wave, digest_of

logger = logging.getLogger(__name__)

_KNOWN_TOKENS = 16 << 20
"""Prompt tokens whose chains stage 0 remembers: 128 MB of token ids, 2 MB of hashes."""


class LeaderWave(Wave):
    """Stage 0."""

    _plane: LeaderPlane

    def __init__(self, stage: Any, plane: LeaderPlane, peers: dict[int, int | None], leader: Leader) -> None:
        super().__init__(stage, plane, peers)
        self.leader = leader
        self.answers: deque[Message] = deque()
        """What stage 0's own member says to the leader."""
        self._requests: dict[int, RequestPrefix] = {}
        """Every request from its offer to its end."""
        self._next_seq = 0
        self._chains = None if stage.hints is None else KnownChains(stage.hints.block, _KNOWN_TOKENS)
        self._controls: deque[tuple[Any, float]] = deque()
        self._control_running = False
        self._acks: dict[int, dict[int, ControlDone]] = {}
        self._probes: dict[str | None, TokenizedGenerateReqInput] = {}
        """Health checks that wait for the outputs of a wave: the latest one of each HTTP worker."""
        self._running_probe = -1
        """The latest health check that was made a request of its own."""
        self._moved = (time.monotonic(), self._said)
        """When a stage last moved, and what the stages were at."""
        channels = stage.scheduler.ipc_channels
        self._sockets = [s for s in (channels.recv_from_tokenizer, channels.recv_from_rpc) if s is not None]
        self._rpc = channels.recv_from_rpc

    # --- called by the loop ------------------------------------------------------------------

    def publish(self, position: int, entries: list[bytes]) -> None:
        """Send log entries, the first at `position`, to every member."""
        self.mail.post(partial(self._plane.send, None, Log(position, entries)))

    def planned(self, spans: list[tuple[int, int]]) -> None:
        """A wave was planned for prompt tokens of committed requests: (seq, tokens)."""
        self.mail.post(partial(self.leader.planned, spans))

    def want_growth(self, items: list[tuple[int, int]]) -> None:
        """Running requests need more room: (seq, KV length)."""
        for seq, until in items:
            self.mail.post(partial(self.leader.want_growth, seq, until))

    def wave_finished(
        self, position: int, computed: list[tuple[int, int]], ended: Iterable[int], freed: bool
    ) -> None:
        """A wave's outputs were applied (or requests dropped); `ended` requests are over.

        `position` is the log position after it, `computed` what it has computed of prompts: (seq, tokens);
        `freed`: stage 0 had refused somebody room before.
        """
        self.mail.post(partial(self._finished, position, computed, list(ended), freed))

    def retracted(self, position: int, items: list[tuple[int, Any]], freed: bool) -> None:
        """Requests gave their KV back and wait again: (seq, SGLang request). The others as above."""
        self.mail.post(partial(self._retracted, position, items, freed))

    def abort_waiting(self, seq: int, reason: Any) -> None:
        """A client aborted a request that the loop does not run (any more)."""
        self.mail.post(partial(self._abort_one, seq, reason))

    def control_logged(self, position: int) -> None:
        """A control decision was logged and applied by stage 0."""
        self.mail.post(partial(self._control_logged, position))

    def control_over(self) -> None:
        """The client of a control request has its answer."""
        self.mail.post(self._control_over)

    def answer_rpc(self, output: Any) -> None:
        """Answer on the RPC socket, which this thread owns."""
        self.mail.post(partial(sock_send, self._rpc, output))

    # --- the thread --------------------------------------------------------------------------

    def _register(self, poller: zmq.Poller) -> None:
        self._poller = poller
        self._read_requests(True)

    def _read_requests(self, reading: bool) -> None:
        """Sleep on SGLang's sockets or not: they keep the requests that a slow stage leaves no room for."""
        self._reading = reading
        for socket in self._sockets:
            self._poller.register(socket, zmq.POLLIN if reading else 0)

    def _beat(self) -> None:
        self._plane.beat(self.stage.loop.log.position, self.stage.loop.progress.doing)

    def _check_limits(self) -> None:
        self.leader.check()
        self._check_outputs()
        with self.guarded():
            timeouts = self.stage.scheduler._poll_timeout_aborts()
        for request in timeouts:
            self._abort(request)

    def _check_outputs(self) -> None:
        """A wave under way must make a stage move. The stages' own watches are stricter, and come first."""
        loop, now = self.stage.loop, time.monotonic()
        said = {0: f"{loop.progress.doing or 'idle'} at log entry {loop.log.position}", **self._said}
        if not loop.sequencer.in_flight or self._control_running or said != self._moved[1]:
            self._moved = (now, said)
        still = now - max(self._moved[0], self._resumed)
        config = self.stage.config
        if still > config.stall_timeout * loop.progress.patience + config.heartbeat_timeout:
            stages = "; ".join(f"stage {rank} is {what}" for rank, what in said.items())
            raise ProtocolError(f"waves are under way, but no stage has moved for {still:.0f} s: {stages}")

    def _turn(self, ready: Container[object]) -> None:
        for rank, message in self._plane.receive(ready):
            self._on_member(rank, message)
        for socket in self._sockets:
            if socket not in ready:
                continue
            for _ in range(BULK_AT_A_TIME):
                if self._plane.crowded:
                    break
                try:
                    request = sock_recv(socket, zmq.NOBLOCK)
                except zmq.Again:
                    break
                self._on_request(request)
        if self._reading == self._plane.crowded:
            self._read_requests(not self._reading)
        self._compiled()
        if self.stage.intake.displaced:
            self._displace()
        self._settle()
        self._start_control()
        self._check_health()

    def _settle(self) -> None:
        """Run the state machines until they are quiet."""
        while True:
            self.leader.step()
            answered = bool(self.answers)
            while self.answers:
                self.leader.on_message(0, self.answers.popleft())
            if not (answered or self.leader.outbox or self.leader.events):
                return
            outbox, self.leader.outbox = self.leader.outbox, []
            events, self.leader.events = self.leader.events, []
            for event in events:
                self._on_event(event)
            for rank, message in outbox:
                if rank != 0:
                    self._plane.send(rank, message)
                if rank in (None, 0):
                    self.stage.member.on_message(message)

    def _on_member(self, rank: int, message: Message) -> None:
        self._saw(rank, message)
        if isinstance(message, WaveDone):
            if self._probes:
                # Every stage has executed it. SGLang answers the checks when the loop applies its outputs.
                answered = self.stage.scheduler.return_health_check_ipcs
                self.stage.loop.post(partial(answered.extend, list(self._probes)))
                self._probes.clear()
            self.stage.loop.post(partial(self.stage.loop.wave_done, message))
        elif isinstance(message, ControlDone):
            self._control_acked(rank, message)
        elif isinstance(message, Beat):
            if message.took:
                self.stage.loop.post(partial(self.stage.loop.took, rank, message.took))
        else:
            self.leader.on_message(rank, message)

    def _on_event(self, event: Event) -> None:
        loop = self.stage.loop
        if isinstance(event, Committed):
            with self.guarded():
                self._leave_queue(self._requests[event.seq].req)
            loop.post(partial(loop.commit, event, self._requests[event.seq].digest))
        elif isinstance(event, Rejected):
            self.stage.stats.rejected += 1
            known = self._requests.pop(event.seq, None)
            if known is not None:
                with self.guarded():
                    self.stage.intake.cancel(event.seq)
                    known.req.set_finish_with_abort(event.reason)
                    self._retire(known.req)
        elif isinstance(event, GrowthGranted):
            loop.post(partial(loop.grown, event.items))
        else:
            loop.post(partial(loop.growth_refused, event.seq, event.hopeless))

    def _finished(
        self, position: int, computed: list[tuple[int, int]], ended: list[int], freed: bool
    ) -> None:
        self.leader.wave_finished(position, computed)
        self.leader.finished(ended)
        for seq in ended:
            self._requests.pop(seq, None)
        if freed:
            self.leader.on_message(0, self.stage.member.capacity())

    def _retracted(self, position: int, items: list[tuple[int, Any]], freed: bool) -> None:
        for seq, req in items:
            length = len(req.origin_input_ids) + len(req.output_ids)
            remaining = req.sampling_params.max_new_tokens - len(req.output_ids)
            self.leader.retracted(seq, length, remaining, position)
        if freed:
            self.leader.on_message(0, self.stage.member.capacity())

    # --- requests ----------------------------------------------------------------------------

    def _check_health(self) -> None:
        """Health checks that no running request will answer become a request of their own."""
        if self._probes and not self.stage.loop.executor.live and self._running_probe not in self._requests:
            self._running_probe = self._next_seq
            self._admit(self._probes.popitem()[1])

    def _on_request(self, request: Any) -> None:
        if isinstance(request, TokenizedGenerateReqInput):
            if is_health_check_generate_req(request):
                # No progress, no answer: see `_check_health`.
                self._probes[request.http_worker_ipc] = request
            else:
                self._admit(request)
        elif isinstance(request, BatchTokenizedGenerateReqInput):
            for each in request.batch:
                self._admit(each)
        elif isinstance(request, AbortReq):
            self._abort(request)
        elif isinstance(request, TokenizedEmbeddingReqInput | BatchTokenizedEmbeddingReqInput):
            logger.error("WavePP serves generation only: an embedding request was dropped")
        elif isinstance(request, GetInternalStateReq):
            self.stage.loop.post(partial(self.stage.loop.local, request))
        elif isinstance(request, OpenSessionReqInput):
            logger.error("WavePP does not support sessions yet: the session was not opened")
            self._answer(request, OpenSessionReqOutput(session_id=request.session_id, success=False))
        elif isinstance(request, ResumeMemoryOccupationReqInput) and not self._released(request):
            logger.error("resume_memory_occupation: nothing of it was released")
            self._answer(request, ResumeMemoryOccupationReqOutput())
        else:
            self._control(request)

    def _released(self, request: ResumeMemoryOccupationReqInput) -> bool:
        """Is the memory released that the request wants back? SGLang would fail otherwise."""
        released: set[str] = self.stage.scheduler.weight_updater.offload_tags
        return released.issuperset(request.tags or GPU_MEMORY_ALL_TYPES)

    def _control(self, request: Any) -> None:
        try:
            encode_control(request)
        except CannotCarryError as error:
            logger.error("%s", error)
        else:
            self._controls.append((request, time.monotonic()))

    def _answer(self, request: Any, output: Any) -> None:
        with self.guarded():
            self.stage.scheduler.send_control_output(output, request)

    def _admit(self, request: TokenizedGenerateReqInput) -> None:
        request.unwrap_pickle_fields()
        seq = self._next_seq
        self._next_seq += 1
        refusal = ""
        try:
            payload = encode_request(request)
        except CannotCarryError as error:
            refusal = str(error)
            strip_unsupported(request)
        with self.guarded():
            req, ready = self.stage.intake.build(seq, request)
            if req is not None and refusal:
                self.stage.intake.cancel(seq)
                req.set_finish_with_abort(refusal)
            failed = req is not None and req.to_finish is not None
            if failed:
                self._retire(req)
        if req is None or failed:
            return
        hints, hashes = self.stage.hints, array("Q")
        if self._chains is not None:
            namespace = seed_of(hints.seed, req.extra_key, req.cache_salt)
            hashes = self._chains.chain(req.origin_input_ids, namespace)
        chain = hashes.tobytes()
        prefix = RequestPrefix(req, digest_of(payload, chain), hashes, hints)
        self._requests[seq] = prefix
        s = self.stage.scheduler
        if s.enable_priority_scheduling and req.priority is None:
            s._set_or_validate_priority(req)  # SGLang has not yet, if its grammar is being compiled
        rank = req.priority * s.policy.priority_sign if s.enable_priority_scheduling else 0
        shared: Sequence[int] = hashes if prefix.max_boundary > 0 else ()
        remaining = req.sampling_params.max_new_tokens
        position = self.leader.arrive(seq, req.origin_input_ids, remaining, shared, rank)
        self._plane.send(None, Offer(seq, prefix.digest, position), payload, chain)
        self.stage.member.arrives(seq)
        if ready:
            self._built(seq, req)

    def _displace(self) -> None:
        """SGLang's queue was full: requests of a lower priority were answered and left it."""
        gone, self.stage.intake.displaced = self.stage.intake.displaced, []
        for seq in [seq for seq, known in self._requests.items() if known.req in gone]:
            if self.leader.cancel(seq):
                del self._requests[seq]
            else:
                self.stage.loop.post(partial(self.stage.loop.abort, seq, None))

    def _built(self, seq: int, req: Any | None) -> None:
        if req is not None and req.to_finish is None:
            self.stage.member.offered(seq, self._requests[seq])
            return
        self.leader.cancel(seq)
        self._requests.pop(seq, None)
        if req is not None:
            with self.guarded():
                self._retire(req)

    def _retire(self, req: Any) -> None:
        """Answer the client of a request that failed before admission. Under the guard."""
        self._leave_queue(req)
        self.stage.scheduler.retire_unadmitted_request(req)

    def _leave_queue(self, req: Any) -> None:
        queue = self.stage.scheduler.waiting_queue
        if req in queue:
            queue.remove(req)

    def _abort(self, request: AbortReq) -> None:
        for seq, known in list(self._requests.items()):
            if request.abort_all or known.req.rid.startswith(request.rid):
                self._abort_one(seq, request.finished_reason)

    def _abort_one(self, seq: int, reason: Any) -> None:
        known = self._requests.get(seq)
        if known is None:
            return
        if not self.leader.cancel(seq):
            self.stage.loop.post(partial(self.stage.loop.abort, seq, reason))
            return
        del self._requests[seq]
        scheduler, req = self.stage.scheduler, known.req
        with self.guarded():
            self.stage.intake.cancel(seq)
            self._leave_queue(req)
            scheduler._release_aborted_request(req)
            scheduler.send_abort_output(_make_abort_req(req, finished_reason=reason), req)

    # --- control requests --------------------------------------------------------------------

    def _start_control(self) -> None:
        """Hand the next control request to the loop. Admission stands still from here until it is over.

        A flush that may wait for idleness is passed over until then, or until its time is up. Before memory
        is released the running requests are finished, and meanwhile nobody is admitted.
        """
        if self._control_running:
            return
        idle = self.leader.idle or (self._closed() and self.leader.settled)
        now = time.monotonic()
        for request, since in self._controls:
            if isinstance(request, ReleaseMemoryOccupationReqInput):
                self.leader.barrier(True, give_back=True)
                if self.leader.settled:
                    idle = True
                    break
                continue
            wait = (request.timeout_s or 0.0) if isinstance(request, FlushCacheReqInput) else 0.0
            if idle or now - since >= wait:
                break
        else:
            return
        self._controls.remove((request, since))
        if isinstance(request, FlushCacheReqInput):
            request.timeout_s = 0.0  # the waiting is over: the stages answer at once
        self.leader.barrier(True)
        self._control_running = True
        self.stage.loop.post(partial(self.stage.loop.control, request, idle))

    def _control_logged(self, position: int) -> None:
        # Members may be faster: their answers count once stage 0 itself has applied the decision.
        self._acks.setdefault(position, {})[0] = ControlDone(position, self.stage.member.epoch, "")
        self._check_acks(position)

    def _control_acked(self, rank: int, done: ControlDone) -> None:
        self._acks.setdefault(done.position, {})[rank] = done
        self._check_acks(done.position)

    def _check_acks(self, position: int) -> None:
        acks = self._acks[position]
        if len(acks) < self.stage.stages:
            return
        del self._acks[position]
        for rank, done in acks.items():
            if done.epoch != acks[0].epoch:
                raise ProtocolError(
                    f"stage {rank} is in epoch {done.epoch} after log entry {position}, "
                    f"stage 0 in {acks[0].epoch}"
                )
        errors = [f"stage {rank}: {done.error}" for rank, done in sorted(acks.items()) if done.error]
        self.stage.loop.post(partial(self.stage.loop.control_done, position, errors))

    def _closed(self) -> bool:
        """Is the server paused, or its memory released?"""
        s = self.stage.scheduler
        return bool(s._engine_paused or s.weight_updater.offload_tags)

    def _control_over(self) -> None:
        while self.leader.epoch < self.stage.member.epoch:
            self.leader.new_epoch()
        # A closed server admits nobody, and the waiting hold nothing.
        waits = any(isinstance(request, ReleaseMemoryOccupationReqInput) for request, _ in self._controls)
        closed = self._closed() or waits
        self.leader.barrier(closed, give_back=closed)
        self._control_running = False
