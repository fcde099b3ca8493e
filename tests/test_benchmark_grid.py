"""The grid: cells, systems, timelines and tables are pure; its client is run against a small server."""

from __future__ import annotations

import argparse
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks import grid, report
from benchmarks.cells import HIGHEST, LOWEST, QUICK, WORKLOADS, Cell, Prepared, parse_cells, prepare
from benchmarks.load import Answer, LoadError, run
from benchmarks.measure import doubts, kinds
from benchmarks.predict import compared
from benchmarks.systems import ALL, DEFAULT, system
from benchmarks.timeline import CAUSES, Wave, cost_error, host_time, of_requests, parse, read_stage, split
from sglang_wavepp.mpu.profile import load_profile

# --- cells ------------------------------------------------------------------------------------------


def test_cells_are_named_by_workload_output_and_concurrency() -> None:
    assert parse_cells(["suffix-4k:8,32", "mixed-16k+32:8"]) == [
        Cell("suffix-4k", 8),
        Cell("suffix-4k", 32),
        Cell("mixed-16k", 8, 32),
    ]
    assert [cell.concurrency for cell in parse_cells(["cold-65k"])] == [1, 4, 8, 16, 32]
    assert parse_cells(["cold-65k"], [2]) == [Cell("cold-65k", 2)]
    every = parse_cells([*QUICK, *WORKLOADS])
    assert parse_cells([cell.name for cell in every]) == every


@pytest.mark.parametrize("name", ["warm-65k", "cold-65k:", "cold-65k:0", "cold-65k+0:8", "cold-65k:8x"])
def test_what_is_no_cell_is_refused_with_its_name(name: str) -> None:
    with pytest.raises(ValueError, match=name.replace("+", r"\+")):
        parse_cells([name])


@pytest.mark.parametrize("name", ["suffix-4k:3", "mixed-16k:4", "cold-16k:1"])
def test_requests_of_a_cell_share_with_their_seed_what_is_cached_and_nothing_else(name: str) -> None:
    cell = parse_cells([name])[0]
    seeds, measured = prepare(cell, 24, "r0-")
    prompts = {request.rid: json.loads(request.body)["input_ids"] for request in [*seeds, *measured]}
    assert len(prompts) == len(seeds) + len(measured) == len(seeds) + 24
    seeded = [prompts[request.rid] for request in seeds]
    for number, request in enumerate(measured):
        kind = cell.of[number % len(cell.of)]
        ids = prompts[request.rid]
        assert (len(ids), request.tokens, request.cached) == (kind["tokens"], kind["tokens"], kind["cached"])
        assert min(ids) >= LOWEST and max(ids) < HIGHEST
        others = [*seeded, *(prompts[other.rid] for other in measured[:number])]
        assert max([0, *(_common(ids, other) for other in others)]) == kind["cached"]
    assert len(seeds) == sum(cell.of[i % len(cell.of)]["cached"] > 0 for i in range(cell.prefixes(24)))


def _common(one: list[int], other: list[int]) -> int:
    return next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), len(other))


def test_a_pool_holds_what_was_seeded_and_what_is_under_way() -> None:
    for cell in parse_cells(list(WORKLOADS)):
        of = cell.of
        seeded = sum(of[i % len(of)]["cached"] for i in range(cell.prefixes()))
        new = sum(kind["tokens"] - kind["cached"] for kind in of) / len(of)
        assert cell.pool() >= seeded + cell.concurrency * new + cell.longest


# --- systems ----------------------------------------------------------------------------------------


def test_systems_are_told_by_their_names() -> None:
    assert all(system(name).name == name for name in (*ALL, *DEFAULT))
    deep = system("stock-4096-d2")
    assert (deep.wavepp, deep.budget) == (False, 4096)
    assert deep.flags == ("--sleep-on-idle", "--pp-async-batch-depth", "2")
    assert "--enable-dynamic-chunking" in system("stock-dynamic").flags
    own = system("wavepp-timed-8192")
    assert (own.wavepp, own.budget, own.flags) == (True, 8192, ("--wavepp-planner", "timed"))


@pytest.mark.parametrize("name", ["stock", "stock-8192-d3", "wavepp-best", "stock-0"])
def test_what_is_no_system_is_refused_with_its_name(name: str) -> None:
    with pytest.raises(ValueError, match=name):
        system(name)


