"""How the sockets of the rounds plane find each other, and who may connect to them.

`ipc://` on one host: sockets in a directory that only this user can enter. Stage 0 holds a lock on it while
it lives, which tells a directory in use from one that a killed server left behind. It goes as soon as all
stages are connected.

`tcp://` between hosts, always encrypted and authenticated (CURVE): stage 0 listens on one given address.
Every stage makes a key pair for this server; the secret keys stay where they were made, the public ones go
round over SGLang's process group, whose integrity is thus taken for granted, as for activations. Stage 0
admits exactly the keys of its members, each for one stage, and nobody any more once all are connected.
"""

from __future__ import annotations

import contextlib
import fcntl
import ipaddress
import os
import socket
import stat
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Protocol

import zmq
from zmq.auth.thread import ThreadAuthenticator

from sglang_wavepp.errors import HandshakeError

NAMES = ("control", "bulk")
"""The sockets of a plane."""
SHARED_BYTES = 255
"""The most that a stage gives to a `Share`."""

Share = Callable[[bytes], list[bytes]]
"""Give every stage some bytes; returns what each has given, by rank. All stages call it equally often.

Raises `HandshakeError` if a stage does not take part in time.
"""
Sockets = Mapping[str, zmq.Socket[bytes]]

_PREFIX = "wavepp-sockets-"
_STALE_S = 60.0
"""A directory younger than this is let be: its server may be about to lock it."""
_PATIENCE_S = 10.0
"""Another server that starts holds the lock for as long as it takes to see that the directory is new."""
_DOMAIN = "wavepp"


class Wire(Protocol):
    """One end of a transport."""

    where: str
    """The place, for messages."""
    users: Mapping[int, str]
    """Stage 0: the ZAP user id of each member's frames. Empty if the way to the sockets is proof enough."""

    def open(self, sockets: Sockets, refused: Callable[[], None]) -> None:
        """Bind or connect the sockets. `refused` is called, by any thread, for a peer that was turned away.

        Raises `HandshakeError`.
        """

    def seal(self) -> None:
        """Stage 0: let nobody else connect. Idempotent."""


# --- one host --------------------------------------------------------------------------------


class IpcLeader:
    """Stage 0's end: makes the directory, mode 0700, and first removes those of servers that are dead.

    Raises `HandshakeError` if there is something by that name, or if it cannot be made.
    """

    def __init__(self, parent: str, instance: str) -> None:
        above = Path(parent or tempfile.gettempdir())
        for found in sorted(above.glob(f"{_PREFIX}*")):
            _remove_if_stale(found)
        self.directory = above / f"{_PREFIX}{instance}"
        self.where = str(self.directory)
        self.users: Mapping[int, str] = {}
        self._lock = contextlib.ExitStack()
        try:
            self.directory.mkdir(mode=0o700)
            self._lock.enter_context(_locked(self.directory, _PATIENCE_S))
        except OSError as error:
            raise HandshakeError(f"cannot make the socket directory {self.where}: {error.strerror}") from None

    def open(self, sockets: Sockets, refused: Callable[[], None]) -> None:
        """Bind."""
        for name, sock in sockets.items():
            sock.bind(f"ipc://{self.directory / name}")

    def seal(self) -> None:
        """Connected sockets do without the directory."""
        with contextlib.suppress(OSError):
            _remove(self.directory)
        self._lock.close()


class IpcMember:
    """A member's end: waits for stage 0's directory and checks that it is ours alone.

    `deadline` is in `time.monotonic` seconds. Raises `HandshakeError`.
    """

    def __init__(self, parent: str, instance: str, deadline: float) -> None:
        self.directory = Path(parent or tempfile.gettempdir()) / f"{_PREFIX}{instance}"
        self.where = str(self.directory)
        self.users: Mapping[int, str] = {}
        while not self.directory.exists():
            if time.monotonic() > deadline:
                raise HandshakeError(f"stage 0 did not make its socket directory {self.where} in time")
            time.sleep(0.02)
        status = self.directory.lstat()
        if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid() or status.st_mode & 0o077:
            raise HandshakeError(f"{self.where} is not a private directory of this user")

    def open(self, sockets: Sockets, refused: Callable[[], None]) -> None:
        """Connect."""
        for name, sock in sockets.items():
            sock.connect(f"ipc://{self.directory / name}")

    def seal(self) -> None:
        """Nothing to do."""


@contextlib.contextmanager
def _locked(directory: Path, patience: float = 0.0) -> Iterator[os.stat_result]:
    """Lock a directory, and tell about it.

    Raises `OSError` if it is no directory, or is still locked after so many seconds.
    """
    handle = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    deadline = time.monotonic() + patience
    try:
        while True:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() >= deadline:
                    raise
                time.sleep(0.01)
        yield os.fstat(handle)
    finally:
        os.close(handle)


