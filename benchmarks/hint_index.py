"""The hint index beside SGLang's matching, a linear scan of the same index, and Dynamo's `RadixTree`.

    python -m benchmarks.hint_index --json --plot docs/hint_index.svg

One run, all systems burst by burst in turn, medians. Sequences in groups that share half of their tokens are
inserted chunk by chunk into a tree with SGLang's Rust core, which fills our index, and into one with its
Python core. A query's leading `reuse` % are resident, the rest is not; all systems have to give the same
answer before any is timed. With `concurrency` n, n queries one after the other are one operation; with 1,
each sample takes another query, so its hashes are seldom in a CPU cache. With `writer`, a second thread adds
and evicts other leaves of the same structure all the time (for `wavepp`'s probe, `linear` and `sglang-rust`:
of the tree with the Rust core). The two threads share the GIL: whoever gives it up, as SGLang's Rust core and
Dynamo do in a call, may wait for it for CPython's switch interval, 5 ms.

* `match` is `RadixKey.match`: the comparison of tokens alone, of the query with the resident sequence.
* The hashes that a probe takes are made before, so are SGLang's keys and Dynamo's block hashes.
* `snapshot` finds the last recurrent state before the boundary, one every `--chunk` tokens; `snapshot_none`
  looks for one where there is none.
* `lock` locks and unlocks what a lease found at the end of a node: what a lease costs under the stage's guard
  (the comparison of tokens before it is `match_full_device_prefix`). `match_prefix_lock` is SGLang's way.
* `hash_next_turn` hashes a prompt that continues a known one by `--chunk` tokens.
* Dynamo's tree differs in kind: it walks hashes of single blocks (not chained) one by one, and scores the
  overlap of each of many workers (here one). It does so in a thread of its own, whose CPU time is in neither
  `_cpu_us`. Without the package its rows are left out. It pins pydantic below the version in
  requirements-cpu.txt, so beside that: `pip install --no-deps ai-dynamo-runtime`.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import itertools
import json
import logging
import statistics
import sys
import threading
import time
from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import torch
from sglang.srt.mem_cache.allocator.paged import PagedTokenToKVPoolAllocator
from sglang.srt.mem_cache.base_prefix_cache import EvictParams, InsertParams, MatchPrefixParams
from sglang.srt.mem_cache.cache_init_params import CacheInitParams
from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.srt.mem_cache.unified_cache.components.base import ComponentType
from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache

from sglang_wavepp.hint_index import HintIndex, KnownChains, SnapshotIndex, chain, seed_of
from sglang_wavepp.hint_index.index import KEPT
from sglang_wavepp.radix.protocol import Match
from sglang_wavepp.radix.tree import SGLangTree, WaveRadixCache

try:
    from dynamo.llm import RadixTree, compute_block_hash_for_seq
except ImportError:
    RadixTree = None

REUSES = (0, 50, 90, 100)
GROUPS = 8
PAGE = 64
"""Reused prefixes are whole numbers of these, for both block sizes."""
LEAVES = 4
"""Other leaves that the writer adds and evicts in turn."""
BASE_SEED = 1
SEED = seed_of(BASE_SEED, None, None)

Tokens = array  # of int64


@dataclass
class Case:
    """One operation of one system, and its samples in ns."""

    system: str
    op: str
    one: Callable[[Any], Any]
    items: Sequence[Any]
    mutate: Callable[[], None]
    prepare: Callable[[list[Any]], list[Any]] = list
    """Makes what `one` takes from a batch of items, untimed, anew for each sample."""
    wall: list[int] = field(default_factory=list)
    cpu: list[int] = field(default_factory=list)


class Cell(NamedTuple):
    """What the cases that are measured in turn have in common."""

    block: int
    reuse: int | None
    concurrency: int
    writer: bool


class Tree:
    """A cache of SGLang's without any KV memory, that holds `residents`."""

    def __init__(self, cls: type[Any], core: str, page: int, residents: list[Tokens], chunk: int) -> None:
        length = len(residents[0])
        self._allocator = PagedTokenToKVPoolAllocator(
            size=(len(residents) + 2) * (length // page + 1) * page + LEAVES * chunk,
            page_size=page,
            dtype=torch.bfloat16,
            device="cpu",
            kvcache=SimpleNamespace(register_mapping=lambda *_: None),
            need_sort=False,
        )
        rows = SimpleNamespace(req_to_token=torch.zeros((1, 1), dtype=torch.int32), device="cpu", size=1)
        params = CacheInitParams(
            disable=False,
            req_to_token_pool=rows,
            token_to_kv_pool_allocator=self._allocator,
            page_size=page,
            tree_components=(ComponentType.FULL,),
            tree_core_backend=core,
        )
        self.cache = cls(params)
        self.core = self.cache.tree_core
        self.hints = self.cache.keep_hints(page, BASE_SEED) if cls is WaveRadixCache else None
        self.locks = [self._insert(tokens, chunk) for tokens in residents]

    def _insert(self, tokens: Tokens, chunk: int) -> Any:
        found = self._find(tokens)
        have = found.device_prefix_len
        root = self.cache.root_node_handle()
        slots = torch.cat(
            [
                self.core.collect_full_device_indices(found.last_device_node, root),
                self._allocator.alloc(len(tokens) - have),
            ]
        )
        while have < len(tokens):
            end = min(len(tokens), have + chunk)
            self._add(tokens[:end], slots[:end].clone(), have)
            have = end
        # What is locked is not what the writer evicts.
        return self.cache.lock(self._find(tokens).last_device_node)

    def _find(self, tokens: Tokens) -> Any:
        return self.cache.match_prefix(MatchPrefixParams(key=RadixKey(tokens)))

    def _add(self, tokens: Tokens, slots: torch.Tensor, have: int) -> None:
        self.cache.insert(InsertParams(key=RadixKey(tokens), value=slots, prev_prefix_len=have))

    def writer(self, leaves: list[Tokens]) -> Callable[[], None]:
        """Adds and evicts one of `leaves` a call."""
        turns = itertools.cycle(leaves)

        def mutate() -> None:
            leaf = next(turns)
            self._add(leaf, self._allocator.alloc(len(leaf)), 0)
            self.cache.evict(EvictParams(num_tokens=len(leaf)))

        return mutate


class Dynamo:
    """Dynamo's tree with `residents`, all on one worker."""

    def __init__(self, block: int, residents: list[Tokens], leaves: list[Tokens]) -> None:
        self._block = block
        self._tree = RadixTree()
        for tokens in residents:
            self._tree.apply_event(0, self._stored(tokens))
        self._events = [(self._stored(leaf), self._removed(leaf)) for leaf in leaves]

    def hashes(self, tokens: Sequence[int]) -> list[int]:
        hashes: list[int] = compute_block_hash_for_seq(tokens, self._block)
        return hashes

    def find(self, hashes: list[int]) -> int:
        return max(self._tree.find_matches(hashes).scores.values(), default=0)

    def writer(self) -> Callable[[], None]:
        """Adds and removes one leaf a call."""
        turns = itertools.cycle(self._events)

        def mutate() -> None:
            for event in next(turns):
                self._tree.apply_event(0, event)

        return mutate

    def _stored(self, tokens: Tokens) -> bytes:
        pairs = zip(chain(tokens, self._block, SEED), self.hashes(list(tokens)), strict=True)
        blocks = [{"block_hash": whole, "tokens_hash": own} for whole, own in pairs]
        return _event({"stored": {"parent_hash": None, "blocks": blocks}})

    def _removed(self, tokens: Tokens) -> bytes:
        return _event({"removed": {"block_hashes": chain(tokens, self._block, SEED).tolist()}})


def _event(data: dict[str, Any]) -> bytes:
    return json.dumps({"event_id": 0, "data": data}).encode()


def linear(index: HintIndex, hashes: array[int]) -> int:
    """What `index.probe` answers, one block after the other."""
    present = index._present
    for at, each in enumerate(hashes):
        if each & KEPT not in present:
            return at
    return len(hashes)


class Stage:
    """All systems with the same sequences resident, for one block size."""

    def __init__(self, block: int, residents: list[Tokens], rng: np.random.Generator, chunk: int) -> None:
        self.block, self.residents, self._rng, self._chunk = block, residents, rng, chunk
        leaves = [_random(rng, chunk) for _ in range(LEAVES)]
        self.rust = Tree(WaveRadixCache, "rust", block, residents, chunk)
        self.python = Tree(UnifiedRadixCache, "python", block, residents, chunk)
        self.dynamo = Dynamo(block, residents, leaves) if RadixTree is not None else None
        self._writers = {"rust": self.rust.writer(leaves), "python": self.python.writer(leaves)}
        self._states, self._no_states = SnapshotIndex(), SnapshotIndex()
        step = chunk // block
        for hashes in map(self._chain, residents):
            for blocks in range(step, len(hashes) + 1, step):
                self._states.add(hashes, blocks)
        self._leaf_chains = [self._chain(leaf) for leaf in leaves]
        self._leaf_turns = itertools.cycle(self._leaf_chains)

    def _chain(self, tokens: Tokens) -> array[int]:
        return chain(tokens, self.block, SEED)

    def _mutate_states(self) -> None:
        hashes = next(self._leaf_turns)
        self._states.remove(self._states.add(hashes, len(hashes)))

    def _mutate_no_states(self) -> None:
        hashes = next(self._leaf_turns)
        self._no_states.remove(self._no_states.add(hashes, len(hashes)))

    def boundary(self, reuse: int) -> int:
        """Tokens of each query that are resident."""
        return len(self.residents[0]) * reuse // 100 // PAGE * PAGE

    def probes(self, reuse: int) -> list[Case]:
        """The cases that ask how far the queries go. Checks that all agree, which also splits the nodes."""
        at = self.boundary(reuse)
        queries = [old[:at] + _random(self._rng, len(old) - at) for old in self.residents]
        chains = [self._chain(query) for query in queries]
        keys = [RadixKey(query) for query in queries]
        pairs = [(RadixKey(old), key) for old, key in zip(self.residents, keys, strict=True)]
        index = self.rust.hints.index
        blocks = at // self.block
        rust, python = self._writers["rust"], self._writers["python"]

        def match_prefix(tree: Tree) -> Callable[[RadixKey], int]:
            find = tree.cache.match_prefix
            return lambda key: find(MatchPrefixParams(key=key)).device_prefix_len // self.block

        def read_only(tree: Tree) -> Callable[[RadixKey], int]:
            find = tree.core.match_full_device_prefix
            return lambda key: find(key)[0] // self.block

        def match(pair: tuple[RadixKey, RadixKey]) -> int:
            return pair[0].match(pair[1], self.block) // self.block

        cases = [
            Case("wavepp", "probe", index.probe, chains, rust),
            Case("linear", "probe", lambda hashes: linear(index, hashes), chains, rust),
            Case("sglang-rust", "match_prefix", match_prefix(self.rust), keys, rust),
            Case("sglang-rust", "match_full_device_prefix", read_only(self.rust), keys, rust),
            Case("sglang-python", "match_prefix", match_prefix(self.python), keys, python),
            Case("sglang-python", "match_full_device_prefix", read_only(self.python), keys, python),
            Case("sglang-python", "match", match, pairs, python),
        ]
        if self.dynamo is not None:
            hashes = [self.dynamo.hashes(list(query)) for query in queries]
            cases.append(Case("dynamo", "find_matches", self.dynamo.find, hashes, self.dynamo.writer()))
        for case in cases:
            _expect(case, blocks)

        if at:
            cases += self._locks(keys, rust)

        last = at // self._chunk * (self._chunk // self.block)
        for op, states, mutate, expected in (
            ("snapshot", self._states, self._mutate_states, last),
            ("snapshot_none", self._no_states, self._mutate_no_states, 0),
        ):
            scan = Case("wavepp", op, lambda hashes, s=states: s.last(hashes, blocks), chains, mutate)
            _expect(scan, expected)
            cases.append(scan)
        return cases

    def _locks(self, keys: list[RadixKey], mutate: Callable[[], None]) -> list[Case]:
        """The cases that lock the resident part of each query, which ends with a node by now."""
        cache, tree = self.rust.cache, SGLangTree(self.rust.cache, None, None)
        found = [tree.match(SimpleNamespace(key=lambda _, key=key: key), len(key)) for key in keys]
        if not all(match.ends for match in found):
            raise SystemExit("error: a resident prefix does not end with a node")

        def lock(match: Match) -> None:
            tree.unlock(tree.lock(None, match).lock)

        def match_prefix_lock(key: RadixKey) -> None:
            cache.unlock(cache.lock(cache.match_prefix(MatchPrefixParams(key=key)).last_device_node))

        return [
            Case("wavepp", "lock", lock, found, mutate),
            Case("sglang-rust", "match_prefix_lock", match_prefix_lock, keys, mutate),
        ]

    def hashing(self) -> list[Case]:
        """The cases that hash whole prompts."""

        def known(batch: list[Tokens]) -> list[tuple[KnownChains, Tokens]]:
            memory = KnownChains(self.block, 2 * sum(map(len, batch)))
            for tokens in batch:
                memory.chain(tokens[: -self._chunk], SEED)
            return [(memory, tokens) for tokens in batch]

        def next_turn(pair: tuple[KnownChains, Tokens]) -> array[int]:
            return pair[0].chain(pair[1], SEED)

        def lists(batch: list[Tokens]) -> list[list[int]]:
            return [list(tokens) for tokens in batch]

        rust = self._writers["rust"]
        cases = [
            Case("wavepp", "hash", self._chain, self.residents, rust),
            Case("wavepp", "hash_next_turn", next_turn, self.residents, rust, known),
        ]
        for tokens, (memory, _) in zip(self.residents, known(self.residents), strict=True):
            if memory.chain(tokens, SEED) != self._chain(tokens):
                raise SystemExit("error: a known chain differs from one that is hashed anew")
        if self.dynamo is not None:
            writer = self.dynamo.writer()
            cases.append(Case("dynamo", "hash", self.dynamo.hashes, self.residents, writer, lists))
        return cases

    def check(self) -> None:
        """The index has to be what it was when all writers were done."""
        counted = self.rust.hints.index.statistics()
        if counted.duplicates or counted.missing:
            raise SystemExit(f"error: the index and its tree are out of step: {counted}")


def _expect(case: Case, blocks: int) -> None:
    for item in case.items:
        if (got := case.one(item)) != blocks:
            raise SystemExit(f"error: {case.system} {case.op} answers {got} blocks instead of {blocks}")


def _random(rng: np.random.Generator, n: int) -> Tokens:
    tokens = array("q")
    tokens.frombytes(rng.integers(1, 150_000, n, dtype=np.int64).tobytes())
    return tokens


@contextlib.contextmanager
def _writing(mutate: Callable[[], None] | None) -> Iterator[None]:
    """A second thread calls `mutate` all the time, at least once before this goes on."""
    if mutate is None:
        yield
        return
    stop, begun = threading.Event(), threading.Event()
    failures: list[Exception] = []

    def write() -> None:
        try:
            while not stop.is_set():
                mutate()
                begun.set()
        except Exception as failure:
            failures.append(failure)
            begun.set()

    thread = threading.Thread(target=write)
    thread.start()
    begun.wait()
    try:
        yield
    finally:
        stop.set()
        thread.join()
    if failures:
        raise failures[0]


def _burst(case: Case, batches: Iterator[list[Any]], seconds: float) -> None:
    """Samples for `seconds`, at least one."""
    one = case.one
    until = time.monotonic() + seconds
    while True:
        batch = case.prepare(next(batches))
        cpu = time.thread_time_ns()
        wall = time.perf_counter_ns()
        for item in batch:
            one(item)
        case.wall.append(time.perf_counter_ns() - wall)
        case.cpu.append(time.thread_time_ns() - cpu)
        if time.monotonic() >= until:
            return


def _measure(cases: list[Case], cell: Cell, rounds: int, seconds: float) -> Iterator[dict[str, Any]]:
    """One row a case. The cases take turns, in alternating order."""
    turns = []
    for case in cases:
        case.wall, case.cpu = [], []
        items = case.items
        batches = [list(items)] if cell.concurrency > 1 else [[item] for item in items]
        turns.append((case, itertools.cycle(batches)))
    for _ in range(rounds):
        for case, batches in turns:
            with _writing(case.mutate if cell.writer else None):
                _burst(case, batches, seconds)
        turns.reverse()
    for case in cases:
        yield {
            "system": case.system,
            "op": case.op,
            "block": cell.block,
            "reuse": cell.reuse,
            "concurrency": cell.concurrency,
            "writer": cell.writer,
            "p50_us": round(statistics.median(case.wall) / 1e3, 2),
            "p99_us": round(_p99(case.wall) / 1e3, 2),
            "p50_cpu_us": round(statistics.median(case.cpu) / 1e3, 2),
            "p99_cpu_us": round(_p99(case.cpu) / 1e3, 2),
            "samples": len(case.wall),
        }


def _p99(samples: list[int]) -> int:
    return sorted(samples)[int(len(samples) * 0.99)]


def measure(args: argparse.Namespace) -> list[dict[str, Any]]:
    """All rows."""
    rng = np.random.default_rng(1)
    half = args.tokens // 2 // PAGE * PAGE
    shared = [_random(rng, half) for _ in range(GROUPS)]
    residents = [shared[i % GROUPS] + _random(rng, args.tokens - half) for i in range(args.sequences)]
    rows = []
    for block in args.blocks:
        stage = Stage(block, residents, rng, args.chunk)
        for reuse in (None, *REUSES):
            cases = stage.hashing() if reuse is None else stage.probes(reuse)
            gc.collect()
            gc.freeze()
            for concurrency, writer in itertools.product((1, args.sequences), (False, True)):
                cell = Cell(block, reuse, concurrency, writer)
                rows += [
                    {"tokens": args.tokens, **row} for row in _measure(cases, cell, args.rounds, args.burst)
                ]
            gc.unfreeze()
            print(f"block {block}, reuse {'-' if reuse is None else reuse} done", file=sys.stderr)
        stage.check()
    return rows


class Goal(NamedTuple):
    """The worst `key` of the rows of our `op`, at most `limit`."""

    name: str
    op: str
    key: str
    concurrency: int
    limit: float


def goals(args: argparse.Namespace, rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The goals beside the worst of what was measured over all reuses, by block and writer."""
    found = []
    for goal in (
        Goal("probe, p50", "probe", "p50_us", 1, 5),
        Goal(f"{args.sequences} probes, p50", "probe", "p50_us", args.sequences, 500),
        Goal(f"hash of {args.tokens} tokens, p50", "hash", "p50_us", 1, 600),
        Goal("probe, p99 of CPU time", "probe", "p99_cpu_us", 1, 100),
    ):
        for block, writer in itertools.product(args.blocks, (False, True)):
            worst = max(
                row[goal.key]
                for row in rows
                if (row["system"], row["op"], row["concurrency"]) == ("wavepp", goal.op, goal.concurrency)
                and (row["block"], row["writer"]) == (block, writer)
            )
            found.append(
                {
                    "goal": goal.name,
                    "limit_us": goal.limit,
                    "block": block,
                    "writer": writer,
                    "worst_us": worst,
                }
            )
    return found


def _print_tables(rows: list[dict[str, Any]], reached: list[dict[str, Any]]) -> None:
    print("p50 in us by reuse (hash: under 100 %), worst p99 and p99 of CPU time")
    reuses = "".join(f"{f'{reuse} %':>11}" for reuse in REUSES)
    print(f"{'system':14}{'op':26}{'block':>5}{'c':>4} {'writer':6}{reuses}{'p99':>11}{'p99 CPU':>11}")
    lines: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for row in rows:
        key = (row["op"].startswith("hash"), row["block"], row["concurrency"], row["writer"])
        lines.setdefault((*key, row["system"], row["op"]), []).append(row)
    for (_, block, concurrency, writer, system, op), group in sorted(lines.items()):
        by_reuse = {100 if row["reuse"] is None else row["reuse"]: f"{row['p50_us']:.1f}" for row in group}
        p50 = "".join(f"{by_reuse.get(reuse, ''):>11}" for reuse in REUSES)
        p99 = "".join(f"{max(row[key] for row in group):11.1f}" for key in ("p99_us", "p99_cpu_us"))
        print(f"{system:14}{op:26}{block:5}{concurrency:4} {'yes' if writer else 'no':6}{p50}{p99}")
    print("\nGoals, and the worst that was measured, in us")
    for each in reached:
        where = f"block {each['block']}, {'beside a writer' if each['writer'] else 'quiet'}"
        verdict = "met" if each["worst_us"] <= each["limit_us"] else "not met"
        print(f"{each['goal']:28} <= {each['limit_us']:4}   {where:27}{each['worst_us']:10.1f}  {verdict}")


def _plot(rows: list[dict[str, Any]], args: argparse.Namespace) -> None:
    import matplotlib

    matplotlib.use("svg" if args.plot.suffix == ".svg" else "agg")
    from matplotlib import pyplot

    block = args.blocks[-1]
    figure, panels = pyplot.subplots(1, 2, figsize=(11, 4.8), sharey=True)
    for panel, concurrency in zip(panels, (1, args.sequences), strict=True):
        series: dict[tuple[str, str], dict[bool, dict[int, float]]] = {}
        for row in rows:
            if (row["block"], row["concurrency"]) == (block, concurrency) and row["reuse"] is not None:
                lines = series.setdefault((row["system"], row["op"]), {False: {}, True: {}})
                lines[row["writer"]][row["reuse"]] = row["p50_us"]
        for at, ((system, op), lines) in enumerate(series.items()):
            for writer, points in lines.items():
                panel.plot(
                    list(points),
                    list(points.values()),
                    "--" if writer else "-",
                    color=f"C{at}",
                    marker="o",
                    markersize=3,
                    linewidth=2 if system == "wavepp" else 1,
                    label=None if writer else f"{system} {op}",
                )
        panel.set(yscale="log", xticks=REUSES, xlabel="reuse, %", title=f"concurrency {concurrency}")
        panel.grid(alpha=0.3)
    panels[0].set_ylabel("p50 of one operation, µs")
    figure.suptitle(f"{args.tokens:,} tokens, block {block}; dashed: beside a writer")
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=3, fontsize=8)
    figure.subplots_adjust(left=0.07, right=0.98, top=0.87, bottom=0.3, wspace=0.05)
    figure.savefig(args.plot, dpi=100)


def main() -> int:
    """Parse, measure, print."""
    parser = argparse.ArgumentParser(description="The hint index beside SGLang's matching and Dynamo's tree.")
    parser.add_argument("--tokens", type=int, default=200_000, help="of a sequence")
    parser.add_argument("--sequences", type=int, default=64, help="resident ones, and queries at a time")
    parser.add_argument("--chunk", type=int, default=8192, help="tokens inserted at a time")
    parser.add_argument("--blocks", type=int, nargs="+", default=[16, 64], help="tokens a block and a page")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--burst", type=float, default=0.02, help="seconds of a system's turn, at least one sample"
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw the medians (.svg or .png)")
    args = parser.parse_args()
    if any(PAGE % block for block in args.blocks) or args.chunk % PAGE or args.tokens % PAGE:
        parser.error(f"--blocks must divide {PAGE}, and {PAGE} must divide --chunk and --tokens")
    if args.sequences < 2 or args.tokens <= args.chunk:
        parser.error("--sequences must be at least 2, and --tokens more than --chunk")
    if args.plot is not None:
        try:
            import matplotlib  # noqa: F401
        except ImportError:
            print("error: --plot needs matplotlib (pip install matplotlib)", file=sys.stderr)
            return 2
    if RadixTree is None:
        print("note: ai-dynamo-runtime is not installed, its rows are left out", file=sys.stderr)
    logging.disable(logging.INFO)
    torch.set_num_threads(1)
    rows = measure(args)
    reached = goals(args, rows)
    if args.plot is not None:
        _plot(rows, args)
    if args.json:
        print(json.dumps({"rows": rows, "goals": reached}))
    else:
        _print_tables(rows, reached)
    return 0


if __name__ == "__main__":
    sys.exit(main())