def test_each_default_profile_is_there() -> None:
    assert all(load_profile(name).stages(pp) for pp, name in grid.PROFILES.items())


# --- timelines --------------------------------------------------------------------------------------


def _wave(number: int, start: float, end: float, **more: Any) -> Wave:
    given = {
        "runnable": 0.0,
        "launched": start,
        "input": 0.0,
        "cost": end - start,
        "blocked": 0.0,
        "cpu": 0.0,
        "loop_cpu": 0.0,
    }
    named = {"rids": ("a",), "spans": ((0, 100),), "kind": "extend"}
    return Wave(wave=number, start=start, end=end, **{**given, **named, **more})


def test_a_gap_is_told_by_what_came_last() -> None:
    waves = [
        _wave(0, 11.0, 12.0),
        _wave(1, 15.0, 16.0, runnable=13.5, input=13.0, blocked=2.25),
    ]
    first = split(waves, 10.0, 20.0, first_stage=True)
    assert (first.busy, first.fill, first.no_work, first.activations) == (2.0, 5.0, 1.5, 0.0)
    assert (first.outputs, first.host) == (0.75, 0.75)
    later = split(waves, 10.0, 20.0, first_stage=False)
    assert (later.no_work, later.activations, later.outputs, later.host) == (0.0, 1.0, 1.25, 0.75)
    assert first.window == later.window == 10.0
    assert first.shares()["busy"] == 0.2


times = st.floats(0.0, 5.0)


@given(
    st.lists(st.tuples(times, times, times, times, times), max_size=20),
    st.floats(-10.0, 60.0),
    st.floats(0.1, 60.0),
    st.booleans(),
)
def test_busy_time_and_gaps_are_the_window(
    drawn: list[tuple[float, float, float, float, float]], begin: float, length: float, first_stage: bool
) -> None:
    waves, clock = [], 0.0
    for number, (pause, runnable, arrives, cost, blocked) in enumerate(drawn):
        launched = clock + pause
        start = max(launched, clock + arrives)
        more = {"runnable": clock + runnable, "launched": launched, "input": clock + arrives}
        waves.append(_wave(number, start, start + cost, blocked=blocked, **more))
        clock = start + cost
    found = split(waves, begin, begin + length, first_stage=first_stage)
    assert all(getattr(found, cause) >= 0 for cause in CAUSES)
    assert found.window == pytest.approx(length)
    inside = sum(max(0.0, min(w.end, begin + length) - max(w.start, begin)) for w in waves)
    assert found.busy == pytest.approx(inside, abs=1e-9)


def test_costs_are_held_against_the_profile() -> None:
    stage = load_profile("profile-pp4").stages(4)[0]
    seconds = 4e-6 * (
        stage.wave + 300 * stage.token + stage.attention * (100 * 50 + 200 * 1100) + stage.prefix * 1000
    )
    right = [_wave(0, 1.0, 1.0 + seconds, spans=((0, 100), (1000, 200)), cost=seconds)]
    assert cost_error(right, stage, 4.0) == pytest.approx(0.0, abs=1e-9)
    assert cost_error(right, stage, 8.0) == pytest.approx(0.5)
    busy_for_longer = [_wave(0, 1.0, 1.0 + 2 * seconds, spans=((0, 100), (1000, 200)), cost=seconds)]
    assert cost_error(busy_for_longer, stage, 4.0) == pytest.approx(1.0)
    assert cost_error([], stage, 4.0) == 0.0


def test_cpu_time_counts_from_launch_to_launch() -> None:
    waves = [_wave(i, i, i + 0.5, cpu=10 + 0.004 * i, loop_cpu=5 + 0.003 * i) for i in range(5)]
    found = host_time(waves, 10)
    assert (found.loop_wave, found.process_wave) == (pytest.approx(3.0), pytest.approx(4.0))
    assert (found.loop_request, found.process_request) == (pytest.approx(1.5), pytest.approx(2.0))
    assert host_time(waves[:1], 1).loop_wave == 0.0


