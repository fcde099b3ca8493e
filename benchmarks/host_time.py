"""CPU time of the schedulers' loops, by what they do: WavePP beside stock SGLang, on emulated devices.

    python -m benchmarks.host_time [--tokens 131072] [--cached 117952] [--requests 8] [--rounds 3] [--json]

A two-stage server each, in turn, the same prompts, all but their ends cached. Every function in `ITEMS`
counts the CPU time of its thread without that of other ones among them which it calls. Waiting is no CPU
time, so neither the length of the waves nor other processes matter. Page faults do: where the allocator gives
memory back and takes it again, the kernel's work falls on whichever item touches it first. Two tables,
medians of the rounds: the loop of each stage, and its other threads.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import random
import resource
import statistics
import sys
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.plugin import make_plugin
from sglang_wavepp.launch.models import make_model
from sglang_wavepp.launch.server import Server

_FOLDER = "WAVEPP_HOST_TIME"
"""The environment variable that names the folder for the counts."""
_SCHEDULER = "sglang.srt.managers.scheduler.Scheduler"
_BATCH = "sglang.srt.managers.schedule_batch.ScheduleBatch"
_CACHE = "sglang.srt.mem_cache.unified_radix_cache.UnifiedRadixCache"

ITEMS: dict[str, tuple[str, ...]] = {
    "receive requests": (f"{_SCHEDULER}.ingest_requests",),
    "pass requests on": (f"{_SCHEDULER}._pp_send_pyobj_to_next_stage",),
    "make a request": (f"{_SCHEDULER}.handle_generate_request",),
    "choose a batch": (f"{_SCHEDULER}.get_next_batch_to_run",),
    "match and lock": (f"{_CACHE}.match_prefix", f"{_CACHE}.lock", f"{_CACHE}.unlock"),
    "publish KV": (f"{_CACHE}.checkpoint_into_tree",),
    "rows and slots": (f"{_BATCH}.prepare_for_extend",),
    "forward metadata": ("sglang.srt.model_executor.forward_batch_info.ForwardBatch.init_new",),
    "launch": (f"{_SCHEDULER}._pp_launch_batch",),
    "send activations": (f"{_SCHEDULER}._pp_send_dict_to_next_stage",),
    "receive activations": (f"{_SCHEDULER}._pp_recv_typed_dict",),
    "apply outputs": (f"{_SCHEDULER}.process_batch_result",),
    "WavePP: decide": ("sglang_wavepp.loop.LeaderLoop._advance",),
    "WavePP: prepare": ("sglang_wavepp.executor.Executor.prepare_prefill",),
    "WavePP: commit": ("sglang_wavepp.executor.Executor.commit",),
    "WavePP: outputs": ("sglang_wavepp.executor.Executor.output",),
}
"""What is reported -> SGLang's and WavePP's functions behind it."""


# --- in the server's processes ---------------------------------------------------------------


def register() -> None:
    """Entry point of the group `sglang.srt.plugins`."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    from sglang_wavepp.config import config_of
    from sglang_wavepp.launch.plugin import scheduler_arguments

    scheduler = scheduler_arguments()
    if scheduler is None:
        return
    clock = _Clock(Path(os.environ[_FOLDER]) / f"stage{scheduler['pp_rank']}.json")
    wavepp = config_of(scheduler["server_args"]) is not None
    for item, targets in ITEMS.items():
        for target in targets:
            if wavepp or not target.startswith("sglang_wavepp"):
                HookRegistry.register(target, functools.partial(clock.count, item), HookType.AROUND)


