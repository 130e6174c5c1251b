"""Find left-over bytes without keeping them: fingerprints of short windows, searched at every offset of every file.

A fingerprint is 64 bits of 32 bytes (a polynomial hash modulo 2^64), so it does not reveal the bytes; who has them can
recognize it. A billion offsets against a thousand fingerprints give a false alarm once in ten million searches.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

WINDOW = 32
_BASE = 0x9E3779B97F4A7C15  # odd, so that no byte of the window is shifted out
_LEAST_DIFFERENT = 12  # windows of zeros, ones and counters are everybody's
_CHUNK = 4 << 20
_MODULUS = 1 << 64


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
    windows = [window for piece in held for window in _telling(piece, each)]
    return sorted({_spelled(fingerprints(window.tobytes())[0]) for window in windows})


def _telling(piece: NDArray[np.uint8], count: int) -> list[NDArray[np.uint8]]:
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
    paths = [folder] if folder.is_file() else sorted(folder.rglob("*"))
    found = {path: _within(path, targets) for path in paths if path.is_file() and not path.is_symlink()}
    return {path: hits for path, hits in found.items() if hits}


def _within(path: Path, targets: NDArray[np.uint64]) -> set[str]:
    likely = np.zeros(1 << 16, dtype=bool)  # the upper 16 bits rule out nearly all offsets at once
    likely[(targets >> np.uint64(48)).astype(np.int64)] = True
    hits: set[str] = set()
    for chunk in _chunks(path):
        here = fingerprints(chunk)
        near = here[likely[(here >> np.uint64(48)).astype(np.int64)]]
        hits |= {_spelled(value) for value in near[np.isin(near, targets)]}
    return hits


def _chunks(path: Path) -> Iterator[bytes]:
    """Pieces of a file that overlap, so that no window falls between two."""
    tail = b""
    with path.open("rb") as file:
        while block := file.read(_CHUNK):
            yield tail + block
            tail = (tail + block)[-(WINDOW - 1) :]


def _spelled(value: Any) -> str:
    return f"{int(value):016x}"
