"""What a wave took: from its input on, or from the end of the wave before, whichever is later."""

from __future__ import annotations

from types import SimpleNamespace
from typing import ClassVar

import torch

from sglang_wavepp.timer import WaveTimer


class Event:
    """A device event; the test says when it happened, in milliseconds."""

    made: ClassVar[list[Event]] = []

    def __init__(self, enable_timing: bool = False) -> None:
        assert enable_timing
        self.at: float | None = None
        self.made.append(self)

    def record(self, stream: str) -> None:
        self.stream = stream

    def query(self) -> bool:
        return self.at is not None

    def elapsed_time(self, end: Event) -> float:
        assert self.at is not None and end.at is not None
        return end.at - self.at


DEVICE = SimpleNamespace(Event=Event, current_stream=lambda: "current")


def test_device_events_leave_waiting_out() -> None:
    timer = WaveTimer(DEVICE, "forward")
    Event.made.clear()
    for wave, counts in ((3, True), (4, True), (5, False), (6, True)):
        timer.start()
        timer.stop(wave, counts)
    assert [event.stream for event in Event.made] == ["current", "forward"] * 4
    first, end3, second, end4, third, end5, fourth, end6 = Event.made
    assert timer.take() == []
    first.at, end3.at = 10.0, 15.0
    second.at, end4.at = 11.0, 17.5  # its input was there before wave 3 was through
    assert timer.take() == [(3, 5000), (4, 2500)]
    third.at, end5.at = 18.0, 40.0
    fourth.at, end6.at = 50.0, 51.0  # it waited for its input
    assert timer.take() == [(6, 1000)] and timer.take() == []


def test_waves_behind_the_first_that_is_not_through_have_not_begun() -> None:
    timer = WaveTimer(DEVICE, "forward")
    Event.made.clear()
    assert timer.queued == 0
    for wave in range(4):
        timer.start()
        timer.stop(wave, True)
        assert timer.queued == wave
    ends = Event.made[1::2]
    for through, end in enumerate(ends, 1):
        end.at = 10.0 * through
        assert timer.queued == max(0, 3 - through)


def test_what_an_idle_device_took_may_be_left_out() -> None:
    timer = WaveTimer(DEVICE, "forward")
    Event.made.clear()
    for wave in (1, 2, 3, 4):
        timer.start()
        timer.stop(wave, True, behind_nothing=False)
    first, end1, second, end2, third, end3, fourth, end4 = Event.made
    first.at, end1.at = 0.0, 9.0
    second.at, end2.at = 5.0, 16.0
    third.at, end3.at = 20.0, 29.0
    fourth.at, end4.at = 29.4, 38.0  # the device made its input ready in between
    assert timer.take() == [(2, 7000), (4, 8600)]


def test_a_device_without_timed_events_is_measured_by_the_host() -> None:
    timer = WaveTimer(torch.cpu, None)
    for wave, counts in ((1, True), (2, False)):
        timer.start()
        timer.stop(wave, counts)
        assert timer.queued == 0
    ((wave, took),) = timer.take()
    assert wave == 1 and took >= 0 and timer.take() == []
