"""Who may connect to the rounds plane: directories of living and dead servers, keys, addresses."""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch.distributed
import zmq
from conftest import eventually

from sglang_wavepp.errors import HandshakeError, ProtocolError
from sglang_wavepp.exchange import share_over
from sglang_wavepp.messages import Beat, Hello, Message, Offer, Welcome, encode
from sglang_wavepp.rounds import LeaderPlane, MemberPlane
from sglang_wavepp.transport import SHARED_BYTES, IpcLeader, IpcMember, Share, TcpLeader, TcpMember

BOUND = 20.0
LISTENS = "127.0.0.2"
"""Stage 0's interface: one of the loopback addresses, all of which this host answers on."""


# --- directories -----------------------------------------------------------------------------


def test_the_directory_is_private_and_not_shared(tmp_path: Path) -> None:
    made = IpcLeader(str(tmp_path), "mine").directory
    assert stat.S_IMODE(made.stat().st_mode) == 0o700
    with pytest.raises(HandshakeError, match="cannot make"):
        IpcLeader(str(tmp_path), "mine")
    soon = time.monotonic() + 0.1
    assert IpcMember(str(tmp_path), "mine", soon).directory == made
    made.chmod(0o755)
    with pytest.raises(HandshakeError, match="not a private directory"):
        IpcMember(str(tmp_path), "mine", soon)
    with pytest.raises(HandshakeError, match="in time"):
        IpcMember(str(tmp_path), "nothing", soon)


OWNER = """
import sys
from sglang_wavepp.rounds import LeaderPlane
from sglang_wavepp.transport import IpcLeader
plane = LeaderPlane(IpcLeader(sys.argv[1], sys.argv[2]), 2)
print("up", flush=True)
sys.stdin.read()
plane.close()
"""


@contextlib.contextmanager
def owner(parent: Path, name: str) -> Iterator[subprocess.Popen[str]]:
    """A stage 0 that waits for its members."""
    command = [sys.executable, "-c", OWNER, str(parent), name]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None and process.stdout.readline() == "up\n"
            yield process
        finally:
            process.kill()


def aged(directory: Path) -> Path:
    """As if it had been there for long."""
    os.utime(directory, (0, 0))
    return directory


def names(parent: Path) -> set[str]:
    return {path.name.removeprefix("wavepp-sockets-") for path in parent.iterdir()}


def test_a_start_removes_what_dead_servers_left_and_nothing_else(tmp_path: Path) -> None:
    with owner(tmp_path, "living"), owner(tmp_path, "killed"), owner(tmp_path, "young"):
        assert names(tmp_path) == {"living", "killed", "young"}
        aged(tmp_path / "wavepp-sockets-killed")
        aged(tmp_path / "wavepp-sockets-living")
        IpcLeader(str(tmp_path), "first").seal()
        assert names(tmp_path) == {"living", "killed", "young"}, "all their servers live"
    os.utime(tmp_path / "wavepp-sockets-young")
    with owner(tmp_path, "living 2") as living:
        aged(tmp_path / "wavepp-sockets-living 2")
        other = tmp_path / "wavepp-sockets-with-a-file"
        other.mkdir()
        (other / "mine").touch()
        aged(other)
        elsewhere = tmp_path / "elsewhere"
        elsewhere.mkdir()
        (tmp_path / "wavepp-sockets-link").symlink_to(elsewhere)
        IpcLeader(str(tmp_path), "second").seal()
        left = {"living 2", "young", "with-a-file", "link", "elsewhere"}
        assert names(tmp_path) == left
        assert (other / "mine").exists()
        assert living.stdin is not None
        living.stdin.close()
        living.wait(BOUND)
        assert names(tmp_path) == left - {"living 2"}, "a server that ends removes its own"


def test_racing_starts_leave_each_other_alone(tmp_path: Path) -> None:
    for i in range(20):
        directory = tmp_path / f"wavepp-sockets-dead-{i}"
        directory.mkdir()
        (directory / "control").touch()
        aged(directory)
    with ThreadPoolExecutor(8) as pool:
        wires = list(pool.map(lambda i: IpcLeader(str(tmp_path), f"new-{i}"), range(40)))
    assert names(tmp_path) == {f"new-{i}" for i in range(40)}
    for wire in wires:
        wire.seal()
    assert not list(tmp_path.iterdir())


