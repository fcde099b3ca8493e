"""How a stage ends: once, with one line that names the stage and what it waited for, and with the server."""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
from typing import NoReturn

logger = logging.getLogger(__name__)

_lock = threading.Lock()


def end_server(rank: int, reason: str) -> NoReturn:
    """Log the reason, tell SGLang's main process to end the server, and leave at once.

    Any thread may call this; the process does not return. SGLang's main process reacts to SIGQUIT by
    killing the whole process tree.
    """
    with _lock:
        line = f"WavePP: stage {rank} ends the server: {reason}"
        logger.critical("%s", line)
        for handler in logging.getLogger().handlers:
            handler.flush()
        sys.stderr.flush()
        try:
            os.kill(os.getppid(), signal.SIGQUIT)
        finally:
            os._exit(1)


class PeerWatch:
    """Notices at once when another stage's process on this host ends, however it ends."""

    def __init__(self, pids: dict[int, int]) -> None:
        self._ranks: dict[int, tuple[int, int]] = {}
        for rank, pid in pids.items():
            self._ranks[os.pidfd_open(pid)] = (rank, pid)

    @property
    def fds(self) -> list[int]:
        """File descriptors that become readable when a peer ends."""
        return list(self._ranks)

    def describe(self, fd: int) -> str | None:
        """Text for a descriptor that became readable, or None if it is not a peer's."""
        if fd not in self._ranks:
            return None
        rank, pid = self._ranks[fd]
        return f"the process of stage {rank} (pid {pid}) is gone"

    def close(self) -> None:
        """Stop watching."""
        for fd in self._ranks:
            os.close(fd)
        self._ranks.clear()
