"""The servers that the grid compares, by name.

    stock-8192        SGLang's pipeline with chunks of 8192 tokens
    stock-8192-d1     the same with --pp-async-batch-depth 1
    stock-dynamic     --enable-dynamic-chunking, chunks of 16384 at first (also with -d1, -d2)
    wavepp-timed      WavePP with this planner: static, mpu or timed; waves of 16384 tokens at most
    wavepp-static-8192  the same, waves of 8192 at most

Stock runs with SGLANG_PP_SKIP_PURE_CHUNKED_OUTPUT_COMM=1. SGLANG_PP_COMM_OVERLAP does nothing without CUDA,
so it is left alone. Stock's idle loops spin and would take the cores of the others here: --sleep-on-idle.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping

from sglang_wavepp.mpu import PLANNERS

DEFAULT = ("stock-4096", "stock-8192", "wavepp-static", "wavepp-timed")
"""What the quick grid compares."""
ALL = (
    *(f"stock-{size}{depth}" for size in (4096, 8192, 16384) for depth in ("", "-d1", "-d2")),
    "stock-dynamic",
    "stock-dynamic-d1",
    *(f"wavepp-{planner}" for planner in PLANNERS),
)
_LARGEST = 16384
_STOCK = re.compile(r"stock-(?P<size>\d+|dynamic)(?:-d(?P<depth>[0-2]))?")
_WAVEPP = re.compile(r"wavepp-(?P<planner>[a-z]+)(?:-(?P<size>\d+))?")


@dataclasses.dataclass(frozen=True, slots=True)
class System:
    """How a server is started."""

    name: str
    planner: str
    """Of WavePP; empty for stock SGLang."""
    budget: int
    """--chunked-prefill-size."""
    flags: tuple[str, ...]
    env: Mapping[str, str]

    @property
    def wavepp(self) -> bool:
        """Is it served with WavePP?"""
        return bool(self.planner)


def system(name: str) -> System:
    """The system of this name. Raises ValueError, with a line for the user."""
    if match := _STOCK.fullmatch(name):
        dynamic = match["size"] == "dynamic"
        flags = ["--sleep-on-idle", *(["--enable-dynamic-chunking"] if dynamic else [])]
        if match["depth"]:
            flags += ["--pp-async-batch-depth", match["depth"]]
        size = _LARGEST if dynamic else int(match["size"])
        env = {"SGLANG_PP_SKIP_PURE_CHUNKED_OUTPUT_COMM": "1"}
        return System(name, "", _positive(name, size), tuple(flags), env)
    match = _WAVEPP.fullmatch(name)
    if match and match["planner"] in PLANNERS:
        size = int(match["size"] or _LARGEST)
        return System(
            name, match["planner"], _positive(name, size), ("--wavepp-planner", match["planner"]), {}
        )
    known = f"stock-TOKENS[-dDEPTH], stock-dynamic[-dDEPTH], wavepp-{'|'.join(PLANNERS)}[-TOKENS]"
    raise ValueError(f"{name!r} is no system, which are {known}")


def _positive(name: str, size: int) -> int:
    if size < 1:
        raise ValueError(f"{name!r}: waves of at least one token")
    return size
