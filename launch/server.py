"""Start and stop a real SGLang server from Python, with or without WavePP.

    with Server(model, pp_size=2, wavepp=True) as server:
        server.post("/generate", {"text": "def f(", "sampling_params": {"max_new_tokens": 8}})

A server is a tree of processes (HTTP front, one scheduler per stage, detokenizer, helpers). All of it lives
in one process group of its own, so that a Ctrl-C in the terminal reaches only the caller, who then stops the
tree as a whole. A server outlives a caller who ends without cleaning up: killed by a signal that it neither
turns into an exception nor ignores (SIGKILL always, SIGTERM and SIGHUP by default).
"""

from __future__ import annotations

import atexit
import contextlib
import os
import random
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import psutil
import requests

from sglang_wavepp.errors import WavePPError

HOST = "127.0.0.1"
LOG_LINES = 25
"""Lines of the log that an error message quotes."""
_CAUSE = re.compile(r"^(?:\[.*?\] )?(?:[\w.]*(?:Error|Exception)\b(?::.*)?|(?:[\w .-]+: )?error: .*)$")
"""A log line that ends a traceback or refuses an option. What follows it is often only its consequence."""
_SCHEDULER = re.compile(r"^sglang::scheduler(?:.*_PP(\d+))?")


class ServerError(WavePPError):
    """A server did not start, died, did not stop, or refused a call.

    `status` is the HTTP status of a refused call, None in all other cases.
    """

    def __init__(self, text: str, status: int | None = None) -> None:
        super().__init__(text)
        self.status = status


