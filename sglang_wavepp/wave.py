"""The WAVE thread of a stage: rounds plane, admission, watch. No device work, no waiting for the loop.

Stage 0's (`wave_leader`) also owns SGLang's incoming sockets: requests are validated, offered and agreed on
while the loop executes earlier waves. Calls from the loop come in through a mailbox, calls to the loop are
posted to its inbox; the state machines (`Leader`, `Member`) are touched by this thread alone, except where
`Member` says otherwise.
"""

from __future__ import annotations

import logging
import threading
import time
from array import array
from collections import deque
from collections.abc import Container, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, NoReturn

import msgspec
import xxhash
import zmq
from sglang.srt.utils import DynamicGradMode

from sglang_wavepp.codec import decode_request
from sglang_wavepp.errors import ProtocolError, WavePPError
from sglang_wavepp.messages import (
    Beat,
    Forget,
    Hint,
    HintItem,
    Log,
    Message,
    Offer,
)
from sglang_wavepp.radix.tree import RequestPrefix
from sglang_wavepp.rounds import LeaderPlane, Mailbox, MemberPlane
from sglang_wavepp.watch import PeerWatch, end_server

logger = logging.getLogger(__name__)


_TICK_S = 1.0
"""Heartbeats are sent and time limits looked at this often, or more often if a limit is short."""
_TIMES = 128
"""Waves at most whose times a heartbeat carries: enough to learn from."""


def digest_of(payload: bytes, chain: bytes) -> int:
    """What stages compare to know that they have the same request."""
    digest = xxhash.xxh3_64(payload)
    digest.update(chain)
    return digest.intdigest()


class Wave:
    """What both kinds share: the thread, its poller, heartbeats and the watch over the own loop.

    `peers` are the stages that this one hears from, with the pid of those on this host.
    """

    def __init__(self, stage: Any, plane: LeaderPlane | MemberPlane, peers: dict[int, int | None]) -> None:
        self.stage = stage
        self._device = stage.scheduler.device_module.current_device()
        self.mail = Mailbox()
        self._plane = plane
        self.watch = PeerWatch({rank: pid for rank, pid in peers.items() if pid is not None})
        self._seen = dict.fromkeys(peers, time.monotonic())
        self._said = dict.fromkeys(peers, "")
        self._stop = False
        config = stage.config
        self._tick_s = min(_TICK_S, config.heartbeat_timeout / 4, config.stall_timeout / 4)
        self._ticked = self._resumed = time.monotonic()
        self._thread = threading.Thread(target=self._main, name="WAVE", daemon=True)

    def start(self) -> None:
        """Start the thread; the sockets belong to it from now on."""
        self._thread.start()

    def stop(self) -> None:
        """Send what is queued and end the thread, within 5 seconds."""
        self.mail.post(partial(setattr, self, "_stop", True))
        self._thread.join(5.0)

    def _main(self) -> None:
        try:
            scheduler = self.stage.scheduler
            scheduler.device_module.set_device(self._device)  # a thread starts with the first one
            # A lease inside a node splits it: slots are copied on the device, in order with the loop's work.
            with DynamicGradMode(), scheduler.device_module.StreamContext(scheduler.schedule_stream):
                poller = zmq.Poller()
                for source in (self._plane.control, self._plane.bulk, self.mail.fd, *self.watch.fds):
                    poller.register(source, zmq.POLLIN)
                self._register(poller)
                while not self._stop:
                    ready = dict(poller.poll(int(self._tick_s * 1000)))
                    self._check_peers(ready, poller)
                    if self.mail.fd in ready:
                        self.mail.drain()
                    self._turn(ready)
                    if time.monotonic() - self._ticked > self._tick_s:
                        self._tick()
                        if self._resumed < self._ticked:
                            self._check_limits()
            self.watch.close()
            self._plane.close()
        except WavePPError as error:
            if not self.stage.leaving:
                self._end(str(error))
        except Exception as error:
            logger.exception("WAVE thread of stage %d failed", self.stage.rank)
            self._end(f"its WAVE thread failed: {type(error).__name__}: {error}")

    def _end(self, reason: str) -> NoReturn:
        # Others hear from this stage to the last, and do not take it for another fault.
        self.stage.loop.progress.at("ending the server", long=True)
        end_server(self.stage.rank, reason, self._beat)

    @contextmanager
    def guarded(self) -> Iterator[None]:
        """Hold the stage's guard. While the loop keeps it (a weight load takes minutes), go on watching."""
        while not self.stage.guard.acquire(timeout=self._tick_s):
            if threading.current_thread() is self._thread:
                self._watch_on()
        try:
            yield
        finally:
            self.stage.guard.release()

    def _watch_on(self) -> None:
        gone = self.watch.gone()
        if gone is not None and not self.stage.leaving:
            raise ProtocolError(gone)
        for rank in self._plane.overhear():
            self._saw(rank)
        self._tick()
        self.mail.post(lambda: None)  # what was overheard is still to be handled

    def _register(self, poller: zmq.Poller) -> None:
        """More sources to sleep on."""

    def _turn(self, ready: Container[object]) -> None:
        """Handle what came in. `ready`: the sources that are readable."""
        raise NotImplementedError

    def _beat(self) -> None:
        """Tell the peers that this stage lives."""
        raise NotImplementedError

    def _check_limits(self) -> None:
        """Look at time limits of the role, once a tick."""

    def _compiled(self) -> None:
        """Go on with requests whose grammar is compiled by now."""
        if not self.stage.intake.compiling:
            return
        with self.guarded():
            done = self.stage.intake.ready()
        for seq, req in done:
            self._built(seq, req)

    def _built(self, seq: int, req: Any | None) -> None:
        """SGLang has made the request, failed it (`to_finish`), or answered the client itself (None)."""
        raise NotImplementedError

    def _check_peers(self, ready: Iterable[object], poller: zmq.Poller) -> None:
        for source in ready:
            gone = self.watch.describe(source) if isinstance(source, int) else None
            if gone is None:
                continue
            if not self.stage.leaving:
                raise ProtocolError(gone)
            poller.unregister(source)

    def _tick(self) -> None:
        now = time.monotonic()
        limit = self.stage.config.heartbeat_timeout
        stood_still = now - self._ticked > limit / 2
        self._ticked = now
        self._beat()
        if stood_still:
            # This process was stopped, or the machine starved: judge everybody afresh.
            self._seen = dict.fromkeys(self._seen, now)
            self._resumed = now
        for rank, seen in self._seen.items():
            if now - seen > limit and not self.stage.leaving:
                said = self._said[rank]
                raise ProtocolError(
                    f"stage {rank} was silent for {now - seen:.0f} s" + (f"; it was {said}" if said else "")
                )
        self._check_loop(now)

    def _check_loop(self, now: float) -> None:
        loop = self.stage.loop.progress
        doing = loop.doing  # before `since`, which is as old as this, or newer
        stuck = now - max(loop.since, self._resumed)
        limit = self.stage.config.stall_timeout * loop.patience * loop.stages
        if doing and not loop.long and stuck > limit:
            raise ProtocolError(f"its loop has made no progress for {stuck:.0f} s: it is {doing}")

    def _saw(self, rank: int, message: Message | None = None) -> None:
        self._seen[rank] = time.monotonic()
        if isinstance(message, Beat):
            self._said[rank] = f"{message.doing or 'idle'} at log entry {message.applied}"


