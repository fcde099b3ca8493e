"""A device that computes nothing and takes its time: the timeline of one stage's waves.

A launch returns at once, as on a GPU. It only says when the wave will have run: it starts when the host has
launched it, its input is there and the wave before is through, and takes what the profile says. Events carry
such times, and waiting for one sleeps until then. All stages of a host share one clock.
"""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import IO, Any

import torch

from sglang_wavepp.launch.emulation import Emulation
from sglang_wavepp.mpu.planner import load_of
from sglang_wavepp.mpu.profile import load_profile

READY_KEY = "__wavepp_ready__"
"""Key in the tensors between stages: when the device of the sender has them ready, and sent."""
FREE = "free"
"""While a file of this name is in the trace directory, waves take no time: to fill caches."""

now = time.monotonic


class EmulatedDevice:
    """The device of one stage.

    Args:
        emulation: the profile and how it is run.
        stage: of `stages`, from 0.
    """

    def __init__(self, emulation: Emulation, stage: int, stages: int) -> None:
        profile = load_profile(emulation.profile)
        self._time = profile.stages(stages)[stage]
        self._hop_s = profile.hop_s
        self._dilation = emulation.dilation
        self._synchronous = stages == 1
        """Without stages SGLang's loop waits for no event before it reads the outputs."""
        self.free_at = 0.0
        """When it is through with all that was launched."""
        self.free = False
        """Did the latest wave take no time?"""
        self.latest = 0.0
        """When the latest operation on the host's stream is through: what an event recorded now says."""
        self._blocked = 0.0
        """Seconds that the loop has waited since the latest launch, the device being idle."""
        self.runnable: dict[str, float] = {}
        """Request -> since when it could run: its arrival, its latest launch or its latest output."""
        self._free_file = os.path.join(emulation.trace, FREE) if emulation.trace else ""
        self._trace: IO[str] | None = None
        if emulation.trace:
            self._trace = (Path(emulation.trace) / f"stage{stage}.jsonl").open("a", buffering=1)
        self._wave = 0

    def launch(self, rids: list[str], spans: list[tuple[int, int]], extend: bool, ready: float) -> float:
        """Run a wave of spans (prefix, new tokens) whose input is there at `ready`. Returns when it is sent.

        The time of a decode wave is that of spans of one token.
        """
        load = load_of((0, prefix, prefix + new) for prefix, new in spans)  # type: ignore[misc]
        self.free = free = bool(self._free_file) and os.path.exists(self._free_file)
        cost = 0.0 if free else self._dilation * self._time.of(load) / 1e6
        launched, before = now(), self.free_at
        start = max(launched, ready, before)
        self.free_at = self.latest = end = start + cost
        if self._trace is not None:
            line = {
                "wave": self._wave,
                "kind": "extend" if extend else "decode",
                "rids": rids,
                "spans": spans,
                "runnable": max(self.runnable.get(rid, 0.0) for rid in rids),
                "launched": launched,
                "input": ready,
                "start": start,
                "end": end,
                "cost": cost,
                "blocked": self._blocked,
                "cpu": time.process_time(),
                "loop_cpu": time.thread_time(),
            }
            self._trace.write(json.dumps(line) + "\n")
        self._wave += 1
        self._blocked = 0.0
        self.runnable.update(dict.fromkeys(rids, launched))
        if self._synchronous:
            sleep_until(end)
        return end if free else end + self._dilation * self._hop_s(load)

    def waited(self, begin: float) -> None:
        """The loop has waited for outputs or for messages from `begin` until now."""
        self._blocked += max(0.0, now() - max(begin, self.free_at))

    def synchronize(self, *_: Any) -> None:
        """Wait until everything that was launched is through."""
        sleep_until(self.free_at)

    def event_class(self) -> type:
        """What takes the place of the platform's class of events."""
        device = self

        class Event:
            """An event of the emulated device. Times as those of `torch.cuda.Event`, in milliseconds.

            No time is told of waves that took none: what they took is that of the host.
            """

            def __init__(self, enable_timing: bool = False, **_: Any) -> None:
                self.at = 0.0
                self.free = False

            def record(self, stream: Any = None) -> None:
                self.at = max(now(), device.latest)
                self.free = device.free

            def query(self) -> bool:
                return now() >= self.at

            def synchronize(self) -> None:
                begin = now()
                sleep_until(self.at)
                device.waited(begin)

            def wait(self, stream: Any = None) -> None:
                pass

            def elapsed_time(self, end: Event) -> float:
                return 0.0 if end.free else (end.at - self.at) * 1e3

        return Event


def sleep_until(at: float) -> None:
    """Sleep until a time of the shared clock; not at all if it has passed."""
    left = at - now()
    if left > 0:
        time.sleep(left)


_device: EmulatedDevice | None = None


def install(emulation: Emulation, stage: int, stages: int) -> EmulatedDevice:
    """Make this process's CPU an emulated device."""
    global _device
    _device = device = EmulatedDevice(emulation, stage, stages)
    torch.cpu.Event = device.event_class()  # type: ignore[assignment,misc]
    torch.cpu.synchronize = device.synchronize  # type: ignore[assignment]
    return device


def installed() -> EmulatedDevice:
    """The device of this process."""
    assert _device is not None, "no device is emulated in this process"
    return _device