class _Clock:
    """Exclusive CPU seconds by item, of the loop (the main thread) and of all other threads."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._spent: dict[bool, dict[str, float]] = {True: defaultdict(float), False: defaultdict(float)}
        self._waves = 0
        self._inner = threading.local()

    def count(self, item: str, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        before = getattr(self._inner, "spent", 0.0)
        self._inner.spent = 0.0
        began = time.thread_time()
        try:
            return original(*args, **kwargs)
        finally:
            took = time.thread_time() - began
            loop = threading.current_thread() is threading.main_thread()
            self._spent[loop][item] += took - self._inner.spent
            self._inner.spent = before + took
            if loop and item == "launch":
                self._waves += 1
                self._tell()

    def _tell(self) -> None:
        """All counts so far, replaced at once."""
        here = resource.getrusage(resource.RUSAGE_THREAD).ru_minflt
        told = {
            "waves": self._waves,
            "loop": {**self._spent[True], "all": time.thread_time()},
            "others": {**self._spent[False], "all": time.process_time() - time.thread_time()},
            "faults": {"loop": here, "others": resource.getrusage(resource.RUSAGE_SELF).ru_minflt - here},
        }
        new = self._file.with_suffix(".new")
        new.write_text(json.dumps(told))
        new.replace(self._file)


# --- the caller's side -----------------------------------------------------------------------


def counts(folder: Path) -> list[dict[str, Any]]:
    """What each stage has counted up to its latest wave."""
    return [json.loads(file.read_text()) for file in sorted(folder.glob("stage*.json"))]


def measure(wavepp: bool, args: argparse.Namespace, folder: Path) -> list[dict[str, Any]]:
    """Per stage: waves, page faults a request by thread, milliseconds a request by thread and item."""
    env = make_plugin(folder, "benchmarks.host_time") | {_FOLDER: str(folder)}
    model = make_model(folder / "model", "emulated", layers=2, context=args.tokens + 64)
    draw = random.Random(1)

    def ids(count: int) -> list[int]:
        return draw.choices(range(16, 1000), k=count)

    prefixes = [ids(args.cached) for _ in range(args.requests)]
    with Server(
        model,
        pp_size=2,
        wavepp=wavepp,
        flags=[
            *("--wavepp-emulate", "kimi-k3-gb300", "--wavepp-emulate-dilation", "0.01"),
            *(["--wavepp-planner", "static"] if wavepp else ["--sleep-on-idle"]),
        ],
        env=env,
        max_total_tokens=(args.requests + 2) * args.tokens * 2,
        context_length=args.tokens + 64,
        chunked_prefill_size=args.chunk,
        log_path=folder / "server.log",
        ready_timeout=600.0,
    ) as server:

        def ask(prompt: list[int]) -> int:
            sampling = {"temperature": 0, "max_new_tokens": 1}
            answer = server.post("/generate", {"input_ids": prompt, "sampling_params": sampling}, 600.0)
            return int(answer["meta_info"]["cached_tokens"])

        for prefix in prefixes:
            ask(prefix)
        ask(ids(64))  # its waves tell what came after those of the last prefix
        before = counts(folder)
        found = {ask(prefix + ids(args.tokens - args.cached)) for prefix in prefixes}
        ask(ids(64))
        after = counts(folder)
    if found != {args.cached}:
        raise SystemExit(f"error: requests reused {found} tokens instead of {args.cached}")
    return [
        {
            "waves": b["waves"] - a["waves"] - 1,
            "faults": {
                thread: (faults - a["faults"][thread]) / args.requests
                for thread, faults in b["faults"].items()
            },
            **{
                thread: {
                    item: 1e3 * (value - a[thread].get(item, 0.0)) / args.requests
                    for item, value in b[thread].items()
                }
                for thread in ("loop", "others")
            },
        }
        for a, b in zip(before, after, strict=True)
    ]


def median(rounds: list[Any]) -> Any:
    """The median of each number in values of the same shape; 0 where a round lacks one."""
    first = rounds[0]
    if isinstance(first, list):
        return [median(list(values)) for values in zip(*rounds, strict=True)]
    if isinstance(first, dict):
        keys = dict.fromkeys(key for values in rounds for key in values)
        return {key: median([values.get(key, 0.0) for values in rounds]) for key in keys}
    return statistics.median(rounds)


def table(found: dict[str, list[dict[str, Any]]], thread: str) -> str:
    """Milliseconds a request, a row an item, and a column for each system and stage."""
    columns = [(name, stage) for name, stages in found.items() for stage in range(len(stages))]
    lines = [f"{'ms a request':<22}" + "".join(f"{f'{name} {stage}':>12}" for name, stage in columns)]
    for item in (*ITEMS, "all"):
        values = [found[name][stage][thread].get(item, 0.0) for name, stage in columns]
        if any(value >= 0.005 for value in values):
            lines.append(f"{item:<22}" + "".join(f"{value:>12.2f}" for value in values))
    faults = "".join(f"{found[name][stage]['faults'][thread]:>12.0f}" for name, stage in columns)
    waves = "".join(f"{found[name][stage]['waves']:>12.0f}" for name, stage in columns)
    return "\n".join([*lines, f"{'page faults':<22}{faults}", f"{'waves':<22}{waves}"])


def main() -> None:
    """Parse, measure, print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokens", type=int, default=131_072, help="of a prompt")
    parser.add_argument("--cached", type=int, default=117_952, help="tokens of it that are cached")
    parser.add_argument("--chunk", type=int, default=8192, help="tokens of a wave at most")
    parser.add_argument("--requests", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=3, help="(3)")
    parser.add_argument("--json", action="store_true", help="print JSON")
    args = parser.parse_args()
    systems = ("stock", "wavepp")
    rounds: dict[str, list[list[dict[str, Any]]]] = {name: [] for name in systems}
    for number in range(args.rounds):
        for name in systems if number % 2 == 0 else systems[::-1]:
            with tempfile.TemporaryDirectory() as folder:
                rounds[name].append(measure(name == "wavepp", args, Path(folder)))
            print(f"{name}, round {number}: measured", file=sys.stderr)
    found = {name: median(values) for name, values in rounds.items()}
    if args.json:
        print(json.dumps(found))
        return
    print("Loop\n" + table(found, "loop"))
    print("\nOther threads (WAVE, and what libraries have)\n" + table(found, "others"))


if __name__ == "__main__":
    main()