class Server:
    """A server on 127.0.0.1, started on entry of the context (or by `start`) and stopped on its exit.

    `flags` are appended to the command line, where SGLang lets the last one win. `env` is laid over this
    process's environment and over the CPU defaults, which apply to `device="cpu"` only. `port` 0 takes a free
    one. Without a `log_path` the log goes to a new file in the temporary directory, which stays there.
    `command` replaces the whole command line. `page_size`, `max_total_tokens`, `context_length` and
    `chunked_prefill_size` are tokens, `ready_timeout` is seconds (default: 180, and 30 more for each stage).
    """

    def __init__(
        self,
        model: str | Path,
        *,
        pp_size: int = 1,
        wavepp: bool = False,
        flags: Sequence[str] = (),
        env: Mapping[str, str] | None = None,
        device: str = "cpu",
        page_size: int = 1,
        max_total_tokens: int = 65536,
        context_length: int = 16384,
        chunked_prefill_size: int = 512,
        port: int = 0,
        log_path: str | Path | None = None,
        ready_timeout: float | None = None,
        command: Sequence[str] | None = None,
    ) -> None:
        self.pp_size = pp_size
        self.port = port or _free_port()
        self.url = f"http://{HOST}:{self.port}"
        self._ready_timeout = 180.0 + 30.0 * pp_size if ready_timeout is None else ready_timeout
        self._process: subprocess.Popen[bytes] | None = None
        if log_path is None:
            handle, log_path = tempfile.mkstemp(prefix="wavepp-server-", suffix=".log")
            os.close(handle)
        self.log_path = Path(log_path)

        options: dict[str, Any] = {
            "--model-path": model,
            "--host": HOST,
            "--port": self.port,
            "--pp-size": pp_size,
            "--device": device,
            "--page-size": page_size,
            "--max-total-tokens": max_total_tokens,
            "--context-length": context_length,
            "--chunked-prefill-size": chunked_prefill_size,
            "--random-seed": 1,
        }
        switches = ["--disable-overlap-schedule"]
        self._env = {**os.environ, "PYTHONUNBUFFERED": "1"}
        if device == "cpu":
            # SGLang derives the fraction from the RAM, and it comes out negative on small machines. In less
            # than float32, greedy tokens would depend on which requests share a batch.
            options |= {"--mem-fraction-static": 0.8, "--dtype": "float32"}
            switches.append("--disable-cuda-graph")
            if command is None:
                from sglang_wavepp.launch.cpu_platform import default_environment

                self._env |= default_environment(pp_size)
        self._env |= env or {}
        if wavepp:
            switches.append("--wavepp")
        pairs = [str(part) for option in options.items() for part in option]
        self.command = (
            [sys.executable, "-m", "sglang.launch_server", *pairs, *switches, *flags]
            if command is None
            else list(command)
        )

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    @property
    def pid(self) -> int:
        """Of the HTTP front, which leads the process group. ServerError if the server was not started."""
        if self._process is None:
            raise ServerError("the server is not running")
        return self._process.pid

    def start(self) -> None:
        """Start the server and wait until it answers /health; ServerError if it dies or takes too long."""
        if self._process is not None:
            raise ServerError("the server was started already")
        with self.log_path.open("wb") as log:
            self._process = subprocess.Popen(
                self.command,
                env=self._env,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        atexit.register(self.stop)
        try:
            self._wait_ready()
        except BaseException:
            self.stop()
            raise

    def _wait_ready(self) -> None:
        deadline = time.monotonic() + self._ready_timeout
        with _direct_session() as http:
            while True:
                self.check()
                try:
                    # A health answer takes one generated token; a busy machine needs a while for its first.
                    if http.get(f"{self.url}/health", timeout=10).status_code == 200:
                        return
                except requests.RequestException:
                    pass
                if time.monotonic() > deadline:
                    raise ServerError(self.with_log(f"server not ready after {self._ready_timeout:.0f} s"))
                time.sleep(0.1)

    def check(self) -> None:
        """ServerError, with the last lines of the log, if the server's main process has ended."""
        # Not reaped before `stop`: until then neither its pid nor its group's number can be given to others.
        ended = os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        if ended is not None:
            how = "with exit code" if ended.si_code == os.CLD_EXITED else "by signal"
            raise ServerError(self.with_log(f"server ended {how} {ended.si_status}"))

    def log_tail(self, lines: int = LOG_LINES) -> str:
        """The last lines of the log."""
        return "\n".join(self.log_path.read_text(errors="replace").splitlines()[-lines:])

    def with_log(self, what: str) -> str:
        """`what` with its likely cause out of the log in one line, and then the log's last lines."""
        tail = self.log_tail(200).splitlines()
        causes = [line for line in tail if _CAUSE.match(line)] or [line for line in tail if line.strip()]
        cause = causes[-1].strip() if causes else "nothing was logged"
        return "\n".join([f"{what}: {cause} (log: {self.log_path})", *tail[-LOG_LINES:]])

    def scheduler_pids(self) -> dict[int, int]:
        """The stages' scheduler processes: stage -> pid. Without pipeline parallelism, stage 0 alone."""
        found = {}
        for process in psutil.Process(self.pid).children(recursive=True):
            try:
                title = " ".join(process.cmdline())
            except psutil.Error:
                continue
            if match := _SCHEDULER.match(title):
                found[int(match.group(1) or 0)] = process.pid
        return dict(sorted(found.items()))

    def get(self, path: str, timeout: float = 30.0) -> Any:
        """GET `path`; the decoded JSON, or the text if it is something else. ServerError on any failure."""
        return self._call("GET", path, None, timeout)

    def post(self, path: str, body: Any = None, timeout: float = 120.0) -> Any:
        """POST `body` as JSON to `path`; answers and errors as for `get`."""
        return self._call("POST", path, body, timeout)

    def _call(self, method: str, path: str, body: Any, timeout: float) -> Any:
        try:
            with _direct_session() as http:
                answer = http.request(method, self.url + path, json=body, timeout=timeout)
        except requests.RequestException as error:
            self.check()
            raise ServerError(f"{method} {path} failed: {error}") from error
        if not answer.ok:
            text = f"{method} {path} answered {answer.status_code}: {answer.text[:500]}"
            raise ServerError(text, answer.status_code)
        is_json = answer.headers.get("content-type", "").startswith("application/json")
        return answer.json() if is_json else answer.text

    def stop(self, grace: float = 2.0) -> None:
        """End every process of the server: SIGTERM, and after `grace` seconds SIGKILL. Idempotent.

        ServerError if a process survives even that for 10 s.
        """
        leader = self._process
        if leader is None:
            return
        # Helpers that have left the group can be found through their parents only, while those live.
        strays = _descendants(leader.pid)
        left: set[psutil.Process] | None = None
        try:
            os.killpg(leader.pid, signal.SIGTERM)
            left = _wait_gone(leader.pid, strays, grace)
        finally:
            # Also on a second Ctrl-C during the grace: nothing may be left behind.
            if left is None or left:
                os.killpg(leader.pid, signal.SIGKILL)
                for process in strays:
                    with contextlib.suppress(psutil.NoSuchProcess):
                        process.kill()
                left = _wait_gone(leader.pid, strays, 10.0)
            if not left:
                leader.wait()
            self._process = None
            atexit.unregister(self.stop)
        if left:
            raise ServerError(f"processes {sorted(p.pid for p in left)} survived SIGKILL for 10 s")


def _free_port() -> int:
    """A port that is free now, from below those that the system gives to outgoing connections.

    The server binds it a minute later: one of those could be taken by then.
    """
    for port in random.SystemRandom().sample(range(20_000, 32_000), 100):
        with socket.socket() as probe:
            try:
                probe.bind((HOST, port))
            except OSError:
                continue
            return port
    raise ServerError("of a hundred ports between 20000 and 32000 none is free")


def _direct_session() -> requests.Session:
    """A session that ignores proxy variables: the server is on this machine."""
    session = requests.Session()
    session.trust_env = False
    return session


def _wait_gone(group: int, strays: Sequence[psutil.Process], seconds: float) -> set[psutil.Process]:
    """Wait until no process of the group or of `strays` runs, at most `seconds`; those that still do."""
    deadline = time.monotonic() + seconds
    while True:
        left = {process for process in {*strays, *_group(group)} if _runs(process)}
        if not left or time.monotonic() > deadline:
            return left
        time.sleep(0.02)


def _runs(process: psutil.Process) -> bool:
    try:
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def _descendants(pid: int) -> list[psutil.Process]:
    try:
        return list(psutil.Process(pid).children(recursive=True))
    except psutil.NoSuchProcess:
        return []


def _group(group: int) -> list[psutil.Process]:
    """All processes of a process group, also those whose parents are gone."""
    members = []
    for pid in psutil.pids():
        with contextlib.suppress(ProcessLookupError, psutil.NoSuchProcess):
            if os.getpgid(pid) == group:
                members.append(psutil.Process(pid))
    return members
