"""A plugin for servers under measurement, stock SGLang or WavePP: waves that sleep, and time stamps.

`Probe` makes a folder that holds the plugin's entry point, so it exists only in servers that get `Probe.env`.
There the forward pass of a Llama sleeps instead of computing, as long as `Probe.set(wave_ms=...)` says (the
processes look at each wave), and each process appends what it sees to a file of its own: when the tokenizer
process sent a request to stage 0, when the last stage's scheduler has it, when WavePP's stage 0 committed it,
and how late LOOP runs on. All times are of the system's monotonic clock, which its processes share.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks.plugin import make_plugin

_FOLDER = "WAVEPP_PROBE"
"""The environment variable that names the probe's folder."""
_DELAYS = "WAVEPP_PROBE_DELAYS"
_SLICE_NS = 1_000_000
"""A wave sleeps in slices of this length where LOOP's delays are recorded: so often it wants the GIL back."""


class Probe:
    """The caller's side, in an empty `folder`. With `delays`, LOOP's delays are recorded, too."""

    def __init__(self, folder: Path, delays: bool = False) -> None:
        self._folder = folder
        env = make_plugin(folder, "benchmarks.probe") | {_FOLDER: str(folder)}
        self.env = env | ({_DELAYS: "1"} if delays else {})
        """What a server to be measured needs in its environment."""
        (folder / "seen").mkdir()
        self.set(wave_ms=0.0)

    def set(self, *, wave_ms: float, switch_ms: float = 0.0) -> None:
        """From the next wave on: its length, and CPython's switch interval (0: as it is)."""
        new = self._folder / "new"
        new.write_text(json.dumps([wave_ms, switch_ms]))
        new.replace(self._folder / "settings")

    def seen(self, what: str) -> Iterator[list[Any]]:
        """What the processes have recorded as `what`, up to now, without that name."""
        for file in sorted((self._folder / "seen").iterdir()):
            for line in file.read_bytes().split(b"\n")[:-1]:
                name, *values = json.loads(line)
                if name == what:
                    yield values


# --- in the server's processes ---------------------------------------------------------------


