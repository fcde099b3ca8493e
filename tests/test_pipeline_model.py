"""The pipeline model: recurrences, the modelled server, profiles, the paper's figures, `wavepp plan`."""

from __future__ import annotations

import json
import random
import tomllib
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_wavepp.launch import cli, plan
from sglang_wavepp.launch.pipeline_server import PipelineServer
from sglang_wavepp.launch.prefix_store import PrefixStore, Prompt
from sglang_wavepp.launch.workload import Offered, Outcome, ServerOptions
from sglang_wavepp.mpu import PLANNERS
from sglang_wavepp.mpu.pipeline import Pipeline
from sglang_wavepp.mpu.planner import Load
from sglang_wavepp.mpu.profile import DATA, Profile, ProfileError, load_profile

PLAIN = Profile(
    name="plain",
    flops_per_token=8e6,
    attention_flops=80.0,
    kv_bytes_per_token=1e3,
    weight_bytes=8e8,
    activation_bytes=0,
    flops=1e11,
    bandwidth=1e11,
)
"""In 8 stages: 1 ms a wave, 10 us a token, 0.1 ns a pair of tokens."""


def serve(
    requests: list[Offered], concurrency: int = 0, profile: Profile = PLAIN, **options: Any
) -> tuple[Outcome, PipelineServer]:
    server = PipelineServer(profile, ServerOptions(**options))
    if server.options.planner == "timed":
        server.learn([Offered(tokens=131_072)])
    return server.run(requests, concurrency), server


# --- recurrences -----------------------------------------------------------------------------


@given(st.lists(st.integers(1, 10_000), min_size=1, max_size=30), st.integers(1, 9))
def test_equal_stages_are_a_proportionate_flow_shop(tokens: list[int], stages: int) -> None:
    """All at once: the sum of the times, and for each further stage the longest once more."""
    pipeline = Pipeline(PLAIN, stages)
    times = [pipeline.times[0].of(Load(n, 0, 0, 1)) / 1e6 for n in tokens]
    done = [pipeline.issue(0.0, Load(n, 0, 0, 1)).done for n in tokens]
    assert done[-1] == pytest.approx(sum(times) + (stages - 1) * max(times))
    assert done == sorted(done)


def test_a_wave_waits_for_its_input_and_for_the_wave_before() -> None:
    profile = Profile(
        name="", flops_per_token=4, attention_flops=0, kv_bytes_per_token=0, weight_bytes=0,
        activation_bytes=10, flops=1, bandwidth=1, link_bandwidth=1, shares=(1, 3),
    )  # fmt: skip
    pipeline = Pipeline(profile, 2)
    assert pipeline.slowest == 1
    first = pipeline.issue(5.0, Load(2, 0, 0, 1))
    assert (first.took, first.done, first.gap) == ((2.0, 6.0), 33.0, 27.0)  # 5 + 2, 20 under way, 6
    second = pipeline.issue(0.0, Load(1, 0, 0, 1), waits=0.5)
    assert (pipeline.free, second.gap, second.done) == (8.5, 0.0, 36.0)


# --- the server --------------------------------------------------------------------------------


def some(seed: int, count: int) -> list[Offered]:
    draw = random.Random(seed)
    at, requests = 0.0, []
    for _ in range(count):
        at += draw.expovariate(draw.choice((1.0, 20.0)))
        tokens = draw.randrange(1, 30_000)
        name = draw.choice(("", "", "a", "b"))
        requests.append(
            Offered(
                arrival=at,
                tokens=tokens,
                cached=draw.randrange(tokens + 1),
                output=draw.choice((1, 1, 7)),
                prefix=name,
            )
        )
    return requests