def test_a_trace_is_read_up_to_its_last_complete_line(tmp_path: Path) -> None:
    line = {"wave": 0, "kind": "extend", "rids": ["a", "b"], "spans": [[0, 5], [3, 4]], "runnable": 1.0}
    line |= {
        "launched": 2.0,
        "input": 3.0,
        "start": 3.0,
        "end": 4.0,
        "cost": 1.0,
        "blocked": 0.3,
        "cpu": 0.1,
        "loop_cpu": 0.2,
    }
    file = tmp_path / "stage0.jsonl"
    file.write_text(
        json.dumps(line) + "\n" + json.dumps(line | {"wave": 1, "rids": ["c"]}) + '\n{"wave": 2, "ki'
    )
    waves = read_stage(file)
    assert [wave.wave for wave in waves] == [0, 1]
    assert waves[0] == parse(json.dumps(line)) and waves[0].spans == ((0, 5), (3, 4))
    assert [wave.wave for wave in of_requests(waves, {"b"})] == [0]


# --- what counts, and tables ------------------------------------------------------------------------


def _row(system: str, cell: str, number: int, speed: float, busy: float = 0.8, **more: Any) -> dict[str, Any]:
    host = dict.fromkeys(("loop_wave", "process_wave", "loop_request", "process_request"), 1.0)
    stage = {**dict.fromkeys(CAUSES, 0.0), "busy": busy, "waves": 3, "host_ms": host, "cost_error": 0.0}
    row = {"system": system, "cell": cell, "round": number, "input_tokens_s": speed, "busy": busy}
    row |= {
        "first_p50_s": 1.0,
        "first_p95_s": 2.0,
        "kinds": {},
        "output_tokens_s": 3.0,
        "gap_p99_s": None,
        "idle": 0.5,
        "window_s": 4.0,
    }
    return row | {"stages": [stage], "doubts": [], "front_end": 0.1, **more}


ROWS = [
    *(_row("stock-4096", "a:8", n, speed) for n, speed in enumerate([90.0, 110.0])),
    *(_row("stock-8192", "a:8", n, speed, 0.5) for n, speed in enumerate([200.0, 200.0])),
    *(_row("wavepp-timed", "a:8", n, speed, 0.9) for n, speed in enumerate([300.0, 330.0])),
    _row("stock-4096", "b:8", 0, 1000.0),
    _row("stock-8192", "b:8", 0, 100.0),
    _row("wavepp-timed", "b:8", 0, 900.0),
    _row("wavepp-timed", "b:8", 1, 9000.0, doubts=["the front end computed for 50% of the time"]),
]


def test_a_cell_is_held_against_its_best_stock_and_against_one_for_all() -> None:
    found = report.compare(ROWS)
    assert found["best_single_stock"] == "stock-4096"
    own = {(row["cell"], row["system"]): row for row in found["cells"]}
    a, b = own["a:8", "wavepp-timed"], own["b:8", "wavepp-timed"]
    assert (a["best_stock"], a["over_best_stock"], a["over_single_stock"]) == ("stock-8192", 1.575, 3.15)
    assert (a["bound"], a["of_bound"], a["spread"]) == (2.0, 0.7875, pytest.approx(0.1))
    assert (b["best_stock"], b["over_best_stock"], b["spread"]) == ("stock-4096", 0.9, None)
    # Stock's device time is half of its 1.575 times as long a time, of which 0.9 were busy.
    assert a["short"] == {**dict.fromkeys(CAUSES[1:], 0.0), "device": pytest.approx(0.9 - 0.7875)}
    mean = found["geomean"]["wavepp-timed"]
    assert mean["over_best_stock"] == pytest.approx((1.575 * 0.9) ** 0.5)
    assert mean["over_single_stock"] == pytest.approx((3.15 * 0.9) ** 0.5)


def test_what_is_missing_to_the_bound_adds_up() -> None:
    stock = _row("stock-4096", "a:8", 0, 100.0, 0.6)
    own = _row("wavepp-timed", "a:8", 0, 120.0, 0.8)
    own["stages"][0] |= {"fill": 0.15, "host": 0.05}
    row = report.compare([stock, own])["cells"][1]
    assert row["short"]["fill"] == 0.15 and row["short"]["device"] == pytest.approx(0.08)
    assert row["of_bound"] + sum(row["short"].values()) == pytest.approx(1.0)
    assert "device time" in report.text([stock, own])


