"""Find left-over bytes without keeping them: fingerprints of short windows, searched at every offset of every file.

Also in what a file holds in another form: compressed (gzip, bzip2, xz, zip), as base64 text, also inside of other text, as
hexadecimal digits, or with float32 numbers widened to float64.
Links are followed: what a name in the folder leads to is there.

A fingerprint is 64 bits of 32 bytes (a polynomial hash modulo 2^64), so it does not reveal the bytes; who has them can
recognize it. A billion offsets against a thousand fingerprints give a false alarm once in ten million searches.
"""

from __future__ import annotations

import base64
import binascii
import bz2
import gzip
import lzma
import os
import re
import zipfile
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import IO, Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

WINDOW = 32
_BASE = 0x9E3779B97F4A7C15  # odd, so that no byte of the window is shifted out
_LEAST_DIFFERENT = 12  # windows of zeros, ones and counters are everybody's
_CHUNK = 4 << 20
_MODULUS = 1 << 64
_BASE64 = re.compile(rb"[A-Za-z0-9+/_=\s-]+")  # also as it stands in URLs
_URL_SAFE = bytes.maketrans(b"-_", b"+/")
_TEXT = re.compile(rb"[A-Za-z0-9+/_-]{64,}")  # a stretch of base64 or of hexadecimal digits inside of something else
_HEX = re.compile(rb"(?:[0-9a-f]{2})+|(?:[0-9A-F]{2})+")
_LONGEST = 1 << 20  # bytes of a stretch that are kept for the next block
_UNPACK: Mapping[bytes, Callable[[Path], Any]] = {b"\x1f\x8b": gzip.open, b"BZh": bz2.open, b"\xfd7zXZ": lzma.open}
Stream: TypeAlias = Callable[[], Iterator[bytes]]  # the blocks of one form of a file, from its beginning


def fingerprints(data: bytes | memoryview) -> NDArray[np.uint64]:
    """Of the window at every offset. Two neighbors of length n make one of length 2n, so five steps make 32."""
    found = np.frombuffer(data, dtype=np.uint8).astype(np.uint64) + np.uint64(1)
    length, power = 1, _BASE
    while length < WINDOW:
        if len(found) <= length:
            return found[:0]
        found = found[:-length] * np.uint64(power) + found[length:]
        length, power = 2 * length, power * power % _MODULUS
    return found


