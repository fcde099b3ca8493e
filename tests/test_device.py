"""Who waits for the events of a device, and for how long. With stand-ins, as there is no GPU here."""

from __future__ import annotations

import queue
import threading
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sglang_wavepp import hooks
from sglang_wavepp.device_watch import DeviceWatch
from sglang_wavepp.executor import Executor, _Wave
from sglang_wavepp.loop import MemberLoop, Progress

BOUND = 10.0


class Event:
    """A device event that the test lets happen."""

    def __init__(self) -> None:
        self.happened = threading.Event()

    def query(self) -> bool:
        return self.happened.is_set()

    def synchronize(self) -> None:
        assert self.happened.wait(BOUND)


class Failed(Event):
    def synchronize(self) -> None:
        raise RuntimeError("an illegal memory access was encountered")


def test_a_watch_tells_of_each_event_in_its_turn_and_of_a_device_that_failed() -> None:
    chosen: list[tuple[str, int]] = []
    device = SimpleNamespace(
        current_device=lambda: 3, set_device=lambda n: chosen.append((threading.current_thread().name, n))
    )
    told: queue.SimpleQueue[int] = queue.SimpleQueue()
    watch = DeviceWatch(device, lambda: told.put(1))
    first, second = Event(), Event()
    for event in (Failed(), first, second):
        watch.wait_for(event)
    told.get(timeout=BOUND)
    second.happened.set()
    with pytest.raises(queue.Empty):  # the second one comes after the first
        told.get(timeout=0.2)
    first.happened.set()
    assert [told.get(timeout=BOUND), told.get(timeout=BOUND)] == [1, 1]
    assert chosen == [("DEVICE", 3)]


class Outputs:
    """The executor of a last stage, as far as its loop asks it for outputs."""

    live = 1

    def __init__(self) -> None:
        self.pending: list[Event] = []

    @property
    def awaited(self) -> Event | None:
        return self.pending[0] if self.pending else None

    def sampled(self) -> Event | None:
        return self.pending.pop(0) if self.pending and self.pending[0].query() else None


def test_the_last_stage_goes_on_while_its_device_computes() -> None:
    """It receives the waves behind: until then the stage before may not replay its decode graph."""
    loop, sent = MemberLoop.__new__(MemberLoop), []
    inbox: queue.SimpleQueue[Any] = queue.SimpleQueue()
    loop.__dict__.update(
        s=SimpleNamespace(gracefully_exit=False),
        stage=SimpleNamespace(wave=SimpleNamespace(send=lambda done: (sent.append(done), inbox.put("sent")))),
        executor=Outputs(),
        progress=Progress(),
        _inbox=queue.SimpleQueue(),
        _checked_idle=0.0,
        _computes_since=None,
        _watched=None,
    )
    loop._watch = DeviceWatch(torch.cpu, lambda: loop.post(loop._send_outputs))
    waves = [Event(), Event()]

    def launch(wave: Event) -> None:
        loop.executor.pending.append(wave)  # type: ignore[attr-defined]
        loop._send_outputs()
        inbox.put("launched")

    thread = threading.Thread(target=loop.run, daemon=True)
    thread.start()
    for wave in waves:
        loop.post(lambda wave=wave: launch(wave))
        assert inbox.get(timeout=BOUND) == "launched" and sent == []
    for wave in waves:
        wave.happened.set()
        assert inbox.get(timeout=BOUND) == "sent"
    assert sent == waves
    loop.post(lambda: setattr(loop.s, "gracefully_exit", True))
    thread.join(BOUND)
    assert not thread.is_alive() and loop.progress.doing != "waiting for the device"


