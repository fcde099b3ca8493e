"""The rounds plane on real sockets: handshake, bad frames, private directory."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from pathlib import Path

import pytest
import zmq

from sglang_wavepp.errors import DivergenceError, HandshakeError, ProtocolError
from sglang_wavepp.log import DecisionLog
from sglang_wavepp.messages import Beat, Decode, Drop, Hello, Log, Message, Offer, WaveDone, Welcome, encode
from sglang_wavepp.rounds import LeaderPlane, Mailbox, MemberPlane
from sglang_wavepp.transport import IpcLeader, IpcMember

BOUND = 10.0


def _hello(rank: int, **more: str) -> Hello:
    identity = {"version": "1", **more}
    return Hello(rank, 1000 + rank, f"host {rank}", identity, {"kv_tokens": 100 - rank, "rows": 8})


def _planes(tmp_path: Path, stages: int) -> tuple[LeaderPlane, list[MemberPlane], Path]:
    """Stage 0's plane and those of the members, connected, and the directory of the sockets."""
    wire = IpcLeader(str(tmp_path), "plane")
    leader = LeaderPlane(wire, stages)
    soon = time.monotonic() + BOUND
    members = [MemberPlane(IpcMember(str(tmp_path), "plane", soon), rank) for rank in range(1, stages)]
    return leader, members, wire.directory


