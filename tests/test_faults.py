"""Faults of a running server: it ends within its bounds, says why in one line, and leaves nothing behind.

Faults inside a stage are switched on by files, which a changed `Executor` in the stages looks for.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import requests
import torch
from conftest import eventually, start, statistics

from sglang_wavepp.admission import Limits
from sglang_wavepp.launch.server import Server, ServerError
from sglang_wavepp.leader import Leader
from sglang_wavepp.messages import Beat
from sglang_wavepp.rounds import LeaderPlane, MemberPlane
from sglang_wavepp.transport import IpcLeader, IpcMember

BOUND = 60.0
"""Seconds that any wait here may take before the test fails."""
LIMIT_S = 4
"""Seconds until a silent or stuck stage ends a server here."""

CHANGED_EXECUTOR = """
import importlib.util, os, sys, threading
from pathlib import Path

def wanted(fault, executor):
    return (Path(__file__).parent / f"{fault}-{executor._s.pp_group.rank_in_group}").exists()

def change(module):
    launch, send = module.Executor.launch, module.Executor.send

    def changed_launch(self, wave, batch, proxy):
        if wanted("slow", self):
            threading.Event().wait(0.3)
        if wanted("hang", self):
            threading.Event().wait()
        return launch(self, wave, batch, proxy)

    def changed_send(self, wave, result):
        return [] if wanted("lose", self) else send(self, wave, result)

    module.Executor.launch, module.Executor.send = changed_launch, changed_send

class Finder:
    def find_spec(self, name, path, target=None):
        if name != "sglang_wavepp.executor":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        execute = spec.loader.exec_module
        spec.loader.exec_module = lambda module: (execute(module), change(module))
        return spec