def test_a_device_is_waited_for_since_it_is_at_its_oldest_wave_whatever_comes_in_meanwhile() -> None:
    loop, sent = MemberLoop.__new__(MemberLoop), []
    executor = Outputs()
    oldest, newer = Event(), Event()
    executor.pending += [oldest, newer]
    loop.__dict__.update(
        stage=SimpleNamespace(wave=SimpleNamespace(send=sent.append)),
        executor=executor,
        progress=Progress(),
        _inbox=queue.SimpleQueue(),
        _longest_wait=lambda: 0.001,
        _watch=SimpleNamespace(wait_for=lambda event: None),
        _watched=None,
        _computes_since=None,
    )
    found = []
    for happens in (None, None, oldest, newer):
        if happens:
            happens.happened.set()
        loop.post(lambda: None)
        assert loop._take(0)
        loop._send_outputs()
        loop._wait()
        found.append((loop.progress.doing, loop.progress.since))
    assert [doing for doing, _ in found] == ["waiting for the device"] * 3 + [""]
    assert found[0][1] == found[1][1] < found[2][1] and sent == [oldest, newer]


def test_buffers_are_given_up_once_all_stages_are_through_and_fenced_only_before() -> None:
    loop, settled = MemberLoop.__new__(MemberLoop), []
    progress = Progress()
    progress.patience = 5
    loop.__dict__.update(
        executor=SimpleNamespace(wait_sent=settled.append),
        progress=progress,
        _sends=deque((wave, [f"sends of wave {wave}"]) for wave in range(4)),
        _reused_buffer=True,
    )
    loop._through(2)
    assert settled == [[f"sends of wave {wave}"] for wave in range(3)]
    assert loop._reused_buffer and [wave for wave, _ in loop._sends] == [3] and progress.patience == 1
    loop._through(3)
    assert not loop._reused_buffer and not loop._sends


def test_activations_are_kept_until_the_device_is_through_with_them_and_no_longer() -> None:
    executor = Executor.__new__(Executor)
    kept = SimpleNamespace(tensors={"__wavepp_wave__": 3})
    through, running = Event(), Event()
    through.happened.set()
    waves = {wave: _Wave(None, [], []) for wave in range(4)}  # type: ignore[arg-type]
    for wave, event in ((0, through), (1, running), (2, None)):
        waves[wave].proxy, waves[wave].launched = kept, event  # type: ignore[assignment]
    executor.__dict__.update(_s=SimpleNamespace(_pp_recv_proxy_tensors=lambda: kept), _waves=waves)
    assert executor.receive(3) is kept
    assert [waves[wave].proxy for wave in range(4)] == [None, kept, kept, kept]


def test_outputs_are_read_on_a_stream_that_waits_for_no_other_wave() -> None:
    streams: list[str] = []

    @contextmanager
    def copying() -> Iterator[None]:
        streams.append("copy")
        yield
        streams.pop()

    class Ids:
        def tolist(self) -> list[int]:
            assert streams == ["copy"]
            return [7]

    ready = Event()
    executor = Executor.__new__(Executor)
    batch = SimpleNamespace(reqs=["a request"])
    executor.__dict__.update(
        _s=SimpleNamespace(copy_stream_ctx=copying()),
        _sampled=deque([(ready, SimpleNamespace(tensors={"next_token_ids": Ids()}))]),
        _sampled_waves=deque([(5, 0.0)]),
        _waves={5: _Wave(batch, [], [])},  # type: ignore[arg-type]
    )
    assert executor.sampled() is None and executor.awaited is ready
    ready.happened.set()
    done = executor.sampled()
    assert done is not None and (done.wave, done.tokens) == (5, [7]) and executor.awaited is None


@pytest.mark.parametrize(("backend", "waits"), [("flashinfer", True), ("fa3", False), ("new", True)])
def test_a_decode_graph_is_not_planned_before_the_device_has_read_the_last_plan(
    backend: str, waits: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[str] = []

    class Recorded:
        def record(self) -> None:
            seen.append("record")

        def synchronize(self) -> None:
            seen.append("synchronize")

    monkeypatch.setattr(torch.cpu, "Event", Recorded)
    runner = SimpleNamespace(model_runner=SimpleNamespace(decode_attention_backend_str=backend, device="cpu"))
    for number in range(2):
        plan = hooks._stage_one_at_a_time(lambda _, batch: seen.append("plan") or batch, runner, number)
        assert plan == number
    whole = ["plan", "record", "synchronize", "plan", "record"]
    assert seen == (whole if waits else ["plan", "plan"])
