"""Bundles as files on removable media (air gap), which may be slow, read-only, without hard links, or unplugged early.

Nothing here decides what is good: files that were picked up go through the gate, which names the client by the signed
manifest. So a renamed file is fine, an incomplete copy is refused as such, and nobody's clock matters: a bundle holds no time.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import stat
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from osfl.core.errors import FilesError, Rejected
from osfl.core.names import shown
from osfl.core.types import ClientId
from osfl.runtime.atomic import replace_in_pieces
from osfl.wire.envelope import INCOMPLETE
from osfl.wire.gate import read_manifest
from osfl.wire.sealing import is_sealed

SUFFIX = ".safetensors"
_PIECE = 4 << 20


def check_replaceable(target: Path, client: ClientId) -> None:
    """Refuse to write over a file that is no bundle, or is another client's: an earlier copy of one's own may be replaced."""
    if not target.is_file() or not (size := target.stat().st_size):
        return
    sender = None
    try:
        if is_sealed(target):
            return
        sender = read_manifest(target).get("client")
    except Rejected as no:
        if no.reason == INCOMPLETE and size >= 8:  # a copy that was cut off, such as by unplugging the medium
            return
    if sender != client:
        raise FilesError(
            f"{target} is there already, and it is {f'a bundle of {shown(sender)}' if sender else 'no bundle of a site'}",
            field="out",
            expected=f"no file, or an earlier copy of what {client} sends",
            fix="Choose another --out, or delete that file.",
        )


def carry(source: Path, target: Path) -> str:
    """Copy a file to a medium, read it back from there, and only then say so; its sha256.

    The target appears whole or not at all. No hard links are needed, so exFAT will do.
    """
    sent = hashlib.sha256()
    replace_in_pieces(target, _hashed(source, sent))
    _forget_cached(target)
    received = hashlib.sha256()
    for _ in _hashed(target, received):
        pass
    if received.digest() != sent.digest():
        raise FilesError(
            f"{target} differs from what was copied there",
            field="out",
            expected=sent.hexdigest(),
            got=received.hexdigest(),
            fix="The medium is damaged or full: take another one.",
        )
    return sent.hexdigest()


def _hashed(path: Path, digest: hashlib._Hash) -> Iterator[bytes]:
    with path.open("rb") as file:
        while piece := file.read(_PIECE):
            digest.update(piece)
            yield piece


def _forget_cached(path: Path) -> None:
    """Ask for the bytes of the medium next time, not for those that memory still holds of it."""
    with contextlib.suppress(OSError, AttributeError), path.open("rb") as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


@dataclass(frozen=True)
class Left:
    """A file that was not even given to the gate."""

    path: Path
    why: str
    absent: bool = False  # somebody named it, and it is not there


def pick_up(given: Sequence[Path]) -> tuple[list[Path], list[Left]]:
    """The files to receive, and what was not used: links and special files, and in folders what does not look finished.

    A file that is named itself is taken whatever it is called; of a folder, all `.safetensors` files are.
    """
    taken: list[Path] = []
    left: list[Left] = []
    for path in (found for name in given for found in _spelled_out(name)):
        inside = path.is_dir() and not path.is_symlink()
        for file in sorted(path.iterdir()) if inside else [path]:
            why = _unsuitable(file, named=not inside)
            if not os.path.lexists(file):  # a typing mistake here is no refused delivery
                left.append(Left(file, "there is no such file", absent=True))
            elif why:
                left.append(Left(file, why))
            elif file not in taken:
                taken.append(file)
    return taken, left


def _spelled_out(path: Path) -> list[Path]:
    """A pattern that no shell has replaced, as the files it means; anything else as it is."""
    if os.path.lexists(path) or not any(mark in path.name for mark in "*?["):
        return [path]
    return sorted(path.parent.glob(path.name)) or [path]


def _unsuitable(path: Path, named: bool) -> str:
    try:
        mode = path.lstat().st_mode
    except OSError:
        return ""  # the gate reports what is wrong with it
    if stat.S_ISLNK(mode):
        return "a link, not a file: copy the file itself"
    if not stat.S_ISREG(mode):
        return "not a regular file"
    if named:
        return ""
    if path.name.startswith("."):
        return "a hidden file, such as a copy that is not finished"
    return "" if path.suffix.lower() == SUFFIX else f"not called *{SUFFIX}; if it is a bundle, name the file itself"
