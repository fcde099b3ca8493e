"""The flow of `wavepp demo`: what it compares, prints and returns. No server is started here."""

from __future__ import annotations

import argparse
import contextlib
import json
import signal
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from sglang_wavepp.launch import demo
from sglang_wavepp.launch.replay import Result, Session, load_sessions
from sglang_wavepp.launch.server import ServerError


def answers(url: str, sessions: list[Session], *, concurrency: int, progress: Any) -> list[Result]:
    """In place of `replay`: what a server at `url` answers, "http://wrong" one token wrongly."""
    results = []
    for session in sessions:
        for number, turn in enumerate(session.turns):
            wrong = "wrong" in url and number == 1
            output = (1, 2, 9) if wrong else (1, 2, 3)
            results.append(Result(session.name, number, len(turn.prompt), 500, output, 0.1, 0.3))
            progress(results[-1])
    return results


@pytest.fixture
def options(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> argparse.Namespace:
    """Parsed options; no server is started, but what it would be started with is appended to `.starts`."""
    starts: list[dict[str, Any]] = []

    @contextlib.contextmanager
    def start(model: Path, **given: Any) -> Iterator[SimpleNamespace]:
        assert (model / "config.json").is_file()
        starts.append(given)
        given["log_path"].write_text("log")
        counted = {"internal_states": [{"wavepp": {"waves": 7, "admission_ms": {"p50": 1.5}}}]}
        url = f"http://{parsed.wavepp_answers if given['wavepp'] else 'right'}"
        yield SimpleNamespace(url=url, get=lambda path: counted, check=lambda: None, with_log=str)

    monkeypatch.setattr(demo, "Server", start)
    monkeypatch.setattr(demo, "replay", answers)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    parser = argparse.ArgumentParser()
    demo.add_arguments(parser)
    parsed = parser.parse_args(["--json", "--sessions", "2", "--pp-size", "3", "--page-size", "16"])
    parsed.starts, parsed.wavepp_answers = starts, "right"
    return parsed


def test_the_demo_compares_wavepp_with_plain_sglang(
    options: argparse.Namespace, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert demo.run(options) == 0
    printed = capsys.readouterr()
    report = json.loads(printed.out)
    assert printed.err == ""
    started = [(given["wavepp"], given["pp_size"], given["page_size"]) for given in options.starts]
    assert started == [(True, 3, 16), (False, 1, 16)]
    assert report["ok"] and (report["answers_equal"], report["answers"], report["requests"]) == (12, 12, 12)
    prompts = [len(t.prompt) for s in load_sessions(vocab_size=961, limit=2) for t in s.turns]
    assert report["prompt_tokens"] == sum(prompts) and report["cached_tokens"] == 6000
    assert report["wavepp"]["waves"] == 7 and report["plain"]["requests"] == 12
    assert list(tmp_path.iterdir()) == []


def test_the_table_says_na_for_what_the_server_does_not_count(
    options: argparse.Namespace, capsys: pytest.CaptureFixture[str]
) -> None:
    options.json = False
    assert demo.run(options) == 0
    printed = capsys.readouterr()
    rows = dict(line.strip().split(": ", 1) for line in printed.out.splitlines() if ": " in line)
    assert {name: value.strip() for name, value in rows.items()} == {
        "requests": "12",
        "prompt tokens": "21,342",
        "cached tokens": "6,000",
        "reuse": "28.1 %",
        "rounds per request": "n/a",
        "admission latency p50 / p99": "1.50 / n/a ms",
        "time to first token p50 / p99": "100 / 100 ms",
        "waves": "7",
        "answers equal plain SGLang": "yes (12 of 12)",
    }
    assert "starting WavePP, 3 stages" in printed.err and "12/12" in printed.err


def test_the_demo_reports_wrong_answers(
    options: argparse.Namespace, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    options.wavepp_answers = "wrong"
    assert demo.run(options) == 1
    printed = capsys.readouterr()
    report = json.loads(printed.out)
    assert not report["ok"] and report["answers_equal"] == 10
    assert "session trace_0003, turn 1: token 2 of the answer differs" in printed.err
    (kept,) = tmp_path.iterdir()
    assert f"logs: {kept}" in printed.err and (kept / "wavepp.log").exists()


def test_the_demo_ends_with_one_line_on_errors_and_130_on_ctrl_c(
    options: argparse.Namespace,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    options.sessions = 13
    assert demo.run(options) == 2
    assert capsys.readouterr() == ("", "error: 13 sessions were asked for, agent_sessions.jsonl holds 12\n")
    options.sessions, options.model = 2, tmp_path
    assert demo.run(options) == 2
    assert "is not a model folder" in capsys.readouterr().err
    options.model = None
    for raised, code in ((KeyboardInterrupt(), 130), (ServerError("it died: why (log: x)\ntail"), 2)):

        def fail(*_: Any, error: BaseException = raised, **__: Any) -> None:
            raise error

        monkeypatch.setattr(demo, "replay", fail)
        assert demo.run(options) == code
    printed = capsys.readouterr()
    assert printed.out == "" and printed.err.startswith("error: it died: why (log: x)\nlogs: ")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_signals_end_the_demo_like_exceptions(number: signal.Signals) -> None:
    before = signal.getsignal(number)
    with pytest.raises(SystemExit) as ended, demo.signals_raise():
        signal.raise_signal(number)
    assert ended.value.code == 128 + number
    assert signal.getsignal(number) == before


@pytest.mark.parametrize("given", ["--pp-size=1", "--pp-size=9", "--sessions=0", "--page-size=x"])
def test_the_demo_refuses_numbers_out_of_range(given: str, capsys: pytest.CaptureFixture[str]) -> None:
    parser = argparse.ArgumentParser()
    demo.add_arguments(parser)
    with pytest.raises(SystemExit) as ended:
        parser.parse_args([given])
    assert ended.value.code == 2
    assert "is not a number from" in capsys.readouterr().err
