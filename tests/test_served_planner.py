"""The timed planner on a server: every stage says how long it takes for its waves, and that is learned."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from conftest import eventually, start, statistics
from test_oracle import VOCABULARY, generate

from sglang_wavepp.launch.server import Server


@pytest.fixture
def timed(model: Path, tmp_path: Path) -> Server:
    flags = ("--wavepp-planner", "timed", "--wavepp-wave-floor", "64")
    return start(model, tmp_path / "timed.log", pp_size=2, wavepp=True, flags=flags)


def test_the_times_of_every_stage_are_learned_and_answers_stay_the_same(timed: Server) -> None:
    with timed:
        planning = statistics(timed)["planning"]
        assert planning["planner"] == "timed" and (planning["budget"], planning["floor"]) == (256, 64)
        assert planning["stage_us"] == [None, None]
        rng = random.Random(1)
        prompts = [rng.choices(VOCABULARY, k=1000 + 300 * i) for i in range(5)]
        first = [generate(timed, prompt, 4).output for prompt in prompts]

        def learned() -> bool:
            now = statistics(timed)["planning"]
            return min(now["observed"]) >= 16 and all(now["stage_us"]) and now["slowest"] is not None

        eventually(learned, "that both stages have said what their waves take")
        timed.post("/flush_cache")
        assert [generate(timed, prompt, 4).output for prompt in prompts] == first