sys.meta_path.insert(0, Finder())
"""


class Faulty:
    """A two-stage server, its processes, and its faults: `slow`, `hang` (in a launch), `lose` (a send)."""

    def __init__(self, server: Server, faults: Path) -> None:
        self.server = server
        self._faults = faults
        self.stages = server.scheduler_pids()
        main = psutil.Process(server.pid)
        self._processes = [main, *main.children(recursive=True)]

    def switch(self, fault: str, stage: int, on: bool = True) -> None:
        """Switch a fault of a stage on or off."""
        file = self._faults / f"{fault}-{stage}"
        file.touch() if on else file.unlink()

    def fill_disk(self) -> int:
        """From now on nobody can write to the log. Returns its size in bytes."""
        size = self.server.log_path.stat().st_size
        for process in self._processes:
            process.rlimit(psutil.RLIMIT_FSIZE, (size, size))
        return size

    def ended(self) -> str:
        """Wait for the end of every process. Returns why WavePP ended the server, in its one line."""
        eventually(lambda: not any(map(_runs, self._processes)), f"the end of {self._processes}")
        errors: list[str] = []

        def is_over() -> bool:
            # The main process has no exit code before its last thread is gone.
            try:
                self.server.check()
            except ServerError as error:
                errors.append(str(error))
            return bool(errors)

        eventually(is_over, "the exit code of the server")
        assert "exit code 0" not in errors[0]
        text = self.server.log_path.read_text(errors="replace")
        lines = [line for line in text.splitlines() if " ends the server: " in line]
        assert len(lines) <= 1, lines
        return lines[0].partition("WavePP: ")[2] if lines else ""


def _runs(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@contextmanager
def faulty_server(
    model: Path,
    folder: Path,
    *,
    stall: int = LIMIT_S,
    flags: tuple[str, ...] = (),
    dumps: bool = False,
    more: str = "",
) -> Iterator[Faulty]:
    """With `dumps` SGLang pauses before it ends the server, and then for a minute, as it does by default.

    `more` is code that each process runs first.
    """
    (folder / "sitecustomize.py").write_text(CHANGED_EXECUTOR + more)
    bounds = ("--wavepp-heartbeat-timeout", str(LIMIT_S), "--wavepp-stall-timeout", str(stall))
    env = {"PYTHONPATH": str(folder), "SGLANG_HEALTH_CHECK_TIMEOUT": "3"}
    for kind in ("PYSPY_DUMP", "CUDA_COREDUMP"):
        env[f"SGLANG_{kind}_BEFORE_CRASH"] = str(int(dumps))
    server = start(model, folder / "server.log", pp_size=2, wavepp=True, flags=(*bounds, *flags), env=env)
    with server:
        yield Faulty(server, folder)


def _body(seed: int, tokens: int = 4) -> dict[str, object]:
    return {
        "input_ids": [300 + (seed * 97 + k * k) % 700 for k in range(900)],
        "sampling_params": {"temperature": 0, "max_new_tokens": tokens, "ignore_eos": True},
    }


def _health(server: Server) -> int:
    """The status of /health, 0 if the connection was closed."""
    try:
        return requests.get(f"{server.url}/health", timeout=BOUND, proxies={"http": ""}).status_code
    except requests.ConnectionError:
        return 0


@contextmanager
def _clients(server: Server, count: int, tokens: int = 4000) -> Iterator[list[Future[object]]]:
    """Clients that wait for answers. All have one, or an error, at the end of the context."""
    with ThreadPoolExecutor(count) as pool:
        yield [pool.submit(server.post, "/generate", _body(i, tokens), BOUND) for i in range(count)]


def _status_of_a_refusal(server: Server) -> int:
    """The status of a request that stage 0 refuses, 0 if the connection was closed."""
    body = {**_body(1), "session_params": {"id": "none", "rid": None}}
    try:
        return requests.post(f"{server.url}/generate", json=body, timeout=BOUND).status_code
    except requests.ConnectionError:
        return 0


def _waves(server: Server) -> int:
    """Waves so far."""
    counted = statistics(server)
    return int(counted["prefill_waves"] + counted["decode_waves"])


@contextmanager
def load(server: Server, count: int, tokens: int = 4000) -> Iterator[list[Future[object]]]:
    """`_clients`, and the first waves for them have run."""
    before = _waves(server)
    with _clients(server, count, tokens) as clients:
        eventually(lambda: _waves(server) > before, "a wave")
        yield clients


def refused(clients: list[Future[object]]) -> None:
    """None of them got an answer, and none hangs."""
    for client in clients:
        assert isinstance(client.exception(BOUND), ServerError)


def test_slow_stage_is_waited_for_and_a_hung_one_is_not(model: Path, stock: Server, tmp_path: Path) -> None:
    with faulty_server(model, tmp_path, dumps=True) as faulty:
        server = faulty.server
        before = statistics(server)["decode_waves"]
        faulty.switch("slow", 1)
        began = time.monotonic()
        with _clients(server, 6, tokens=10) as slow:
            eventually(lambda: statistics(server)["decode_waves"] > before, "a decode wave")
            assert _health(server) == 200
        assert time.monotonic() - began > LIMIT_S, "the waves together take longer than one may"
        for i, answer in enumerate(slow):
            want = stock.post("/generate", _body(i, tokens=10))
            assert answer.result()["output_ids"] == want["output_ids"]  # type: ignore[index]
        faulty.switch("slow", 1, on=False)
        assert _health(server) == 200
        faulty.switch("hang", 1)
        with _clients(server, 3) as clients, ThreadPoolExecutor(1) as pool:
            health, refusals = pool.submit(_health, server), 0
            while not health.done():  # what stage 0 answers by itself is no sign of health
                refusals += _status_of_a_refusal(server) == 400
            assert health.result() != 200 and refusals > 0
        refused(clients)
        why = faulty.ended()
    assert why.startswith("stage 1 ends the server: its loop has made no progress for "), why
    assert "it is running wave " in why, why


def test_paused_server_is_not_healthy_and_lost_activations_end_it(model: Path, tmp_path: Path) -> None:
    with faulty_server(model, tmp_path) as faulty:
        server = faulty.server
        server.post("/pause_generation", {"mode": "in_place"})
        assert [_health(server), _health(server)] == [503, 503]
        with _clients(server, 1, tokens=4) as waiting:
            assert _health(server) == 503
            server.post("/continue_generation", {})
            assert waiting[0].result(BOUND)
            assert _health(server) == 200
        faulty.switch("lose", 0)
        with _clients(server, 3) as clients:
            pass
        refused(clients)
        why = faulty.ended()
    assert why.startswith("stage 1 ends the server: its loop has made no progress for "), why
    assert "it is waiting for the activations of wave " in why and "from stage 0" in why, why


def test_all_may_stand_still_but_not_an_idle_member_alone(model: Path, tmp_path: Path) -> None:
    """A container that is paused and goes on is no fault, however long it was paused."""
    with faulty_server(model, tmp_path) as faulty:
        server = faulty.server
        with load(server, 4, tokens=100) as clients:
            for pid in faulty.stages.values():
                os.kill(pid, signal.SIGSTOP)
            threading.Event().wait(1.5 * LIMIT_S)
            for pid in faulty.stages.values():
                os.kill(pid, signal.SIGCONT)
        assert [len(c.result()["output_ids"]) for c in clients] == [100] * 4  # type: ignore[index]
        os.kill(faulty.stages[1], signal.SIGSTOP)
        assert _health(server) != 200
        why = faulty.ended()
    assert why.startswith("stage 0 ends the server: stage 1 was silent for "), why


def test_a_death_is_noticed_by_a_stage_that_waits_for_activations(model: Path, tmp_path: Path) -> None:
    with faulty_server(model, tmp_path, stall=600) as faulty:
        faulty.switch("lose", 0)
        with load(faulty.server, 2) as clients:
            os.kill(faulty.stages[0], signal.SIGKILL)
        refused(clients)
        why = faulty.ended()
    assert why == f"stage 1 ends the server: the process of stage 0 (pid {faulty.stages[0]}) is gone"
    assert "Loop of stage 1 failed" not in faulty.server.log_path.read_text()


def test_a_full_disk_keeps_nobody_from_serving_nor_from_ending(model: Path, tmp_path: Path) -> None:
    """Nothing can be logged, and SGLang fails when it wants to dump requests before it ends.

    Here stage 1 ends the server, because stage 0 is stopped.
    """
    flags = ("--log-requests", "--crash-dump-folder", "/proc/nowhere")
    with faulty_server(model, tmp_path, flags=flags) as faulty:
        server, size = faulty.server, faulty.fill_disk()
        with _clients(server, 4, tokens=8) as clients:
            pass
        assert [len(c.result()["output_ids"]) for c in clients] == [8] * 4  # type: ignore[index]
        assert _health(server) == 200
        with load(server, 4) as clients:
            os.kill(faulty.stages[0], signal.SIGSTOP)
        refused(clients)
        assert faulty.ended() == ""
        assert server.log_path.stat().st_size == size


# --- how a stage leaves, without a server --------------------------------------------------------

LEAVING = """
import logging, multiprocessing, os, select, signal, sys, threading
from sglang_wavepp import watch

