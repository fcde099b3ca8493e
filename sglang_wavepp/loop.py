"""The wave loop: what replaces `Scheduler.event_loop_pp`. One class for stage 0, one for the members.

The LOOP thread alone applies the log. It sleeps on one inbox of calls that the WAVE thread posts, so an
idle stage uses no CPU and wakes on the first input. It holds the stage's guard for everything but waiting
for activations, running the device and waiting for the inbox.
"""

from __future__ import annotations

import logging
import queue
import time
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any

from sglang.srt.managers.io_struct import PauseGenerationReqInput, RpcReqOutput, ShutdownReq
from sglang.srt.managers.schedule_batch import FINISH_ABORT

from sglang_wavepp.admission import Committed
from sglang_wavepp.codec import decode_request, encode_control
from sglang_wavepp.device_watch import DeviceWatch
from sglang_wavepp.errors import DivergenceError
from sglang_wavepp.executor import Executor
from sglang_wavepp.log import DecisionLog
from sglang_wavepp.messages import (
    Commit,
    Control,
    ControlDone,
    Decision,
    Decode,
    Drop,
    Output,
    Prefill,
    WaveDone,
)
from sglang_wavepp.sequencer import Sequencer
from sglang_wavepp.timer import WaveTimer

logger = logging.getLogger(__name__)

_IDLE_HOUSEKEEPING_S = 5.0
_POLL_S = 0.005
"""Stage 0 looks so often whether its device has begun another wave, which does not say so by itself."""
_COLD = 5
"""So many times the usual patience has a stage until the first wave is through: kernels may be compiled."""


class Progress:
    """What the loop is at, for the WAVE thread's watch."""

    def __init__(self) -> None:
        self.doing = ""
        """Empty while the loop waits for input."""
        self.since = time.monotonic()
        self.long = False
        """A control operation that may take minutes, such as a weight load."""
        self.stages = 1
        """How many stages work for it one after the other."""
        self.patience = 1
        """So many times longer than usual it may take."""

    def at(self, doing: str, long: bool = False, stages: int = 1, since: float | None = None) -> None:
        """The loop begins something, or goes on with what it began at `since`."""
        self.since = time.monotonic() if since is None else since
        self.long = long
        self.stages = stages
        self.doing = doing


