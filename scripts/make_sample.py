"""Make the demo's sample of agent sessions: `python scripts/make_sample.py SRC DST`.

SRC is a file of real coding-agent sessions (`launch/data/README.md` names its origin), one JSON object a
line: `{"id", "bs", "tool", "sys", "reqs": [[t, input, output, keep, runs, ...], ...]}`. `keep` leading blocks
of 64 tokens are identical to the session's previous request; objects among `reqs` are sub-agents and are left
out.

DST gets a few windows of consecutive turns in the same format, with every length divided by `DIVISOR` so that
a tiny model on two CPU cores can serve them. What makes the workload an agent's survives: the prefix that all
sessions share, prompts that grow by appending, and compactions, where a turn keeps little more than that
prefix. The output depends on SRC and the constants below only.
"""

from __future__ import annotations

import itertools
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

DIVISOR = 24
BLOCK = 16
"""Tokens per block in the sample; the source has 64."""
TURNS = 6
GROWING, COMPACTED = 8, 4
"""Sessions without and with a compaction."""
FIRST_PROMPT = (30_000, 60_000)
LAST_PROMPT = (45_000, 98_000)
"""Allowed lengths of a window's first and last prompt, in tokens of the source."""
OUTPUT = (4, 16)
"""Output tokens are divided, too, and then clipped to this range."""
APPENDED = 0.98
"""A turn that keeps less than this share of the previous prompt's blocks is a compaction."""


def windows(turns: list[Any]) -> Iterator[tuple[list[Any], bool]]:
    """All runs of `TURNS` turns within the length bounds, and whether one of them is a compaction."""
    for start in range(len(turns) - TURNS + 1):
        window = turns[start : start + TURNS]
        if not FIRST_PROMPT[0] <= window[0][1] <= FIRST_PROMPT[1]:
            continue
        if max(t[1] for t in window) > LAST_PROMPT[1] or window[-1][1] < LAST_PROMPT[0]:
            continue
        compactions = sum(not appends(a, b) for a, b in itertools.pairwise(window))
        if compactions <= 1:
            yield window, bool(compactions)


def appends(previous: Any, turn: Any) -> bool:
    """Whether `turn` keeps (nearly) the whole of `previous`."""
    return bool(turn[3] >= APPENDED * (previous[1] // 64))


def scale(name: str, window: list[Any], shared: int) -> dict[str, Any]:
    """One session of the sample; `shared` is the length of the common prefix in blocks of the sample.

    Ids below `shared` mean the same in every session; the others are local to the session. A prompt's last
    block may be partial; a turn that appends completes it under the same id.
    """
    ids: list[int] = []
    length, fresh = 0, shared
    reqs: list[list[Any]] = []
    for previous, turn in zip([None, *window], window, strict=False):
        if previous is None:
            kept_tokens = 0
        elif appends(previous, turn):
            kept_tokens = length
        else:
            kept_tokens = max(turn[3] * 64 // DIVISOR // BLOCK, shared) * BLOCK
        keep = -(-kept_tokens // BLOCK)
        length = max(turn[1] // DIVISOR, kept_tokens + 1, shared * BLOCK + 1)
        # A block that follows the kept ones is new, unless it belongs to the common prefix.
        block_ids = ids[:keep]
        while len(block_ids) * BLOCK < length:
            if len(block_ids) < shared:
                block_ids.append(len(block_ids))
            else:
                block_ids.append(fresh)
                fresh += 1
        ids = block_ids
        output = min(max(turn[2] // DIVISOR, OUTPUT[0]), OUTPUT[1])
        reqs.append([turn[0] - window[0][0], length, output, keep, runs(ids[keep:])])
    return {"id": name, "bs": BLOCK, "sys": shared * BLOCK, "reqs": reqs}


def runs(ids: list[int]) -> list[int]:
    """`[start, length, ...]` of the consecutive runs in `ids`."""
    flat: list[int] = []
    for i in ids:
        if flat and flat[-2] + flat[-1] == i:
            flat[-1] += 1
        else:
            flat += [i, 1]
    return flat


def main(source: Path, target: Path) -> None:
    chosen: dict[bool, list[tuple[str, int, list[Any]]]] = {False: [], True: []}
    seen: set[tuple[int, int]] = set()
    for line in source.read_text().splitlines():
        session = json.loads(line)
        turns = [r for r in session["reqs"] if isinstance(r, list)]
        for window, compacted in windows(turns):
            room = len(chosen[compacted]) < (COMPACTED if compacted else GROWING)
            # Some sessions of the source are forks of one another: the same turns would come twice.
            lengths = {(t[1], t[2]) for t in window}
            if room and not seen & lengths:
                seen |= lengths
                chosen[compacted].append((session["id"], session["tool"] + session["sys"], window))
                break
    picked = chosen[False] + chosen[True]
    if len(picked) < GROWING + COMPACTED:
        sys.exit(f"error: {source} has only {len(picked)} sessions of the wanted kinds")
    shared = min(prefix for _, prefix, _ in picked) // DIVISOR // BLOCK
    # Every third session has a compaction, so that a replay of the first few shows both kinds.
    order: list[tuple[str, int, list[Any]]] = []
    growing, compacting = iter(chosen[False]), iter(chosen[True])
    for i in range(len(picked)):
        order.append(next(compacting if i % 3 == 2 else growing))
    with target.open("w") as out:
        for name, _, window in order:
            out.write(json.dumps(scale(name, window, shared), separators=(",", ":")) + "\n")


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit("usage: make_sample.py SRC DST")
    main(Path(sys.argv[1]), Path(sys.argv[2]))
