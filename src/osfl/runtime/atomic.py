"""Files that are whole or absent, whatever happens in between: a crash, a full disk, sixteen writers at once."""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

TEMPORARY = ".tmp"
_NO_LINKS = {errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS}  # how file systems say "no hard links"
_NO_FOLDER_SYNC = {errno.EINVAL, errno.ENOTSUP, errno.EOPNOTSUPP}  # media that write names at once, or cannot be asked
_OPENS_FOLDERS = os.name != "nt"  # Windows opens none, so none can be synced
_ABANDONED_SECONDS = 3600.0


def create_once(path: Path, data: bytes | memoryview) -> bool:
    """Make `path` hold `data`, durably, unless it exists: True for the one writer who made it, False for all others.

    When this returns, whichever file stands there has its name on disk too.
    """
    with _named(path), _temporary(path, [data], mode=0o600) as temporary:
        created = _publish(temporary, path)
    sync_folder(path.parent)
    return created


def replace_atomically(path: Path, data: bytes | memoryview) -> None:
    """Make `path` hold `data`, durably; readers see the old or the new content, nothing in between."""
    replace_in_pieces(path, [data])


def replace_in_pieces(path: Path, pieces: Iterable[bytes | memoryview]) -> None:
    """The same, for content that need not be in memory at once."""
    with _named(path), _temporary(path, pieces, mode=0o666) as temporary:
        temporary.replace(path)
    sync_folder(path.parent)


def append_line(path: Path, line: bytes) -> None:
    """Add a line durably. A line that a crash tore earlier is closed first, so that it spoils no other."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o666)
    try:
        size = os.fstat(descriptor).st_size
        torn = size > 0 and os.pread(descriptor, 1, size - 1) != b"\n"
        _write_all(descriptor, (b"\n" if torn else b"") + line + b"\n")
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    if not size:
        sync_folder(path.parent)  # the file may be new, and its name not yet on disk


def append_after(path: Path, size: int, data: bytes | memoryview) -> None:
    """Put `data` behind the first `size` bytes, durably; what a crash left behind them is cut off."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT, 0o666)
    try:
        os.ftruncate(descriptor, size)
        os.lseek(descriptor, size, os.SEEK_SET)
        _write_all(descriptor, data)
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def supports_hard_links(folder: Path) -> bool:
    """Whether exactly-once rests on the file system (True) or on a lock file (False)."""
    first = _temporary_name(folder / "probe")
    second = _temporary_name(folder / "probe")
    first.touch()
    try:
        _link(first, second)
        return True
    except OSError as error:
        if error.errno in _NO_LINKS:
            return False
        raise
    finally:
        first.unlink(missing_ok=True)
        second.unlink(missing_ok=True)


def sweep(folder: Path) -> None:
    """Remove temporary files of writers that died. Only old ones: a young one may belong to someone writing now."""
    for leftover in folder.glob(f".*{TEMPORARY}"):
        with contextlib.suppress(OSError):
            if time.time() - leftover.stat().st_mtime > _ABANDONED_SECONDS:
                leftover.unlink()


def make_folder(folder: Path) -> None:
    """Make a folder and those above it, durably: files in a folder that a power cut forgets are lost with it."""
    if not folder.exists():
        make_folder(folder.parent)
        folder.mkdir(exist_ok=True)
    with contextlib.suppress(PermissionError):  # above may be a folder that nobody may list, such as /home of a cluster
        sync_folder(folder.parent)


def sync_folder(folder: Path) -> bool:
    """Put the folder's names on disk; without it a power cut may forget a file whose content is safe. False: not possible."""
    if not _OPENS_FOLDERS:
        return False
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
        return True
    except OSError as error:
        if error.errno not in _NO_FOLDER_SYNC:
            raise
        return False
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def locked(lock: Path, wait: bool = True) -> Iterator[None]:
    """One at a time: whoever comes later waits, or gets a BlockingIOError. The kernel frees the lock of a process that dies;
    a mere O_EXCL file would stay forever."""
    import fcntl  # absent on Windows, where hard links exist

    descriptor = os.open(lock, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        yield
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def _named(path: Path) -> Iterator[None]:
    """Report errors of the file system with the name of the file that was asked for, not of the temporary one."""
    try:
        yield
    except OSError as error:
        if error.filename is None or str(error.filename).endswith(TEMPORARY):
            error.filename, error.filename2 = str(path), None
        raise


@contextlib.contextmanager
def _temporary(path: Path, pieces: Iterable[bytes | memoryview], mode: int) -> Iterator[Path]:
    """A synced file beside `path`, gone afterwards unless it was renamed."""
    temporary = _temporary_name(path)
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
    try:
        try:
            for piece in pieces:
                _write_all(descriptor, piece)
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        yield temporary
    finally:
        with contextlib.suppress(OSError):  # already renamed; or a leftover, which nobody reads and `sweep` removes
            temporary.unlink()


def _link(first: Path, second: Path) -> None:
    """Some systems have no hard links at all, not even the function."""
    if not hasattr(os, "link"):
        raise OSError(errno.ENOTSUP, "no hard links on this system")
    os.link(first, second)


def _temporary_name(path: Path) -> Path:
    return path.with_name(f".{path.name}.{secrets.token_hex(8)}{TEMPORARY}")


def _write_all(descriptor: int, data: bytes | memoryview) -> None:
    rest = memoryview(data)
    while rest:
        rest = rest[os.write(descriptor, rest) :]


def _publish(temporary: Path, path: Path) -> bool:
    """Give the file its final name, if that is free: `os.link` fails when it is not, so no lock is needed."""
    try:
        _link(temporary, path)
        return True
    except FileExistsError:
        return False
    except OSError as error:
        if error.errno not in _NO_LINKS:
            raise
    with locked(path.parent / ".lock"):
        if path.exists():
            return False
        temporary.rename(path)
        return True