class StageLoop:
    """What both loops share: the inbox, running a wave, control requests, idleness."""

    def __init__(self, stage: Any) -> None:
        self.stage = stage
        self.s = stage.scheduler
        self.log = DecisionLog(stage.rank, stage.recorder())
        self.executor = Executor(stage.scheduler, stage.member, stage.stages)
        self.progress = Progress()
        self.progress.patience = _COLD
        learns = stage.rank == 0 or stage.config.planner == "timed"
        self._timer = WaveTimer(self.s.device_module, self.s.forward_stream) if learns else None
        self._inbox: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._sends: deque[tuple[int, list[Any]]] = deque()
        self._reused_buffer = False
        """The latest activations lie in a buffer of a device graph, which the next replay writes again."""
        self._checked_idle = 0.0
        self._computes_since: float | None = None
        """Last stage: since when the device is at the oldest wave whose outputs are missing."""

    def post(self, call: Callable[[], None]) -> None:
        """Run `call` in the loop, in the order of posting. Any thread; never blocks."""
        self._inbox.put(call)

    def run(self) -> None:
        """Serve until a shutdown request is applied."""
        raise NotImplementedError

    def _take(self, timeout: float) -> bool:
        """Run what is in the inbox, waiting up to `timeout` seconds for the first. False if it was empty."""
        try:
            call = self._inbox.get(timeout=timeout) if timeout else self._inbox.get_nowait()
        except queue.Empty:
            return False
        while True:
            self.progress.at("handling a message")
            call()
            try:
                call = self._inbox.get_nowait()
            except queue.Empty:
                return True

    def _wait(self) -> None:
        """Nothing to do: housekeeping if the stage is idle, then sleep on the inbox."""
        idle = not self.executor.live
        if idle and self._inbox.empty():
            now = time.monotonic()
            if now - self._checked_idle > _IDLE_HOUSEKEEPING_S or not self.s._sched_idled:
                self._checked_idle = now
                self.progress.at("tidying up")
                self._settle_sends(None)
                self.s._sched_idled = True
                with self.stage.guard:
                    self.s.on_idle()
        since = self._computes_since
        self.progress.at("" if since is None else "waiting for the device", since=since)
        self._take(_IDLE_HOUSEKEEPING_S if idle else self._longest_wait())

    def _longest_wait(self) -> float:
        """Seconds that a stage with requests sleeps on its inbox, at most."""
        return 1.0

    def _run_wave(self, d: Prefill | Decode) -> None:
        e, p = self.executor, self.progress
        p.at(f"preparing wave {d.wave}")
        with self.stage.guard:
            batch = e.prepare_prefill(d) if isinstance(d, Prefill) else e.prepare_decode(d)
        if self.stage.rank:
            before = self.stage.rank
            p.at(f"waiting for the activations of wave {d.wave} from stage {before - 1}", stages=before)
        proxy = e.receive(d.wave)
        p.at(f"running wave {d.wave}")
        if self._reused_buffer:
            e.wait_sent(self._sends.pop()[1], fence=True)
        if self._timer is not None:
            self._timer.start()
        result = e.launch(d.wave, batch, proxy)
        if self._timer is not None:
            prefill = isinstance(d, Prefill)
            self._timer.stop(d.wave, prefill or self.stage.rank == 0, behind_nothing=prefill)
            if times := self._timer.take():
                self._took(times)
        if self.stage.rank < self.stage.stages - 1:
            p.at(f"sending the activations of wave {d.wave} to stage {self.stage.rank + 1}")
            self._sends.append((d.wave, e.send(d.wave, result)))
            self._reused_buffer = bool(result.can_run_cuda_graph)
        with self.stage.guard:
            e.after_launch(d.wave)

    def _took(self, times: list[tuple[int, int]]) -> None:
        """This stage took so long for waves: (wave, microseconds)."""
        raise NotImplementedError

    def _through(self, wave: int) -> None:
        """All stages are through with a wave, and so with those before it."""
        self.progress.patience = 1
        self._settle_sends(wave)

    def _settle_sends(self, upto: int | None) -> None:
        """Let go of the buffers of waves up to `upto` (None: all). They were received long ago."""
        while self._sends and (upto is None or self._sends[0][0] <= upto):
            self.executor.wait_sent(self._sends.popleft()[1])
        self._reused_buffer = self._reused_buffer and bool(self._sends)

    def _apply_control(self, request: Any, idle: bool) -> Any:
        name = type(request).__name__
        self.progress.at(f"finishing the waves before {name}")
        self._settle_sends(None)
        self.s.device_module.synchronize()
        self.progress.at(f"applying {name}", long=True)
        if isinstance(request, ShutdownReq):
            self.stage.leaving = True
        with self.stage.guard:
            self.stage.control_idle = idle
            try:
                return self.s._request_dispatcher(request)
            finally:
                self.stage.control_idle = None


class MemberLoop(StageLoop):
    """Stages 1 to P-1: apply the log, decide nothing."""

    def __init__(self, stage: Any) -> None:
        super().__init__(stage)
        self._watch = DeviceWatch(self.s.device_module, lambda: self.post(self._send_outputs))
        self._watched: Any = None

    def run(self) -> None:
        while not self.s.gracefully_exit:
            if not self._take(0):
                self._send_outputs()
                self._wait()

    def entries(self, first: int, entries: list[bytes]) -> None:
        """Apply consecutive log entries."""
        for i, entry in enumerate(entries):
            self._apply(self.log.read(first + i, entry))
            self._send_outputs()

    def _send_outputs(self) -> None:
        """Last stage: send what the device is through with, and be told when it is with the next wave."""
        while (done := self.executor.sampled()) is not None:
            self.stage.wave.send(done)
        event = self.executor.awaited
        if event is not self._watched:
            self._watched = event
            self._computes_since = None if event is None else time.monotonic()
            if event is not None:
                self._watch.wait_for(event)

    def _apply(self, d: Decision) -> None:
        if isinstance(d, Prefill | Decode):
            self._run_wave(d)
        elif isinstance(d, Control):
            self._control(d)
        else:
            self.progress.at(f"applying {type(d).__name__}")
            with self.stage.guard:
                if isinstance(d, Commit):
                    self.executor.commit(d)
                elif isinstance(d, Output):
                    self.executor.apply_output(d)
                    self._through(d.wave)
                elif isinstance(d, Drop):
                    self.executor.drop(d)
                freed = self.stage.member.freed()
            if freed:
                self.stage.wave.send(self.stage.member.capacity())
        with self.stage.guard:
            self.stage.member.applied(self.log.position)

    def _took(self, times: list[tuple[int, int]]) -> None:
        self.stage.wave.took(times)

    def _control(self, d: Control) -> None:
        position = self.log.position - 1
        error = ""
        output = self._apply_control(decode_request(d.payload), d.idle)
        if getattr(output, "success", True) is False:
            error = str(getattr(output, "message", "")) or "failed"
        self.stage.wave.send(ControlDone(position, self.stage.member.epoch, error))


