"""Small records for every stage over SGLang's own process group: how stages on several hosts get to know
each other.
"""

from __future__ import annotations

import time
from datetime import timedelta
from typing import Any

import torch

from sglang_wavepp.errors import HandshakeError
from sglang_wavepp.transport import SHARED_BYTES, Share


def share_over(group: Any, deadline: float) -> Share:
    """The `Share` of this stage over a process group on the CPU. `deadline` is in `time.monotonic` seconds.

    Records are tensors of a fixed size, the length in front; nothing is pickled.
    """

    def share(mine: bytes) -> list[bytes]:
        if len(mine) > SHARED_BYTES:
            raise HandshakeError(f"{len(mine)} bytes are too many to tell the other stages")
        record = bytes([len(mine)]) + mine.ljust(SHARED_BYTES, b"\0")
        tensor = torch.frombuffer(bytearray(record), dtype=torch.uint8)
        everyone = [torch.zeros_like(tensor) for _ in range(group.size())]
        left = max(deadline - time.monotonic(), 0.001)
        try:
            group.allgather([everyone], [tensor]).wait(timedelta(seconds=left))
        except RuntimeError as error:
            (why, *_) = str(error).splitlines() or [""]
            raise HandshakeError(f"the stages cannot tell each other their keys: {why}") from None
        records = [bytes(other.tolist()) for other in everyone]
        return [other[1 : 1 + other[0]] for other in records]

    return share
