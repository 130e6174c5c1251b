"""Read a bundle that is not trusted yet: its size and its first bytes, and the rest only on request."""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, TypeAlias

from osfl.core.errors import Rejected

BytesLike: TypeAlias = bytes | bytearray | memoryview


class Source(Protocol):
    @property
    def size(self) -> int: ...
    def head(self, count: int) -> bytes: ...
    def whole(self) -> memoryview: ...
    def part(self, start: int, count: int) -> memoryview: ...


@dataclass(frozen=True)
class Memory:
    """Bytes that are here, of a bundle of `size`: all of it, or as much as has arrived."""

    data: memoryview
    size: int

    def head(self, count: int) -> bytes:
        return bytes(self.data[:count])

    def whole(self) -> memoryview:
        return self.data

    def part(self, start: int, count: int) -> memoryview:
        return self.data[start : start + count]


@dataclass(frozen=True)
class _File:
    descriptor: int
    size: int

    def head(self, count: int) -> bytes:
        return bytes(self._read(min(count, self.size)))

    def whole(self) -> memoryview:
        return self._read(self.size)

    def part(self, start: int, count: int) -> memoryview:
        return self._read(max(0, min(count, self.size - start)), start)

    def _read(self, count: int, start: int = 0) -> memoryview:
        """Exactly `count` bytes, into one buffer that is never copied."""
        buffer = memoryview(bytearray(count))
        done = 0
        while done < count:
            got = os.preadv(self.descriptor, [buffer[done:]], start + done)
            if got == 0:
                raise Rejected(
                    "the file became shorter while it was read",
                    field="size",
                    expected=f"{self.size} bytes",
                    got=f"{start + done} bytes",
                    fix="Wait until the copy is complete, then receive it again.",
                )
            done += got
        return buffer.toreadonly()


@contextlib.contextmanager
def opened(source: BytesLike | Path) -> Iterator[Source]:
    """Bytes as they are, or a regular file; nothing that blocks or never ends."""
    if not isinstance(source, Path):
        data = memoryview(source).toreadonly().cast("B")
        yield Memory(data, data.nbytes)
        return
    try:
        descriptor = os.open(source, os.O_RDONLY | os.O_NONBLOCK)  # a named pipe must not make us wait
    except (OSError, ValueError) as error:
        raise _unreadable(source, error) from None
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise _unreadable(source, "it is not a regular file")
        yield _File(descriptor, status.st_size)
    except OSError as error:
        raise _unreadable(source, error) from None
    finally:
        with contextlib.suppress(OSError):  # nothing was written, so nothing can be lost
            os.close(descriptor)


def _unreadable(path: Path, cause: object) -> Rejected:
    why = cause.strerror if isinstance(cause, OSError) else cause
    return Rejected(
        f"the file {path.name!r} cannot be read: {why}",
        field="file",
        expected="a readable bundle",
        got=str(why),
        fix="Give the path of a .safetensors file that `osfl client` or `osfl server` wrote.",
    )
