"""Replay of agent sessions, and the statistics over it; a stand-in answers as the server."""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import itertools
import json
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from sglang_wavepp.launch import demo
from sglang_wavepp.launch import server as server_module
from sglang_wavepp.launch.replay import (
    LOWEST_ID,
    ReplayError,
    Result,
    Session,
    Turn,
    differences,
    load_sessions,
    percentile,
    replay,
    summary,
)

VOCAB = 961
SAMPLE = Path(server_module.__file__).parent / "data" / "agent_sessions.jsonl"
BOUND = 20.0
"""Seconds that any wait here may take before the test fails."""


def common_prefix(a: tuple[int, ...], b: tuple[int, ...]) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


# ---- the sample and its loader


def test_tokens_are_a_function_of_the_file_and_the_vocabulary() -> None:
    sessions = load_sessions(vocab_size=VOCAB)
    assert sessions == load_sessions(SAMPLE, vocab_size=VOCAB)
    text = json.dumps([[turn.prompt for turn in s.turns] for s in sessions])
    # Recorded results name prompts by session and turn: these must stay what they were.
    assert hashlib.sha256(text.encode()).hexdigest()[:16] == "0d628823ed634198"
    tokens = {t for s in sessions for turn in s.turns for t in turn.prompt}
    assert min(tokens) == LOWEST_ID and max(tokens) == VOCAB - 1
    assert {t for s in load_sessions(vocab_size=100) for t in s.turns[0].prompt} == set(range(LOWEST_ID, 100))


def test_each_turn_starts_with_what_it_keeps_of_the_previous_one() -> None:
    for session in load_sessions(vocab_size=VOCAB):
        assert session.turns[0].kept == 0
        for previous, turn in itertools.pairwise(session.turns):
            kept = turn.kept
            assert 0 < kept <= min(len(previous.prompt), len(turn.prompt) - 1)
            assert turn.prompt[:kept] == previous.prompt[:kept]
            # `kept` is all of it, but for tokens that are equal by chance.
            assert common_prefix(previous.prompt, turn.prompt) < kept + 4


def test_all_sessions_share_the_system_prefix_and_nothing_else() -> None:
    shared = json.loads(SAMPLE.read_text().splitlines()[0])["sys"]
    assert shared >= 512
    sessions = load_sessions(vocab_size=VOCAB)
    for one, other in itertools.combinations(sessions, 2):
        for turn in other.turns:
            assert shared <= common_prefix(one.turns[0].prompt, turn.prompt) < shared + 4


def test_every_third_session_has_one_compaction_and_the_others_append() -> None:
    for number, session in enumerate(load_sessions(vocab_size=VOCAB)):
        shrunk = [b.kept < len(a.prompt) for a, b in itertools.pairwise(session.turns)]
        compactions = [2 * b.kept < len(a.prompt) for a, b in itertools.pairwise(session.turns)]
        # Appending turns may lose the last few blocks, as in the real sessions.
        assert sum(shrunk) <= 1
        assert sum(compactions) == (number % 3 == 2)


def test_the_sample_is_small_enough_for_two_cores() -> None:
    assert SAMPLE.stat().st_size < 60_000
    sessions = load_sessions(vocab_size=VOCAB)
    assert len(sessions) == 12 and len({s.name for s in sessions}) == 12
    for session in sessions:
        assert len(session.turns) == 6
        assert all(1000 <= len(turn.prompt) <= 4096 and 4 <= turn.output <= 16 for turn in session.turns)
    fresh = sum(len(turn.prompt) - turn.kept for s in sessions[:6] for turn in s.turns)
    assert fresh < 20_000
    assert max(len(turn.prompt) for s in sessions for turn in s.turns) + 16 < demo.CONTEXT


def test_partial_blocks_are_completed_and_kept_blocks_cut(tmp_path: Path) -> None:
    turns = [[0, 10, 4, 0, [0, 3]], [5, 13, 4, 3, [3, 1]], [9, 12, 4, 2, [4, 1]]]
    record = {"id": "a", "bs": 4, "sys": 4, "reqs": turns}
    file = tmp_path / "sessions.jsonl"
    file.write_text(json.dumps(record) + "\n" + json.dumps({**record, "id": "b"}) + "\n")
    a, b = load_sessions(file, vocab_size=50_000)
    assert [len(t.prompt) for t in a.turns] == [10, 13, 12]
    assert [t.kept for t in a.turns] == [0, 10, 8]
    assert a.turns[1].prompt[:10] == a.turns[0].prompt
    assert a.turns[2].prompt[:8] == a.turns[0].prompt[:8] and a.turns[2].prompt[8:] != a.turns[1].prompt[8:12]
    assert a.turns[0].prompt[:4] == b.turns[0].prompt[:4] and a.turns[0].prompt[4:8] != b.turns[0].prompt[4:8]


