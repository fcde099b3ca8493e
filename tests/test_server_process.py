"""Starting and stopping servers: with a stand-in of real processes, and no way for one of them to survive."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from sglang_wavepp.launch import server as server_module
from sglang_wavepp.launch.server import Server, ServerError

BOUND = 60.0
"""Seconds that any wait here may take before the test fails."""

CHILD = """
import os, signal, sys, time
import setproctitle
signal.signal(signal.SIGTERM, signal.SIG_IGN)
if sys.argv[1] == "stray":
    os.setsid()
setproctitle.setproctitle(sys.argv[1])
os.fork()
os.write(1, b"%d\\n" % os.getpid())
time.sleep(600)
"""
"""A process and its child: deaf to SIGTERM, and as a stray also outside of the server's process group."""

SERVER = """
import http.server, json, os, subprocess, sys
port, mode, child = int(sys.argv[1]), sys.argv[2], sys.argv[3]
pids = [os.getpid()]
for title in ("sglang::scheduler_PP0", "sglang::scheduler_PP1_TP0", "sglang::detokenizer", "stray"):
    process = subprocess.Popen([sys.executable, "-c", child, title], stdout=subprocess.PIPE, text=True)
    pids += [int(process.stdout.readline()), int(process.stdout.readline())]
print("pids", json.dumps(pids), flush=True)
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        if self.path == "/end":
            print("ValueError: told to end\\nand more", flush=True)
            os._exit(9)
        self.send_response(200 if self.path in ("/health", "/pids") and mode == "well" else 503)
        self.send_header("content-type", "application/json")
        self.end_headers()
        self.wfile.write(json.dumps(pids).encode())
    do_POST = do_GET
http.server.ThreadingHTTPServer(("127.0.0.1", port), Handler).serve_forever()
"""
"""A server with eight processes below it, whose /pids are its own pid and theirs."""


def command_line(port: int, mode: str) -> list[str]:
    """Of a server that answers /health if `mode` is "well"."""
    return [sys.executable, "-c", SERVER, str(port), mode, CHILD]


def tree(tmp_path: Path) -> Server:
    port = server_module._free_port()
    command = command_line(port, "well")
    return Server("none", command=command, port=port, log_path=tmp_path / "log", ready_timeout=BOUND)


def running(pids: list[int]) -> list[int]:
    """Those that still run; a zombie that nobody has reaped yet does not."""
    left = []
    for pid in pids:
        with contextlib.suppress(psutil.NoSuchProcess):
            if psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
                left.append(pid)
    return left


def logged_pids(log: Path) -> list[int]:
    lines = [line for line in log.read_text().splitlines() if line.startswith("pids ")]
    return list(json.loads(lines[0].removeprefix("pids "))) if lines else []


def test_stop_leaves_no_process(tmp_path: Path) -> None:
    with tree(tmp_path) as server:
        pids = server.get("/pids")
        assert len(pids) == 9 and running(pids) == pids and pids[0] == server.pid
        assert set(server.scheduler_pids()) == {0, 1}
        server.stop(grace=0.1)
        assert running(pids) == []
        server.stop()
        with pytest.raises(ServerError, match="not running"):
            server.check()
        server.start()  # a stopped server can be started again
        again = server.get("/pids")
        assert running(again) == again and not set(again) & set(pids)
    assert running(again) == []


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, SystemExit])
def test_an_exception_in_the_context_leaves_no_process(tmp_path: Path, error: type[BaseException]) -> None:
    with pytest.raises(error), tree(tmp_path) as server:
        pids = server.get("/pids")
        raise error
    assert len(pids) == 9 and running(pids) == []


