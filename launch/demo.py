"""`wavepp demo`: real agent sessions on a WavePP server, and its answers against those of plain SGLang."""

from __future__ import annotations

import argparse
import contextlib
import json
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

from tqdm import tqdm

from sglang_wavepp.errors import WavePPError
from sglang_wavepp.launch.models import TOKENIZER_SIZE, make_model
from sglang_wavepp.launch.replay import (
    ReplayError,
    Result,
    Session,
    differences,
    load_sessions,
    replay,
    summary,
)
from sglang_wavepp.launch.server import Server, ServerError

LAYERS = 8
"""Of the demo's model, and thereby the largest number of stages."""
CONTEXT = 8192
"""Tokens; the sample's longest prompt has less than half of it."""


class DemoError(WavePPError):
    """The demo was asked for something that it cannot do."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Start a WavePP server on this machine's CPU, replay a sample of real coding-agent sessions, and "
        "compare every answer with plain SGLang's. Exit code 0: all answers are equal; 1: some differ; "
        "2: an error."
    )
    number = _number
    parser.add_argument("--pp-size", type=number(2, LAYERS), default=2, metavar="N", help="stages (2)")
    parser.add_argument("--model", type=Path, metavar="DIR", help="model folder (default: a tiny model)")
    parser.add_argument("--sessions", type=number(1, 1000), default=6, metavar="N", help="sessions (6)")
    parser.add_argument("--concurrency", type=number(1, 1000), default=4, metavar="N", help="at a time (4)")
    parser.add_argument("--page-size", type=number(1, 1024), default=1, metavar="N", help="tokens a page (1)")
    parser.add_argument("--port", type=number(1, 65535), default=0, metavar="N", help="(default: a free one)")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")
    parser.add_argument("--keep-logs", action="store_true", help="keep the servers' logs, and say where")


def run(args: argparse.Namespace) -> int:
    """The exit code: 0 if all answers are equal, 1 if not, 2 after an error, 130 after Ctrl-C.

    Leaves no process behind, also when SIGTERM or SIGHUP ends it (SystemExit), and no files unless there is
    something to look up in the logs.
    """
    say = _quiet if args.json and not sys.stderr.isatty() else _say
    keep = args.keep_logs
    folder = Path(tempfile.mkdtemp(prefix="wavepp-demo-"))
    try:
        with signals_raise():
            report, unequal = _demonstrate(args, folder, say)
    except KeyboardInterrupt:
        return 130
    except (WavePPError, OSError) as error:
        # A server's error goes on with lines of its log; the log itself is kept.
        keep = keep or isinstance(error, ServerError)
        print(f"error: {str(error).splitlines()[0]}", file=sys.stderr)
        return 2
    else:
        keep = keep or bool(unequal)
        print(json.dumps(report) if args.json else _table(report))
        for line in unequal[:5]:
            print(line, file=sys.stderr)
        return 1 if unequal else 0
    finally:
        if keep:
            print(f"logs: {folder}", file=sys.stderr)
        else:
            shutil.rmtree(folder, ignore_errors=True)


def _demonstrate(
    args: argparse.Namespace, folder: Path, say: Callable[[str], None]
) -> tuple[dict[str, Any], list[str]]:
    """The report, and a line for each answer that is not plain SGLang's."""
    began = time.monotonic()
    model = args.model or make_model(folder / "model", layers=LAYERS)
    sessions = load_sessions(vocab_size=_vocabulary(model), limit=args.sessions)

    def serve(name: str, pp_size: int, wavepp: bool) -> tuple[list[Result], dict[str, Any]]:
        stages = f"{pp_size} stages" if pp_size > 1 else "one stage"
        say(f"starting {name}, {stages} ...")
        with Server(
            model,
            pp_size=pp_size,
            wavepp=wavepp,
            page_size=args.page_size,
            context_length=CONTEXT,
            port=args.port,
            log_path=folder / f"{'wavepp' if wavepp else 'plain'}.log",
        ) as server:
            results = _replay(server, sessions, args.concurrency, name, hide=say is _quiet)
            return results, _statistics(server) if wavepp else {}

    results, statistics = serve("WavePP", args.pp_size, True)
    # One after the other: two servers at a time would be too much for a small machine's memory.
    expected, _ = serve("plain SGLang", 1, False)
    unequal = differences(results, expected)
    report = {
        "ok": not unequal,
        "stages": args.pp_size,
        "sessions": args.sessions,
        "concurrency": args.concurrency,
        "page_size": args.page_size,
        **summary(results),
        "wavepp": statistics,
        "plain": summary(expected),
        "answers_equal": len(results) - len(unequal),
        "answers": len(results),
        "seconds": round(time.monotonic() - began, 1),
    }
    return report, unequal


