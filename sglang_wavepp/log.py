"""The decision log: numbered, immutable entries and the digest that every stage keeps over them."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import xxhash

from sglang_wavepp.errors import DivergenceError, ProtocolError
from sglang_wavepp.messages import Decision, Decode, Prefill, decode_decision, encode


class DecisionLog:
    """One stage's copy of the log: how far it is, and the digest of everything up to there.

    Entries themselves are not kept: an applied decision has done its work, and a server runs for months.
    `record`, if there is one, gets each of them.
    """

    def __init__(self, rank: int, record: Callable[[bytes], None] | None = None) -> None:
        self._rank = rank
        self._record = record
        self.position = 0
        """Entries applied."""
        self.digest = 0
        """xxh3-64, chained over the entries."""

    def append(self, decision: Decision) -> bytes:
        """Stage 0: number and encode a new entry."""
        entry = encode(decision)
        self.skip(entry)
        return entry

    def read(self, position: int, entry: bytes) -> Decision:
        """Members: take the entry at `position`.

        Raises `DivergenceError` if it is not the next one or, at a wave, if the digests differ.
        """
        if position != self.position:
            raise DivergenceError(
                f"stage {self._rank} expects log entry {self.position}, got entry {position}"
            )
        try:
            decision = decode_decision(entry)
        except msgspec.DecodeError as error:
            raise ProtocolError(f"log entry {position} does not decode: {error}") from None
        if isinstance(decision, Prefill | Decode) and decision.digest != self.digest:
            raise DivergenceError(
                f"stage {self._rank}, wave {decision.wave}: the log's digest is {self.digest:016x} here "
                f"and {decision.digest:016x} on stage 0"
            )
        self.skip(entry)
        return decision

    def skip(self, entry: bytes) -> None:
        """Go past an entry without a look at what it says."""
        self.digest = xxhash.xxh3_64_intdigest(entry, seed=self.digest)
        self.position += 1
        if self._record is not None:
            self._record(entry)