def stage(mode):
    log = logging.StreamHandler()
    logging.getLogger().addHandler(log)
    watch._TELL_S = watch._END_S = 0.5 if mode != "well" else 30.0
    beats = threading.Event()
    if mode == "full":
        os.dup2(os.open("/dev/full", os.O_WRONLY), 2)
        log.flush = lambda: 1 / 0
    elif mode == "unread":
        unread, pipe = os.pipe()
        os.set_blocking(pipe, False)
        try:
            while True:
                os.write(pipe, b"x" * 4096)
        except BlockingIOError:
            os.set_blocking(pipe, True)
            os.dup2(pipe, 2)
    elif mode == "spared":
        watch.spare_main_process()
    elif mode == "orphan":
        peers = watch.PeerWatch({})
        os.write(1, b"ready\\n")
        select.select(peers.fds, [], [])
        assert peers.gone() == peers.describe(peers.fds[0])
        watch.end_server(1, peers.gone())
    watch.end_server(1, "because", beats.set if mode != "spared" else lambda: 1 / 0)

def main(mode):
    if mode in ("deaf", "spared"):
        signal.signal(signal.SIGQUIT, signal.SIG_IGN)
    else:
        signal.signal(signal.SIGQUIT, lambda *_: os._exit(42))
    process = multiprocessing.get_context("spawn").Process(target=stage, args=(mode,))
    process.start()
    process.join()
    os._exit(100 + process.exitcode)

if __name__ == "__main__":
    main(sys.argv[1])
