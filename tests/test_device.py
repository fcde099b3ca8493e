"""Who waits for the events of a device, and for how long. With stand-ins, as there is no GPU here."""

from __future__ import annotations

import queue
import threading
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
    told: queue.SimpleQueue[int] = queue.SimpleQueue()
    watch = DeviceWatch(lambda: told.put(1))
    first, second = Event(), Event()
    for event in (Failed(), first, second):
        watch.wait_for(event)
    told.get(timeout=BOUND)
    second.happened.set()
    assert told.empty(), "the second one comes after the first"
    first.happened.set()
    assert [told.get(timeout=BOUND), told.get(timeout=BOUND)] == [1, 1]


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
        _watched=None,
    )
    loop._watch = DeviceWatch(lambda: loop.post(loop._send_outputs))
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
    began = loop.progress.since
    for wave in waves:
        wave.happened.set()
        assert inbox.get(timeout=BOUND) == "sent"
    assert sent == waves
    loop.post(lambda: setattr(loop.s, "gracefully_exit", True))
    thread.join(BOUND)
    assert not thread.is_alive() and loop.progress.since > began


def test_waiting_for_the_device_is_one_wait_however_often_the_loop_looks() -> None:
    loop = MemberLoop.__new__(MemberLoop)
    executor = Outputs()
    executor.pending.append(Event())
    loop.__dict__.update(
        executor=executor, progress=Progress(), _inbox=queue.SimpleQueue(), _longest_wait=lambda: 0.001
    )
    loop._wait()
    since = loop.progress.since
    loop._wait()
    assert (loop.progress.doing, loop.progress.since) == ("waiting for the device", since)


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
