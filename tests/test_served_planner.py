"""The timed planner on a server: every stage says how long it takes for its waves, and that is learned."""

from __future__ import annotations

from conftest import eventually, statistics
from test_oracle import VOCABULARY, generate

from sglang_wavepp.launch.server import Server


def test_the_times_of_every_stage_are_learned(wave4: Server) -> None:
    wave4.post("/flush_cache")
    planning = statistics(wave4)["planning"]
    assert planning["planner"] == "timed" and (planning["budget"], planning["floor"]) == (256, 64)
    before = planning["observed"]
    for i in range(4):
        generate(wave4, [VOCABULARY[(i + k) % len(VOCABULARY)] for k in range(1000 + 200 * i)], 1)

    def learned() -> bool:
        now = statistics(wave4)["planning"]
        return all(n >= b + 16 for n, b in zip(now["observed"], before, strict=True)) and all(now["stage_us"])

    eventually(learned, "that all stages have said what their waves take")