def _remove_if_stale(directory: Path) -> None:
    with contextlib.suppress(OSError), _locked(directory) as status:
        if status.st_uid == os.getuid() and time.time() - status.st_mtime > _STALE_S:
            _remove(directory)


def _remove(directory: Path) -> None:
    """Remove our sockets and the directory; nothing else that may be in it. Raises `OSError`."""
    for name in NAMES:
        (directory / name).unlink(missing_ok=True)
    directory.rmdir()


# --- several hosts ---------------------------------------------------------------------------


class TcpLeader:
    """Stage 0's end: listens on `address` (a name is looked up) and no other, on ports that the system picks.

    Raises `HandshakeError`.
    """

    def __init__(self, address: str, share: Share) -> None:
        self._share = share
        self._address = _resolve(address)
        self.where = f"tcp://{_bracketed(self._address)}"
        public, self._secret = zmq.curve_keypair()
        self._members = share(public)[1:]
        self.users: Mapping[int, str] = {rank: key.decode() for rank, key in enumerate(self._members, 1)}
        self._authenticator: ThreadAuthenticator | None = None

    def open(self, sockets: Sockets, refused: Callable[[], None]) -> None:
        """Bind, and tell the members where."""
        context = sockets[NAMES[0]].context
        self._authenticator = ThreadAuthenticator(context)
        self._authenticator.start()
        self._authenticator.configure_curve_callback(_DOMAIN, _AllowList(self._members, refused))
        endpoints = []
        for name in NAMES:
            sock = sockets[name]
            sock.ipv6 = ":" in self._address
            sock.curve_server = True
            sock.curve_secretkey = self._secret
            sock.zap_domain = _DOMAIN.encode()
            sock.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)  # without the authenticator nobody is admitted
            try:
                sock.bind(f"{self.where}:*")
            except zmq.ZMQError as error:
                raise HandshakeError(
                    f"stage 0 cannot listen on {self._address}: {error}; --wavepp-bind names an address of "
                    "its host"
                ) from None
            endpoints.append(sock.get_string(zmq.LAST_ENDPOINT))
        self._share(" ".join(endpoints).encode())

    def seal(self) -> None:
        """Without the authenticator nobody is admitted. To stop listening would cut those who are."""
        if self._authenticator is not None:
            self._authenticator.stop()
            self._authenticator = None


class TcpMember:
    """A member's end. Raises `HandshakeError`."""

    def __init__(self, share: Share) -> None:
        self.users: Mapping[int, str] = {}
        self._public, self._secret = zmq.curve_keypair()
        self._leader = share(self._public)[0]
        self._endpoints = share(b"")[0].decode(errors="replace").split()
        if len(self._endpoints) != len(NAMES):
            raise HandshakeError("stage 0 did not say where it listens; is its WavePP another version?")
        self.where = " ".join(self._endpoints)

    def open(self, sockets: Sockets, refused: Callable[[], None]) -> None:
        """Connect. A connection that breaks is not made again: messages would be missing."""
        for name, endpoint in zip(NAMES, self._endpoints, strict=True):
            sock = sockets[name]
            sock.ipv6 = "[" in endpoint
            sock.curve_publickey, sock.curve_secretkey = self._public, self._secret
            sock.curve_serverkey = self._leader
            sock.reconnect_ivl = -1
            sock.connect(endpoint)

    def seal(self) -> None:
        """Nothing to do."""


class _AllowList:
    """Tells the authenticator who is a member."""

    def __init__(self, keys: Sequence[bytes], refused: Callable[[], None]) -> None:
        self._keys = frozenset(keys)
        self._refused = refused

    def callback(self, domain: str, key: bytes) -> bool:
        """Is the public key `key` a member's?"""
        if key in self._keys:
            return True
        self._refused()
        return False


def _resolve(address: str) -> str:
    """The numeric address. Raises `HandshakeError` if there is none, or if it means every interface."""
    try:
        numeric = str(socket.getaddrinfo(address, None, type=socket.SOCK_STREAM)[0][4][0])
    except OSError as error:
        raise HandshakeError(f"the address {address} of stage 0 is not known: {error.strerror}") from None
    if ipaddress.ip_address(numeric.split("%")[0]).is_unspecified:
        raise HandshakeError(f"stage 0 cannot listen on {numeric}: --wavepp-bind has to name one interface")
    return numeric


def _bracketed(address: str) -> str:
    return f"[{address}]" if ":" in address else address