"""


def _leave(tmp_path: Path, mode: str) -> subprocess.CompletedProcess[str]:
    """Run a main process with one stage that leaves."""
    script = tmp_path / "leaving.py"
    script.write_text(LEAVING)
    command = [sys.executable, str(script), mode]
    return subprocess.run(command, capture_output=True, text=True, timeout=BOUND, check=False)


@pytest.mark.parametrize(
    ("mode", "code"),
    [
        ("well", 42),
        ("full", 42),  # a full disk: writing the reason fails
        ("unread", 42),  # a pipe that nobody reads: writing the reason hangs
        ("deaf", -signal.SIGKILL),  # the main process does not react
        ("spared", 101),  # it has a handler of its own, which decides
    ],
)
def test_a_stage_that_ends_the_server_sees_it_through(tmp_path: Path, mode: str, code: int) -> None:
    done = _leave(tmp_path, mode)
    assert done.returncode == code, done.stderr
    lines = done.stderr.splitlines()
    assert lines == ([] if mode in ("full", "unread") else ["WavePP: stage 1 ends the server: because"])


def test_an_orphan_says_so_and_ends_nobody_else(tmp_path: Path) -> None:
    """The main process is killed, and its stage falls to another process, which is none of its business."""
    script = tmp_path / "leaving.py"
    script.write_text(LEAVING)
    libc = ctypes.CDLL(None)
    assert libc.prctl(36, 1, 0, 0, 0) == 0  # PR_SET_CHILD_SUBREAPER: that process is this one
    asked = threading.Event()
    before = signal.signal(signal.SIGQUIT, lambda *_: asked.set())
    try:
        command = [sys.executable, str(script), "orphan"]
        main = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        assert main.stdout is not None and main.stderr is not None
        assert main.stdout.readline() == "ready\n"
        (stage,) = [
            p for p in psutil.Process(main.pid).children() if "resource_tracker" not in str(p.cmdline())
        ]
        main.kill()
        said = main.stderr.read()
        _, status = os.waitpid(stage.pid, 0)
        assert os.waitstatus_to_exitcode(status) == 1
        assert f"stage 1 ends the server: SGLang's main process (pid {main.pid}) is gone" in said
        assert not asked.is_set()
        main.wait()
    finally:
        libc.prctl(36, 0, 0, 0, 0)
        signal.signal(signal.SIGQUIT, before)


# --- the watch of a stage, without a server ------------------------------------------------------


class Watched:
    """A real WAVE thread on a real plane; the test is its loop, and the other stage."""

    def __init__(self, rank: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, **options: float) -> None:
        from sglang_wavepp import wave, wave_leader
        from sglang_wavepp.config import WavePPConfig
        from sglang_wavepp.loop import Progress

        self.reason: Future[str] = Future()
        self.peer = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
        leader = LeaderPlane(IpcLeader(str(tmp_path), "plane"), 2)
        member = MemberPlane(IpcMember(str(tmp_path), "plane", time.monotonic() + BOUND), 1)
        member.send(Beat(0, ""))
        assert leader.control.poll(BOUND * 1000)
        self.progress = Progress()
        self.guard = threading.RLock()
        idle = SimpleNamespace(recv_from_tokenizer=None, recv_from_rpc=None)
        stage = SimpleNamespace(
            rank=rank,
            config=WavePPConfig(**options),  # type: ignore[arg-type]
            guard=self.guard,
            leaving=False,
            hints=None,
            intake=SimpleNamespace(compiling=0, displaced=[]),
            loop=SimpleNamespace(
                progress=self.progress,
                log=SimpleNamespace(position=7),
                sequencer=SimpleNamespace(in_flight=2),
                executor=SimpleNamespace(live=0),
            ),
            scheduler=SimpleNamespace(
                ipc_channels=idle,
                _engine_paused=False,
                _poll_timeout_aborts=lambda: [],
                device_module=torch.cpu,
                schedule_stream=torch.cpu.Stream(),
            ),
        )

        monkeypatch.setattr(wave, "end_server", lambda rank, reason, beat: self.reason.set_result(reason))
        self._other: LeaderPlane | MemberPlane
        self._mine: LeaderPlane | MemberPlane
        if rank == 0:
            limits = Limits(
                stages=2, pool=9, running=1, page=1, reserve=1, block=1, ahead=1, wave=1, round_bound=BOUND
            )
            self._other, self._mine = member, leader
            self.wave = wave_leader.LeaderWave(
                stage, leader, {1: self.peer.pid}, Leader(limits, time.monotonic)
            )
        else:
            self._other, self._mine = leader, member
            self.wave = wave.MemberWave(stage, member, {0: self.peer.pid})
        self.wave.start()

    def say(self, doing: str) -> None:
        """The other stage beats."""
        if isinstance(self._other, MemberPlane):
            self._other.send(Beat(3, doing))
        else:
            self._other.send(1, Beat(3, doing))

    def ends(self, doing: Callable[[], str]) -> str:
        """The other stage beats until this one ends the server. Returns why it does."""
        deadline = time.monotonic() + BOUND
        while not self.reason.done():
            assert time.monotonic() < deadline
            self.say(doing())
            with contextlib.suppress(TimeoutError):
                self.reason.exception(0.1)
        return self.reason.result()

    def close(self) -> None:
        """Whether or not the thread has ended by itself."""
        self.peer.kill()
        self.peer.wait()
        self.wave.stop()
        if self.reason.done():
            self._mine.close()
        self._other.close()


@pytest.fixture
def watched(
    sglang_with_plugins: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[..., Watched]]:
    made: list[Watched] = []

    def make(rank: int, **options: float) -> Watched:
        made.append(Watched(rank, tmp_path, monkeypatch, **options))
        return made[-1]

    yield make
    for each in made:
        each.close()


def test_silence_is_noticed_also_while_the_loop_keeps_the_guard(watched: Callable[..., Watched]) -> None:
    stage = watched(1, heartbeat_timeout=1.0)
    stage.progress.at("loading weights", long=True)
    with stage.guard:
        stage.wave.mail.post(stage.wave.guarded().__enter__)
        stage.say("loading weights")
        why = stage.reason.result(BOUND)
    assert why.startswith("stage 0 was silent for 1 s"), why


@pytest.mark.parametrize("rank", [0, 1])
def test_a_death_is_noticed_also_while_the_loop_keeps_the_guard(
    rank: int, watched: Callable[..., Watched]
) -> None:
    stage = watched(rank)
    stage.progress.at("loading weights", long=True)
    with stage.guard:
        stage.wave.mail.post(stage.wave.guarded().__enter__)
        stage.peer.kill()
        why = stage.reason.result(BOUND)
    assert why == f"the process of stage {1 - rank} (pid {stage.peer.pid}) is gone"


def test_what_the_wave_thread_does_on_the_device_is_in_order_with_the_loop(
    watched: Callable[..., Watched], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A lease inside a node splits it: slots are copied on the current stream, which is a thread's own."""
    entered: Future[tuple[str, object]] = Future()

    @contextlib.contextmanager
    def context(stream: object) -> Iterator[None]:
        entered.set_result((threading.current_thread().name, stream))
        yield

    monkeypatch.setattr(torch.cpu, "StreamContext", context)
    stage = watched(1)
    assert entered.result(BOUND) == ("WAVE", stage.wave.stage.scheduler.schedule_stream)


