"""The member's side of admission: what one stage answers to the leader. Pure; every stage runs one.

Calls come from two threads. The WAVE thread feeds the `on_*` methods with messages; the LOOP thread
calls the methods under "the loop's side" while it applies the log. Everything that changes the tree or
the ledger happens under the stage's guard, which the LOOP thread holds for each whole compound
operation, so the inequality of the ledger is never evaluated in the middle of one. Hints, and the
comparison of tokens before a lease, do without the guard and never wait for the loop.

Ownership: a lease and its escrow belong to this machine until `take`; from COMMIT on they belong to the
loop. The leader's frames can only give back what is uncommitted.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from typing import Any

from sglang_wavepp.errors import ProtocolError
from sglang_wavepp.messages import (
    Capacity,
    Forget,
    Grow,
    Grown,
    GrownItem,
    Held,
    HeldItem,
    Hint,
    HintItem,
    HintQuery,
    Hold,
    Message,
    Nack,
    Release,
    Ungrow,
)
from sglang_wavepp.radix.lease import Lease, LeaseTable
from sglang_wavepp.radix.ledger import Ledger
from sglang_wavepp.radix.protocol import PrefixTree


@dataclasses.dataclass(frozen=True, slots=True)
class MemberStatistics:
    """What one stage holds for requests; all zero on an idle server."""

    offered: int
    """Requests that are known and not committed."""
    leases: int
    """Leases of uncommitted or committed but not yet started requests."""
    committed: int
    """Requests between COMMIT and their end."""
    escrow_tokens: int
    escrow_rows: int
    refused: int
    """Holds and growths refused since the start for want of room."""


class Member:
    """Admission state of one stage.

    Args:
        tree: the stage's prefix tree and pools.
        guard: makes the context manager under which the tree and the ledger may be touched.
        send: hands a message to the leader; must not block.
    """

    def __init__(
        self,
        tree: PrefixTree,
        guard: Callable[[], AbstractContextManager[Any]],
        send: Callable[[Message], None],
    ) -> None:
        self._tree = tree
        self._guard = guard
        self._send = send
        self.ledger = Ledger(tree)
        self.leases = LeaseTable(tree)
        self._offered: dict[int, Any] = {}
        self._committed: dict[int, Any] = {}
        self._applied = 0
        """Log entries that this stage's loop has applied."""
        self._early: list[HintQuery | Forget] = []
        """Messages that wait until the loop has come to their log position: they may concern requests that it
        has yet to commit or to retract."""
        self._gave_back = False
        """A committed request gave its room back since the last look."""
        self._latest_offer = -1
        self._forgotten: set[int] = set()
        """Requests that were forgotten before their offer came: it takes another socket."""

    @property
    def epoch(self) -> int:
        """Number of tree resets so far."""
        return self.leases.epoch

    # --- the WAVE thread's side --------------------------------------------------------------

    def arrives(self, seq: int) -> bool:
        """The offer of a request came, in the order of arrival. False if it was forgotten before."""
        self._latest_offer = seq
        if seq in self._forgotten:
            self._forgotten.discard(seq)
            return False
        return True

    def offered(self, seq: int, prefix: Any, position: int = 0) -> None:
        """A request is ready on this stage (payload verified, grammar compiled): hint its prefix.

        Once the log is applied up to `position`: up to there other requests leave what this one may reuse.
        """
        self._offered[seq] = prefix
        if not self._comes_early(HintQuery(self.epoch, position, [seq])):
            self._hint([seq])

    def failed(self, seq: int, error: str) -> None:
        """This stage cannot serve the request. The leader decides what becomes of it."""
        self._send(Hint(self.epoch, [HintItem(seq, 0, error)]))

    def on_message(self, message: Message) -> None:
        """One frame of the leader. Raises `ProtocolError` on a frame that no leader sends."""
        epoch = getattr(message, "epoch", self.epoch)
        if epoch != self.epoch:
            # The leader sends nothing of a new epoch before every stage has acknowledged the reset.
            self._send(Nack(self.epoch, getattr(message, "round", 0)))
        elif isinstance(message, HintQuery | Forget):
            if not self._comes_early(message):
                self._handle(message)
        elif isinstance(message, Hold):
            self._hold(message)
        elif isinstance(message, Release):
            self._release(message.seqs)
        elif isinstance(message, Grow):
            self._grow(message)
        elif isinstance(message, Ungrow):
            with self._guard():
                for seq, until in message.items:
                    self.ledger.shrink(seq, until)
        else:
            raise ProtocolError(f"a member got {type(message).__name__}, which no leader sends")

    def _comes_early(self, message: HintQuery | Forget) -> bool:
        """Put a message aside that the loop is not ready for yet."""
        if message.position <= self._applied:
            return False
        with self._guard():
            if message.position <= self._applied:
                return False
            self._early.append(message)
            return True

    def _handle(self, message: HintQuery | Forget) -> None:
        if isinstance(message, HintQuery):
            self._hint(message.seqs)
        else:
            self._release(message.seqs)
            for seq in message.seqs:
                if self._offered.pop(seq, None) is None and seq > self._latest_offer:
                    self._forgotten.add(seq)

    def _hint(self, seqs: Iterable[int]) -> None:
        items = [HintItem(q, self._tree.hint(prefix)) for q in seqs if (prefix := self._offered.get(q))]
        if items:
            self._send(Hint(self.epoch, items))

    def _hold(self, message: Hold) -> None:
        answers: list[HeldItem] = []
        void = False
        for item in message.items:
            prefix = self._offered.get(item.seq)
            if void or prefix is None:
                answers.append(HeldItem(item.seq, 0, False))
                continue
            found = self.leases.find(item.seq, prefix, min(item.boundary, prefix.max_boundary))
            with self._guard():
                lease = self.leases.acquire(item.seq, prefix, found)
                granted = self.ledger.grant(item.seq, lease.boundary, item.until) or (
                    self.leases.thin(lease) and self.ledger.grant(item.seq, lease.boundary, item.until)
                )
                if not granted:
                    self.leases.release(lease)
                hopeless = not granted and not self._committed and not len(self.leases)
            void = not granted
            answers.append(HeldItem(item.seq, lease.boundary, granted, hopeless))
        self._send(Held(self.epoch, message.round, answers))

    def _release(self, seqs: Iterable[int]) -> None:
        tell = False
        for seq in seqs:
            if seq not in self._offered:
                continue
            with self._guard():
                lease = self.leases.get(seq)
                if lease is not None:
                    self.leases.release(lease)
                    self.ledger.close(seq)
                    tell = tell or self.freed()
        if tell:
            self._send(self.capacity())

    def _grow(self, message: Grow) -> None:
        answers = []
        for seq, until in message.items:
            with self._guard():
                # A request that ended meanwhile needs no room; the leader learns of the end from the log.
                granted = not self.ledger.owns(seq) or self.ledger.grow(seq, until)
                hopeless = not granted and self.ledger.statistics().owners == 1 and not len(self.leases)
            answers.append(GrownItem(granted, hopeless))
        self._send(Grown(self.epoch, message.round, answers))

    # --- the loop's side (the loop holds the guard) ------------------------------------------

    def take(self, seq: int, boundary: int) -> tuple[Any, Lease]:
        """COMMIT: the request and its lease now belong to the loop.

        Raises `ProtocolError` if the stage does not hold what the log says.
        """
        prefix = self._offered.pop(seq, None)
        lease = self.leases.get(seq)
        if prefix is None or lease is None or lease.boundary != boundary:
            held = "no lease" if lease is None else f"a lease of {lease.boundary} tokens"
            raise ProtocolError(f"request {seq} was committed at {boundary} tokens, this stage has {held}")
        self._committed[seq] = prefix
        return prefix, lease

    def reusable(self, seq: int) -> int:
        """Tokens of a committed request that this stage could reuse now."""
        return self._tree.hint(self._committed[seq])

    def finish(self, seq: int) -> None:
        """The request ended: its escrow is over."""
        self._committed.pop(seq, None)
        self.ledger.close(seq)
        self._gave_back = True

    def retract(self, seq: int) -> None:
        """The request gave its KV back and waits for admission again."""
        prefix = self._committed.pop(seq)
        self.ledger.close(seq)
        self._gave_back = True
        self._offered[seq] = prefix

    def applied(self, position: int) -> None:
        """The loop has applied the log up to `position`: handle what waited for it."""
        self._applied = position
        due = [m for m in self._early if m.position <= position]
        if due:
            self._early = [m for m in self._early if m.position > position]
            for message in due:
                self._handle(message)

    def freed(self) -> bool:
        """Room may have become free. True if the leader should be told, since it was refused before."""
        gave, self._gave_back = self._gave_back, False
        return self.ledger.relieved(anyhow=gave)

    def capacity(self) -> Capacity:
        """The message to send after `freed` said so."""
        return Capacity(self.epoch)

    def reset(self) -> None:
        """The tree was reset at a log position: all receipts are void, nothing is promised any more."""
        self.leases.reset()
        for seq in [*self._offered, *self._committed]:
            self.ledger.close(seq)

    def statistics(self) -> MemberStatistics:
        """A snapshot; taken without the guard, so it may be torn between two operations."""
        ledger = self.ledger.statistics()
        return MemberStatistics(
            len(self._offered),
            len(self.leases),
            len(self._committed),
            ledger.tokens,
            ledger.rows,
            ledger.refused,
        )