def test_the_report_tells_what_does_not_count() -> None:
    text = report.text(ROWS)
    assert "invalid: b:8 wavepp-timed round 1: the front end computed for 50% of the time" in text
    assert "9000" not in text
    assert "single stock: stock-4096" in text
    # Without stock there is nothing to compare with.
    assert report.text([_row("wavepp-static", "a:8", 0, 5.0)])


def test_prefills_are_told_apart_by_the_kind_of_request() -> None:
    def answer(tokens: int, cached: int, seconds: float) -> Answer:
        return Answer(Prepared("", b"", tokens, cached), 5.0, (5.0 + seconds,), 1, cached)

    cold, warm = [answer(64, 0, 8.0)], [answer(64, 32, seconds) for seconds in (2.0, 4.0, 6.0)]
    found = kinds([*cold, *warm], 2.0)
    assert list(found) == ["64, 0 cached", "64, 32 cached"]
    assert found["64, 0 cached"] == {"p50": 4.0, "p95": 4.0} and found["64, 32 cached"]["p50"] == 2.0
    assert kinds(cold, 1.0) == {}
    assert kinds([answer(tokens, 0, 1.0) for tokens in range(9)], 1.0) == {}
    assert "64, 32 cached" in report.text([_row("wavepp-static", "a:8", 0, 5.0, kinds=found)])


def test_the_report_of_nothing_that_counts_is_why() -> None:
    broken = {"system": "wavepp-mpu", "cell": "a:8", "round": 1, "doubts": ["no answer"]}
    assert report.text([broken]) == "invalid: a:8 wavepp-mpu round 1: no answer"


def test_an_interrupted_grid_keeps_what_was_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stopped = []

    class Idle:
        def __init__(self, *_: object) -> None:
            pass

        def __enter__(self) -> Idle:
            return self

        def __exit__(self, *_: object) -> None:
            stopped.append(self)

    def interrupted(_: object) -> dict[str, Any]:
        raise KeyboardInterrupt

    monkeypatch.setattr(grid, "Bench", Idle)
    monkeypatch.setattr(grid, "make_model", lambda *_, **__: tmp_path)
    parser = argparse.ArgumentParser()
    grid.add_server_arguments(parser)
    options = parser.parse_args(["--out", str(tmp_path)])
    shared = grid.setting(options, context=64, pool=64, concurrency=1)
    loads: dict[str, grid.Measure] = {
        "a:8": lambda _: _row("stock-8192", "a:8", 0, 5.0),
        "b:8": interrupted,
    }
    with pytest.raises(SystemExit) as left, grid.fail():
        grid.compared(options, shared, [system("stock-8192")], loads)
    assert left.value.code == 130 and len(stopped) == 1
    kept = json.loads((tmp_path / "rows.json").read_text())
    assert [row["input_tokens_s"] for row in kept["rows"]] == [5.0]


def test_a_measurement_of_the_host_does_not_count() -> None:
    row = _row("stock-8192", "a:8", 0, 1.0)
    assert doubts(row, []) == []
    assert "front end" in doubts(row | {"front_end": 0.21}, [])[0]
    late = {**row["stages"][0], "host": 0.3}
    idler = {**row["stages"][0], "busy": 0.1, "host": 0.9}
    assert doubts(row | {"stages": [row["stages"][0], idler]}, []) == []
    assert "stage 0" in doubts(row | {"stages": [late, idler]}, [])[0]
    assert "1.5% off" in doubts(row | {"stages": [{**row["stages"][0], "cost_error": 0.015}]}, [])[0]


# --- the client -------------------------------------------------------------------------------------


