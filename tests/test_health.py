"""What counts as a sign of life for `/health`."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from sglang_wavepp.launch import health
from sglang_wavepp.launch.flags import carried

pytestmark = pytest.mark.usefixtures("sglang_with_plugins")

ABORT, LENGTH = {"type": "abort"}, {"type": "length"}


@pytest.mark.parametrize(
    ("reasons", "counts"),
    [([None], True), ([LENGTH], True), ([ABORT], False), ([ABORT, None], True), ([], False)],
)
def test_outputs_count_unless_all_are_aborts(reasons: list[Any], counts: bool) -> None:
    assert health.shows_progress(SimpleNamespace(finished_reasons=reasons)) is counts


def test_an_answer_to_a_health_check_counts_and_other_messages_do_not() -> None:
    from sglang.srt.managers.io_struct import AbortReq, HealthCheckOutput

    assert health.shows_progress(HealthCheckOutput())
    assert not health.shows_progress(AbortReq(rid="x"))


@pytest.mark.parametrize("wavepp", [False, True])
def test_without_wavepp_every_message_counts(wavepp: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    class Manager:
        last_receive_tstamp = health._last_sign

        def __init__(self) -> None:
            self.server_args = SimpleNamespace(
                _wavepp=carried({}, from_command_line=True) if wavepp else None
            )
            self.last_receive_tstamp = 1.0

    async def receive(message: Any) -> Any:
        return message

    manager = Manager()
    monkeypatch.setattr(health._last_sign, "counts", True, raising=False)
    for message, seconds in ((SimpleNamespace(finished_reasons=[None]), 2.0), ("an abort", 3.0)):
        assert asyncio.run(health.note_message(receive, message)) is message
        manager.last_receive_tstamp = seconds
    assert manager.last_receive_tstamp == (2.0 if wavepp else 3.0)