def test_a_start_waits_until_another_one_has_looked_at_its_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mkdir = Path.mkdir

    def seen_at_once(directory: Path, mode: int) -> None:
        mkdir(directory, mode)
        handle = os.open(directory, os.O_RDONLY)
        fcntl.flock(handle, fcntl.LOCK_EX)
        threading.Timer(0.1, os.close, [handle]).start()

    monkeypatch.setattr(Path, "mkdir", seen_at_once)
    wire = IpcLeader(str(tmp_path), "new")
    wire.seal()
    assert not list(tmp_path.iterdir())


# --- tcp -------------------------------------------------------------------------------------


class Exchange:
    """Gives each of some threads what all have given, as SGLang's process group does for processes."""

    def __init__(self, stages: int) -> None:
        self._barrier = threading.Barrier(stages, timeout=BOUND)
        self._given = [b""] * stages

    def of(self, rank: int) -> Share:
        def share(mine: bytes) -> list[bytes]:
            self._given[rank] = mine
            try:
                self._barrier.wait()
                everyone = list(self._given)
                self._barrier.wait()
            except threading.BrokenBarrierError:
                raise HandshakeError("somebody did not share") from None
            return everyone

        return share

    def fail(self) -> None:
        self._barrier.abort()


class Tcp:
    """The planes of a server over TCP."""

    def __init__(self, stages: int) -> None:
        exchange = Exchange(stages)
        self.wires: list[TcpMember] = []

        def lead() -> LeaderPlane:
            self.wire = TcpLeader(LISTENS, exchange.of(0))
            return LeaderPlane(self.wire, stages)

        with ThreadPoolExecutor(stages) as pool:
            leader = pool.submit(lead)
            wires = [pool.submit(TcpMember, exchange.of(rank)) for rank in range(1, stages)]
            self.leader = leader.result(BOUND)
            self.wires = [wire.result(BOUND) for wire in wires]
        self._planes: list[LeaderPlane | MemberPlane] = [self.leader]

    def member(self, rank: int, wire: TcpMember | None = None) -> MemberPlane:
        """Connect a stage, with its own key or another wire's."""
        plane = MemberPlane(wire or self.wires[rank - 1], rank)
        self._planes.append(plane)
        return plane

    def shake(self, members: list[MemberPlane]) -> list[Welcome]:
        deadline = time.monotonic() + BOUND
        hellos = [Hello(r, r, "", {}, {"kv_tokens": 1}) for r in range(len(members) + 1)]
        with ThreadPoolExecutor(len(hellos)) as pool:
            first = pool.submit(self.leader.gather, hellos[0], deadline, 7, "name")
            joining = [pool.submit(m.join, h, deadline) for m, h in zip(members, hellos[1:], strict=True)]
            return [future.result(BOUND) for future in (first, *joining)]

    def ports(self) -> list[int]:
        return [int(e.rpartition(":")[2]) for e in self.wires[0]._endpoints]

    def received(self, count: int) -> list[tuple[int, Message]]:
        """Wait until stage 0 has received `count` messages."""
        got: list[tuple[int, Message]] = []
        eventually(lambda: got.extend(self.leader.receive()) or len(got) >= count)
        return got

    def close(self) -> None:
        for plane in self._planes:
            plane.close()


@pytest.fixture
def three() -> Iterator[Tcp]:
    """Three stages, of which stage 0 listens."""
    planes = Tcp(3)
    yield planes
    planes.close()


def stranger(kind: int, identity: bytes, endpoint: str, **options: bytes) -> zmq.Socket[bytes]:
    sock: zmq.Socket[bytes] = zmq.Context.instance().socket(kind)
    sock.routing_id = identity
    sock.linger = 0
    for name, value in options.items():
        setattr(sock, name, value)
    sock.connect(endpoint)
    return sock