def test_stop_after_the_main_process_died(tmp_path: Path) -> None:
    with tree(tmp_path) as server:
        pids = server.get("/pids")
        with pytest.raises(ServerError):
            server.get("/end")
        os.waitid(os.P_PID, server.pid, os.WEXITED | os.WNOWAIT)
        with pytest.raises(ServerError) as error:
            server.get("/pids")
        first, *more = str(error.value).splitlines()
        assert first.startswith("server ended with exit code 9: ValueError: told to end (log: ")
        assert more[-1] == "and more"
        group = [pid for pid in pids[1:] if os.getpgid(pid) == pids[0]]
        assert len(group) == 6 and running(group) == group
    assert running(group) == []
    for pid in running(pids):  # the strays: they left the group, and their parent died before `stop`
        os.kill(pid, signal.SIGKILL)


@pytest.mark.parametrize(
    "line",
    [
        "ConfigError: --x needs --y",
        "[2026-01-02 03:04:05 PP1] sglang_wavepp.errors.DivergenceError: wave 7",
        "error: WavePP does not support --x",
        "sglang serve: error: unrecognized arguments: --x",
    ],
)
def test_a_command_that_ends_fails_fast_and_says_why(tmp_path: Path, line: str) -> None:
    code = "import sys; print('Traceback'); print(sys.argv[1]); print('[03:04] cleaning up'); sys.exit(3)"
    command = [sys.executable, "-c", code, line]
    server = Server("none", command=command, log_path=tmp_path / "log", ready_timeout=600)
    began = time.monotonic()
    with pytest.raises(ServerError) as error, server:
        pytest.fail("it cannot become ready")
    assert time.monotonic() - began < BOUND
    assert error.value.status is None
    assert str(error.value).splitlines() == [
        f"server ended with exit code 3: {line} (log: {tmp_path / 'log'})",
        "Traceback",
        line,
        "[03:04] cleaning up",
    ]


def test_a_signal_is_named(tmp_path: Path) -> None:
    code = "import os; os.kill(os.getpid(), 9)"
    server = Server("none", command=[sys.executable, "-c", code], log_path=tmp_path / "log")
    with pytest.raises(ServerError, match=r"server ended by signal 9: nothing was logged"):
        server.start()


def test_a_server_that_never_gets_ready_is_stopped(tmp_path: Path) -> None:
    command = [sys.executable, "-c", "import time; time.sleep(600)", str(tmp_path)]
    server = Server("none", command=command, log_path=tmp_path / "log", ready_timeout=1.0)
    with pytest.raises(ServerError, match="server not ready after 1 s: nothing was logged"):
        server.start()
    assert not [p for p in psutil.process_iter(["cmdline"]) if str(tmp_path) in (p.info["cmdline"] or [])]


def test_a_refused_call_carries_its_status(tmp_path: Path) -> None:
    with tree(tmp_path) as server:
        with pytest.raises(ServerError, match="POST /nothing answered 503") as error:
            server.post("/nothing", {})
        assert error.value.status == 503


CALLER = """
import signal, sys
from sglang_wavepp.launch.server import Server
signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored in background jobs
port, log, *command = sys.argv[1:]
Server("none", command=command, port=int(port), log_path=log, ready_timeout=600).start()
"""


@pytest.mark.parametrize("how", ["ctrl-c while starting", "end without stop"])
def test_a_caller_that_ends_takes_the_server_along(tmp_path: Path, how: str) -> None:
    log = tmp_path / "log"
    mode = "sick" if "ctrl-c" in how else "well"
    port = server_module._free_port()
    arguments = [str(port), str(log), *command_line(port, mode)]
    caller = subprocess.Popen([sys.executable, "-c", CALLER, *arguments], stderr=subprocess.PIPE)
    try:
        if "ctrl-c" in how:
            wait_until(lambda: log.exists() and bool(logged_pids(log)), "the tree to be there")
            caller.send_signal(signal.SIGINT)
        _, errors = caller.communicate(timeout=BOUND)
    finally:
        caller.kill()
    assert (b"KeyboardInterrupt" in errors) == ("ctrl-c" in how)
    pids = logged_pids(log)
    assert len(pids) == 9 and running(pids) == []


def wait_until(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + BOUND
    pause = threading.Event()
    while not condition():
        assert time.monotonic() < deadline, f"waited {BOUND} s for {what}"
        pause.wait(0.01)