@given(
    seed=st.integers(0, 10**6),
    planner=st.sampled_from(sorted(PLANNERS)),
    stages=st.sampled_from([1, 2, 5]),
    pool=st.sampled_from([0, 40_000, 90_000]),
    late=st.booleans(),
    concurrency=st.sampled_from([0, 3]),
)
@settings(max_examples=40, deadline=None)
def test_all_requests_end_and_all_time_is_accounted_for(
    seed: int, planner: str, stages: int, pool: int, late: bool, concurrency: int
) -> None:
    options = {"planner": planner, "stages": stages, "late": late, "budget": 8192, "running": 20}
    profile = Profile(**{**_fields(PLAIN), "kv_tokens": pool})
    outcome, server = serve(some(seed, 25), concurrency, profile, prepare_s=1e-4, wave_s=1e-5, **options)
    assert len(outcome.served) == 25
    for served in outcome.served:
        assert not served.rejected
        assert served.arrived <= served.committed <= served.prefilled <= served.done <= outcome.seconds
        assert served.produced == served.offered.output
        assert served.reused <= min(served.offered.cached, served.offered.tokens - 1)
    slowest = server.pipeline.slowest
    assert outcome.busy[slowest] + sum(outcome.bubbles.values()) == pytest.approx(outcome.seconds, rel=1e-6)
    assert server.sequencer.live == server.sequencer.in_flight == 0
    held = server._member.statistics()
    assert (held.leases, held.committed, held.escrow_tokens, held.escrow_rows) == (0, 0, 0, 0)
    store = server.store
    assert store._private == store._locked == 0 and store.free_rows() == 20
    assert store._cached == sum(entry.tokens for entry in store._entries.values())


def _fields(profile: Profile) -> dict[str, Any]:
    return {name: getattr(profile, name) for name in Profile.__slots__}


def test_what_is_larger_than_the_pool_is_refused() -> None:
    profile = Profile(**{**_fields(PLAIN), "kv_tokens": 10_000})
    outcome, _ = serve([Offered(tokens=20_000), Offered(tokens=500)], 1, profile)
    assert "no room" in outcome.served[0].rejected and not outcome.served[1].rejected


def test_a_common_prompt_is_computed_once() -> None:
    together = [Offered(tokens=10_100 + i, cached=10_000, prefix="system") for i in range(8)]
    outcome, _ = serve(together)
    assert [served.reused for served in outcome.served] == [0] + [9984] * 7


@pytest.mark.parametrize("page", [1, 48, 128, 3000])
def test_pages_of_any_size_are_shared(page: int) -> None:
    """What is shared is whole pages and, as far as the hint index tells, whole blocks of them."""
    together = [Offered(tokens=10_100, cached=9100, prefix="system", arrival=i * 10.0) for i in range(3)]
    outcome, _ = serve(together, page=page, stages=2)
    assert [served.reused for served in outcome.served] == [0] + [9100 // page * page] * 2


def test_admission_on_the_path_costs_what_it_takes() -> None:
    requests = [Offered(tokens=4096)] * 32
    off, _ = serve(requests, 32, late=True)
    on, _ = serve(requests, 32, late=True, request_s=0.01)
    assert on.seconds == pytest.approx(off.seconds + 0.32)
    assert on.bubbles["host"] == pytest.approx(0.32)


def test_t19_slow_messages_cost_nothing_while_they_take_less_than_a_wave() -> None:
    """Half a millisecond, three and twenty beside waves of 86: as many as fill the ring are admitted ahead.

    With messages as slow as two waves that is too little, and admission sets the pace.
    """
    requests = [Offered(tokens=4096)] * 96
    options: dict[str, Any] = {"stages": 4, "budget": 4096}
    fast, server = serve(requests, 24, **options)
    wave = fast.busy[server.pipeline.slowest] / fast.waves
    assert wave == pytest.approx(0.086, rel=0.01)
    for delay in (0.5e-3, 3e-3, 20e-3):
        slow, _ = serve(requests, 24, message_s=delay, **options)
        assert fast.seconds / slow.seconds > 0.98
    slow, _ = serve(requests, 24, message_s=2 * wave, **options)
    assert fast.seconds / slow.seconds < 0.8


def test_the_least_recently_used_prefix_goes_first() -> None:
    store = PrefixStore(300, 4, 10)
    for name in "abc":
        store.seed(name, 100)
    used = store.lock(Prompt(0, 200, "a", 100), store.match(Prompt(0, 200, "a", 100), 100))
    assert used.boundary == 100 and store.evictable_tokens() == 200
    store.allocate(Prompt(1, 120, "d", 0), 120)
    assert [store.hint(Prompt(2, 200, name, 100)) for name in "abc"] == [100, 0, 80]
    store.unlock(used.lock)


# --- profiles ----------------------------------------------------------------------------------


def test_shares_are_of_the_whole_model(tmp_path: Path) -> None:
    text = (DATA / "profile-pp4.toml").read_text() + "\n[stages]\nshares = [1, 1, 2]\n"
    (tmp_path / "own.toml").write_text(text)
    whole, three = load_profile("profile-pp4").stages(1)[0], load_profile(tmp_path / "own.toml").stages(3)
    assert [time.token for time in three] == pytest.approx(
        [whole.token / 4, whole.token / 4, whole.token / 2]
    )
    assert sum(time.wave for time in three) == pytest.approx(whole.wave)
    with pytest.raises(ProfileError, match="shares of 3 stages, not of 4"):
        load_profile(tmp_path / "own.toml").stages(4)


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (("flops = 1e15", ""), "flops is missing"),
        (("flops = 1e15", "flops = 0"), "flops is 0, not a number above 0"),
        (("flops = 1e15", "flops = 'many'"), "flops is 'many', not a number above 0"),
        (("flops = 1e15", "flop = 1"), "nothing called 'flop' in [device]"),
        (("[device]", "[gpu]"), "nothing called 'gpu' in a profile"),
        (("[device]", "[device"), "cannot be read"),
    ],
)
def test_a_bad_profile_is_one_clear_line(change: tuple[str, str], complaint: str, tmp_path: Path) -> None:
    text = (DATA / "profile-pp4.toml").read_text()
    assert change[0] in text
    (tmp_path / "bad.toml").write_text(text.replace(*change, 1))
    with pytest.raises(ProfileError) as raised:
        load_profile(tmp_path / "bad.toml")
    assert complaint in str(raised.value)


