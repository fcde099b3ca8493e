"""Builds SGLang requests in the WAVE thread, off the execution path, the same way on every stage.

SGLang's own handler validates a request, clips its lengths and starts grammar compilation; the hook on
`Scheduler._add_request_to_queue` hands what comes out of it to this class instead of to the stock loop.
Everything here runs under the stage's guard, which also serialises the use of SGLang's output sockets.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent import futures
from typing import Any

from sglang.srt.constrained.base_grammar_backend import InvalidGrammarObject
from sglang.srt.environ import envs


class Intake:
    """Requests of one stage until they are ready for admission.

    Args:
        scheduler: SGLang's scheduler of this stage.
        wake: called from any thread when a grammar is compiled.
    """

    def __init__(self, scheduler: Any, wake: Callable[[], None]) -> None:
        self._s = scheduler
        self._wake = wake
        self._captured: Any = None
        self.displaced: list[Any] = []
        """Requests that SGLang took from its full queue, and answered, in favour of newer ones."""
        self._compiling: dict[int, tuple[Any, float]] = {}
        self._grammar_bound = (
            envs.SGLANG_GRAMMAR_POLL_INTERVAL.get() * envs.SGLANG_GRAMMAR_MAX_POLL_ITERATIONS.get()
        )

    def capture(self, req: Any) -> None:
        """Called by the hook: SGLang accepted `req`."""
        self._captured = req

    def build(self, seq: int, request: Any) -> tuple[Any | None, bool]:
        """Run SGLang's handler on a request.

        Returns (request, ready). The request is None if SGLang has already answered it with an error;
        not ready means that its grammar is being compiled, see `ready`. A request that SGLang accepted
        only to fail it comes back with `to_finish` set.
        """
        queue = self._s.grammar_manager.grammar_queue
        before = len(queue)
        self._captured = None
        self._s.handle_generate_request(request)
        if self._captured is not None:
            req, self._captured = self._captured, None
            return req, True
        if len(queue) > before:
            req = queue.pop()
            self._compiling[seq] = (req, time.monotonic())
            if isinstance(req.grammar, futures.Future):
                req.grammar.add_done_callback(lambda _: self._wake())
            return req, False
        return None, True

    def ready(self) -> list[tuple[int, Any | None]]:
        """Requests whose grammar is compiled by now (or failed: `to_finish` is set), as (seq, request).

        The request is None if SGLang did not queue it after all and has answered the client.
        """
        done = [
            (seq, req)
            for seq, (req, since) in self._compiling.items()
            if req.grammar is None or req.grammar.done() or time.monotonic() - since > self._grammar_bound
        ]
        queued: list[tuple[int, Any | None]] = []
        for seq, req in done:
            del self._compiling[seq]
            self._finish_grammar(req)
            self._captured = None
            self._s._add_request_to_queue(req)
            queued.append((seq, self._captured))
        self._captured = None
        return queued

    def cancel(self, seq: int) -> None:
        """Forget a request that is still compiling."""
        found = self._compiling.pop(seq, None)
        if found is not None and isinstance(found[0].grammar, futures.Future):
            found[0].grammar.cancel()

    @property
    def compiling(self) -> int:
        """Requests that wait for their grammar."""
        return len(self._compiling)

    def _finish_grammar(self, req: Any) -> None:
        manager = self._s.grammar_manager
        future = req.grammar
        if not isinstance(future, futures.Future):
            return
        if not future.done():
            future.cancel()
            req.grammar = InvalidGrammarObject("Grammar preprocessing timed out")
        else:
            try:
                req.grammar = future.result()
            except Exception as error:  # whatever the grammar backend raises is the client's answer
                req.grammar = InvalidGrammarObject(f"Grammar compilation failed: {error}")
        manager.grammar_backend.set_cache(req.grammar_key, req.grammar.copy())
        manager._apply_request_reasoning_config(req)
        if isinstance(req.grammar, InvalidGrammarObject):
            req.set_finish_with_abort(
                f"Failed to compile {req.grammar_key[0]} grammar: {req.grammar.error_message}"
            )