class _Handler(BaseHTTPRequestHandler):
    """Streams `max_new_tokens` events; refuses what has no input."""

    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with self.server.lock:  # type: ignore[attr-defined]
            self.server.order.append(asked["rid"])  # type: ignore[attr-defined]
        if not asked["input_ids"]:
            self.send_error(400, "no input")
            return
        count = asked["sampling_params"]["max_new_tokens"]
        self.send_response(200)
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        for number in range(1, count + 1):
            reason = {"type": "length"} if number == count else None
            meta = {"finish_reason": reason, "completion_tokens": number, "cached_tokens": 7}
            self._chunk(b"data: " + json.dumps({"meta_info": meta}).encode() + b"\n\n")
        self._chunk(b"data: [DONE]\n\n")
        self._chunk(b"")

    def setup(self) -> None:
        super().setup()
        with self.server.lock:  # type: ignore[attr-defined]
            self.server.connections += 1  # type: ignore[attr-defined]

    def _chunk(self, content: bytes) -> None:
        self.wfile.write(b"%x\r\n%s\r\n" % (len(content), content))

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def http_server() -> Iterator[Any]:
    server: Any = ThreadingHTTPServer(("127.0.0.1", 0), _Handler)
    server.order, server.lock, server.connections = [], threading.Lock(), 0
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield server
    server.shutdown()
    thread.join(timeout=10)
    server.server_close()


def _request(rid: str, ids: str, output: int = 3) -> Prepared:
    from benchmarks.cells import body

    return Prepared(rid, body(rid, [ids], output), 1, 0)


def test_the_client_answers_in_the_order_of_the_jobs(http_server: Any) -> None:
    jobs = [[_request(f"{job}-{turn}", "5") for turn in range(3)] for job in range(5)]
    answers = run("127.0.0.1", http_server.server_port, jobs, 2, 30.0)
    assert [a.request.rid for a in answers] == [r.rid for job in jobs for r in job]
    assert all((len(a.arrivals), a.output, a.cached, len(a.gaps)) == (3, 3, 7, 2) for a in answers)
    assert all(a.first >= 0 and min(a.gaps) >= 0 for a in answers)
    for job in range(5):  # turns of a job follow each other
        own = [rid for rid in http_server.order if rid.startswith(f"{job}-")]
        assert own == [f"{job}-{turn}" for turn in range(3)]
        turns = [a for a in answers if a.request.rid.startswith(f"{job}-")]
        assert all(one.arrivals[-1] <= other.sent for one, other in pairwise(turns))


def test_the_client_keeps_a_connection_but_not_over_a_pause(http_server: Any) -> None:
    first, second, third = (_request(rid, "5") for rid in "abc")
    later = Prepared(third.rid, third.body, 1, 0, pause=0.01)
    assert len(run("127.0.0.1", http_server.server_port, [[first, second, later]], 1, 30.0)) == 3
    assert http_server.connections == 2


def test_the_client_names_the_request_that_failed(http_server: Any) -> None:
    with pytest.raises(LoadError, match=r"request bad: the server answered 400"):
        run("127.0.0.1", http_server.server_port, [[_request("good", "5")], [_request("bad", "")]], 1, 30.0)


def test_the_client_waits_no_longer_than_it_may(http_server: Any) -> None:
    late = Prepared("late", _request("late", "5").body, 1, 0, at=3600.0)
    with pytest.raises(LoadError, match="0 of 1 requests were answered within 0 s"):
        run("127.0.0.1", http_server.server_port, [[late]], 1, 0.1)


def test_the_model_is_compared_with_what_counts() -> None:
    def row(name: str, cell: str, **more: Any) -> dict[str, Any]:
        shown = {"requests": 16, "front_end": 0.05, "input_tokens_s": 400_000.0, "doubts": []}
        return {"system": name, "cell": cell, **shown, **more}

    rows = [
        row("stock-8192", "suffix-4k:8"),
        row("wavepp-static", "suffix-4k:8"),
        row("wavepp-static", "suffix-4k:8", front_end=2.0),
        row("wavepp-static", "suffix-4k:8", doubts=["the host was late"]),
        row("wavepp-static", "mixed-16k+32:8"),
    ]
    found = list(compared({"profile": "glm-5.2-b300", "options": {"pp": 4}, "rows": rows}))
    assert [(each["system"], each["cell"]) for each in found] == [("wavepp-static", "suffix-4k:8")] * 2
    quick, slow = (each["predicted"] for each in found)
    assert slow == pytest.approx(200_000, rel=0.1), "the front takes 5 us for a token, and is the bottleneck"
    assert quick > 1.5 * slow
    assert all(each["ratio"] == each["predicted"] / 400_000 for each in found)
