"""Files of many images that stay in the cache, and how a start knows without reading them that they are what was written.

    decoded/X.pixels     the images, mapped into memory
    decoded/X.written    their sha256, and the file's marks when it was written: inode, size, times
    decoded/Y.digest     a digest of some of the images, by what they are: Y is of their sha256, places and labels

Any write leaves other marks. A file with other marks is read as a whole; if it holds anything else than what was written, it
is made again. Notes that somebody else owns, or could have written, are not believed. Who can write as the owner, could write
the images, too: `osfl cache --verify` reads all.
"""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import IO

import numpy as np

from osfl.core.method import quiet
from osfl.core.types import Progress
from osfl.data.source import Pixels
from osfl.runtime.cache import cache_folder, used

PIXELS, WRITTEN, DIGEST = ".pixels", ".written", ".digest"
BLOCK = 64 << 20  # bytes that are read together


def keep(path: Path, rows: Iterable[Pixels]) -> str:
    """Write rows of pixels, one after the other, and what is known of the file. The sha256 of its content."""
    content = hashlib.sha256()

    def write(out: IO[bytes]) -> None:
        for row in rows:
            block = np.ascontiguousarray(row).data
            content.update(block)
            out.write(block)

    replaced(path, write)
    _note(path, content.hexdigest())
    return content.hexdigest()


def kept(path: Path, shape: tuple[int, ...], progress: Progress = quiet) -> tuple[Pixels, str] | None:
    """The mapped file and the sha256 of its content, or None where it is not what was written. The sha256 is empty where
    nobody trustworthy has noted it: then digests are of the pixels."""
    with suppress(OSError, ValueError, KeyError, TypeError), path.open("rb") as file:
        note = json.loads(path.with_suffix(WRITTEN).read_bytes())
        content, own = note["sha256"], _only_ours(path) and _only_ours(path.with_suffix(WRITTEN))
        if file.seek(0, os.SEEK_END) != int(np.prod(shape)):
            return None
        if note["marks"] != _marks(os.fstat(file.fileno())) or not own:
            if _content(file, progress) != content:
                return None
            if own:
                _note(path, content)
        used(path.with_suffix(WRITTEN))
        return np.memmap(file, dtype=np.uint8, mode="c", shape=shape), content if own else ""
    return None


def known_digest(content: str, facts: bytes, compute: Callable[[], str]) -> str:
    """The digest of these images of a file of this content, as it was computed the first time."""
    path = cache_folder() / "decoded" / f"{hashlib.sha256(content.encode() + facts).hexdigest()}{DIGEST}"
    with suppress(OSError, ValueError):
        note = path.read_text("ascii")
        if len(bytes.fromhex(note)) == hashlib.sha256().digest_size and _only_ours(path):
            used(path)
            return note
    digest = compute()
    with suppress(OSError):  # a cache that cannot be written is no reason to stop
        replaced(path, lambda out: out.write(digest.encode("ascii")))
    return digest


def verify(progress: Progress = quiet) -> tuple[int, list[Path]]:
    """Read all kept pixels: how many files there are, and which of them are not what was written. These are deleted, and so
    are all noted digests: the next start computes them."""
    files, wrong = sorted((cache_folder() / "decoded").glob(f"*{PIXELS}")), []
    for path in files:
        with suppress(OSError, ValueError, KeyError, TypeError), path.open("rb") as file:
            if json.loads(path.with_suffix(WRITTEN).read_bytes())["sha256"] == _content(file, progress):
                continue
        wrong.append(path)
    for path in (*wrong, *(path.with_suffix(WRITTEN) for path in wrong), *(cache_folder() / "decoded").glob(f"*{DIGEST}")):
        path.unlink(missing_ok=True)
    return len(files), wrong


def replaced(path: Path, write: Callable[[IO[bytes]], object]) -> None:
    """Whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(prefix=".", dir=path.parent)
    part = Path(name)
    try:
        with os.fdopen(handle, "wb") as out:
            write(out)
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)


def _note(path: Path, content: str) -> None:
    text = json.dumps({"sha256": content, "marks": _marks(path.stat())})
    replaced(path.with_suffix(WRITTEN), lambda out: out.write(text.encode()))


def _marks(facts: os.stat_result) -> list[int]:
    """What changes when a file is written or replaced. Its times can be set back, but not that of the last change (ctime)."""
    return [facts.st_dev, facts.st_ino, facts.st_size, facts.st_mtime_ns, facts.st_ctime_ns]


def _only_ours(path: Path) -> bool:
    """Whether nobody else owns the file or may write into it; systems without owners cannot tell."""
    facts = path.stat()
    return not hasattr(os, "geteuid") or (facts.st_uid == os.geteuid() and not facts.st_mode & 0o022)


def _content(file: IO[bytes], progress: Progress) -> str:
    content, done, total = hashlib.sha256(), 0, os.fstat(file.fileno()).st_size
    for block in _blocks(file):
        content.update(block)
        done += len(block)
        progress("check kept images", done, total)
    return content.hexdigest()


def _blocks(file: IO[bytes]) -> Iterator[bytes]:
    file.seek(0)
    while block := file.read(BLOCK):
        yield block