def _shake(
    tmp_path: Path, hellos: list[Hello], strangers: Sequence[zmq.Socket[bytes]] = ()
) -> tuple[LeaderPlane, list[MemberPlane], list[object]]:
    """Shake hands; outcomes are `Welcome`s or the errors that were raised, stage 0 first.

    `strangers` connect in time, one to the control socket, the next to the bulk socket.
    """
    leader, members, directory = _planes(tmp_path, len(hellos))
    for stranger, name in zip(strangers, ("control", "bulk"), strict=False):
        stranger.connect(f"ipc://{directory / name}")
    outcomes: list[object] = [None] * len(hellos)
    deadline = time.monotonic() + BOUND

    def run(i: int) -> None:
        try:
            if i == 0:
                outcomes[i] = leader.gather(hellos[i], deadline, 7, "name")
            else:
                outcomes[i] = members[i - 1].join(hellos[i], deadline)
        except HandshakeError as error:
            outcomes[i] = error

    threads = [threading.Thread(target=run, args=(i,)) for i in range(len(hellos))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(BOUND)
    return leader, members, outcomes


def _messages(plane: LeaderPlane | MemberPlane, count: int) -> list[Message]:
    """Wait for `count` messages."""
    got: list[Message] = []
    deadline = time.monotonic() + BOUND
    poller = zmq.Poller()
    poller.register(plane.control, zmq.POLLIN)
    poller.register(plane.bulk, zmq.POLLIN)
    while len(got) < count:
        assert time.monotonic() < deadline, f"only {len(got)} of {count} messages came"
        ready = dict(poller.poll(100))
        got += [m for item in plane.receive(ready) for m in item if isinstance(m, Message)]
    return got


def _close(leader: LeaderPlane, members: list[MemberPlane]) -> None:
    for plane in (leader, *members):
        plane.close()


def test_stages_agree_on_the_smallest_capacity(tmp_path: Path) -> None:
    leader, members, outcomes = _shake(tmp_path, [_hello(0), _hello(1), _hello(2)])
    hosts = ["host 0", "host 1", "host 2"]
    want = Welcome([1000, 1001, 1002], hosts, {"kv_tokens": 98, "rows": 8}, [100, 99, 98], 7, "name")
    assert outcomes == [want] * 3
    assert not list(tmp_path.iterdir()), "the directory goes as soon as all are connected"
    leader.send(None, Beat(1, ""))
    leader.send(2, Offer(5, 77), b"payload", b"hashes")
    assert _messages(members[0], 1) == [Beat(1, "")]
    assert _messages(members[1], 2) in ([Offer(5, 77), Beat(1, "")], [Beat(1, ""), Offer(5, 77)])
    members[0].send(Beat(4, "x"))
    assert _messages(leader, 1) == [Beat(4, "x")]
    _close(leader, members)


def test_a_stage_that_differs_is_named_to_all(tmp_path: Path) -> None:
    leader, members, outcomes = _shake(tmp_path, [_hello(0), _hello(1), _hello(2, version="2")])
    assert [str(o) for o in outcomes] == ["stage 2 has version 2, stage 0 has 1"] * 3
    _close(leader, members)


def test_a_missing_stage_is_named(tmp_path: Path) -> None:
    leader, members, _ = _planes(tmp_path, 3)
    members[0].bulk.send(b"")
    with pytest.raises(HandshakeError, match="stage 1, 2 did not come"):
        leader.gather(_hello(0), time.monotonic() + 0.2, 7, "name")
    with pytest.raises(HandshakeError, match=r"stage 0 at .* did not answer the handshake in time"):
        members[0].join(_hello(1), time.monotonic() + 0.2)
    _close(leader, members)


def test_garbage_and_strangers_are_counted_and_dropped(tmp_path: Path) -> None:
    leader, (member,), directory = _planes(tmp_path, 2)
    stranger = zmq.Context.instance().socket(zmq.DEALER)
    stranger.connect(f"ipc://{directory / 'control'}")
    stranger.send(b"\x93\x01\x02")
    for frame in (b"", b"garbage", b"\xc1", b"\x91\xa7Unknown"):
        member.control.send(frame)
    member.control.send_multipart([b"two", b"frames"])
    member.send(Beat(3, "alive"))
    assert _messages(leader, 1) == [Beat(3, "alive")]
    assert leader.dropped >= 5
    leader.control.send_multipart([b"stage-1", b"\x00nonsense"])
    leader.send(1, Offer(5, 77))
    leader.send(1, Beat(9, ""), b"no", b"offer")
    leader.send(1, Offer(6, 78), b"payload", b"hashes")
    leader.send(1, Beat(9, ""))
    assert set(_messages(member, 2)) == {Beat(9, ""), Offer(6, 78)}
    assert member.dropped == 3
    stranger.close(0)
    _close(leader, [member])


def test_a_gone_member_is_an_error_not_a_silence(tmp_path: Path) -> None:
    leader = LeaderPlane(IpcLeader(str(tmp_path), "plane"), 2)
    with pytest.raises(ProtocolError, match="stage 1 cannot be reached"):
        leader.send(None, Beat(0, ""))
    leader.close()


def test_mailbox_keeps_order_and_wakes() -> None:
    mail = Mailbox()
    poller = zmq.Poller()
    poller.register(mail.fd, zmq.POLLIN)
    seen: list[int] = []
    for i in range(3):
        mail.post(lambda i=i: seen.append(i))  # type: ignore[misc]
    assert poller.poll(BOUND * 1000)
    mail.drain()
    assert seen == [0, 1, 2]
    assert not poller.poll(0)


def test_a_flood_of_strangers_starves_nobody(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Garbage, and frames that a member could have sent, on both sockets: dropped, and warned of once."""
    strangers = [zmq.Context.instance().socket(zmq.DEALER) for _ in range(2)]
    for stranger in strangers:
        stranger.set_hwm(0)
    leader, members, _ = _shake(tmp_path, [_hello(0), _hello(1)], strangers)
    for i in range(1500):
        for stranger in strangers:
            stranger.send(encode(WaveDone(i, 0, [7], b"")) if i % 2 else b"\xc1garbage")
    members[0].send(Beat(5, "alive"))
    poller = zmq.Poller()
    poller.register(leader.control, zmq.POLLIN)
    poller.register(leader.bulk, zmq.POLLIN)
    got: list[tuple[int, Message]] = []
    deadline = time.monotonic() + BOUND
    while leader.dropped < 3000 or not got:
        assert time.monotonic() < deadline, f"{leader.dropped} frames were dropped, {got} came"
        ready = dict(poller.poll(100))
        before = leader.dropped
        got += leader.receive(ready)
        assert leader.dropped - before <= 2000, "other work has its turn"
    assert got == [(1, Beat(5, "alive"))]
    assert not poller.poll(0), "a frame that nobody reads would keep the thread awake"
    assert sum("dropped a frame" in record.message for record in caplog.records) == 1
    for stranger in strangers:
        stranger.close(0)
    _close(leader, members)


def test_what_was_overheard_is_received_once_and_in_order(tmp_path: Path) -> None:
    leader, members, _ = _shake(tmp_path, [_hello(0), _hello(1)])
    member = members[0]
    for i in range(3):
        member.send(Beat(i, ""))
        leader.send(1, Beat(i, ""))
    assert leader.control.poll(BOUND * 1000) and member.control.poll(BOUND * 1000)
    assert set(leader.overhear()) == {1} and set(member.overhear()) == {0}
    receiving = leader.receive(ready={})  # a poll finds nothing of it
    assert next(receiving) == (1, Beat(0, ""))
    member.send(Beat(3, ""))
    assert leader.control.poll(BOUND * 1000)
    list(leader.overhear())
    leader.send(1, Offer(7, 8), b"payload", b"hashes")
    got = [message for _, message in receiving]
    while len(got) < 3:
        got += _messages(leader, 1)
    assert got == [Beat(1, ""), Beat(2, ""), Beat(3, "")]
    assert _messages(member, 4) == [*(Beat(i, "") for i in range(3)), Offer(7, 8)]
    _close(leader, members)


def test_a_log_entry_that_is_not_the_next_one_is_no_garbage() -> None:
    """A member must not go on without it, nor with another: both end the stage."""
    leader, member = DecisionLog(0), DecisionLog(1)
    first = leader.append(Drop([1], False))
    assert member.read(0, first) == Drop([1], False)
    with pytest.raises(DivergenceError, match="stage 1 expects log entry 1, got entry 0"):
        member.read(0, first)
    leader.append(Drop([2], False))
    with pytest.raises(DivergenceError, match="stage 1 expects log entry 1, got entry 2"):
        member.read(2, leader.append(Decode(0, leader.digest, 0, [3])))
    with pytest.raises(ProtocolError, match="log entry 1 does not decode"):
        member.read(1, b"garbage")
    with pytest.raises(ProtocolError, match="log entry 1 does not decode"):
        member.read(1, encode(Log(1, [first])))
    member.read(1, encode(Drop([66], False)))
    with pytest.raises(DivergenceError, match="stage 1, wave 0: the log's digest is"):
        member.read(2, encode(Decode(0, leader.digest, 0, [3])))
