"""What `/health` takes for a sign of life, in the process of the HTTP server.

SGLang counts any message from the schedulers: also a refusal or an abort, which stage 0 sends by itself
while another stage hangs. Here only what shows that the stages work counts: generated tokens, or stage 0's
answer to a health check, which it gives for waves that have passed every stage.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sglang_wavepp.config import config_of

RECEIVE = "sglang.srt.managers.io_struct.async_sock_recv"
"""The function that `note_message` goes around."""


def shows_progress(message: Any) -> bool:
    """Did the stages work for this message to the tokenizer manager?"""
    from sglang.srt.managers.io_struct import HealthCheckOutput

    reasons = getattr(message, "finished_reasons", ())
    return isinstance(message, HealthCheckOutput) or any(r is None or r["type"] != "abort" for r in reasons)


class _LastSign:
    """In place of `TokenizerManager.last_receive_tstamp`, which is set after each message."""

    counts = True
    """Whether the latest message shows progress."""

    def __get__(self, manager: Any, owner: type) -> Any:
        return self if manager is None else manager.__dict__["last_receive_tstamp"]

    def __set__(self, manager: Any, seconds: float) -> None:
        if self.counts or config_of(manager.server_args) is None:
            manager.__dict__["last_receive_tstamp"] = seconds


_last_sign = _LastSign()


async def note_message(original: Callable[..., Any], *args: Any) -> Any:
    """Hook: a message came in."""
    message = await original(*args)
    _last_sign.counts = shows_progress(message)
    return message


def install() -> None:
    """Have SGLang keep the time of the last sign of life here."""
    from sglang.srt.managers.tokenizer_manager import TokenizerManager

    TokenizerManager.last_receive_tstamp = _last_sign