def broken_off(sock: zmq.Socket[bytes]) -> bool:
    """Has stage 0 turned this peer away? Its connections are not made again."""
    return not sock.poll(0, zmq.POLLOUT)


def test_stages_talk_over_tcp_on_one_interface_only(three: Tcp) -> None:
    members = [three.member(1), three.member(2)]
    welcomes = three.shake(members)
    assert welcomes == [Welcome([0, 1, 2], ["", "", ""], {"kv_tokens": 1}, [1, 1, 1], 7, "name")] * 3
    for rank, member in enumerate(members, 1):
        member.beat(rank, "well")
    assert sorted(three.received(2), key=str) == [(1, Beat(1, "well")), (2, Beat(2, "well"))]
    payload = os.urandom(1 << 20)
    three.leader.send(None, Offer(1, 2), payload, b"hashes")
    for member in members:
        got: list[Any] = []
        eventually(lambda member=member, got=got: got.extend(member.receive()) or got)
        assert got == [(Offer(1, 2), [payload, b"hashes"])]
    # Another program may listen on the same port of another address.
    own = [c.laddr for c in psutil.Process().net_connections("tcp") if c.status == psutil.CONN_LISTEN]
    for port in three.ports():
        socket.create_connection((LISTENS, port), BOUND).close()
        assert [address.ip for address in own if address.port == port] == [LISTENS]


def test_peers_without_a_key_of_the_server_are_never_heard(
    three: Tcp, caplog: pytest.LogCaptureFixture
) -> None:
    """No key at all, a key of nobody, the server's key not known: frames that would count change nothing."""
    public, secret = zmq.curve_keypair()
    other, _ = zmq.curve_keypair()
    keys = {"curve_publickey": public, "curve_secretkey": secret}
    ways: list[dict[str, Any]] = [{}, {**keys, "curve_serverkey": other}]
    ways += [{**keys, "curve_serverkey": three.wires[0]._leader}]
    endpoint = three.wires[0]._endpoints[0]
    strangers = [stranger(zmq.DEALER, b"stage-1", endpoint, reconnect_ivl=-1, **way) for way in ways]
    for sock in strangers:
        with contextlib.suppress(zmq.Again):  # turned away already
            sock.send(encode(Hello(1, 666, "", {}, {"kv_tokens": 1})), zmq.NOBLOCK)
    eventually(lambda: all(map(broken_off, strangers)))
    assert not list(three.leader.receive())
    assert three.leader.dropped == 1, "one of them knew the server's key, and had none of its own"
    (warning,) = caplog.messages
    assert "its key is not one of this server" in warning
    members = [three.member(1), three.member(2)]
    assert three.shake(members)[0].pids == [0, 1, 2]
    for sock in strangers:
        sock.close()


def test_a_key_is_good_for_one_stage(three: Tcp) -> None:
    """Stage 1 in the place of stage 2 is not heard, and does not get what stage 0 says to stage 2."""
    own, false = three.member(1), three.member(2, three.wires[0])
    false.send(Hello(2, 666, "", {}, {"kv_tokens": 1}))
    eventually(lambda: not list(three.leader.receive()) and three.leader.dropped)
    false.bulk.send_multipart((bytes(8), encode(Hello(2, 666, "", {}, {"kv_tokens": 1}))))
    own.bulk.send_multipart((bytes(8), encode(Beat(0, ""))))
    own.send(Hello(1, 1, "", {}, {"kv_tokens": 1}))
    with pytest.raises(HandshakeError, match=r"stage 2 did not come to the handshake at tcp://127.0.0.2 "):
        three.leader.gather(Hello(0, 0, "", {}, {"kv_tokens": 1}), time.monotonic() + 0.5, 7, "name")
    assert three.leader.dropped == 2
    assert not false.control.poll(100), "it was told nothing"


def test_once_all_are_connected_not_even_a_member_can_come_again(three: Tcp) -> None:
    members = [three.member(1), three.member(2)]
    three.shake(members)
    again = three.member(1)
    again.send(Beat(6, "again"))
    eventually(lambda: broken_off(again.control))
    members[0].send(Beat(5, "first"))
    assert three.received(1) == [(1, Beat(5, "first"))]
    with pytest.raises(ProtocolError, match="stage 0 cannot be reached"):
        again.send(Beat(7, "again"))


