"""Traces of agents and of chats as requests of token ids. Pure.

Two formats: sessions, one a line (`reqs` of time, input and output tokens, blocks kept of the previous
prompt, runs of block ids that follow, and, if known, API and think time), and requests, one a line
(`timestamp` in ms, `input_length`, `output_length`, `hash_ids` of blocks of 512 tokens). Requests of
sub-agents are left out, and times of single requests. Where a last, partial block is not told, it is one of
its own.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from benchmarks.cells import HIGHEST, Prepared, body
from sglang_wavepp.launch.replay import block_tokens

MOONCAKE_BLOCK = 512


@dataclasses.dataclass(frozen=True, slots=True)
class Turn:
    """One request."""

    blocks: tuple[str, ...]
    """Names; the last one may be longer than what is left of the prompt."""
    tokens: int
    kept: int
    """Leading tokens that are those of the session's previous prompt."""
    output: int
    think: float
    """Seconds before it is sent."""


def sessions(lines: Iterable[str], longest: int, turns: int) -> list[list[Turn]]:
    """Each line's turns up to the first of more than `longest` tokens, `turns` at most; none is empty."""
    found = []
    for line in lines:
        raw = json.loads(line)
        own = [_single(raw)] if "hash_ids" in raw else _session(raw, turns)
        kept = next((i for i, turn in enumerate(own) if turn.tokens > longest), len(own))
        if own[:kept]:
            found.append(own[:kept])
    return found


def block_size(line: str) -> int:
    """Tokens of a block in the file that this line is of."""
    return int(json.loads(line).get("bs", MOONCAKE_BLOCK))


def _single(raw: dict[str, Any]) -> Turn:
    names = tuple(f"all/{block}" for block in raw["hash_ids"])
    return Turn(names, raw["input_length"], 0, raw["output_length"], 0.0)


def _session(raw: dict[str, Any], limit: int) -> list[Turn]:
    size = raw["bs"]
    shared = (raw.get("tool", 0) + raw.get("sys", 0)) // size
    scope = "all" if raw.get("scope") == "global" else raw["id"]
    found: list[Turn] = []
    names: list[str] = []
    before = 0.0
    for request in raw["reqs"]:
        if len(found) == limit:
            break
        if isinstance(request, dict):
            continue
        at, length, output, keep, runs = request[:5]
        del names[keep:]
        for start, count in zip(runs[::2], runs[1::2], strict=True):
            for block in range(start, start + count):
                own = f"system/{len(names)}" if len(names) < shared else f"{scope}/{block}"
                names.append(own)
        # Without a think time all that is known is when the request was sent.
        think = request[6] if len(request) > 6 and request[6] is not None else at - before
        kept = min(keep * size, found[-1].tokens, length) if found else 0
        missing = range(len(names), -(-length // size))
        blocks = (*names, *(f"{raw['id']}/{len(found)}/{block}" for block in missing))
        found.append(Turn(blocks, length, kept, output, think if found else 0.0))
        before = at
    return found


def jobs(
    found: Sequence[Sequence[Turn]], size: int, output: int, longest_think: float, dilation: float
) -> list[list[Prepared]]:
    """Requests to send, a list for each session; outputs and undilated think times are bounded."""
    made = []
    for number, turns in enumerate(found):
        own = []
        for position, turn in enumerate(turns):
            rid = f"trace-{number}-{position}"
            pause = dilation * min(turn.think, longest_think)
            content = body(rid, [_prompt(turn, size)], max(1, min(turn.output, output)))
            own.append(Prepared(rid, content, turn.tokens, turn.kept, pause=pause))
        made.append(own)
    return made


def _prompt(turn: Turn, size: int) -> str:
    whole, rest = divmod(turn.tokens, size)
    parts = [_block(name, size) for name in turn.blocks[: whole + (rest > 0)]]
    if rest:
        parts[-1] = ",".join(parts[-1].split(",")[:rest])
    return ",".join(parts)


@lru_cache(maxsize=1 << 16)
def _block(name: str, size: int) -> str:
    return ",".join(map(str, block_tokens(name, size, HIGHEST)))


def read(file: Path, count: int, longest: int, turns: int) -> tuple[list[list[Turn]], int]:
    """The first `count` sessions of a file and its block size. ValueError or OSError."""
    lines = file.read_text().splitlines()
    if not lines:
        raise ValueError(f"{file} is empty")
    try:
        found = sessions(lines[: 4 * count], longest, turns)[:count]
        return found, block_size(lines[0])
    except (KeyError, TypeError, json.JSONDecodeError) as error:
        raise ValueError(f"{file} is no trace of a known format: {error!r}") from None
