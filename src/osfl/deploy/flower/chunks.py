"""Transfer a file in chunks: announced once, requested chunk by chunk, used only when it is complete.

Memory is bounded by one piece, size by the disk. The receiver keeps a growing prefix of the file; a piece that is
damaged, comes twice or comes too early is dropped and asked for again, and a crash costs at most one piece. Programs that
receive the same file take turns: of two that bring the same piece, one adds it.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from osfl.core.errors import OsflError
from osfl.core.names import is_digest
from osfl.core.types import Json
from osfl.runtime.atomic import append_after, locked

_BLOCK = 1 << 20


class Damaged(OsflError):
    """All pieces are there and the file is not what was announced; it was removed and is asked for again."""

    title = "Transfer"


@dataclass(frozen=True)
class FileInfo:
    """What is announced: how long the file is and the hash of all its bytes."""

    bytes: int
    sha256: str

    @classmethod
    def announced(cls, size: Json, sha256: Json) -> FileInfo | None:
        """An untrusted announcement, if it has the right form."""
        right = isinstance(size, int) and not isinstance(size, bool) and size > 0 and is_digest(sha256)
        return cls(size, sha256) if right else None


@dataclass(frozen=True)
class Chunk:
    """One piece of a file, with its own hash."""

    offset: int
    data: bytes
    sha256: str


def announce(path: Path) -> FileInfo:
    digest = hashlib.sha256()
    size = 0
    with path.open("rb") as file:
        while block := file.read(_BLOCK):
            digest.update(block)
            size += len(block)
    return FileInfo(size, digest.hexdigest())


def read_chunk(path: Path, offset: int, length: int) -> Chunk:
    with path.open("rb") as file:
        file.seek(offset)
        data = file.read(length)
    return Chunk(offset, data, hashlib.sha256(data).hexdigest())


class Partial:
    """The part of an announced file that has arrived: `<name>.<hash>.part`, which only ever grows by whole pieces."""

    def __init__(self, folder: Path, name: str, info: FileInfo, chunk: int) -> None:
        self.info, self.chunk = info, chunk
        self.path = folder / f"{name}.{info.sha256[:16]}.part"
        self._lock, self._mine = folder / f".{name}.lock", False
        folder.mkdir(parents=True, exist_ok=True)

    @property
    def size(self) -> int:
        """Bytes of whole pieces. More may lie there: a crash tore the last one, or somebody is writing it just now."""
        try:
            found = self.path.stat().st_size
        except FileNotFoundError:
            return 0
        return found if found == self.info.bytes else min(found, self.info.bytes) // self.chunk * self.chunk

    @property
    def finished(self) -> bool:
        return self.size == self.info.bytes

    @contextlib.contextmanager
    def turn(self) -> Iterator[None]:
        """One writer at a time, in whatever process; what is done inside is one step for all others."""
        if self._mine:
            yield
            return
        with locked(self._lock):
            self._mine = True
            try:
                yield
            finally:
                self._mine = False

    def add(self, chunk: Chunk) -> bool:
        """Append the next piece, durably; False for any other and for a damaged one."""
        if hashlib.sha256(chunk.data).hexdigest() != chunk.sha256:
            return False
        with self.turn():
            size = self.size
            if chunk.offset != size or not 0 < len(chunk.data) <= self.info.bytes - size:
                return False
            append_after(self.path, size, chunk.data)
        return True

    def complete(self) -> Path:
        """The file, if its bytes are those that were announced; otherwise it is removed."""
        with self.turn():
            found = announce(self.path)
            if found != self.info:
                self.remove()
                raise Damaged(
                    "the pieces do not make the file that was announced",
                    field="sha256",
                    expected=self.info.sha256,
                    got=found.sha256,
                    fix="It is asked for again.",
                )
        return self.path

    def remove(self) -> None:
        with self.turn():
            self.path.unlink(missing_ok=True)