def test_the_first_wave_may_compile_kernels(watched: Callable[..., Watched]) -> None:
    stage = watched(1, stall_timeout=0.5)
    began = time.monotonic()
    stage.progress.patience = 5
    stage.progress.at("running wave 0")
    why = stage.ends(lambda: "")
    assert time.monotonic() - began > 2.5
    assert why.endswith("s: it is running wave 0"), why


def test_a_late_stage_of_a_long_pipeline_waits_for_all_before_it(watched: Callable[..., Watched]) -> None:
    stage = watched(1, stall_timeout=0.5)
    began = time.monotonic()
    stage.progress.at("waiting for the activations of wave 2 from stage 2", stages=3)
    why = stage.ends(lambda: "")
    assert time.monotonic() - began > 1.5
    assert why.endswith("s: it is waiting for the activations of wave 2 from stage 2"), why


def test_waves_whose_outputs_never_come_end_the_server(watched: Callable[..., Watched]) -> None:
    """No loop is stuck: a message was lost. While another stage moves, stage 0 waits."""
    stage = watched(0, stall_timeout=0.5, heartbeat_timeout=1.0)
    began = time.monotonic()
    waves = iter(range(1 << 30))

    def doing() -> str:
        stage.progress.at("")  # stage 0's loop has looked at its inbox, and sleeps again
        return f"running wave {next(waves)}" if time.monotonic() < began + 3.0 else ""

    why = stage.ends(doing)
    assert time.monotonic() - began > 4.5
    assert why.startswith("waves are under way, but no stage has moved for "), why
    assert why.endswith(": stage 0 is idle at log entry 7; stage 1 is idle at log entry 3"), why
