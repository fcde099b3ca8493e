"""Numbers on the frames of one direction of one socket. Pure.

ZeroMQ keeps frames in order and repeats none, but over TCP it drops what was under way when a connection
breaks, and then goes on with a new one. A frame that is missing would leave somebody waiting for an answer
that nobody owes, so a gap ends the server.
"""

from __future__ import annotations

import msgspec

from sglang_wavepp.errors import ProtocolError

STAMP_BYTES = 8


class Numbering:
    """The counter of one end: of what it sends, or of what it receives."""

    def __init__(self) -> None:
        self.count = 0
        """Frames so far."""

    def stamp(self) -> bytes:
        """Sender: the number of the next frame, 8 bytes."""
        number = self.count
        self.count += 1
        return number.to_bytes(STAMP_BYTES, "big")

    def accept(self, stamp: bytes) -> None:
        """Receiver: this frame is the next one.

        Raises `msgspec.DecodeError` if it came before or has no number, `ProtocolError` if some are missing.
        """
        number = int.from_bytes(stamp, "big")
        if len(stamp) != STAMP_BYTES or number < self.count:
            raise msgspec.DecodeError(f"frame {number} instead of {self.count}")
        if number > self.count:
            raise ProtocolError(f"frames {self.count} to {number - 1} were lost on the rounds plane")
        self.count += 1
