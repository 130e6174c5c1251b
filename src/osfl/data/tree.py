"""Files of a dataset by name, in a folder or inside a zip that is never unpacked."""

from __future__ import annotations

import os
import stat
import zipfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from osfl.core.errors import DataError

LARGEST_FILE = 256 << 20  # bytes of one image file, after decompression


@dataclass(frozen=True)
class Tree:
    """Names with '/' between folders, what each file is (to notice a change), and how to read one."""

    stamps: Mapping[str, str]
    read: Callable[[str], bytes]


@contextmanager
def open_tree(path: Path) -> Iterator[Tree]:
    """A folder or a zip, seen the same way."""
    if path.is_dir():
        yield _folder(path)
        return
    try:
        archive = zipfile.ZipFile(path)
    except (zipfile.BadZipFile, OSError) as error:
        raise DataError(f"'{path.name}' cannot be read as a zip: {error}", field="file", fix="Pack it again.") from None
    with archive:
        yield _zip(archive)


def _folder(root: Path) -> Tree:
    stamps = {}
    for folder, _, names in os.walk(root):
        for name in names:
            path = Path(folder, name)
            relative = path.relative_to(root).as_posix()
            if not hidden(relative):
                stamps[relative] = stamp(path)
    return Tree(stamps, lambda name: read_file(root / name))


def stamp(path: Path) -> str:
    """Which file it is, its size and times of change, of which the last cannot be set back; a link that leads nowhere has
    none."""
    try:
        facts = path.stat()
    except (OSError, ValueError):  # also a name that no file can have
        return "unreadable"
    return f"{facts.st_ino}:{facts.st_size}:{facts.st_mtime_ns}:{facts.st_ctime_ns}"


def read_file(path: Path) -> bytes:
    if not stat.S_ISREG(path.stat().st_mode):  # opening a pipe would wait forever
        raise OSError("not a regular file")
    with path.open("rb") as handle:
        return _bounded(handle.read(LARGEST_FILE + 1))


def _zip(archive: zipfile.ZipFile) -> Tree:
    # Some programs on Windows write backslashes; folders are entries that end in a slash.
    named = {member.filename.replace("\\", "/"): member for member in archive.infolist()}
    members = {name: member for name, member in named.items() if not name.endswith("/") and not hidden(name)}

    def read(name: str) -> bytes:
        # The size in the directory can lie; reading stops at the limit whatever it is.
        with archive.open(members[name]) as handle:
            return _bounded(handle.read(LARGEST_FILE + 1))

    return Tree({name: f"{m.file_size}:{m.CRC}" for name, m in members.items()}, read)


def _bounded(blob: bytes) -> bytes:
    if len(blob) > LARGEST_FILE:
        raise ValueError(f"larger than {LARGEST_FILE:,} bytes")
    return blob


def hidden(name: str) -> bool:
    """What file managers leave behind; not worth a report."""
    parts = PurePosixPath(name).parts
    if not parts or parts[-1] in ("Thumbs.db", "desktop.ini"):
        return True
    return any(part == "__MACOSX" or (part.startswith(".") and part != "..") for part in parts)