def sample(pieces: Iterable[bytes | memoryview], most: int = 1024) -> list[str]:
    """Fingerprints that show whether some of these bytes are still there: of every piece some, spread evenly."""
    held = [np.frombuffer(piece, dtype=np.uint8) for piece in pieces if len(memoryview(piece).cast("B")) >= WINDOW]
    each = min(64, max(1, most // max(1, len(held))))
    windows = [window for piece in held for window in _distinct_windows(piece, each)]
    return sorted({_spelled(fingerprints(window.tobytes())[0]) for window in windows})


def _distinct_windows(piece: NDArray[np.uint8], count: int) -> list[NDArray[np.uint8]]:
    """So many windows of a piece that are no constants; there may be few where it is mostly padding."""
    starts = sorted({int(start) for start in np.linspace(0, len(piece) - WINDOW, 16 * count)})
    windows = [piece[start : start + WINDOW] for start in starts]
    found = [window for window in windows if len(np.unique(window)) >= _LEAST_DIFFERENT]
    return [found[int(i)] for i in np.linspace(0, len(found) - 1, min(count, len(found)))]


def search(folder: Path, wanted: Iterable[str]) -> dict[Path, set[str]]:
    """The files under a folder (or the file itself) in which some of these fingerprints occur, and which."""
    targets = np.array(sorted(int(text, 16) for text in wanted), dtype=np.uint64)
    if not len(targets):
        return {}
    found = {path: _within(path, targets) for path in sorted(_files(folder))}
    return {path: hits for path, hits in found.items() if hits}


def _files(folder: Path) -> Iterator[Path]:
    """Every file under a folder, links followed, each directory once."""
    if folder.is_file():
        yield folder
        return
    seen: set[Path] = set()
    for where, inside, names in os.walk(folder, followlinks=True):
        real = Path(where).resolve()
        if real in seen:
            inside.clear()
            continue
        seen.add(real)
        yield from (path for name in names if (path := Path(where) / name).is_file())


def _within(path: Path, targets: NDArray[np.uint64]) -> set[str]:
    likely = np.zeros(1 << 16, dtype=bool)  # the upper 16 bits rule out nearly all offsets at once
    likely[(targets >> np.uint64(48)).astype(np.int64)] = True
    hits: set[str] = set()
    for chunk in _overlapping(_forms(path)):
        here = fingerprints(chunk)
        near = here[likely[(here >> np.uint64(48)).astype(np.int64)]]
        hits |= {_spelled(value) for value in near[np.isin(near, targets)]}
    return hits


def _forms(path: Path) -> Iterator[Iterator[bytes]]:
    """What a file holds, as blocks: as it is, unpacked and decoded, each also with float64 numbers as float32."""
    for stream in _streams(path):
        yield stream()
        yield _narrowed(stream())


def _streams(path: Path) -> Iterator[Stream]:
    yield lambda: _blocks(path.open("rb"))
    with path.open("rb") as file:
        start = file.read(4096)
    for magic, unpack in _UNPACK.items():
        if start.startswith(magic):
            yield lambda unpack=unpack: _readable(lambda: unpack(path))  # type: ignore[misc]
    if start.startswith(b"PK\x03\x04"):
        with suppress(OSError, zipfile.BadZipFile), zipfile.ZipFile(path) as archive:
            for name in archive.namelist():
                yield lambda name=name: _readable(lambda: archive.open(name))  # type: ignore[misc]
    if len(start) >= WINDOW and _BASE64.fullmatch(start):
        yield lambda: _decoded(path)
    yield lambda: _embedded(path)


def _readable(opened: Callable[[], IO[bytes]]) -> Iterator[bytes]:
    """As much as can be unpacked: a file that only begins like an archive is none."""
    with suppress(OSError, EOFError, RuntimeError, NotImplementedError, zlib.error, lzma.LZMAError, zipfile.BadZipFile):
        yield from _blocks(opened())


def _decoded(path: Path) -> Iterator[bytes]:
    kept = b""
    for block in _blocks(path.open("rb")):
        text = kept + b"".join(block.split()).translate(_URL_SAFE)
        whole = len(text) // 4 * 4
        kept = text[whole:]
        with suppress(binascii.Error):
            yield base64.b64decode(text[:whole])


def _embedded(path: Path) -> Iterator[bytes]:
    """What stretches of text in a file spell, each decoded from its beginning; a stretch may go on in the next block."""
    kept = b""
    for block in _blocks(path.open("rb")):
        text = kept + block
        found = list(_TEXT.finditer(text))
        goes_on = found.pop() if found and found[-1].end() == len(text) else None
        start = goes_on.start() if goes_on else max(0, len(text) - 64)  # what follows may make a stretch of it
        yield from (part for one in found for part in _spelled_out(one.group()))
        if goes_on and len(text) - start > _LONGEST:
            whole = (len(text) - start) // 4 * 4
            yield from _spelled_out(text[start : start + whole])
            start += whole
        kept = text[max(start, found[-1].end() if found else 0) :]
    yield from (part for one in _TEXT.finditer(kept) for part in _spelled_out(one.group()))


def _spelled_out(text: bytes) -> Iterator[bytes]:
    """As base64, and as hexadecimal digits where these are all there is."""
    if _HEX.fullmatch(text):
        yield bytes.fromhex(text.decode())
    yield base64.b64decode(text.translate(_URL_SAFE)[: len(text) // 4 * 4])


def _narrowed(blocks: Iterator[bytes]) -> Iterator[bytes]:
    """Numbers of eight bytes as float32 where they fit, zero where not; nothing where few of them do."""
    kept = b""
    for block in blocks:
        data = kept + block
        whole = len(data) // 8 * 8
        kept, wide = data[whole:], np.frombuffer(data[:whole], dtype="<f8")
        with np.errstate(all="ignore"):
            narrow = wide.astype("<f4")
            exact = narrow.astype("<f8") == wide
        if int((exact & (wide != 0)).sum()) >= WINDOW // 4:
            yield np.where(exact, narrow, np.float32(0)).tobytes()


def _overlapping(forms: Iterable[Iterator[bytes]]) -> Iterator[bytes]:
    """The blocks of each form, overlapping, so that no window falls between two."""
    for blocks in forms:
        tail = b""
        for block in blocks:
            yield tail + block
            tail = (tail + block)[-(WINDOW - 1) :]


def _blocks(file: IO[bytes]) -> Iterator[bytes]:
    with file:
        while block := file.read(_CHUNK):
            yield block


def _spelled(value: Any) -> str:
    return f"{int(value):016x}"