def test_a_broken_connection_is_an_error_on_both_sides(three: Tcp) -> None:
    """It is not made again: what was on the way would be missing."""
    members = [three.member(1), three.member(2)]
    three.shake(members)
    members[1].close()

    def unreachable() -> bool:
        try:
            three.leader.send(2, Beat(0, ""))
        except ProtocolError as error:
            assert str(error).startswith("stage 2 cannot be reached on the rounds plane")
            return True
        return False

    eventually(unreachable)
    three.leader.send(1, Beat(0, ""))
    three.leader.close()
    eventually(lambda: broken_off(members[0].control))
    with pytest.raises(ProtocolError, match="stage 0 cannot be reached"):
        members[0].beat(0, "")


def test_a_member_notices_that_stage_0_is_gone_during_the_handshake(three: Tcp) -> None:
    member, hello = three.member(1), Hello(1, 1, "", {}, {})
    with ThreadPoolExecutor(1) as pool:
        joining = pool.submit(member.join, hello, time.monotonic() + 10 * BOUND)
        assert three.received(1) == [(1, hello)]
        three.leader.close()
        complaint = r"stage 0 at tcp://127.0.0.2:.* broke off the handshake"
        with pytest.raises(HandshakeError, match=complaint):
            joining.result(BOUND)
    with pytest.raises(HandshakeError, match=complaint):
        member.join(hello, time.monotonic() + BOUND)


@pytest.mark.parametrize(
    ("address", "complaint"),
    [
        ("0.0.0.0", "stage 0 cannot listen on 0.0.0.0: --wavepp-bind has to name one interface"),
        ("192.0.2.1", "stage 0 cannot listen on 192.0.2.1: .*; --wavepp-bind names an address of its host"),
        ("nobody.invalid", "the address nobody.invalid of stage 0 is not known: "),
    ],
)
def test_an_address_that_stage_0_cannot_listen_on(address: str, complaint: str) -> None:
    def share(mine: bytes) -> list[bytes]:
        return [mine, mine]

    with pytest.raises(HandshakeError, match=complaint):
        LeaderPlane(TcpLeader(address, share), 2)


# --- over a process group --------------------------------------------------------------------


def groups(tmp_path: Path, stages: int) -> list[Any]:
    """A group over gloo, as SGLang's, with a thread for each stage."""
    with ThreadPoolExecutor(stages) as pool:

        def make(rank: int) -> Any:
            store = torch.distributed.FileStore(str(tmp_path / "store"), stages)
            return torch.distributed.ProcessGroupGloo(store, rank, stages)

        return list(pool.map(make, range(stages)))


def test_records_go_round_over_a_process_group(tmp_path: Path) -> None:
    stages = 3
    deadline = time.monotonic() + BOUND
    shares = [share_over(group, deadline) for group in groups(tmp_path, stages)]
    rounds = [[b"key of 0", b"\0of 1\0", b""], [bytes([rank]) * SHARED_BYTES for rank in range(stages)]]
    with ThreadPoolExecutor(stages) as pool:
        for given in rounds:
            for got in pool.map(lambda rank, given=given: shares[rank](given[rank]), range(stages)):
                assert got == given
    with pytest.raises(HandshakeError, match="256 bytes are too many"):
        shares[0](b"x" * (SHARED_BYTES + 1))


def test_a_stage_that_does_not_share_ends_the_wait(tmp_path: Path) -> None:
    mine, other = groups(tmp_path, 2)
    with pytest.raises(HandshakeError, match="the stages cannot tell each other their keys: "):
        share_over(mine, time.monotonic() + 0.2)(b"key")
    del other  # first: gloo waits for it as long as both are there
    with pytest.raises(HandshakeError, match="the stages cannot tell each other their keys: "):
        share_over(mine, time.monotonic() + 10 * BOUND)(b"key")
