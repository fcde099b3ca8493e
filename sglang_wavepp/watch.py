"""How a stage ends: once, with one line that names the stage and what it waited for, and with the server."""

from __future__ import annotations

import contextlib
import logging
import multiprocessing
import os
import secrets
import select
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

from sglang_wavepp.errors import HandshakeError

logger = logging.getLogger(__name__)

_TELL_S = 5.0
"""What writing the reason may take: a full disk, or a pipe that nobody reads, does not keep a stage."""
_END_S = 8.0
"""What SGLang's main process may take to end the server: it starts with a pause of 5 s, answers nobody
meanwhile, and then would wait for a core dump of the GPU for a minute, whether or not there will be one."""
_DUMP_S = 120.0
"""What it gets on top where the operator wants such dumps."""

_lock = threading.Lock()
_spare_main_process = False


def spare_main_process() -> None:
    """Never kill the main process, only send it SIGQUIT: its owner handles that signal as he likes."""
    global _spare_main_process
    _spare_main_process = True


def end_server(rank: int, reason: str, meanwhile: Callable[[], None] | None = None) -> NoReturn:
    """Log the reason, tell SGLang's main process to end the server, and leave.

    Any thread may call this; the process does not return. SGLang's main process reacts to SIGQUIT by
    killing the whole process tree; if it takes too long it is killed, and the tree goes with it.
    `meanwhile` is called again and again until then, so that others can see who is at work.
    """
    with _lock:
        try:
            line = f"WavePP: stage {rank} ends the server: {reason}"
            teller = threading.Thread(target=_tell, args=(line,), daemon=True)
            teller.start()
            teller.join(_TELL_S)
            _end_main_process(meanwhile)
        finally:
            os._exit(1)


def _tell(line: str) -> None:
    with contextlib.suppress(Exception):
        logger.critical("%s", line)
        for handler in logging.getLogger().handlers:
            handler.flush()
        sys.stderr.flush()


def _end_main_process(meanwhile: Callable[[], None] | None) -> None:
    steps = [(signal.SIGQUIT, _END_S)]
    if not _spare_main_process:
        if os.environ.get("CUDA_ENABLE_USER_TRIGGERED_COREDUMP") == "1":
            # Asked a second time it ends without dumps: the first time it may have failed to write them.
            steps.append((signal.SIGQUIT, _DUMP_S))
        steps.append((signal.SIGKILL, 0.0))
    parent = _main_process()
    for signum, patience in steps:
        if os.getppid() != parent:
            return  # it is gone: whoever has this orphan now is another process
        os.kill(parent, signum)
        deadline = time.monotonic() + patience
        while os.getppid() == parent and time.monotonic() < deadline:
            if meanwhile is not None:
                with contextlib.suppress(Exception):
                    meanwhile()
            time.sleep(0.1)


def _main_process() -> int:
    """Pid of the process that started this one, alive or not."""
    started_by = multiprocessing.parent_process()
    if started_by is None or started_by.pid is None:
        return os.getppid()
    return started_by.pid


def host_id() -> str:
    """Equal for two processes only if a pid means the same process to both: one kernel, one pid namespace."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot}/{os.stat('/proc/self/ns/pid').st_ino}"
    except OSError:
        return secrets.token_hex()


class PeerWatch:
    """Notices at once when another stage's process on this host, or SGLang's main process, ends somehow.

    Args:
        pids: the stages on this host.

    Raises `HandshakeError` if one of the processes has ended already.
    """

    def __init__(self, pids: dict[int, int]) -> None:
        main = _main_process()
        names = {main: f"SGLang's main process (pid {main})"}
        names |= {pid: f"the process of stage {rank} (pid {pid})" for rank, pid in pids.items()}
        self._names: dict[int, str] = {}
        for pid, name in names.items():
            try:
                self._names[os.pidfd_open(pid)] = name
            except OSError as error:
                raise HandshakeError(f"{name} cannot be watched: {error.strerror}") from None

    @property
    def fds(self) -> list[int]:
        """File descriptors that become readable when a process ends."""
        return list(self._names)

    def describe(self, fd: int) -> str | None:
        """Text for a descriptor that became readable, or None if it is not of this watch."""
        return f"{self._names[fd]} is gone" if fd in self._names else None

    def gone(self, within: float = 0.0) -> str | None:
        """The same for a process that has ended by now, or ends within so many seconds; or None."""
        poller = select.poll()
        for fd in self._names:
            poller.register(fd, select.POLLIN)
        return next((self.describe(fd) for fd, _ in poller.poll(within * 1000)), None)

    def close(self) -> None:
        """Stop watching."""
        for fd in self._names:
            os.close(fd)
        self._names.clear()
