"""Emulated devices: their timeline, what is refused, and real servers on them that answer right."""

from __future__ import annotations

import argparse
import itertools
import json
import random
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from conftest import READY_S

from sglang_wavepp.errors import ConfigError
from sglang_wavepp.launch import emulated_device, emulation
from sglang_wavepp.launch.emulated_device import FREE, EmulatedDevice
from sglang_wavepp.launch.emulation import Emulation
from sglang_wavepp.launch.models import VOCAB_SIZE, make_model
from sglang_wavepp.launch.server import Server
from sglang_wavepp.mpu.packing import Pending
from sglang_wavepp.mpu.planner import load_of
from sglang_wavepp.mpu.profile import load_profile

PROFILE = """
[model]
flops_per_token = 2e9
attention_flops = 2e4
kv_bytes_per_token = 1e4
weight_bytes = 2e9
activation_bytes = 1e4
[device]
flops = 1e12
bandwidth = 1e12
[link]
link_bandwidth = 1e10
link_s = 0.001
"""
"""On two stages: 1 ms a wave, 1 ms a token, 10 ns a pair of tokens; 1 ms and 1 us a token to the next."""


class Clock:
    """Stands still until it is told to go on, or somebody sleeps."""

    def __init__(self) -> None:
        self.at = 100.0

    def now(self) -> float:
        return self.at

    def sleep_until(self, at: float) -> None:
        self.at = max(self.at, at)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    found = Clock()
    monkeypatch.setattr(emulated_device, "now", found.now)
    monkeypatch.setattr(emulated_device, "sleep_until", found.sleep_until)
    return found


@pytest.fixture
def profile(tmp_path: Path) -> str:
    path = tmp_path / "profile.toml"
    path.write_text(PROFILE)
    return str(path)


def seconds(profile: str, *spans: tuple[int, int], stages: int = 2) -> float:
    """What a wave takes on a stage."""
    load = load_of(Pending(0, prefix, prefix + new) for prefix, new in spans)
    return load_profile(profile).stages(stages)[0].of(load) / 1e6


def lines(folder: Path, stage: int) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / f"stage{stage}.jsonl").read_text().splitlines()]


# --- the timeline ----------------------------------------------------------------------------


def test_a_launch_returns_at_once_and_waves_follow_each_other(clock: Clock, profile: str) -> None:
    device = EmulatedDevice(Emulation(profile=profile), 0, 2)
    first = device.launch(["a"], [(0, 100)], True, 0.0)
    assert clock.at == 100.0
    end = 100.0 + seconds(profile, (0, 100))
    assert first == pytest.approx(end + 0.001 + 100e-6)
    device.launch(["b"], [(0, 50), (1000, 50)], True, 0.0)
    end += seconds(profile, (0, 50), (1000, 50))
    assert device.free_at == pytest.approx(end)
    clock.at = end + 5
    device.launch(["c"], [(1000, 1)], False, 0.0)
    assert device.free_at == pytest.approx(end + 5 + seconds(profile, (1000, 1)))


def test_a_wave_waits_for_its_input(clock: Clock, profile: str) -> None:
    device = EmulatedDevice(Emulation(profile=profile), 1, 2)
    device.launch(["a"], [(0, 10)], True, 107.0)
    assert device.free_at == pytest.approx(107.0 + seconds(profile, (0, 10)))
    assert clock.at == 100.0


def test_dilation_stretches_everything(clock: Clock, profile: str) -> None:
    sent = [
        EmulatedDevice(Emulation(profile=profile, dilation=k), 0, 2).launch(["a"], [(64, 10)], True, 0.0)
        for k in (1.0, 8.0)
    ]
    assert sent[1] - 100.0 == pytest.approx(8 * (sent[0] - 100.0))


def test_a_server_of_one_stage_works_in_step(clock: Clock, profile: str) -> None:
    EmulatedDevice(Emulation(profile=profile), 0, 1).launch(["a"], [(0, 10)], True, 0.0)
    assert clock.at == pytest.approx(100.0 + seconds(profile, (0, 10), stages=1))


def test_events_say_when_what_was_launched_before_is_through(clock: Clock, profile: str) -> None:
    device = EmulatedDevice(Emulation(profile=profile), 0, 2)
    event = device.event_class()
    start, end = event(enable_timing=True), event(enable_timing=True)
    start.record()
    device.launch(["a"], [(0, 100)], True, 0.0)
    end.record()
    assert start.query() and not end.query()
    assert start.elapsed_time(end) == pytest.approx(1e3 * seconds(profile, (0, 100)))
    end.synchronize()
    assert end.query() and clock.at == pytest.approx(device.free_at)


def test_each_wave_is_traced(clock: Clock, profile: str, tmp_path: Path) -> None:
    device = EmulatedDevice(Emulation(profile=profile, trace=str(tmp_path)), 1, 2)
    device.runnable["a"] = 99.0
    device.launch(["a"], [(0, 100)], True, 103.0)
    (tmp_path / FREE).touch()
    device.launch(["a"], [(100, 1)], False, 103.0)
    first, second = lines(tmp_path, 1)
    assert (first["wave"], first["kind"], first["rids"], first["spans"]) == (0, "extend", ["a"], [[0, 100]])
    assert (first["runnable"], first["launched"], first["input"], first["start"]) == (
        99.0,
        100.0,
        103.0,
        103.0,
    )
    assert first["cost"] == pytest.approx(seconds(profile, (0, 100))) == first["end"] - first["start"]
    assert (second["kind"], second["cost"]) == ("decode", 0.0), "free"


