"""Bugs that are put into the protocol, to see that the simulation sees them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

from cluster import Guard, SimStage

from sglang_wavepp.errors import ProtocolError
from sglang_wavepp.leader import Committed, Leader, State
from sglang_wavepp.member import Member
from sglang_wavepp.messages import Held, Hold
from sglang_wavepp.numbering import Numbering
from sglang_wavepp.radix.lease import LeaseTable
from sglang_wavepp.radix.ledger import Ledger
from sglang_wavepp.sequencer import Sequencer

Patch = tuple[Any, str, Callable[..., Any]]
"""(class, method, replacement that takes the method first)."""


def _skip(original: Callable[..., Any], *args: Any) -> None:
    """Do nothing."""


def _yes(original: Callable[..., Any], *args: Any) -> bool:
    return True


def _unlock_nothing(release: Callable[..., Any], table: LeaseTable, lease: Any) -> None:
    table.transfer(lease)


def _each_alone(hold: Callable[..., Any], member: Member, message: Hold) -> None:
    """A grant may follow a refusal."""
    answers = []
    send, member._send = member._send, answers.append
    for item in message.items:
        hold(member, Hold(message.epoch, message.round, [item]))
    member._send = send
    send(Held(message.epoch, message.round, [item for answer in answers for item in answer.items]))


def _most(end_hold: Callable[..., Any], leader: Leader, r: Any, columns: list[tuple[Any, ...]]) -> None:
    """The longest boundary is taken, not the shortest."""
    for a, column in zip(r.holds, columns, strict=True):
        most = max(item.boundary for item in column)
        if a in leader._queue and all(item.granted for item in column):
            a.candidate, a.state = most, State.AGREED


def _last_is_not_asked(on_answer: Callable[..., Any], leader: Leader, rank: int, message: Any) -> None:
    """A round is over when all stages but one have answered."""
    r = leader._round
    on_answer(leader, rank, message)
    if r is not None and r is leader._round and len(r.answers) == leader.limits.stages - 1:
        for silent in set(range(leader.limits.stages)) - r.answers.keys():
            on_answer(leader, silent, message)


def _commit_twice(commit: Callable[..., Any], leader: Leader) -> None:
    commit(leader)
    leader.events += [event for event in leader.events if isinstance(event, Committed)]


def _promise_all(room: Callable[..., Any], ledger: Ledger) -> int:
    """What is promised to others counts as free."""
    return int(room(ledger)) + ledger.statistics().tokens


def _free_rows(grant: Callable[..., Any], ledger: Ledger, *args: int) -> bool:
    """Rows that are promised to others count as free."""
    ledger._rows, rows = 0, ledger._rows
    granted = bool(grant(ledger, *args))
    ledger._rows += rows
    return granted


def _no_slack(cover: Callable[..., Any], ledger: Ledger, until: int) -> int:
    return max(0, int(cover(ledger, until)) - 2 * ledger._page)


def _oldest(refused: Callable[..., Any], sequencer: Sequencer, seq: int, hopeless: bool) -> None:
    """The oldest request gives its room back, not the youngest."""
    if seq in sequencer._live and len(sequencer._live) > 1 and not hopeless:
        min(sequencer._live.values(), key=lambda r: r.order).drop = "retract"
    else:
        refused(sequencer, seq, hopeless)


def _position_forgotten(retracted: Callable[..., Any], leader: Leader, *args: int) -> None:
    """Nobody waits until the stages have applied a retraction."""
    retracted(leader, *args[:-1], 0)


def _keep_epoch(reset: Callable[..., Any], table: LeaseTable) -> None:
    reset(table)
    table.epoch -= 1


BUGS: dict[str, Patch] = {
    "a release unlocks nothing": (LeaseTable, "release", _unlock_nothing),
    "a grant may follow a refusal": (Member, "_hold", _each_alone),
    "the longest boundary is agreed on": (Leader, "_end_hold", _most),
    "a round does not wait for the last answer": (Leader, "_on_answer", _last_is_not_asked),
    "a request is committed twice": (Leader, "_commit", _commit_twice),
    "what is promised to others counts as free": (Ledger, "room", _promise_all),
    "rows that are promised to others count as free": (Ledger, "grant", _free_rows),
    "escrow is not given back": (Ledger, "close", _skip),
    "escrow is two pages short": (Ledger, "_cover", _no_slack),
    "the oldest request is retracted": (Sequencer, "growth_refused", _oldest),
    "a row decodes without room": (Sequencer, "_has_room", _yes),
    "a request that ended stays in the leader's books": (Leader, "finished", _skip),
    "nobody waits for a retraction to be applied": (Leader, "retracted", _position_forgotten),
    "a flush keeps the epoch": (LeaseTable, "reset", _keep_epoch),
    "a flush forgets no lease": (LeaseTable, "reset", _skip),
    "nobody is told of room": (Member, "freed", _skip),
    "a growth is not taken back where another stage refused": (Ledger, "shrink", _skip),
}


@contextmanager
def broken(bug: str) -> Iterator[None]:
    """Runs in this context have the bug."""
    where, name, replacement = BUGS[bug]
    original = getattr(where, name)
    with mock.patch.object(where, name, lambda *args: replacement(original, *args)):
        yield


