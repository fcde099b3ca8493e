"""Decision logs on disk: what each stage applied, to be read and compared after the fact.

A file is a line `MAGIC`, then records: 4 bytes of length (little-endian), and so many bytes. The first record
is a `Header`, the others are the entries of the log as they were applied, from position 0 on. Each is
written at once, so a stage that is killed leaves all that it applied; the last record may be cut off.
"""

from __future__ import annotations

import logging
import os
import struct
from collections.abc import Iterator
from pathlib import Path

import msgspec

from sglang_wavepp.errors import WavePPError

logger = logging.getLogger(__name__)

MAGIC = b"sglang-wavepp decision log 1\n"
_LENGTH = struct.Struct("<I")


class Header(msgspec.Struct, frozen=True):
    """Whose decisions these are."""

    version: str
    rank: int
    stages: int


class Recorder:
    """Writes one stage's log; the file, mode 0600, must not exist. Raises `OSError` if it cannot be made.

    If the disk fails later, the record ends with a warning and the stage goes on.
    """

    def __init__(self, path: Path, header: Header) -> None:
        self._path = path
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        os.write(self._file, MAGIC)
        self(msgspec.msgpack.encode(header))

    def __call__(self, entry: bytes) -> None:
        """Append an entry."""
        if self._file < 0:
            return
        record = _LENGTH.pack(len(entry)) + entry
        try:
            if os.write(self._file, record) < len(record):
                raise OSError("it is full")
        except OSError as error:
            logger.warning("The decision log %s ends here: %s", self._path, error)
            os.close(self._file)
            self._file = -1


def read(path: Path) -> tuple[Header, Iterator[bytes]]:
    """A log's header and its entries; one that was cut off is left out.

    Raises `WavePPError` if there is no such log.
    """
    try:
        data = path.read_bytes()
    except OSError as error:
        raise WavePPError(f"cannot read {path}: {error.strerror}") from None
    records = _records(data)
    try:
        if not data.startswith(MAGIC):
            raise msgspec.DecodeError("it does not begin like one")
        header = msgspec.msgpack.decode(next(records, b""), type=Header)
    except msgspec.DecodeError as error:
        raise WavePPError(f"{path} is not a decision log: {error}") from None
    return header, records


def _records(data: bytes) -> Iterator[bytes]:
    at = len(MAGIC)
    while at + _LENGTH.size <= len(data):
        (length,) = _LENGTH.unpack_from(data, at)
        at += _LENGTH.size
        if at + length > len(data):
            return
        yield data[at : at + length]
        at += length
