"""`wavepp log`: read and compare the decision logs that `--wavepp-decision-log` writes."""

from __future__ import annotations

import argparse
import itertools
from pathlib import Path

import msgspec

from sglang_wavepp.log import DecisionLog
from sglang_wavepp.messages import decode_decision
from sglang_wavepp.record import read


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of the command."""
    commands = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    show = commands.add_parser("show", help="print a log, one decision a line")
    show.add_argument("file", type=Path)
    show.add_argument("--first", type=int, default=0, metavar="N", help="from this position on (0)")
    show.add_argument("--last", type=int, metavar="N", help="up to this position")
    diff = commands.add_parser("diff", help="compare two stages' logs; exit code 1 if they differ")
    diff.add_argument("a", type=Path)
    diff.add_argument("b", type=Path)


def run(options: argparse.Namespace) -> int:
    """Run the command. Raises `WavePPError` for a file that is no log."""
    if options.action == "show":
        return _show(options.file, options.first, options.last)
    return _diff(options.a, options.b)


def _show(path: Path, first: int, last: int | None) -> int:
    header, entries = read(path)
    print(f"stage {header.rank} of {header.stages}, sglang-wavepp {header.version}")
    log = DecisionLog(header.rank)
    for position, entry in enumerate(entries):
        if last is not None and position > last:
            break
        log.skip(entry)
        if position >= first:
            print(f"{position:8} {log.digest:016x} {_text(entry)}")
    return 0


def _diff(a: Path, b: Path) -> int:
    (_, ours), (_, theirs) = read(a), read(b)
    equal = ended = 0
    for position, (one, other) in enumerate(itertools.zip_longest(ours, theirs)):
        if one is None or other is None:
            ended += 1
        elif one != other:
            print(f"{equal} equal entries, then at position {position}:\n< {_text(one)}\n> {_text(other)}")
            return 1
        else:
            equal += 1
    more = f"; one of them goes on for {ended} more" if ended else ""
    print(f"{equal} equal entries{more}")
    return 0


def _text(entry: bytes) -> str:
    try:
        return str(decode_decision(entry))
    except msgspec.DecodeError as error:
        return f"does not decode ({error}): {entry.hex()}"
