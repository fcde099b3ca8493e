"""The rounds plane: ZeroMQ sockets between the WAVE threads, a star around stage 0.

Two sockets a stage, so that a megabyte prompt delays no decision: `control` for everything small and
`bulk` for request payloads. ROUTER on stage 0, DEALER on members; `transport` says how they find each other.
A frame that does not decode or comes from an unknown peer is counted and dropped with a rate-limited
warning; however many there are, they keep nobody from the frames that count. Frames are numbered
(`numbering`): one that was lost ends the server, and heartbeats on both sockets see to it that this is soon.

What waits for a member that does not read is bounded, though the sockets' queues are not: payloads by
`UNTAKEN_BYTES`, after which stage 0 reads no further requests (`LeaderPlane.crowded`); decisions, since waves
wait for the last stage's acknowledgements and admissions for the answers of all; and the whole by the time
limits on a silent or stuck stage, which end the server.

The handshake runs in the main thread before the WAVE thread starts; the sockets then belong to the latter.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Container, Iterator

import msgspec
import zmq

from sglang_wavepp.errors import HandshakeError, ProtocolError
from sglang_wavepp.messages import (
    Beat,
    Hello,
    Message,
    Offer,
    Refuse,
    Welcome,
    decode_from_leader,
    decode_from_member,
    encode,
)
from sglang_wavepp.numbering import Numbering
from sglang_wavepp.transport import NAMES, Wire

logger = logging.getLogger(__name__)

_WARN_EVERY_S = 10.0
BULK_AT_A_TIME = 8
"""Requests taken in one go, between looking at everything else."""
_COPY_BELOW = 65536
"""Bytes; larger bulk is sent from where it lies."""
_FRAMES_AT_A_TIME = 1000
"""Frames of members, or of strangers, taken in one go."""
UNTAKEN_BYTES = 128 << 20
"""Request payloads that may wait for one member. Where they are copied at all, each member has its copy."""


class _Plane:
    """What both ends share: a pair of sockets and the counting of bad frames."""

    def __init__(self, wire: Wire, kind: int, **options: int | bytes) -> None:
        self.dropped = 0
        """Frames dropped because they did not decode or came from an unknown peer, and peers turned away."""
        self._dropping = threading.Lock()
        self._warned = 0.0
        self._wire = wire
        self._context = zmq.Context(1)
        self.control = self._context.socket(kind)
        self.bulk = self._context.socket(kind)
        self._sockets = (self.control, self.bulk)
        for socket in self._sockets:
            socket.set_hwm(0)
            socket.linger = 1000
            for name, value in options.items():
                setattr(socket, name, value)
        try:
            wire.open(dict(zip(NAMES, self._sockets, strict=True)), self._turned_away)
        except BaseException:
            self.close()
            raise

    def _turned_away(self) -> None:
        self._drop("a peer", "its key is not one of this server")

    def _drop(self, peer: object, why: object) -> None:
        with self._dropping:
            self.dropped += 1
            now = time.monotonic()
            if now - self._warned > _WARN_EVERY_S:
                self._warned = now
                logger.warning("rounds plane: dropped a frame of %s: %s (%d so far)", peer, why, self.dropped)

    def close(self) -> None:
        """Close the sockets after sending what is queued, for at most a second."""
        self.control.close()
        self.bulk.close()
        self._wire.seal()
        self._context.term()


class LeaderPlane(_Plane):
    """Stage 0's end. Peers are known by the identity `stage-<rank>`."""

    def __init__(self, wire: Wire, stages: int) -> None:
        super().__init__(wire, zmq.ROUTER, router_mandatory=1)
        self._ranks = {f"stage-{rank}".encode(): rank for rank in range(1, stages)}
        self._identities = {rank: identity for identity, rank in self._ranks.items()}
        self._overheard: deque[tuple[int, Message]] = deque()
        self._sent = {(socket, rank): Numbering() for socket in self._sockets for rank in self._identities}
        self._received = {key: Numbering() for key in self._sent}
        self._untaken: dict[int, deque[int]] = {rank: deque() for rank in self._identities}
        """Bytes of each payload that a member has not taken yet, as far as it has told."""
        self._untaken_bytes = dict.fromkeys(self._identities, 0)
        self._taken = dict.fromkeys(self._identities, 0)

    @property
    def crowded(self) -> bool:
        """Do so many payloads wait for a member that there should not be more?"""
        return any(size > UNTAKEN_BYTES for size in self._untaken_bytes.values())

    def send(self, rank: int | None, message: Message, *bulk: bytes) -> None:
        """Send to one member, or to all; with `bulk`, two frames that follow it, on the bulk socket.

        Raises `ProtocolError` if a member is gone.
        """
        frame, size = encode(message), sum(map(len, bulk))
        for target in self._identities if rank is None else (rank,):
            self._send(self.bulk if bulk else self.control, target, (frame, *bulk), size < _COPY_BELOW)
            if bulk:
                self._untaken[target].append(size)
                self._untaken_bytes[target] += size

    def _send(self, socket: zmq.Socket[bytes], rank: int, frames: tuple[bytes, ...], copy: bool) -> None:
        stamp = self._sent[socket, rank].stamp()
        try:
            socket.send_multipart((self._identities[rank], stamp, *frames), copy=copy)
        except zmq.ZMQError as error:
            raise ProtocolError(f"stage {rank} cannot be reached on the rounds plane: {error}") from None

    def beat(self, applied: int, doing: str) -> None:
        """Tell all members that this stage lives, on both sockets."""
        frame = encode(Beat(applied, doing))
        for socket in self._sockets:
            for rank in self._identities:
                self._send(socket, rank, (frame,), True)

    def receive(self, ready: Container[object] | None = None) -> Iterator[tuple[int, Message]]:
        """Messages that are there now, as (rank, message). Never blocks.

        `ready`: what a poll found readable, by default both sockets. To look into an empty one in vain takes
        pyzmq as long as to read a message, and the thread wakes often.
        """
        if ready is None or self.bulk in ready:
            for _ in self._receive(self.bulk):
                # Unread, it would wake the thread for ever.
                self._drop("a member", "it has nothing to send here")
        arriving = self._receive(self.control) if ready is None or self.control in ready else iter(())
        while (item := self._overheard.popleft() if self._overheard else next(arriving, None)) is not None:
            yield item

    def overhear(self) -> Iterator[int]:
        """The ranks of those who have sent something by now; `receive` will yield what it was."""
        for rank, message in self._receive(self.control):
            self._overheard.append((rank, message))
            yield rank

    def _receive(self, socket: zmq.Socket[bytes]) -> Iterator[tuple[int, Message]]:
        users = self._wire.users
        for _ in range(_FRAMES_AT_A_TIME):
            try:
                if users:
                    parts = socket.recv_multipart(zmq.NOBLOCK, copy=False)
                    user = parts[-1].get("User-Id")
                    frames = [part.bytes for part in parts]
                else:
                    frames = socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            rank = self._ranks.get(frames[0])
            try:
                if rank is None or len(frames) != 3:
                    raise msgspec.DecodeError(f"{len(frames)} frames")
                if users and user != users[rank]:
                    raise msgspec.DecodeError("its key is another stage's")
                self._received[socket, rank].accept(frames[1])
                message = decode_from_member(frames[2])
            except msgspec.DecodeError as error:
                self._drop(frames[0][:32], error)
                continue
            if isinstance(message, Beat):
                self._has_taken(rank, message.taken)
            yield rank, message

    def _has_taken(self, rank: int, count: int) -> None:
        sizes = self._untaken[rank]
        while sizes and self._taken[rank] < count:
            self._untaken_bytes[rank] -= sizes.popleft()
            self._taken[rank] += 1

    def gather(self, mine: Hello, deadline: float, seed: int, instance: str) -> Welcome:
        """Handshake: wait for all members, compare, agree on the smallest capacity, answer.

        All get `seed` and `instance`. `deadline` is in `time.monotonic` seconds. Raises `HandshakeError`
        after telling the members why. Once every member is connected nobody else can connect.
        """
        hellos = {0: mine}
        connected = {0}
        poller = zmq.Poller()
        poller.register(self.control, zmq.POLLIN)
        poller.register(self.bulk, zmq.POLLIN)
        try:
            while min(len(hellos), len(connected)) <= len(self._ranks):
                left = deadline - time.monotonic()
                if left <= 0:
                    missing = [r for r in self._identities if r not in hellos]
                    raise HandshakeError(
                        f"stage {', '.join(map(str, missing))} did not come to the handshake at "
                        f"{self._wire.where} in time; does every stage load the same WavePP, and can it "
                        "reach this?"
                    )
                poller.poll(int(min(left, 0.5) * 1000))
                connected.update(rank for rank, _ in self._receive(self.bulk))
                for rank, message in self._receive(self.control):
                    if isinstance(message, Hello):
                        hellos[rank] = message
            for rank, hello in sorted(hellos.items()):
                _compare(mine, hello, rank)
        except HandshakeError as error:
            for rank in hellos:
                if rank:
                    self.send(rank, Refuse(str(error)))
            raise
        capacity = {k: min(h.capacity[k] for h in hellos.values()) for k in mine.capacity}
        self._wire.seal()
        ordered = [hellos[rank] for rank in sorted(hellos)]
        pools = [h.capacity["kv_tokens"] for h in ordered]
        welcome = Welcome(
            [h.pid for h in ordered], [h.host for h in ordered], capacity, pools, seed, instance
        )
        self.send(None, welcome)
        return welcome