def _vocabulary(model: Path) -> int:
    """Prompts use token ids below this. In a large vocabulary the special tokens are at one of its ends."""
    try:
        config = json.loads((model / "config.json").read_text())
        size = int(config.get("text_config", config)["vocab_size"])
    except (OSError, ValueError, KeyError, AttributeError) as error:
        raise DemoError(f"{model} is not a model folder: its config.json gives no vocab_size") from error
    return min(size, TOKENIZER_SIZE)


def _replay(server: Server, sessions: list[Session], concurrency: int, name: str, hide: bool) -> list[Result]:
    total = sum(len(s.turns) for s in sessions)
    with tqdm(total=total, desc=name, unit="req", file=sys.stderr, disable=hide) as bar:

        def progress(_: Result) -> None:
            bar.update()

        try:
            return replay(server.url, sessions, concurrency=concurrency, progress=progress)
        except ReplayError as error:
            server.check()
            raise ServerError(server.with_log(str(error))) from error


def _statistics(server: Server) -> dict[str, Any]:
    """What the server counted; empty if it does not say."""
    states = server.get("/server_info").get("internal_states") or [{}]
    found = states[0].get("wavepp")
    return found if isinstance(found, dict) else {}


def _table(report: dict[str, Any]) -> str:
    counted = report["wavepp"]
    waves = [counted.get(f"{kind}_waves") for kind in ("prefill", "decode")]
    split = f" ({waves[0]} prefill, {waves[1]} decode)" if None not in waves else ""
    rows = {
        "requests": f"{report['requests']:,}",
        "prompt tokens": f"{report['prompt_tokens']:,}",
        "cached tokens": f"{report['cached_tokens']:,}",
        "reuse": f"{100 * report['reuse']:.1f} %",
        "rounds per request": _decimal(counted.get("rounds_per_request"), 2),
        "admission latency p50 / p99": _pair(counted.get("admission_ms"), 2),
        "time to first token p50 / p99": _pair(report["ttft_ms"], 0),
        "waves": f"{counted.get('waves', 'n/a')}{split}",
        "answers equal plain SGLang": (
            f"{'yes' if report['ok'] else 'NO'} ({report['answers_equal']} of {report['answers']})"
        ),
    }
    title = f"WavePP, {report['stages']} stages, {report['sessions']} sessions of coding agents"
    width = max(map(len, rows)) + 2
    return "\n".join(["", title, *(f"  {name + ':':{width}}{value}" for name, value in rows.items())])


def _decimal(value: Any, digits: int) -> str:
    return f"{value:,.{digits}f}" if isinstance(value, int | float) else "n/a"


def _pair(values: Any, digits: int) -> str:
    values = values if isinstance(values, dict) else {}
    return f"{_decimal(values.get('p50'), digits)} / {_decimal(values.get('p99'), digits)} ms"


def _number(least: int, most: int) -> Callable[[str], int]:
    def parse(text: str) -> int:
        if not text.isdecimal() or not least <= int(text) <= most:
            raise argparse.ArgumentTypeError(f"{text!r} is not a number from {least} to {most}")
        return int(text)

    return parse


@contextlib.contextmanager
def signals_raise() -> Iterator[None]:
    """SIGTERM and SIGHUP raise SystemExit, so that the servers are stopped as for any exception."""
    if threading.current_thread() is not threading.main_thread():
        yield  # only the main thread may set handlers
        return

    def leave(number: int, _: FrameType | None) -> None:
        raise SystemExit(128 + number)

    before = {number: signal.signal(number, leave) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _quiet(_: str) -> None:
    pass
