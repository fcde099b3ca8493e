"""A stage's hint: how long a leading part of a request it could reuse, answered without its tree.

| module | job |
|---|---|
| `chain` | tokens -> chained block hashes (`chain`), namespaces kept apart by their seed (`seed_of`) |
| `known` | `KnownChains`: chains of recent prompts, so that a session's next turn is not hashed anew |
| `index` | `HintIndex`: the hashes whose KV is resident on this stage, and the probe over them |
| `snapshots` | `SnapshotIndex`: where recurrent states are, and the reverse scan for the last one |
| `boundary` | `Hints`: both indices of one stage, and its answer in tokens for plain and for hybrid models |

A request is hashed once, where it arrives; its chain travels with it, and every stage probes it in
microseconds. Pure: no tree, no clock, no transport. The radix tree adapter keeps the index in step.
"""

from .boundary import Hints
from .chain import chain, seed_of
from .index import HintIndex, HintIndexStatistics
from .known import KnownChains
from .snapshots import Snapshot, SnapshotIndex

__all__ = [
    "HintIndex",
    "HintIndexStatistics",
    "Hints",
    "KnownChains",
    "Snapshot",
    "SnapshotIndex",
    "chain",
    "seed_of",
]