# --- the paper ---------------------------------------------------------------------------------


def test_half_of_the_figures_are_predicted_and_all_are_quoted() -> None:
    paper = tomllib.loads((DATA / "paper.toml").read_text())
    cells = tomllib.loads((DATA / "cells.toml").read_text())
    figures = paper["figure"]
    assert len({f["name"] for f in figures}) == len(figures)
    uses = [f["use"] for f in figures]
    assert set(uses) == {"fit", "predict"} and uses.count("predict") >= len(uses) / 2
    assert all(f["words"] and f["source"] in ("review", "abstract", "news") for f in figures)
    assert {f["server"] for f in figures} <= set(cells["servers"])
    for server in cells["servers"].values():
        given = {k: v for k, v in server.items() if k not in ("rule", "profile")}
        load_profile(server["profile"]).stages(ServerOptions(**given).stages)


def reuse(planner: str, rounds: int) -> float:
    requests = [Offered(tokens=262_144, cached=235_904)] * (32 * rounds)
    return serve(requests, 32, load_profile("profile-kimi-k3-gb300"), planner=planner)[0].throughput


@pytest.mark.parametrize("rounds", [1, 4])
def test_mpu_loses_late_in_long_prompts_and_timed_does_not(rounds: int) -> None:
    static = reuse("static", rounds)
    assert reuse("mpu", rounds) < static * (0.99 if rounds == 1 else 1.0)
    assert reuse("timed", rounds) > 0.995 * static


@pytest.mark.parametrize("planner", ["mpu", "timed"])
def test_few_requests_are_spread_over_the_pipeline(planner: str) -> None:
    requests = [Offered(tokens=131_072, cached=117_952)] * 8
    profile = load_profile("profile-kimi-k3-gb300")
    found = serve(requests, 8, profile, planner=planner)[0].throughput
    assert found > 1.2 * serve(requests, 8, profile)[0].throughput


@pytest.mark.parametrize("clients", [16, 32])
def test_clients_that_keep_asking_are_served_as_by_the_best_static_waves(clients: int) -> None:
    """1,664 new tokens each on eight stages: neither one nor two whole requests make the best wave."""
    requests = [Offered(tokens=16_384, cached=14_720)] * (16 * clients)

    def throughput(planner: str, budget: int) -> float:
        options = {"planner": planner, "budget": budget, "client_s": 0.008}
        return serve(requests, clients, load_profile("kimi-k3-gb300"), **options)[0].throughput

    static = [throughput("static", budget) for budget in (1024, 2048, 4096, 8192)]
    assert throughput("timed", 16_384) > 0.99 * max(static) > 1.01 * throughput("static", 16_384)


