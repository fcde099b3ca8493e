"""Bugs that are put into the protocol, to see that the simulation sees them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import partialmethod
from typing import Any
from unittest import mock

import msgspec
from cluster import Cluster
from sim_stage import Guard, SimStage

from sglang_wavepp.admission import Committed, State
from sglang_wavepp.leader import Leader
from sglang_wavepp.member import Member
from sglang_wavepp.messages import Held, Hold, Release
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
        oldest = min(sequencer._live.values(), key=lambda r: r.order)
        sequencer._leaving[oldest.seq] = "retract"
    else:
        refused(sequencer, seq, hopeless)


def _position_forgotten(retracted: Callable[..., Any], leader: Leader, *args: int) -> None:
    """Nobody waits until the stages have applied a retraction."""
    retracted(leader, *args[:-1], 0)


def _keep_epoch(reset: Callable[..., Any], table: LeaseTable) -> None:
    reset(table)
    table.epoch -= 1


def _first_acknowledgement(end: Callable[..., Any], cluster: Cluster) -> None:
    """The leader takes the first stage that applied a reset for all."""
    (epoch, *_) = cluster._acks.values()
    cluster._acks = dict.fromkeys(range(len(cluster.stages)), epoch)
    end(cluster)


def _of_any_epoch(on_message: Callable[..., Any], member: Member, message: Any) -> None:
    if hasattr(message, "epoch"):
        message = msgspec.structs.replace(message, epoch=member.epoch)
    on_message(member, message)


def _release_again(commit: Callable[..., Any], leader: Leader) -> None:
    """What was committed is released."""
    commit(leader)
    seqs = [event.seq for event in leader.events if isinstance(event, Committed)]
    if seqs:
        leader._send(Release(leader.epoch, seqs))


def _release_twice(release: Callable[..., Any], table: LeaseTable, lease: Any) -> None:
    lock = table.transfer(lease)
    table._tree.unlock(lock)
    table._tree.unlock(lock)


def _longer_next_time(end_hold: Callable[..., Any], leader: Leader, r: Any, columns: Any) -> None:
    end_hold(leader, r, columns)
    for a in r.holds:
        if a in leader._queue and a.state is State.HINTED and a.until:
            a.candidate += leader.limits.page


def _impatient(applied: Callable[..., Any], member: Member, position: int) -> None:
    """The stage itself gives a request up that takes long."""
    applied(member, position)
    if position % 17 == 0 and member._committed:
        member.finish(next(iter(member._committed)))


def _by_itself(may_flush: Callable[..., Any], stage: SimStage, d: Any) -> bool:
    return not stage.live


def _any_number(accept: Callable[..., Any], numbering: Numbering, stamp: bytes) -> None:
    numbering.count = max(numbering.count, int.from_bytes(stamp, "big"))
    accept(numbering, stamp)


def _once_more(accept: Callable[..., Any], numbering: Numbering, stamp: bytes) -> None:
    with suppress(msgspec.DecodeError):
        accept(numbering, stamp)


def _not_in_flight(drop: Callable[..., Any], sequencer: Sequencer, seq: int, **options: bool) -> bool:
    """An abort does not wait for the waves of the request."""
    if seq in sequencer._live:
        sequencer._live[seq].in_flight = 0
    return bool(drop(sequencer, seq, **options))


def _far_ahead(init: Callable[..., Any], sequencer: Sequencer, **options: Any) -> None:
    init(sequencer, **options | {"run_ahead": 1000})


def _no(original: Callable[..., Any], *args: Any) -> bool:
    return False


BUGS: dict[str, list[Patch]] = {
    "a release unlocks nothing": [(LeaseTable, "release", _unlock_nothing)],
    "a release unlocks twice": [(LeaseTable, "release", _release_twice)],
    "a grant may follow a refusal": [(Member, "_hold", _each_alone)],
    "the longest boundary is agreed on": [(Leader, "_end_hold", _most)],
    "a boundary grows from round to round": [(Leader, "_end_hold", _longer_next_time)],
    "a round does not wait for the last answer": [(Leader, "_on_answer", _last_is_not_asked)],
    "a request is committed twice": [(Leader, "_commit", _commit_twice)],
    "what was committed is released": [(Leader, "_commit", _release_again)],
    "what is promised to others counts as free": [(Ledger, "room", _promise_all)],
    "rows that are promised to others count as free": [(Ledger, "grant", _free_rows)],
    "a grant does not wait for the guard": [(Guard, "__enter__", _skip)],
    "escrow is not given back": [(Ledger, "close", _skip)],
    "escrow is two pages short": [(Ledger, "_cover", _no_slack)],
    "the oldest request is retracted": [(Sequencer, "growth_refused", _oldest)],
    "a row decodes without room": [(Sequencer, "_has_room", _yes)],
    "an abort does not wait for the waves of its request": [(Sequencer, "drop", _not_in_flight)],
    "waves are issued without end": [(Sequencer, "__init__", _far_ahead)],
    "a request that ended stays in the leader's books": [(Leader, "finished", _skip)],
    "nobody waits for a retraction to be applied": [(Leader, "retracted", _position_forgotten)],
    "a stage answers before it has applied what was asked about": [(Member, "_comes_early", _no)],
    "a request is built although it was forgotten": [(Member, "arrives", _yes)],
    "a stage gives a request up by itself": [(Member, "applied", _impatient)],
    "a stage flushes when it is idle itself": [(SimStage, "may_flush", _by_itself)],
    "a flush keeps the epoch": [(LeaseTable, "reset", _keep_epoch)],
    "a flush forgets no lease": [(LeaseTable, "reset", _skip)],
    "a new epoch begins before all are in it": [(Cluster, "_end_control", _first_acknowledgement)],
    "frames of any epoch count": [
        (Cluster, "_end_control", _first_acknowledgement),
        (Member, "on_message", _of_any_epoch),
    ],
    "nobody is told of room": [(Member, "freed", _skip)],
    "a growth is not taken back where another stage refused": [(Ledger, "shrink", _skip)],
    "a lost frame is not noticed": [(Numbering, "accept", _any_number)],
    "a repeated frame counts twice": [(Numbering, "accept", _once_more)],
}


@contextmanager
def broken(bug: str) -> Iterator[None]:
    """Runs in this context have the bug."""
    with ExitStack() as patches:
        for where, name, replacement in BUGS[bug]:
            patched = partialmethod(_patched, getattr(where, name), replacement)
            patches.enter_context(mock.patch.object(where, name, patched))
        yield


def _patched(self: Any, original: Any, replacement: Any, *args: Any, **options: Any) -> Any:
    return replacement(original, self, *args, **options)