def register() -> None:
    """Entry point of the group `sglang.srt.plugins`."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    from sglang_wavepp.config import config_of
    from sglang_wavepp.launch.plugin import scheduler_arguments

    agent = _Agent(Path(os.environ[_FOLDER]))
    scheduler = scheduler_arguments()
    if scheduler is None:
        hooks: dict[str, Callable[..., Any]] = {
            "sglang.srt.managers.tokenizer_manager.TokenizerManager._dispatch_to_scheduler": agent.sent
        }
    else:
        hooks = {"sglang.srt.models.llama.LlamaModel.forward": agent.forward}
        if config_of(scheduler["server_args"]) is None:
            hooks["sglang.srt.managers.scheduler.Scheduler.process_input_requests"] = agent.received
        else:
            hooks["sglang_wavepp.wave_leader.LeaderWave._on_event"] = agent.committed
            if _DELAYS in os.environ:
                hooks["sglang_wavepp.stage.Stage.__init__"] = agent.built
                hooks["sglang_wavepp.wave_leader.LeaderWave._turn"] = agent.turn
                hooks["sglang_wavepp.wave.MemberWave._turn"] = agent.turn
    for target, hook in hooks.items():
        HookRegistry.register(target, hook, HookType.AROUND)


class _Agent:
    """The hooks of one process."""

    def __init__(self, folder: Path) -> None:
        self._settings = folder / "settings"
        self._file = os.open(folder / "seen" / str(os.getpid()), os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        self._guard: _TimedGuard | None = None
        self._turns: list[list[int]] = []
        """When WAVE was at work since the start of this wave: [begin, end] in ns, the end 0 while it is."""

    def _write(self, *row: Any) -> None:
        os.write(self._file, json.dumps(row).encode() + b"\n")

    def sent(self, original: Callable[..., Any], manager: Any, message: Any) -> Any:
        now = time.monotonic()
        result = original(manager, message)
        if (rid := getattr(message, "rid", None)) is not None and hasattr(message, "sampling_params"):
            self._write("sent", rid, now)
        return result

    def received(self, original: Callable[..., Any], scheduler: Any, requests: list[Any]) -> Any:
        if scheduler.pp_group.is_last_rank:
            now = time.monotonic()
            for request in requests:
                if hasattr(request, "sampling_params"):
                    self._write("received", request.rid, now)
        return original(scheduler, requests)

    def committed(self, original: Callable[..., Any], wave: Any, event: Any) -> Any:
        from sglang_wavepp.admission import Committed

        if isinstance(event, Committed) and not event.again:
            self._write("committed", wave._requests[event.seq].req.rid, time.monotonic(), event.rounds)
        return original(wave, event)

    def built(self, original: Callable[..., Any], stage: Any, *args: Any) -> None:
        original(stage, *args)
        stage.guard = self._guard = _TimedGuard(stage.guard)

    def forward(
        self,
        original: Callable[..., Any],
        model: Any,
        input_ids: Any,
        positions: Any,
        forward_batch: Any,
        input_embeds: Any = None,
        pp_proxy_tensors: Any = None,
    ) -> Any:
        """Sleep, and pass on what came in."""
        from sglang.srt.model_executor.forward_batch_info import PPProxyTensors

        wave_ms, switch_ms = json.loads(self._settings.read_text())
        if self._guard is None:
            time.sleep(wave_ms / 1e3)
        else:
            self._sleep_in_slices(self._guard, model.pp_group.rank_in_group, wave_ms)
            if switch_ms:
                sys.setswitchinterval(switch_ms / 1e3)
        if pp_proxy_tensors is None:
            hidden = residual = model.embed_tokens(input_ids)
        else:
            hidden, residual = pp_proxy_tensors["hidden_states"], pp_proxy_tensors["residual"]
        if model.pp_group.is_last_rank:
            return hidden
        return PPProxyTensors({"hidden_states": hidden, "residual": residual})

    def turn(self, original: Callable[..., Any], wave: Any, ready: Any) -> Any:
        turn = [time.monotonic_ns(), 0]
        self._turns.append(turn)
        try:
            return original(wave, ready)
        finally:
            turn[1] = time.monotonic_ns()

    def _sleep_in_slices(self, guard: _TimedGuard, rank: int, wave_ms: float) -> None:
        """Record how late this thread runs on after each slice, and how long it waited for a core then.

        Apart from each other: slices that were over while WAVE was at work, and all others.
        """
        waits = guard.take()
        self._turns = self._turns[-1:]
        late: list[tuple[int, int, int]] = []
        with _run_queue() as waited:
            before, now = waited(), time.monotonic_ns()
            end = now + int(wave_ms * 1e6)
            while now < end:
                time.sleep(_SLICE_NS / 1e9)
                after, queued = time.monotonic_ns(), waited()
                due = now + _SLICE_NS
                late.append((due, after - due, queued - before))
                before, now = queued, time.monotonic_ns()
        rows: dict[bool, list[tuple[int, int]]] = {False: [], True: []}
        turns = list(self._turns)
        for due, delay, queue in late:
            beside = any(begin <= due and (due <= over or not over) for begin, over in turns)
            rows[beside].append((delay // 1000, queue // 1000))
        self._write("delays", rank, sys.getswitchinterval() * 1e3, rows[False], rows[True], waits)


@contextmanager
def _run_queue() -> Iterator[Callable[[], int]]:
    """A function that gives the ns for which this thread was ready to run but waited for a core."""
    file = os.open("/proc/thread-self/schedstat", os.O_RDONLY)
    try:
        yield lambda: int(os.pread(file, 100, 0).split()[1])
    finally:
        os.close(file)


class _TimedGuard:
    """The stage's guard, which records how long LOOP (the main thread) waited for it, in µs."""

    def __init__(self, guard: Any) -> None:
        self._guard = guard
        self._main = threading.main_thread().ident
        self._waits: list[int] = []

    def acquire(self, *args: Any, **kwargs: Any) -> bool:
        return bool(self._guard.acquire(*args, **kwargs))

    def release(self) -> None:
        self._guard.release()

    def __enter__(self) -> None:
        started = time.monotonic_ns()
        self._guard.acquire()
        if threading.get_ident() == self._main:
            self._waits.append((time.monotonic_ns() - started) // 1000)

    def __exit__(self, *error: object) -> None:
        self._guard.release()

    def take(self) -> list[int]:
        """The waits since the last call."""
        waits, self._waits = self._waits, []
        return waits
