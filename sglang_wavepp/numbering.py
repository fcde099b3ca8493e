"""Numbers on the frames of one direction of one socket. Pure.

ZeroMQ keeps frames in order and repeats none, but over TCP it drops what was under way when a connection
breaks, and then goes on with a new one. A frame that is missing would leave somebody waiting for an answer
that nobody owes, so a gap ends the server.
"""

from __future__ import annotations

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

    def accept(self, stamp: bytes) -> bool:
        """Receiver: is this the next frame? False for one that came before.

        Raises `ProtocolError` if frames before it are missing.
        """
        number = int.from_bytes(stamp, "big")
        if len(stamp) != STAMP_BYTES:
            raise ProtocolError(f"a frame on the rounds plane has a number of {len(stamp)} bytes")
        if number > self.count:
            raise ProtocolError(f"frames {self.count} to {number - 1} were lost on the rounds plane")
        if number < self.count:
            return False
        self.count += 1
        return True
