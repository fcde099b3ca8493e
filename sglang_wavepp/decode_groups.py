"""Which requests decode together. Pure.

Decode rows live in groups, and one wave of a group is in flight at a time, so as many groups as stages fill
the pipeline. Each wave reads the weights, however few its rows are. As long as that is nearly all that a wave
takes, two groups decode no faster than one with the rows of both: a token takes one read on each stage either
way. But they take twice the time that prefill could have. So while prompts wait, a group is filled up
before the next one is begun, as far as its rows do not make its waves noticeably longer. Without prompts
that wait only the first few rows share a group, and there are two groups at least: while one is on the
device, the other one is launched.

How long rows take is learned from the waves of stage 0 that followed another one closely. All that counts is
how many of them take as long as what is read for any wave, which is much the same on each stage.
"""

from __future__ import annotations

from collections.abc import Iterator

from sglang_wavepp.mpu.planner import Load
from sglang_wavepp.mpu.stage_time import Observations

_LONGER = 0.03
"""By so much of what it takes anyway may rows lengthen a wave before another group is begun."""
_FEW = 4
"""Rows of a group before another one is begun, if no prompt waits or as long as too little is known."""
_SPREAD = 2
"""From waves that differ less in their rows than this, times, nothing is learned about rows. What is learned
does not count beyond as many times the most rows that were seen."""


class DecodeGroups:
    """The groups of one server.

    Args:
        count: groups at most, one for each stage.
        rows: no group is filled up beyond this while there is another one; with 1 rows are spread over all.
    """

    def __init__(self, count: int, rows: int) -> None:
        self.count, self._rows = count, rows
        self._members: list[list[int]] = [[] for _ in range(count)]
        self._busy: set[int] = set()
        """Groups with a wave in flight."""
        self._latest = [-1] * count
        """The latest wave of each group."""
        self._loads: dict[int, Load] = {}
        """The latest waves that stage 0 has not told the time of: their rows, and the KV that these read."""
        self._observed = Observations()
        self.filled = min(_FEW, rows)
        """Rows of a group before another one is begun."""

    def __len__(self) -> int:
        """Requests in all groups."""
        return sum(map(len, self._members))

    def choose(self, rows: int, prompts_wait: bool) -> int:
        """The group that finished prompts join, so many: the fullest with room, or the smallest."""
        sizes = [len(seqs) for seqs in self._members]
        used = sum(map(bool, sizes))
        most = self.filled if prompts_wait else min(_FEW, self.filled) if used > 1 else 0
        fit = [g for g, size in enumerate(sizes) if size and size + rows <= most]
        if fit:
            return max(fit, key=lambda g: sizes[g])
        return min(range(len(sizes)), key=lambda g: sizes[g])

    def join(self, group: int, seq: int) -> None:
        """A request decodes with this group from its next wave on."""
        self._members[group].append(seq)

    def leave(self, group: int, seq: int) -> None:
        """It is through."""
        self._members[group].remove(seq)

    def ready(self) -> Iterator[tuple[int, list[int]]]:
        """Groups that have requests and no wave in flight, the one that waits longest first."""
        waiting = [g for g, seqs in enumerate(self._members) if seqs and g not in self._busy]
        for group in sorted(waiting, key=lambda g: self._latest[g]):
            yield group, self._members[group]

    def issued(self, group: int, wave: int, context: int) -> None:
        """A wave of the group is on its way; its rows have `context` tokens of KV together."""
        self._busy.add(group)
        self._latest[group] = wave
        self._loads[wave] = Load(float(len(self._members[group])), float(context), 0.0, 0.0)
        if len(self._loads) > 2 * len(self._members):
            del self._loads[next(iter(self._loads))]

    def output(self, group: int) -> None:
        """The last stage acknowledged the group's wave."""
        self._busy.discard(group)

    def took(self, wave: int, elapsed_us: int) -> None:
        """Stage 0 took so long for a wave. Of one that is long past nothing is learned."""
        load = self._loads.pop(wave, None)
        if load is not None and self._observed.add(load, elapsed_us):
            self.filled = self._fill()

    def _fill(self) -> int:
        time, mean, rows = self._observed.time, self._observed.mean, self._observed.tokens
        if time is None or rows[1] < _SPREAD * rows[0]:
            return max(self.filled, min(_FEW, self._rows))  # and larger groups will tell
        row = time.token + time.attention * mean.attention / mean.tokens
        most = min(_SPREAD * rows[1], self._rows)
        return max(1, int(min(_LONGER * time.wave / row, most) if row > 0 else most))
