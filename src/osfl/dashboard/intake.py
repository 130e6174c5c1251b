"""Receive a bundle from the page: written to disk in small pieces, then checked by the same gate as every other."""

from __future__ import annotations

import contextlib
import os
import secrets
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from osfl.core.errors import OsflError
from osfl.roles.coordinator import receive
from osfl.wire.inbox import Receipt
from osfl.wire.sealing import is_sealed
from osfl.wire.signing import SigningKey

CHUNK = 1 << 16
_PART = "incoming-{}.part"
_ONE = threading.Lock()  # the gate holds one bundle in memory; not two


class CutOff(OsflError):
    """The bytes ended before the file did."""

    title = "Not received"


def take_in(fl_round: Path, folder: Path, stream: BinaryIO, length: int, key: Path | None = None) -> Receipt:
    """Receive `length` bytes of `stream`; `folder` is where they lie until the gate has seen them, `key` opens seals."""
    with _kept(folder, stream, length) as path, _ONE:
        return receive(fl_round, path, SigningKey.load(key) if key and is_sealed(path) else None)


@contextlib.contextmanager
def _kept(folder: Path, stream: BinaryIO, length: int) -> Iterator[Path]:
    path = folder / _PART.format(secrets.token_hex(8))
    try:
        with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
            _copy(stream, file, length)
        yield path
    finally:
        path.unlink(missing_ok=True)


def _copy(stream: BinaryIO, file: BinaryIO, length: int) -> None:
    left = length
    while left:
        try:
            piece = stream.read(min(CHUNK, left))
        except OSError:  # the connection broke, or nothing came for too long
            piece = b""
        if not piece:
            raise CutOff(
                "the transfer was cut off",
                field="size",
                expected=f"{length} bytes",
                got=f"{length - left} bytes",
                fix="Drop the file once more.",
            )
        left -= len(piece)
        file.write(piece)


def sweep(folder: Path) -> None:
    """Remove what a killed dashboard left behind. Only the dashboard of this round calls it, before it takes anything in."""
    for path in folder.glob(_PART.format("*")):
        path.unlink(missing_ok=True)
