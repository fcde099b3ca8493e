"""What a slow stage costs the others: bounded memory, and few frames."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import zmq
from conftest import eventually
from sglang.srt.managers.io_struct import AbortReq, sock_send

from sglang_wavepp import rounds
from sglang_wavepp.admission import Limits
from sglang_wavepp.config import WavePPConfig
from sglang_wavepp.leader import Leader
from sglang_wavepp.loop import Progress
from sglang_wavepp.messages import Beat, Held, Hint, HintItem, Message, Offer
from sglang_wavepp.rounds import LeaderPlane, MemberPlane
from sglang_wavepp.transport import IpcLeader, IpcMember
from sglang_wavepp.wave import MemberWave
from sglang_wavepp.wave_leader import LeaderWave

BOUND = 20.0
LIMIT = 1 << 20
Planes = tuple[LeaderPlane, list[MemberPlane]]
PAYLOAD = bytes(LIMIT // 4)


@pytest.fixture
def planes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Planes]:
    """Three stages that are connected, with a small limit on payloads."""
    monkeypatch.setattr(rounds, "UNTAKEN_BYTES", LIMIT)
    leader = LeaderPlane(IpcLeader(str(tmp_path), "plane"), 3)
    members = [MemberPlane(IpcMember(str(tmp_path), "plane", time.monotonic() + BOUND), r) for r in (1, 2)]
    came: set[int] = set()
    for member in members:
        member.beat(0, "")
        member.bulk.send(b"")
    eventually(lambda: came.update(rank for rank, _ in leader.receive()) or came == {1, 2})
    eventually(lambda: list(leader.receive()) or leader.dropped == 2)
    yield leader, members
    for plane in (leader, *members):
        plane.close()


def take(member: MemberPlane, count: int) -> None:
    """Receive that many messages of stage 0."""
    got: list[Message] = []
    eventually(lambda: got.extend(message for message, _ in member.receive()) or len(got) == count)


def test_stage_0_knows_how_much_waits_for_a_member(planes: Planes) -> None:
    leader, members = planes
    for seq in range(5):
        assert not leader.crowded, "not more than the limit"
        leader.send(None, Offer(seq, 0), PAYLOAD, b"")
    assert leader.crowded
    take(members[0], 5)
    assert members[0].beat_due and not members[1].beat_due
    members[0].beat(1, "")
    assert not members[0].beat_due
    eventually(lambda: list(leader.receive()))
    assert leader.crowded, "the other one has taken nothing"
    take(members[1], 5)
    members[1].beat(1, "")
    eventually(lambda: list(leader.receive()))
    assert not leader.crowded
    leader.send(1, Offer(5, 0), bytes(LIMIT + 1), b"")
    assert leader.crowded, "one that is larger than the limit goes alone"


def stage(rank: int, requests: zmq.Socket[bytes] | None = None) -> Any:
    """What the WAVE thread of an idle stage looks at."""
    channels = SimpleNamespace(recv_from_tokenizer=requests, recv_from_rpc=None)
    return SimpleNamespace(
        rank=rank,
        config=WavePPConfig(),
        hints=None,
        guard=threading.RLock(),
        intake=SimpleNamespace(compiling=0, displaced=[]),
        loop=SimpleNamespace(
            progress=Progress(),
            log=SimpleNamespace(position=0),
            executor=SimpleNamespace(live=0),
        ),
        scheduler=SimpleNamespace(
            device_module=torch.cpu,
            ipc_channels=channels,
            _engine_paused=False,
            weight_updater=SimpleNamespace(offload_tags=set()),
        ),
    )


def test_requests_stay_with_sglang_while_payloads_wait(
    planes: Planes, monkeypatch: pytest.MonkeyPatch
) -> None:
    leader, members = planes
    context = zmq.Context.instance()
    requests, client = context.socket(zmq.PULL), context.socket(zmq.PUSH)
    client.connect(f"tcp://127.0.0.1:{requests.bind_to_random_port('tcp://127.0.0.1')}")
    limits = Limits(
        stages=3, pool=9, running=1, page=1, reserve=1, block=1, ahead=1, wave=1, round_bound=BOUND
    )
    wave = LeaderWave(stage(0, requests), leader, {1: None, 2: None}, Leader(limits, time.monotonic))
    came: list[str] = []

    def offer(request: AbortReq) -> None:
        came.append(request.rid)
        leader.send(None, Offer(len(came), 0), PAYLOAD, b"")

    monkeypatch.setattr(wave, "_on_request", offer)
    poller = zmq.Poller()
    poller.register(leader.control, zmq.POLLIN)
    wave._register(poller)
    rids = [f"request {i}" for i in range(12)]
    for rid in rids:
        sock_send(client, AbortReq(rid=rid))

    sources = (leader.control, leader.bulk, requests)

    def turn(count: int) -> None:
        def came_by_now() -> bool:
            wave._turn(sources)
            return len(came) >= count

        eventually(came_by_now)
        assert came == rids[:count]

    turn(5)
    assert requests.poll(BOUND * 1000), "there are more"
    assert not poller.poll(0), "but they do not wake the thread"
    wave._turn(sources)
    assert len(came) == 5
    for member in members:
        take(member, 5)
        member.beat(0, "")
    assert poller.poll(BOUND * 1000), "the acknowledgement does"
    turn(10)
    for member in members:
        take(member, 5)
        member.beat(0, "")
    turn(12)
    wave.watch.close()
    requests.close(0)
    client.close(0)


def test_hints_that_come_together_go_together_and_in_order(
    planes: Planes,
) -> None:
    leader, (member, _) = planes
    wave = MemberWave(stage(1), member, {0: None})
    said = [Hint(0, [HintItem(1, 10)]), Hint(0, [HintItem(2, 20)]), Hint(0, [HintItem(3, 0, "why")])]
    said += [Hint(1, [HintItem(4, 0)])]
    other = Held(1, 5, [])
    for message in (*said, other, *said[3:], *said[3:]):
        wave.send(message)
    wave.mail.drain()
    got: list[Message] = []
    eventually(lambda: got.extend(message for _, message in leader.receive()) or len(got) >= 4)
    assert got == [
        Hint(0, [item for hint in said[:3] for item in hint.items]),
        said[3],
        other,
        Hint(1, [HintItem(4, 0), HintItem(4, 0)]),
    ]
    wave.send(Beat(3, ""))
    wave.mail.drain()
    eventually(lambda: got.extend(message for _, message in leader.receive()) or len(got) >= 5)
    assert got[4:] == [Beat(3, "")], "nothing is said twice"
    wave.watch.close()
