"""The rounds plane: ZeroMQ sockets between the WAVE threads, a star around stage 0.

Two sockets a stage, so that a megabyte prompt delays no decision: `control` for everything small and
`bulk` for request payloads. ROUTER on stage 0, DEALER on members, `ipc://` in a directory that only this
user can enter. A frame that does not decode or comes from an unknown peer is counted and dropped with a
rate-limited warning; however many there are, they keep nobody from the frames that count.

The handshake runs in the main thread before the WAVE thread starts; the sockets then belong to the latter.
"""

from __future__ import annotations

import logging
import os
import shutil
import stat
import tempfile
import time
from collections import deque
from collections.abc import Callable, Container, Iterator
from pathlib import Path

import msgspec
import zmq

from sglang_wavepp.errors import HandshakeError, ProtocolError
from sglang_wavepp.messages import (
    Hello,
    Message,
    Offer,
    Refuse,
    Welcome,
    decode_from_leader,
    decode_from_member,
    encode,
)

logger = logging.getLogger(__name__)

_WARN_EVERY_S = 10.0
BULK_AT_A_TIME = 8
"""Requests taken in one go, between looking at everything else."""
_COPY_BELOW = 65536
"""Bytes; larger bulk is sent from where it lies."""
_FRAMES_AT_A_TIME = 1000
"""Frames of members, or of strangers, taken in one go."""


def make_socket_dir(parent: str, name: str) -> Path:
    """Stage 0: make the server's socket directory, mode 0700. Raises `HandshakeError` if it exists."""
    path = Path(parent or tempfile.gettempdir()) / name
    try:
        path.mkdir(mode=0o700)
    except OSError as error:
        raise HandshakeError(f"cannot make the socket directory {path}: {error.strerror}") from None
    return path


def find_socket_dir(parent: str, name: str, deadline: float) -> Path:
    """Members: wait for stage 0's directory and check that it is ours alone. Raises `HandshakeError`."""
    path = Path(parent or tempfile.gettempdir()) / name
    while not path.exists():
        if time.monotonic() > deadline:
            raise HandshakeError(f"stage 0 did not make its socket directory {path} in time")
        time.sleep(0.02)
    status = path.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid() or status.st_mode & 0o077:
        raise HandshakeError(f"{path} is not a private directory of this user")
    return path


class _Plane:
    """What both ends share: a pair of sockets and the counting of bad frames."""

    def __init__(self, directory: Path, kind: int) -> None:
        self.directory = directory
        self.dropped = 0
        """Frames dropped because they did not decode or came from an unknown peer."""
        self._warned = 0.0
        self._context = zmq.Context(1)
        self.control = self._context.socket(kind)
        self.bulk = self._context.socket(kind)
        for socket in (self.control, self.bulk):
            socket.set_hwm(0)
            socket.linger = 1000

    def _address(self, name: str) -> str:
        return f"ipc://{self.directory / name}"

    def _drop(self, peer: object, why: object) -> None:
        self.dropped += 1
        now = time.monotonic()
        if now - self._warned > _WARN_EVERY_S:
            self._warned = now
            logger.warning("rounds plane: dropped a frame of %s: %s (%d so far)", peer, why, self.dropped)

    def close(self) -> None:
        """Close the sockets after sending what is queued, for at most a second."""
        self.control.close()
        self.bulk.close()
        self._context.term()


class LeaderPlane(_Plane):
    """Stage 0's end. Peers are known by the identity `stage-<rank>`."""

    def __init__(self, directory: Path, stages: int) -> None:
        super().__init__(directory, zmq.ROUTER)
        self._ranks = {f"stage-{rank}".encode(): rank for rank in range(1, stages)}
        self._identities = {rank: identity for identity, rank in self._ranks.items()}
        self._overheard: deque[tuple[int, Message]] = deque()
        for socket, name in ((self.control, "control"), (self.bulk, "bulk")):
            socket.router_mandatory = 1
            socket.bind(self._address(name))

    def send(self, rank: int | None, message: Message, *bulk: bytes) -> None:
        """Send to one member, or to all; with `bulk`, two frames that follow it, on the bulk socket.

        Raises `ProtocolError` if a member is gone.
        """
        frame = encode(message)
        for target in self._identities if rank is None else (rank,):
            identity = self._identities[target]
            try:
                if not bulk:
                    self.control.send_multipart((identity, frame), copy=True)
                else:
                    copy = sum(map(len, bulk)) < _COPY_BELOW
                    self.bulk.send_multipart((identity, frame, *bulk), copy=copy)
            except zmq.ZMQError as error:
                raise ProtocolError(
                    f"stage {target} cannot be reached on the rounds plane: {error}"
                ) from None

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
        for _ in range(_FRAMES_AT_A_TIME):
            try:
                frames = socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            rank = self._ranks.get(frames[0])
            try:
                if rank is None or len(frames) != 2:
                    raise msgspec.DecodeError(f"{len(frames)} frames")
                message = decode_from_member(frames[1])
            except msgspec.DecodeError as error:
                self._drop(frames[0][:32], error)
                continue
            yield rank, message

    def gather(self, mine: Hello, deadline: float, seed: int) -> Welcome:
        """Handshake: wait for all members, compare, agree on the smallest capacity, answer.

        All get `seed`. `deadline` is in `time.monotonic` seconds. Raises `HandshakeError` after telling the
        members why. Once every member is connected the directory is not needed any more, and goes.
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
                        f"stage {', '.join(map(str, missing))} did not come to the handshake in time; "
                        "does every stage load the same WavePP?"
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
        shutil.rmtree(self.directory, ignore_errors=True)
        ordered = [hellos[rank] for rank in sorted(hellos)]
        pools = [h.capacity["kv_tokens"] for h in ordered]
        welcome = Welcome([h.pid for h in ordered], capacity, pools, seed)
        self.send(None, welcome)
        return welcome

    def close(self) -> None:
        super().close()
        shutil.rmtree(self.directory, ignore_errors=True)


class MemberPlane(_Plane):
    """A member's end."""

    def __init__(self, directory: Path, rank: int) -> None:
        super().__init__(directory, zmq.DEALER)
        self._overheard: deque[tuple[Message, list[bytes]]] = deque()
        for socket, name in ((self.control, "control"), (self.bulk, "bulk")):
            socket.setsockopt(zmq.IDENTITY, f"stage-{rank}".encode())
            socket.connect(self._address(name))

    def send(self, message: Message) -> None:
        """Send to stage 0. Never blocks."""
        self.control.send(encode(message), zmq.NOBLOCK)

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
                if len(frames) != (3 if socket is self.bulk else 1):
                    raise msgspec.DecodeError(f"{len(frames)} frames")
                message = decode_from_leader(frames[0])
                if isinstance(message, Offer) != (socket is self.bulk):
                    raise msgspec.DecodeError(f"{type(message).__name__} on the wrong socket")
            except msgspec.DecodeError as error:
                self._drop("stage 0", error)
                continue
            yield message, frames[1:]

    def join(self, mine: Hello, deadline: float) -> Welcome:
        """Handshake: introduce this stage and wait for stage 0's verdict. Raises `HandshakeError`."""
        self.bulk.send(encode(mine))
        self.send(mine)
        while (left := deadline - time.monotonic()) > 0:
            if self.control.poll(int(min(left, 0.5) * 1000)):
                for message, _ in self.receive():
                    if isinstance(message, Welcome):
                        return message
                    if isinstance(message, Refuse):
                        raise HandshakeError(message.reason)
        raise HandshakeError("stage 0 did not answer the handshake in time")


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
