"""A stage's hint: how long a leading part of a request it could reuse, answered without its tree.

| module | job |
|---|---|
| `chain` | tokens -> chained block hashes (`chain`), namespaces kept apart by their seed (`seed_of`) |
| `index` | `HintIndex`: the hashes whose KV is resident on this stage, and the probe over them |

A request is hashed once, where it arrives; its chain travels with it, and every stage probes it in
microseconds. Pure: no tree, no clock, no transport. The radix tree adapter keeps the index in step.
"""

from .chain import chain, seed_of
from .index import HintIndex, HintIndexStatistics

__all__ = ["HintIndex", "HintIndexStatistics", "chain", "seed_of"]
