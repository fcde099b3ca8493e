"""Tells a loop that the device is through with something, so that the loop need not wait for it."""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Callable
from typing import Any


class DeviceWatch:
    """A thread that waits for device events, one after the other. It ends with the process.

    Args:
        device: torch's module of the device (`torch.cuda`, ...); its current device is that of the events.
        through: called from that thread, once for each event; too early if the device failed.
    """

    def __init__(self, device: Any, through: Callable[[], None]) -> None:
        self._device, self._number = device, device.current_device()
        self._through = through
        self._events: queue.SimpleQueue[Any] = queue.SimpleQueue()
        threading.Thread(target=self._main, name="DEVICE", daemon=True).start()

    def wait_for(self, event: Any) -> None:
        """Never blocks."""
        self._events.put(event)

    def _main(self) -> None:
        self._device.set_device(self._number)  # a thread starts with the first one
        while True:
            event = self._events.get()
            # A device that failed says so again to whoever asks the event.
            with contextlib.suppress(Exception):
                event.synchronize()
            self._through()
