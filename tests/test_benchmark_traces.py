"""Retention, traces and pictures of the grid; pure, but for their files."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import retention, timeline_plot, traces
from benchmarks.cells import Prepared
from benchmarks.load import Answer


def _common(one: list[int], other: list[int]) -> int:
    return next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), len(other))


# --- retention and traces ---------------------------------------------------------------------------


def test_retention_offers_sessions_at_a_rate_with_cold_prompts_between(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name, value in (("SESSIONS", 3), ("PROMPT", 50), ("PREFIX", 40), ("COLD", 20)):
        monkeypatch.setattr(retention, name, value)
    seeds, measured = retention.offered(0.5, 400, 4.0)
    assert [(len(seeds), seed.tokens, seed.cached) for seed in seeds] == [(3, 40, 0)] * 3
    prefixes = [json.loads(seed.body)["input_ids"] for seed in seeds]
    warm = [request for request in measured if request.cached]
    assert len(warm) == 400 and len(measured) == 600
    assert all(json.loads(request.body)["input_ids"][:40] in prefixes for request in warm)
    times = [request.at for request in measured]
    assert times == sorted(times)
    assert times[-1] / 400 == pytest.approx(4.0 / 0.5, rel=0.2)


def test_a_good_hit_reuses_most_of_what_could_be() -> None:
    def answer(cached: int, reused: int) -> Answer:
        return Answer(Prepared("a", b"", 100, cached), 0.0, (1.0,), 1, reused)

    found = retention.hits([answer(80, 80), answer(80, 64), answer(80, 40), answer(0, 0), answer(80, 96)])
    assert found == {"reused_of_reusable": pytest.approx((1 + 0.8 + 0.5 + 1) / 4), "good_hits": 0.75}


SESSION = {
    "id": "s1",
    "bs": 4,
    "tool": 5,
    "sys": 4,
    "reqs": [
        [0.0, 14, 9, 0, [1, 2, 7, 2], 3.0, 0.0],
        {"sub": "x", "t": 1, "dur_ms": 2, "tool": 0, "sys": 0, "reqs": []},
        [20.0, 19, 1, 3, [20, 1], 3.0, 6.5],
        [30.0, 99, 1, 4, [30, 21], 3.0, None],
    ],
}


def test_a_session_keeps_what_its_trace_says() -> None:
    first, second = traces.sessions([json.dumps(SESSION)], longest=50, turns=9)[0]
    assert first.blocks == ("system/0", "system/1", "s1/7", "s1/8")
    assert second.blocks == ("system/0", "system/1", "s1/7", "s1/20", "s1/1/4")
    assert (first.tokens, first.kept, second.tokens, second.kept, second.think) == (14, 0, 19, 12, 6.5)
    assert traces.sessions([json.dumps(SESSION)], longest=99, turns=9)[0][2].think == 10.0
    assert len(traces.sessions([json.dumps(SESSION)], longest=99, turns=1)[0]) == 1
    assert traces.sessions([json.dumps(SESSION)], longest=13, turns=9) == []
    one, two = (
        json.loads(job.body)["input_ids"] for job in traces.jobs([[first, second]], 4, 2, 5.0, 8.0)[0]
    )
    assert (len(one), len(two)) == (14, 19)
    assert _common(one, two) == 12
    made = traces.jobs([[first, second]], 4, 2, 5.0, 8.0)[0]
    assert [job.pause for job in made] == [0.0, 40.0]
    assert [json.loads(job.body)["sampling_params"]["max_new_tokens"] for job in made] == [2, 1]


def test_requests_with_global_blocks_share_them(tmp_path: Path) -> None:
    lines = [
        json.dumps({"timestamp": 0, "input_length": 1000, "output_length": 6, "hash_ids": ids})
        for ids in ([0, 1], [0, 2])
    ]
    file = tmp_path / "trace.jsonl"
    file.write_text("\n".join(lines))
    found, size = traces.read(file, 2, 4096, 1)
    one, two = (json.loads(job[0].body)["input_ids"] for job in traces.jobs(found, size, 1, 0.0, 1.0))
    assert (len(one), len(two), _common(one, two)) == (1000, 1000, 512)
    file.write_text('{"text": "hello"}')
    with pytest.raises(ValueError, match="no trace of a known format"):
        traces.read(file, 1, 4096, 1)


# --- pictures ---------------------------------------------------------------------------------------


def _run(folder: Path, name: str) -> None:
    trace = folder / f"0-{name}" / "trace"
    trace.mkdir(parents=True)
    for stage in range(2):
        lines = []
        for number in range(3):
            start = 100.0 + 2 * number + stage
            line = {
                "wave": number,
                "kind": "extend",
                "rids": ["seed-0"] if not number else ["a:8-0", "a:8-1"],
            }
            line |= {"spans": [[0, 30]] if not number else [[0, 10], [5, 30]], "runnable": start, "cpu": 0.0}
            line |= {"launched": start, "input": start * (stage > 0), "start": start, "end": start + 1.0}
            lines.append(json.dumps(line | {"cost": 1.0, "loop_cpu": 0.0, "blocked": 0.0}) + "\n")
        (trace / f"stage{stage}.jsonl").write_text("".join(lines))
    (folder / "rows.json").write_text(json.dumps({"dilation": 4.0}))


def test_a_trace_for_perfetto_has_a_row_for_each_stage_and_only_the_cell(tmp_path: Path) -> None:
    _run(tmp_path, "stock-8192")
    systems = {"stock-8192": timeline_plot.load(tmp_path, "stock-8192", "a:8")}
    assert timeline_plot.dilation_of(tmp_path) == 4.0
    events = timeline_plot.perfetto(systems, 4.0)["traceEvents"]
    waves = [event for event in events if event["ph"] == "X"]
    assert [(event["tid"], event["ts"], event["dur"]) for event in waves] == [
        (0, 0.0, 250_000.0),
        (0, 500_000.0, 250_000.0),
        (1, 250_000.0, 250_000.0),
        (1, 750_000.0, 250_000.0),
    ]
    assert {event["args"]["name"] for event in events if event["ph"] == "M"} == {
        "stock-8192",
        "stage 0",
        "stage 1",
    }
    assert timeline_plot.parts(systems["stock-8192"][0][0]) == [
        ("a:8-0", 102.0, 102.25),
        ("a:8-1", 102.25, 103.0),
    ]
    with pytest.raises(ValueError, match="no requests of b:8"):
        timeline_plot.load(tmp_path, "stock-8192", "b:8")
    with pytest.raises(FileNotFoundError, match="no traces of wavepp-mpu"):
        timeline_plot.load(tmp_path, "wavepp-mpu", "a:8")


def test_a_picture_of_two_systems_is_drawn(tmp_path: Path) -> None:
    for name in ("stock-8192", "wavepp-mpu"):
        _run(tmp_path, name)
    systems = {name: timeline_plot.load(tmp_path, name, "a:8") for name in ("stock-8192", "wavepp-mpu")}
    timeline_plot.draw(systems, 4.0, tmp_path / "picture.png", "a:8", [0.0, 1.0])
    assert (tmp_path / "picture.png").read_bytes().startswith(b"\x89PNG")