class MemberWave(Wave):
    """Stages 1 to P-1."""

    _plane: MemberPlane

    def __init__(self, stage: Any, plane: MemberPlane, peers: dict[int, int | None]) -> None:
        super().__init__(stage, plane, peers)
        self._outbox: deque[Message] = deque()
        self._building: dict[int, tuple[Offer, array[int]]] = {}
        """Requests that are being built, with their prompt hashes."""
        self._took: list[tuple[int, int]] = []
        """How long the stage took for prefill waves, to go with the next heartbeat."""

    # --- called by the loop ------------------------------------------------------------------

    def send(self, message: Message) -> None:
        """Send to stage 0."""
        self._outbox.append(message)
        self.mail.post(self._flush)

    def took(self, times: list[tuple[int, int]]) -> None:
        """How long this stage took for prefill waves: (wave, microseconds)."""
        self.mail.post(partial(self._took.extend, times))

    # --- the thread --------------------------------------------------------------------------

    def _beat(self) -> None:
        loop = self.stage.loop
        self._plane.beat(loop.log.position, loop.progress.doing, tuple(self._took[-_TIMES:]))
        self._took.clear()

    def _flush(self) -> None:
        """Send what has come together; hints in a row in one frame."""
        while self._outbox:
            message = self._outbox.popleft()
            if isinstance(message, Hint):
                items = list(message.items)
                while (more := self._next_hints(message.epoch)) is not None:
                    items += more
                message = Hint(message.epoch, items)
            self._plane.send(message)

    def _next_hints(self, epoch: int) -> list[HintItem] | None:
        """Take the hints that are next in the outbox, if they are of this epoch."""
        following = self._outbox[0] if self._outbox else None
        if not isinstance(following, Hint) or following.epoch != epoch:
            return None
        self._outbox.popleft()
        return following.items

    def _turn(self, ready: Container[object]) -> None:
        for message, bulk in self._plane.receive(ready):
            self._saw(0, message)
            if isinstance(message, Log):
                self.stage.loop.post(partial(self.stage.loop.entries, message.first, message.entries))
            elif isinstance(message, Offer):
                self._offer(message, *bulk)
            elif not isinstance(message, Beat):
                if isinstance(message, Forget):
                    for seq in message.seqs:
                        self.stage.intake.cancel(seq)
                        self._building.pop(seq, None)
                self.stage.member.on_message(message)
        if self._plane.beat_due:
            self._beat()
        self._compiled()

    def _offer(self, offer: Offer, payload: bytes, chain: bytes) -> None:
        member = self.stage.member
        if not member.arrives(offer.seq):
            return
        if digest_of(payload, chain) != offer.digest:
            member.failed(offer.seq, "the payload arrived damaged")
            return
        hashes = array("Q")
        try:
            hashes.frombytes(chain)
            request = decode_request(payload)
        except (msgspec.DecodeError, ValueError) as error:
            member.failed(offer.seq, f"the payload does not decode: {error}")
            return
        with self.guarded():
            req, ready = self.stage.intake.build(offer.seq, request)
        self._building[offer.seq] = offer, hashes
        if ready:
            self._built(offer.seq, req)

    def _built(self, seq: int, req: Any | None) -> None:
        offer, hashes = self._building.pop(seq)
        hints = self.stage.hints
        if req is None:
            self.stage.member.failed(seq, "the request is not valid here")
        elif req.to_finish is not None:  # SGLang has replaced its prompt
            self.stage.member.failed(seq, req.to_finish.message)
        elif len(hashes) != (0 if hints is None else len(req.origin_input_ids) // hints.block):
            self.stage.member.failed(seq, f"{len(hashes)} prompt hashes do not fit its prompt here")
        else:
            self.stage.member.offered(seq, RequestPrefix(req, offer.digest, hashes, hints), offer.position)