class LeaderLoop(StageLoop):
    """Stage 0: plan, log, apply."""

    def __init__(self, stage: Any, sequencer: Sequencer) -> None:
        super().__init__(stage)
        self.sequencer = sequencer
        self._unsent: list[bytes] = []
        """The latest entries of the log, which the members do not have yet."""
        self._controls: deque[tuple[Any, bool]] = deque()
        self._answers: dict[int, tuple[Any, Any]] = {}
        """Log position of a control decision -> (request, output) until every stage has applied it."""
        self._aborts: dict[int, FINISH_ABORT] = {}
        """What the clients of aborted requests are told."""

    def run(self) -> None:
        while not (self.s.gracefully_exit and not self._answers):
            self._take(0)
            if not self._advance():
                self._wait()

    # --- posted by the WAVE thread -----------------------------------------------------------

    def commit(self, c: Committed, digest: int) -> None:
        """Every stage holds the request: log it."""
        d = Commit(c.seq, c.order, c.boundary, c.length, c.until, digest)
        self._append(d)
        with self.stage.guard:
            req = self.executor.commit(d)
        most = len(req.origin_input_ids) + req.sampling_params.max_new_tokens
        most = min(most, self.stage.longest)
        self.sequencer.commit(c, most)
        self.stage.stats.admission(rounds=c.rounds, waited_s=c.waited, length=c.length, boundary=c.boundary)

    def wave_done(self, done: WaveDone) -> None:
        """The last stage has finished a wave: apply its outputs and log them."""
        self.progress.at(f"applying the outputs of wave {done.wave}")
        self.stage.stats.wave(done.elapsed_us)
        group = self.sequencer.join_group(done.wave)
        computed = self.executor.computed(done.wave)
        with self.stage.guard:
            finished = self.executor.output(done.wave, group, done.tokens, done.extra)
            freed = self.stage.member.freed()
        self._through(done.wave)
        for seq in finished:
            self._aborts.pop(seq, None)
        self._append(Output(done.wave, group, done.tokens, finished, done.extra))
        self.sequencer.output(done.wave, group, finished)
        if finished:
            with self.stage.guard:
                self.sequencer.reconsider(self.stage.member.reusable, self.stage.block)
        self.stage.wave.wave_finished(self.log.position, computed, finished, freed)

    def took(self, stage: int, times: Iterable[tuple[int, int]]) -> None:
        """How long a stage took for waves, stage 0 also for those of decode: (wave, microseconds)."""
        for wave, elapsed_us in times:
            self.sequencer.took(stage, wave, elapsed_us)

    def abort(self, seq: int, reason: dict[str, Any] | None) -> None:
        """A client aborted a committed request: it leaves when none of its waves is in flight."""
        if not self.sequencer.drop(seq):
            # It has ended, or it was retracted meanwhile and waits: the WAVE thread knows which.
            self.stage.wave.abort_waiting(seq, reason)
            return
        given = {k: v for k, v in (reason or {}).items() if k != "type" and v is not None}
        self._aborts[seq] = FINISH_ABORT(**given)

    def grown(self, items: tuple[tuple[int, int], ...]) -> None:
        """Every stage promised running requests more room."""
        self.sequencer.grown(items)

    def growth_refused(self, seq: int, hopeless: bool) -> None:
        """Some stage has no room for a running request."""
        self.sequencer.growth_refused(seq, hopeless)

    def control(self, request: Any, idle: bool) -> None:
        """A control request; admission stands still until it was applied by every stage."""
        self._controls.append((request, idle))

    def local(self, request: Any) -> None:
        """A request that only asks for stage 0's state: no log entry, no barrier."""
        with self.stage.guard:
            self._answer(request, self.s._request_dispatcher(request))

    def control_done(self, position: int, errors: list[str]) -> None:
        """Every member applied the control decision at `position`."""
        request, output = self._answers.pop(position)
        ok = getattr(output, "success", True) is not False
        if len(errors) != (0 if ok else self.stage.stages - 1):
            raise DivergenceError(
                f"{type(request).__name__} went {'well' if ok else 'wrong'} on stage 0 but not so on "
                f"others: {'; '.join(errors) or 'no error'}"
            )
        with self.stage.guard:
            self._answer(request, output)
        self.stage.wave.control_over()

    # --- planning ----------------------------------------------------------------------------

    def _took(self, times: list[tuple[int, int]]) -> None:
        self.took(0, times)

    def _advance(self) -> bool:
        """Log and apply the next decision. False if there is none."""
        if self._controls and self._control_ready():
            self._log_control(*self._controls.popleft())
            return True
        d = self.sequencer.next(self.log.digest, self._timer.queued if self._timer else 0)
        if self.sequencer.growth_requests:
            self.stage.wave.want_growth(self.sequencer.growth_requests)
            self.sequencer.growth_requests = []
        if d is None:
            return False
        self._publish(d)
        if isinstance(d, Drop):
            self._drop(d)
            return True
        stats = self.stage.stats
        if isinstance(d, Prefill):
            stats.prefill_waves += 1
            self.stage.wave.planned([(span.seq, span.end - span.begin) for span in d.spans])
        else:
            stats.decode_waves += 1
        assert isinstance(d, Prefill | Decode)
        self._run_wave(d)
        return True

    def _append(self, d: Decision) -> None:
        """Log a decision. The members get it together with the next one that is sent on."""
        self._unsent.append(self.log.append(d))
        with self.stage.guard:
            self.stage.member.applied(self.log.position)

    def _publish(self, d: Decision) -> None:
        """Log a decision and send it on."""
        self._append(d)
        self._send_log()

    def _send_log(self) -> None:
        if self._unsent:
            self.stage.wave.publish(self.log.position - len(self._unsent), self._unsent)
            self._unsent = []

    def _wait(self) -> None:
        self._send_log()
        super()._wait()

    def _longest_wait(self) -> float:
        return _POLL_S if self.sequencer.held_back else super()._longest_wait()

    def _drop(self, d: Drop) -> None:
        with self.stage.guard:
            if not d.retract:
                for seq in d.seqs:
                    no_room = FINISH_ABORT("The KV cache has no room for another token of this request.")
                    self.executor.request(seq).to_finish = self._aborts.pop(seq, no_room)
            began = sum(map(self.executor.began, d.seqs))
            reqs = self.executor.drop(d)
            freed = self.stage.member.freed()
            if d.retract:
                self.stage.stats.retracted += began
                self.stage.stats.readmitted += len(reqs) - began
                self.s.waiting_queue[:0] = reqs
            else:
                self.s.output_streamer.stream_output(reqs, any(r.return_logprob for r in reqs))
        if d.retract:
            self.stage.wave.retracted(self.log.position, list(zip(d.seqs, reqs, strict=True)), freed)
        else:
            self.stage.wave.wave_finished(self.log.position, [], d.seqs, freed)

    # --- control requests --------------------------------------------------------------------

    def _control_ready(self) -> bool:
        """A pause that retracts waits until everything was retracted; everything else goes at once."""
        request = self._controls[0][0]
        if not (isinstance(request, PauseGenerationReqInput) and request.mode == "retract"):
            return True
        self.sequencer.retract_all()
        return not self.sequencer.live

    def _log_control(self, request: Any, idle: bool) -> None:
        position = self.log.position
        self._publish(Control(encode_control(request), idle))
        output = self._apply_control(request, idle)
        self.sequencer.paused = bool(self.s._engine_paused or self.s.gracefully_exit)
        self._answers[position] = (request, output)
        self.stage.wave.control_logged(position)

    def _answer(self, request: Any, output: Any) -> None:
        if output is None:
            return
        if isinstance(output, RpcReqOutput):
            self.stage.wave.answer_rpc(output)
        else:
            self.s.send_control_output(output, request)
