"""Tells a loop that the device is through with something, so that the loop need not wait for it."""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Callable
from typing import Any


class DeviceWatch:
    """A thread that sleeps on device events, one after the other. It ends with the process.

    Args:
        through: called from that thread, once for each event.
    """

    def __init__(self, through: Callable[[], None]) -> None:
        self._through = through
        self._events: queue.SimpleQueue[Any] = queue.SimpleQueue()
        threading.Thread(target=self._main, name="DEVICE", daemon=True).start()

    def wait_for(self, event: Any) -> None:
        """Never blocks."""
        self._events.put(event)

    def _main(self) -> None:
        while True:
            # A device that failed says so again to whoever asks the event.
            with contextlib.suppress(Exception):
                self._events.get().synchronize()
            self._through()