def test_clients_take_their_time_to_ask_again() -> None:
    options = ServerOptions(stages=4, client_s=2.0)
    outcome = PipelineServer(load_profile("laptop"), options).run([Offered(tokens=64)] * 40, 1)
    ready = [0.0, *(s.done for s in outcome.served)]
    pauses = [s.arrived - before for s, before in zip(outcome.served, ready, strict=False)]
    assert 1.0 <= min(pauses) < 1.5 and 2.5 < max(pauses) <= 3.0


# --- wavepp plan ---------------------------------------------------------------------------------


@pytest.fixture
def requests_file(tmp_path: Path) -> Path:
    file = tmp_path / "requests.jsonl"
    lines = [{"arrival": i * 0.1, "tokens": 20_000, "cached": 16_000, "output": 1 + i % 2} for i in range(12)]
    file.write_text("\n".join(map(json.dumps, lines)) + "\n\n")
    return file


def test_plan_prints_a_table(requests_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["plan", "--requests", str(requests_file), "--budget", "4096", "--budget", "8192"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split()[:3] == ["planner", "budget", "tokens/s"]
    rows = [line.split() for line in lines[1:7]]
    assert [row[0] for row in rows] == [name for name in PLANNERS for _ in range(2)]
    assert sum("*" in row for row in rows) == 3


def test_plan_prints_json(requests_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["plan", "--requests", str(requests_file), "--json", "--planner", "mpu", "--concurrency", "4"]
    assert cli.main([*argv, "--stages", "4", "--profile", "pp4"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["stages"] == 4 and len(said["rows"]) == 4
    for row in said["rows"]:
        assert row["busy"] + sum(row["bubbles"].values()) == pytest.approx(1.0)
        assert row["tokens_per_s"] == pytest.approx(12 * 20_000 / row["seconds"])
        assert 0 < row["completion_s"]["p50"] <= row["completion_s"]["p95"] <= row["seconds"]


def test_plan_draws(requests_file: Path, tmp_path: Path) -> None:
    file = tmp_path / "plan.svg"
    argv = ["plan", "--requests", str(requests_file), "--budget", "4096", "--plot", str(file)]
    assert cli.main(argv) == 0
    assert "<svg" in file.read_text()


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ("{", "line 1: "),
        ('{"tokens": "many"}', "line 1: Expected `int`"),
        ('{"tokens": 5, "token": 5}', "unknown field `token`"),
        ('{"tokens": 5, "cached": 6}', "line 1: tokens and output are from 1 to 10,000,000"),
        ('{"tokens": 50000000000}', "line 1: tokens and output are from 1 to 10,000,000"),
        ('{"arrival": 1}', "missing required field `tokens`"),
        ("", "has no requests"),
        ('{"tokens": 9000000}', "no request can be served"),
    ],
)
def test_a_bad_request_is_one_clear_line(
    line: str, complaint: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "bad.jsonl"
    file.write_text(line)
    assert cli.main(["plan", "--requests", str(file), "--kv-tokens", "100000"]) == 2
    (error,) = capsys.readouterr().err.splitlines()
    assert error.startswith("error: ") and complaint in error


def test_other_mistakes_are_one_clear_line(
    requests_file: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    given = ["plan", "--requests", str(requests_file)]
    for argv, complaint in (
        (["plan", "--requests", "/no/such/file"], "/no/such/file cannot be read"),
        ([*given, "--profile", "h100"], "there is no profile 'h100'; there are glm-5.2-b300, "),
        ([*given, "--budget", "10"], "a budget of 10 tokens is less than a page of 64"),
        ([*given, "--budget", "4096", "--plot", "/no/such/plot.svg"], "plot.svg cannot be written"),
    ):
        assert cli.main(argv) == 2
        (error,) = capsys.readouterr().err.splitlines()
        assert complaint in error
    monkeypatch.setitem(__import__("sys").modules, "matplotlib", None)
    assert cli.main([*given, "--plot", "x.svg"]) == 2
    assert "--plot needs matplotlib" in capsys.readouterr().err
    assert plan.read_requests(str(requests_file))[1] == Offered(
        arrival=0.1, tokens=20_000, cached=16_000, output=2
    )