def test_the_loader_refuses_what_it_cannot_do() -> None:
    assert [s.name for s in load_sessions(vocab_size=VOCAB, limit=2)] == ["trace_0003", "trace_0004"]
    with pytest.raises(ReplayError, match=r"13 sessions were asked for, agent_sessions.jsonl holds 12"):
        load_sessions(vocab_size=VOCAB, limit=13)
    with pytest.raises(ReplayError, match="vocabulary of 16 tokens"):
        load_sessions(vocab_size=16)


def test_the_script_scales_appended_turns_and_compactions() -> None:
    path = Path(__file__).parents[1] / "scripts" / "make_sample.py"
    spec = importlib.util.spec_from_file_location("make_sample", path)
    assert spec is not None and spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    d = script.DIVISOR
    window = [
        [7.0, 100 * d, 300 * d, 0, [1, 37]],
        [9.0, 120 * d, 1, 100 * d // 64, [40, 8]],
        [30.0, 115 * d, 10 * d, 20 * d // 64, [60, 40]],
    ]
    scaled = script.scale("x", window, shared=2)
    assert scaled == {
        "id": "x",
        "bs": 16,
        "sys": 32,
        # 100 tokens are 7 blocks, the last one partial: the next turn keeps and completes it. The third turn
        # keeps 20 tokens, which is less than the shared prefix, whose two blocks it has anyhow.
        "reqs": [[0.0, 100, 16, 0, [0, 7]], [2.0, 120, 4, 7, [7, 1]], [23.0, 115, 10, 2, [8, 6]]],
    }
    assert script.runs([3, 4, 9, 10, 11, 2]) == [3, 2, 9, 3, 2, 1]


# ---- statistics


def result(session: str = "s", turn: int = 0, output: tuple[int, ...] = (1, 2), **given: Any) -> Result:
    values = {"prompt_tokens": 100, "cached_tokens": 0, "ttft": 0.1, "latency": 0.2} | given
    return Result(session=session, turn=turn, output_ids=output, **values)


def test_percentiles_are_observed_values() -> None:
    values = [float(v) for v in range(100, 0, -1)]
    assert [percentile(values, share) for share in (0.0, 0.01, 0.5, 0.99, 1.0)] == [1, 1, 50, 99, 100]
    assert percentile([7.0], 0.5) == percentile([7.0], 0.99) == 7.0
    assert percentile([1.0, 2.0, 3.0], 0.5) == 2.0
    with pytest.raises(ValueError, match="no values"):
        percentile([], 0.5)


def test_summary_adds_up() -> None:
    results = [result(cached_tokens=60, ttft=0.1), result(prompt_tokens=300, cached_tokens=240, ttft=0.5)]
    assert summary(results) == {
        "requests": 2,
        "prompt_tokens": 400,
        "cached_tokens": 300,
        "reuse": 0.75,
        "output_tokens": 4,
        "ttft_ms": {"p50": 100.0, "p99": 500.0},
        "latency_ms": {"p50": 200.0, "p99": 200.0},
    }


def test_differences_name_turn_and_token() -> None:
    good = [result(turn=0, output=(1, 2, 3)), result(turn=1, output=(4, 5))]
    assert differences(good, good) == []
    longer = [good[0], result(turn=1, output=(4, 5, 6))]
    wrong = [result(turn=0, output=(1, 9, 3)), good[1]]
    (line,) = differences(wrong, good)
    assert "session s, turn 0: token 1 of the answer differs: [9, 3]" in line
    assert "token 2" in differences(longer, good)[0]
    with pytest.raises(ValueError, match="not of the same replay"):
        differences(good, good[::-1])


# ---- replay against a stand-in server in this process


class Replies:
    """What the stand-in does with a request, and what it saw."""

    def __init__(self) -> None:
        self.bodies: list[dict[str, Any]] = []
        self.running = 0
        self.most_running = 0
        self.lock = threading.Lock()
        self.before: Callable[[dict[str, Any]], Any] = lambda body: None
        self.status = 200
        self.tail: list[dict[str, Any]] | None = None
        """Events that replace the last one of an answer."""

    def events(self, body: dict[str, Any]) -> list[dict[str, Any]]:
        count = body["sampling_params"]["max_new_tokens"]
        seed = sum(body["input_ids"])
        ids = [(seed + i) % VOCAB for i in range(count)]
        events: list[dict[str, Any]] = []
        for n in range(count + 1):
            reason = {"type": "length", "length": count} if n == count else None
            meta = {
                "cached_tokens": len(body["input_ids"]) // 2,
                "completion_tokens": n,
                "finish_reason": reason,
            }
            events.append({"output_ids": ids[:n], "meta_info": meta})
        return events if self.tail is None else [*events[:-1], *self.tail]


@pytest.fixture
def fake() -> Iterator[tuple[str, Replies]]:
    replies = Replies()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["content-length"])))
            with replies.lock:
                replies.bodies.append(body)
                replies.running += 1
                replies.most_running = max(replies.most_running, replies.running)
            replies.before(body)
            events = replies.events(body)
            with replies.lock:
                replies.running -= 1
            self.send_response(replies.status)
            self.end_headers()
            with contextlib.suppress(OSError):
                for event in events if replies.status == 200 else [{"error": "no such thing"}]:
                    self.wfile.write(b"data: " + json.dumps(event).encode() + b"\n\n")
                self.wfile.write(b"data: [DONE]\n\n")

        def log_message(self, format: str, *args: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as http:
        http.daemon_threads = True
        thread = threading.Thread(target=http.serve_forever, daemon=True, kwargs={"poll_interval": 0.01})
        thread.start()
        yield f"http://127.0.0.1:{http.server_address[1]}", replies
        http.shutdown()


def make_sessions(count: int, turns: int = 3) -> list[Session]:
    return [
        Session(f"s{s}", tuple(Turn(tuple(range(100 * s, 100 * s + 10 + t)), 0, 5) for t in range(turns)))
        for s in range(count)
    ]


def test_replay_returns_all_results_in_order(fake: tuple[str, Replies]) -> None:
    url, replies = fake
    seen: list[Result] = []
    sessions = make_sessions(5)
    results = replay(url, sessions, concurrency=3, max_new_tokens=4, progress=seen.append)
    assert [(r.session, r.turn) for r in results] == [(f"s{s}", t) for s in range(5) for t in range(3)]
    assert sorted(seen, key=lambda r: (r.session, r.turn)) == results
    assert replies.most_running <= 3
    for r in results:
        assert r.prompt_tokens == 10 + r.turn and r.cached_tokens == r.prompt_tokens // 2
        prompt = sessions[int(r.session[1:])].turns[r.turn].prompt
        assert r.output_ids == tuple((sum(prompt) + i) % VOCAB for i in range(4))
        assert 0 < r.ttft <= r.latency < BOUND
    for s in range(5):
        lengths = [len(b["input_ids"]) for b in replies.bodies if b["input_ids"][0] == 100 * s]
        assert lengths == [10, 11, 12]
    sampling = {"temperature": 0, "max_new_tokens": 4, "ignore_eos": True}
    assert all(b["sampling_params"] == sampling for b in replies.bodies)


def test_sessions_run_in_parallel(fake: tuple[str, Replies]) -> None:
    url, replies = fake
    together = threading.Barrier(3, timeout=BOUND)
    replies.before = lambda body: together.wait()
    assert len(replay(url, make_sessions(3), concurrency=3)) == 9
    assert replies.most_running == 3


def test_a_refused_request_ends_the_replay(fake: tuple[str, Replies]) -> None:
    url, replies = fake
    replies.status = 400
    with pytest.raises(ReplayError, match=r"session s0, turn 0: the server answered 400: .*no such thing"):
        replay(url, make_sessions(1), concurrency=2)


@pytest.mark.parametrize(
    ("tail", "text"),
    [
        ([], "the stream ended before the answer did"),
        ([{"error": {"message": "too long"}}], "too long"),
        (
            [{"output_ids": [1], "meta_info": {"finish_reason": {"type": "abort"}, "completion_tokens": 1}}],
            "not a full answer: 1 tokens, .*abort",
        ),
    ],
)
def test_a_partial_answer_is_an_error(
    fake: tuple[str, Replies], tail: list[dict[str, Any]], text: str
) -> None:
    url, replies = fake
    replies.tail = tail
    with pytest.raises(ReplayError, match=text):
        replay(url, make_sessions(1), concurrency=1)


@pytest.mark.parametrize("limits", [{"request_timeout": 0.2}, {"timeout": 0.2}])
def test_a_silent_server_does_not_block_the_replay(fake: tuple[str, Replies], limits: dict[str, Any]) -> None:
    url, replies = fake
    release = threading.Event()
    replies.before = lambda body: release.wait(BOUND)
    began = time.monotonic()
    with pytest.raises(ReplayError, match=r"session s0, turn 0: .*timed out|longer than 0 s; 0 of 3 turns"):
        replay(url, make_sessions(1), concurrency=1, **limits)
    release.set()
    assert time.monotonic() - began < BOUND / 2
