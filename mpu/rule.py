"""The published budget rule (Maximum Pipeline Utilization), exact.

With `W` tokens left over all committed requests and `N(x)` of these requests with more than x tokens left,
a budget b can supply `n(b) = max(W / b, N(b / 2))` waves. The rule takes the largest b in M, M/2, M/4, ...
with `n(b) >= R`, R being the execution ring of 2 waves a stage, and the smallest allowed budget if none
reaches it.

What the publication leaves open, and how it is decided here:

* *left* means: no wave was planned for it yet. What is in flight counts no more, so the budget is chosen anew
  for each wave and shrinks towards the end of the work. That costs throughput where a small wave is dear, as
  late in long prompts; it is kept, since it is the rule. `TimedPlanner` does without it.
* `W / b` is a quotient, not rounded, and `n(b) = R` is enough.
* N counts requests with *more than* b/2 left: two halves share a wave.
* The second term needs a packer that does not split what fits into a wave of its own: `pack_whole`.
* The budgets end at the floor. Each is rounded down to where requests may be cut. There may be fewer requests
  than stages, or one only: then the first term decides.
* The limit of requests in a wave is not part of the rule; it makes waves smaller, so there are only more.

The paper's own example has 36K tokens left, 4 stages and M = 16,384, and says "if MPU reduces to b = 8,192".
By its formula n(8192) = 4.5 is below R = 8, and the rule goes on to 4,096 (n = 9). The formula is followed.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from itertools import islice
from typing import Any

from sglang_wavepp.mpu.packing import Pending, pack_whole
from sglang_wavepp.mpu.planner import Load, WaveLimits


def budgets(limits: WaveLimits) -> list[int]:
    """The budgets that the rule chooses from, the largest first."""
    found, budget = [limits.budget], limits.budget // 2
    while budget >= limits.floor:
        found.append(budget // limits.align * limits.align)
        budget //= 2
    return found


def choose(left: Sequence[int], budgets: Sequence[int], ring: int) -> int:
    """The budget for requests with `left` tokens each. O(n), O(n log n) if it is not the largest."""
    total = sum(left)
    if total >= ring * budgets[0]:
        return budgets[0]
    ordered = sorted(left)
    for budget in budgets:
        if total >= ring * budget or len(ordered) - bisect_right(ordered, budget // 2) >= ring:
            return budget
    return budgets[-1]


class MpuPlanner:
    """Halves the budget until there are waves enough for the ring."""

    def __init__(self, limits: WaveLimits) -> None:
        self._limits = limits
        self._budgets = budgets(limits)
        self._budget = limits.budget

    def spans(self, pending: Iterable[Pending], rows: int, ring: Sequence[Load]) -> list[Pending]:
        """See `Planner`. O(n) in the pending requests, O(n log n) where their tokens do not fill the ring."""
        waiting = list(pending)
        self._budget = choose([end - begin for _, begin, end in waiting], self._budgets, self._limits.ring)
        return pack_whole(islice(waiting, rows), self._budget, self._limits.align)

    def observe(self, stage: int, load: Load, elapsed_us: int) -> None:
        """The rule knows tokens only."""

    def statistics(self) -> dict[str, Any]:
        """See `Planner`. `budget` is the latest one."""
        return {"planner": "mpu", "budget": self._budget, "floor": self._budgets[-1]}