def test_the_loops_waiting_counts_from_when_the_device_is_idle(
    clock: Clock, profile: str, tmp_path: Path
) -> None:
    device = EmulatedDevice(Emulation(profile=profile, trace=str(tmp_path)), 0, 2)
    device.launch(["a"], [(0, 100)], True, 0.0)
    clock.at = device.free_at + 0.5
    device.waited(begin=100.0)
    device.launch(["b"], [(0, 100)], True, 0.0)
    assert [round(line["blocked"], 6) for line in lines(tmp_path, 0)] == [0.0, 0.5]


# --- what is refused -------------------------------------------------------------------------


def parsed(*args: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    emulation.add_flags(parser)
    return parser.parse_args(args)


def test_the_flags_are_carried() -> None:
    assert emulation.given_options(parsed()) is None
    given = emulation.given_options(parsed("--wavepp-emulate", "x", "--wavepp-emulate-dilation", "4"))
    assert emulation.emulation_of(SimpleNamespace(_wavepp_emulation=given)) == Emulation(
        profile="x", dilation=4.0
    )
    with pytest.raises(ConfigError, match="--wavepp-emulate-check has no effect without --wavepp-emulate"):
        emulation.given_options(parsed("--wavepp-emulate-check"))


@pytest.mark.parametrize("dilation", ["0", "-1", "nan", "much"])
def test_a_dilation_is_a_number_above_0(dilation: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parsed("--wavepp-emulate", "x", f"--wavepp-emulate-dilation={dilation}")
    assert "must be a number" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("platform", "options", "reason"),
    [
        ("", {}, "set SGLANG_PLATFORM=wavepp-cpu"),
        ("wavepp-cpu", {"tp_size": 2}, "leave out --tp-size"),
        ("wavepp-cpu", {"profile": "no-such-device"}, "there is no profile 'no-such-device'"),
    ],
)
def test_what_cannot_be_emulated_is_refused(
    platform: str, options: dict[str, Any], reason: str, profile: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SGLANG_PLATFORM", platform)
    given = {"profile": options.pop("profile", profile)}
    record = SimpleNamespace(**{"tp_size": 1, "pp_size": 2, **options}, _wavepp_emulation=given)
    with pytest.raises(ConfigError, match=reason):
        emulation.check(record)


# --- real servers ----------------------------------------------------------------------------


@pytest.mark.parametrize("wavepp", [False, True], ids=["stock", "wavepp"])
def test_a_server_on_emulated_devices_answers_right(wavepp: bool, tmp_path: Path) -> None:
    """Prompts that share prefixes, a cache that is too small for them, and every KV slot checked."""
    from sglang_wavepp.launch.emulated_model import expected

    folder = make_model(tmp_path / "model", "emulated", layers=2, hidden=32, context=16384)
    trace = tmp_path / "trace"
    trace.mkdir()
    name = "kimi-k3-gb300"
    flags = ["--wavepp-emulate", name, "--wavepp-emulate-dilation", "0.05", "--wavepp-emulate-check"]
    flags += ["--wavepp-emulate-trace", str(trace), *([] if wavepp else ["--sleep-on-idle"])]
    draw = random.Random(1)
    prefixes = [draw.choices(range(16, VOCAB_SIZE), k=draw.randint(500, 5000)) for _ in range(6)]
    prompts = [
        prefix[: draw.randint(1, len(prefix))] + draw.choices(range(16, VOCAB_SIZE), k=draw.randint(1, 1500))
        for prefix in prefixes * 8
    ]
    with Server(
        folder,
        pp_size=2,
        wavepp=wavepp,
        flags=flags,
        max_total_tokens=24_000,
        chunked_prefill_size=1024,
        log_path=tmp_path / "log",
        ready_timeout=READY_S,
    ) as server:

        def ask(prompt: list[int]) -> tuple[list[int], int]:
            sampling = {"temperature": 0, "max_new_tokens": 6, "ignore_eos": True}
            answer = server.post("/generate", {"input_ids": prompt, "sampling_params": sampling})
            return answer["output_ids"], answer["meta_info"]["cached_tokens"]

        with ThreadPoolExecutor(8) as pool:
            answers = list(pool.map(ask, prompts))
    assert [ids for ids, _ in answers] == [expected(prompt, 6, VOCAB_SIZE) for prompt in prompts]
    assert sum(cached for _, cached in answers) > 0
    for stage in range(2):
        waves = lines(trace, stage)
        assert all(a["end"] <= b["start"] for a, b in itertools.pairwise(waves))
        took = sum(wave["end"] - wave["start"] for wave in waves)
        profiled = sum(seconds(name, *map(tuple, wave["spans"])) for wave in waves)  # type: ignore[arg-type]
        assert took == pytest.approx(0.05 * profiled)
