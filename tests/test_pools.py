"""How large each stage's KV pool becomes, through the hooks on SGLang's sizing."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, NoReturn

import pytest

pytestmark = pytest.mark.usefixtures("sglang_with_plugins")

ROOM = 5000
"""KV tokens that the stage's memory holds."""
SMALLEST = 3000
"""What SGLang makes of it: the smallest over all stages."""


class EndedError(Exception):
    """In place of the end of the server."""


@pytest.fixture
def pool(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Size the pool of stage 1 with these options."""
    from sglang.srt import runtime_context

    from sglang_wavepp import hooks, watch
    from sglang_wavepp.launch.flags import carried

    def end(rank: int, reason: str) -> NoReturn:
        raise EndedError(f"stage {rank}: {reason}")

    def size(pool_tokens: str, max_total_tokens: int | None = None) -> int:
        record = SimpleNamespace(_wavepp=carried({"pool_tokens": pool_tokens}, from_command_line=True))
        schedule = SimpleNamespace(max_total_tokens=max_total_tokens)
        for name, value in (
            ("get_server_args", record),
            ("get_schedule", schedule),
            ("get_parallel", SimpleNamespace(pp_rank=1)),
        ):
            monkeypatch.setattr(runtime_context, name, lambda value=value: value)
        monkeypatch.setattr(watch, "end_server", end)
        return hooks._own_pool(lambda configurator, tokens: min(tokens, SMALLEST), None, ROOM)

    return size


def test_without_the_option_all_stages_take_the_smallest(pool: Any) -> None:
    assert pool("") == SMALLEST


def test_auto_takes_what_the_stage_has(pool: Any) -> None:
    assert pool("auto") == ROOM
    assert pool("auto", max_total_tokens=4000) == 4000


def test_a_list_gives_each_stage_its_own(pool: Any) -> None:
    assert pool("9999,4500") == 4500


def test_more_than_there_is_ends_the_server(pool: Any) -> None:
    with pytest.raises(
        EndedError, match=r"stage 1: .* wants 5001 KV tokens for it, but its memory holds 5000"
    ):
        pool("100,5001")
    with pytest.raises(EndedError, match="but --max-total-tokens allows 4000"):
        pool("100,4500", max_total_tokens=4000)


def test_free_memory_is_the_stages_own_where_pools_are(monkeypatch: pytest.MonkeyPatch, pool: Any) -> None:
    from sglang_wavepp import hooks

    def free(device: str, gpu_id: int, distributed: bool = False, cpu_group: Any = None) -> str:
        return "smallest" if distributed else "own"

    for pool_tokens, want in (("", "smallest"), ("auto", "own"), ("1,2", "own")):
        pool(pool_tokens, max_total_tokens=2)
        assert hooks._own_memory(free, "cpu", 0, distributed=True) == want
