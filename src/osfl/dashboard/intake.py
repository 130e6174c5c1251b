"""Receive a bundle from the page: its header is checked first, the rest written to disk in small pieces, then the same gate
as for every other bundle."""

from __future__ import annotations

import contextlib
import os
import secrets
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from osfl.core.errors import OsflError
from osfl.core.types import Limits
from osfl.roles.coordinator import check_start, receive
from osfl.wire.inbox import Receipt
from osfl.wire.sealing import is_sealed
from osfl.wire.signing import SigningKey

CHUNK = 1 << 16
_PART = "incoming-{}.part"
_ONE = threading.Lock()  # the gate holds one bundle in memory; not two


class CutOff(OsflError):
    """The bytes ended before the file did."""

    title = "Not received"


def take_start(fl_round: Path, stream: BinaryIO, length: int) -> bytes:
    """Length and header of a bundle of `length` bytes, which the gate has seen; `Rejected` before the rest is read. Of a sealed
    bundle these are its first bytes, which say nothing."""
    start = _read(stream, min(8, length), length)
    header = int.from_bytes(start, "little")
    if len(start) == 8 and header <= min(length - 8, Limits().header_bytes):
        start += _read(stream, header, length, 8)
    check_start(fl_round, start, length)
    return start


def take_in(fl_round: Path, folder: Path, start: bytes, stream: BinaryIO, length: int, key: Path | None = None) -> Receipt:
    """Receive `length` bytes, `start` and the rest from `stream`; `folder` is where they lie until the gate has seen them,
    `key` opens seals."""
    with _kept(folder, start, stream, length) as path, _ONE:
        return receive(fl_round, path, SigningKey.load(key) if key and is_sealed(path) else None)


@contextlib.contextmanager
def _kept(folder: Path, start: bytes, stream: BinaryIO, length: int) -> Iterator[Path]:
    path = folder / _PART.format(secrets.token_hex(8))
    try:
        with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
            file.write(start)
            for done in range(len(start), length, CHUNK):
                file.write(_read(stream, min(CHUNK, length - done), length, done))
        yield path
    finally:
        path.unlink(missing_ok=True)


def _read(stream: BinaryIO, count: int, length: int, done: int = 0) -> bytes:
    """The next `count` bytes of `length`, of which `done` have been read."""
    pieces = b""
    while len(pieces) < count:
        try:
            piece = stream.read(count - len(pieces))
        except OSError:  # the connection broke, or nothing came for too long
            piece = b""
        if not piece:
            raise CutOff(
                "the transfer was cut off",
                field="size",
                expected=f"{length} bytes",
                got=f"{done + len(pieces)} bytes",
                fix="Drop the file once more.",
            )
        pieces += piece
    return pieces


def sweep(folder: Path) -> None:
    """Remove what a killed dashboard left behind. Only the dashboard of this round calls it, before it takes anything in."""
    for path in folder.glob(_PART.format("*")):
        path.unlink(missing_ok=True)
