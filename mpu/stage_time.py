"""How long a stage takes for a wave, learned from observations.

The time is taken as linear in the load of the wave with coefficients that are never negative: so much a wave
(weights are read once, kernels launched), a token, a pair of tokens in attention, a prefix token (its KV is
read, or expanded, once for each span) and a span. That is the usual cost model of prefill. What it cannot
express ends in the residual, of which the fit sees the relative size: a short wave counts as much as a long
one.
"""

from __future__ import annotations

from statistics import median
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from sglang_wavepp.mpu.planner import Load

_WINDOW = 256
"""Observations of a stage that count: older ones were another load, or another clock."""
_FIRST = (8, 16, 32)
"""Observations of a stage at the first fits; with fewer nothing is said about it."""
_EVERY = 64
"""Observations between two fits, once there are as many."""
_OUTLIER = 4.0
"""Residuals beyond so many times the median one are left out: a stage was interrupted."""
_RIDGE = np.array([1e-4, 1e-6, 1e-6, 1e-4, 1e-3])
"""Relative; decides where the observations do not. What was known before stays as it is then. At first, if
all waves were alike, what they took is put down to their tokens rather than to the wave: then smaller waves
are tried, and tell. If all had one span, it is put down to the wave rather than to the span: then larger ones
are."""


class StageTime(NamedTuple):
    """Microseconds of a stage for each unit of a wave's load."""

    wave: float
    token: float
    attention: float
    prefix: float
    span: float

    def of(self, load: Load) -> float:
        """Microseconds for a wave. O(1)."""
        return self.wave + self.work(load)

    def work(self, load: Load) -> float:
        """What of it does not go away if the wave is joined with another one."""
        tokens, attention, prefix, spans = load
        return self.token * tokens + self.attention * attention + self.prefix * prefix + self.span * spans

    def begin(self, prefix: int) -> float:
        """What a span costs besides its tokens if `prefix` tokens are before it."""
        return self.span + self.prefix * prefix

    def span_work(self, begin: int, end: int) -> float:
        """`work` of a wave with this span alone."""
        new = end - begin
        return self.begin(begin) + (self.token + self.attention * (begin + new / 2)) * new

    def tokens_in(self, time: float, prefix: int) -> int:
        """Tokens behind `prefix` that take at most this long, without the beginning of the span."""
        if time <= 0:
            return 0
        linear, half = self.token + self.attention * prefix, self.attention / 2
        if linear <= 0 and half <= 0:
            return 1 << 60
        # The root of half * x^2 + linear * x = time, in the form that also holds for half = 0.
        return int(2 * time / (linear + (linear * linear + 4 * half * time) ** 0.5))


class Observations:
    """The latest waves of one stage, and the times fitted to them."""

    def __init__(self) -> None:
        self._rows: NDArray[np.float64] = np.empty((_WINDOW, 6))
        self.count = 0
        self.time: StageTime | None = None
        """None until there are observations enough."""

    def add(self, load: Load, elapsed_us: int) -> bool:
        """Count one wave. True if the times were fitted anew. A fit is O(window)."""
        self._rows[self.count % _WINDOW] = (1.0, *load, max(1, elapsed_us))
        self.count += 1
        due = self.count % _EVERY == 0 or self.count in _FIRST
        if due:
            self._fit()
        return due

    @property
    def mean(self) -> Load:
        """The mean load of the waves in the window."""
        return Load(*self._rows[: min(self.count, _WINDOW), 1:5].mean(axis=0).tolist())

    @property
    def tokens(self) -> tuple[float, float]:
        """The fewest and the most tokens of a wave in the window."""
        found = self._rows[: min(self.count, _WINDOW), 1]
        return float(found.min()), float(found.max())

    def _fit(self) -> None:
        rows = self._rows[: min(self.count, _WINDOW)]
        relative = rows[:, :5] / rows[:, 5:]
        known = np.array(self.time or (0.0,) * 5)
        found = nonnegative_least_squares(relative, np.ones(len(rows)), _RIDGE, known)
        residual = np.abs(relative @ found - 1.0)
        inside = residual <= _OUTLIER * max(median(residual.tolist()), 1e-3)
        if not inside.all():
            found = nonnegative_least_squares(relative[inside], np.ones(int(inside.sum())), _RIDGE, known)
        self.time = StageTime(*found.tolist())


def nonnegative_least_squares(
    rows: NDArray[np.float64],
    values: NDArray[np.float64],
    ridge: NDArray[np.float64],
    known: NDArray[np.float64],
) -> NDArray[np.float64]:
    """The x >= 0 with the smallest |rows @ x - values|, by the active sets of Lawson and Hanson.

    It begins with all columns, since mostly few of them end at 0. `ridge` holds each x near `known`, relative
    to the length of its column; above 0 if columns may be alike. O(rows * columns^2 + columns^4); a few
    columns are meant.
    """
    gram = rows.T @ rows
    scale = np.sqrt(gram.diagonal())
    scale[scale == 0] = 1.0
    gram = gram / np.outer(scale, scale) + np.diag(ridge)
    moment = rows.T @ values / scale + ridge * known * scale
    x = np.ones(rows.shape[1])
    active = np.ones(rows.shape[1], dtype=bool)
    for _ in range(3 * rows.shape[1]):
        while True:
            chosen = np.flatnonzero(active)
            target = np.linalg.solve(gram[chosen[:, None], chosen], moment[chosen])
            falling = target <= 0
            if not falling.any():
                x[chosen] = target
                break
            # Go as far as the first coefficient that would turn negative, and take that one out.
            step = x[chosen][falling] / (x[chosen][falling] - target[falling])
            x[chosen] += float(step.min()) * (target - x[chosen])
            active[chosen[falling][step <= step.min()]] = False
            x[~active] = 0.0
        gradient = moment - gram @ x
        gradient[active] = -np.inf
        best = int(gradient.argmax())
        if gradient[best] <= 1e-9:
            break
        active[best] = True
    answer: NDArray[np.float64] = x / scale
    return answer