class MemberPlane(_Plane):
    """A member's end."""

    def __init__(self, wire: Wire, rank: int) -> None:
        super().__init__(wire, zmq.DEALER, routing_id=f"stage-{rank}".encode())
        self._overheard: deque[tuple[Message, list[bytes]]] = deque()
        self._sent = {socket: Numbering() for socket in self._sockets}
        self._received = {socket: Numbering() for socket in self._sockets}
        self._taken = 0
        """Payloads received so far."""
        self._untold = 0
        """Bytes of those that stage 0 was not told about."""

    def send(self, message: Message) -> None:
        """Send to stage 0. Never blocks. Raises `ProtocolError` if it is gone."""
        self._send(self.control, message)

    def beat(self, applied: int, doing: str, took: tuple[tuple[int, int], ...] = ()) -> None:
        """Tell stage 0 that this stage lives, what it has taken, and how long its waves took."""
        self._untold = 0
        self.send(Beat(applied, doing, self._taken, took))

    @property
    def beat_due(self) -> bool:
        """Has so much been taken that stage 0 should hear of it before the next heartbeat?"""
        return self._untold > UNTAKEN_BYTES // 8

    def _send(self, socket: zmq.Socket[bytes], message: Message) -> None:
        try:
            socket.send_multipart((self._sent[socket].stamp(), encode(message)), zmq.NOBLOCK)
        except zmq.Again:
            raise ProtocolError("stage 0 cannot be reached on the rounds plane") from None

    def receive(self, ready: Container[object] | None = None) -> Iterator[tuple[Message, list[bytes]]]:
        """Messages that are there now, with the two frames that follow if they came on the bulk socket.

        Small messages first and all of them; of the bulky ones a few, so that a burst delays no decision.
        `ready` as for `LeaderPlane.receive`.
        """
        arriving = (
            self._receive(self.control, 1 << 30) if ready is None or self.control in ready else iter(())
        )
        while (item := self._overheard.popleft() if self._overheard else next(arriving, None)) is not None:
            yield item
        if ready is None or self.bulk in ready:
            yield from self._receive(self.bulk, BULK_AT_A_TIME)

    def overhear(self) -> Iterator[int]:
        """0 for every small message of stage 0 by now; `receive` will yield it."""
        for item in self._receive(self.control, 1 << 30):
            self._overheard.append(item)
            yield 0

    def _receive(self, socket: zmq.Socket[bytes], most: int) -> Iterator[tuple[Message, list[bytes]]]:
        for _ in range(most):
            try:
                frames = socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            try:
                if len(frames) < 2:
                    raise msgspec.DecodeError(f"{len(frames)} frames")
                stamp, frame, *bulk = frames
                self._received[socket].accept(stamp)
                message = decode_from_leader(frame)
                offer = isinstance(message, Offer)
                here = isinstance(message, Beat) or socket is (self.bulk if offer else self.control)
                if not here or len(bulk) != 2 * offer:
                    raise msgspec.DecodeError(f"{type(message).__name__} with {len(bulk)} frames more")
            except msgspec.DecodeError as error:
                self._drop("stage 0", error)
                continue
            if offer:
                self._taken += 1
                self._untold += sum(map(len, bulk))
            yield message, bulk

    def join(self, mine: Hello, deadline: float) -> Welcome:
        """Handshake: introduce this stage and wait for stage 0's verdict. Raises `HandshakeError`."""
        try:
            self._send(self.bulk, mine)
            self._send(self.control, mine)
            while (left := deadline - time.monotonic()) > 0:
                if self.control.poll(int(min(left, 0.5) * 1000)):
                    for message, _ in self.receive():
                        if isinstance(message, Welcome):
                            return message
                        if isinstance(message, Refuse):
                            raise HandshakeError(message.reason)
                elif not self.control.poll(0, zmq.POLLOUT):
                    raise ProtocolError("the connection is gone")
        except ProtocolError:
            raise HandshakeError(f"stage 0 at {self._wire.where} broke off the handshake") from None
        raise HandshakeError(f"stage 0 at {self._wire.where} did not answer the handshake in time")


def _compare(mine: Hello, hello: Hello, rank: int) -> None:
    for key in sorted(mine.identity.keys() | hello.identity.keys()):
        ours, theirs = mine.identity.get(key), hello.identity.get(key)
        if ours != theirs:
            raise HandshakeError(f"stage {rank} has {key} {theirs}, stage 0 has {ours}")
    if mine.capacity.keys() != hello.capacity.keys():
        raise HandshakeError(f"stage {rank} states other capacities than stage 0")


class Mailbox:
    """Calls posted to the WAVE thread from elsewhere, with a file descriptor to sleep on."""

    def __init__(self) -> None:
        self._calls: deque[Callable[[], None]] = deque()
        self.fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)

    def post(self, call: Callable[[], None]) -> None:
        """Run `call` in the WAVE thread soon, after what was posted before. Any thread; never blocks."""
        self._calls.append(call)
        os.eventfd_write(self.fd, 1)

    def drain(self) -> None:
        """Run what was posted. Only the WAVE thread."""
        try:
            os.eventfd_read(self.fd)
        except BlockingIOError:
            return
        while self._calls:
            self._calls.popleft()()
