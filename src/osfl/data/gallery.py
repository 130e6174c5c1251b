"""Many image files decoded at once, in threads (Pillow lets go of the interpreter), and kept on disk for next time."""

from __future__ import annotations

import hashlib
import io
import json
import os
import tempfile
import warnings
import zipfile
import zlib
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import PIL
from PIL import Image

from osfl.core.types import Progress, digest_of
from osfl.data.decode import BROKEN, Decoded, Unusable, decode, full_scale
from osfl.data.layout import SKIPPED
from osfl.data.source import Indices, Pixels, Problem
from osfl.runtime.cache import cache_folder

VERSION = 3  # of what decoding does; a change makes old caches unused
_ARRAYS = ("images", "kept", "content", "color", "oblong", "sides")
THREADS = min(8, os.cpu_count() or 1)


@dataclass(frozen=True)
class Gallery:
    """The usable images of a list of files; arrays are aligned with `kept`."""

    images: Pixels  # (n, channels, size, size)
    kept: Indices  # (n,) positions in the list of files
    content: npt.NDArray[np.uint8]  # (n, 32) sha256 of the file, to find the same picture under two names
    color: npt.NDArray[np.bool_]
    oblong: npt.NDArray[np.bool_]
    sides: Indices  # (n,) shorter side of each file, in pixels
    problems: tuple[Problem, ...]


def gallery(
    names: Sequence[str],
    stamps: Sequence[str],
    read: Callable[[str], bytes],
    size: int,
    channels: int | None,
    progress: Progress,
) -> Gallery:
    """Decoded now, or as decoded the last time these very files were asked for at this size."""
    key = digest_of([VERSION, PIL.__version__, size, channels, list(zip(names, stamps, strict=True))])
    store = cache_folder() / "decoded" / f"{key}.npz"
    found = _load(store)
    if found is None:
        found = _decode_all(names, read, size, channels, progress)
        _save(store, found)
    return found


def _decode_all(
    names: Sequence[str], read: Callable[[str], bytes], size: int, channels: int | None, progress: Progress
) -> Gallery:
    def one(name: str) -> tuple[bytes, Decoded] | Problem:
        try:
            blob = read(name)
            return hashlib.sha256(blob).digest(), decode(blob, name, size, channels)
        except Unusable as why:
            return Problem(name, why.reason, SKIPPED, why.detail)
        except (*BROKEN, zipfile.BadZipFile) as error:
            cause = getattr(error, "strerror", None) or str(error)  # without the path, which would differ from file to file
            return Problem(name, "unreadable", SKIPPED, cause)

    outcomes = []
    Image.init()  # loads the readers once, before the threads would do so together
    with warnings.catch_warnings(), ThreadPoolExecutor(THREADS) as pool:
        warnings.simplefilter("ignore")  # Pillow warns of what the report contains anyway
        for outcome in pool.map(one, names):
            outcomes.append(outcome)
            progress("decode images", len(outcomes), len(names))
    return _assemble(names, outcomes, size, channels)


def _assemble(
    names: Sequence[str], outcomes: Sequence[tuple[bytes, Decoded] | Problem], size: int, channels: int | None
) -> Gallery:
    problems = [outcome for outcome in outcomes if isinstance(outcome, Problem)]
    good = [(i, *outcome) for i, outcome in enumerate(outcomes) if not isinstance(outcome, Problem)]
    problems += [Problem(names[i], what, done) for i, _, decoded in good for what, done in decoded.notes]
    planes = channels or (3 if any(decoded.color for _, _, decoded in good) else 1)
    largest = max((float(decoded.pixels.max()) for _, _, decoded in good if decoded.deep), default=1.0)
    images = np.empty((len(good), planes, size, size), dtype=np.uint8)
    for row, (_, _, decoded) in zip(images, good, strict=True):
        row[:] = np.rint(decoded.pixels * (255 / full_scale(largest))) if decoded.deep else decoded.pixels
    return Gallery(
        images,
        np.array([i for i, _, _ in good], dtype=np.int64),
        np.array([list(content) for _, content, _ in good], dtype=np.uint8).reshape(len(good), 32),
        np.array([decoded.color for _, _, decoded in good], dtype=np.bool_),
        np.array([decoded.oblong for _, _, decoded in good], dtype=np.bool_),
        np.array([decoded.side for _, _, decoded in good], dtype=np.int64),
        tuple(problems),
    )


def _save(store: Path, found: Gallery) -> None:
    """A cache that cannot be written is no reason to stop."""
    text = json.dumps([[p.path, p.what, p.done, p.detail] for p in found.problems])
    arrays = {key: getattr(found, key) for key in _ARRAYS}
    try:
        store.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(prefix=".", dir=store.parent)
        part = Path(name)
        try:
            with os.fdopen(handle, "wb") as out:
                np.savez(out, problems=np.frombuffer(text.encode(), dtype=np.uint8), **arrays)
            part.replace(store)
        finally:
            part.unlink(missing_ok=True)
    except OSError:
        return


def _load(store: Path) -> Gallery | None:
    """None for a cache that is absent or damaged (the zip inside .npz has a checksum for each array)."""
    try:
        with np.load(io.BytesIO(store.read_bytes()), allow_pickle=False) as arrays:
            problems = tuple(Problem(*row) for row in json.loads(arrays["problems"].tobytes()))
            images, *rest = (arrays[key] for key in _ARRAYS)
    except (OSError, ValueError, KeyError, TypeError, EOFError, zipfile.BadZipFile, zlib.error):
        return None
    kept, content, color, oblong, sides = rest
    whole = {len(images)} == {len(column) for column in rest}
    return Gallery(images, kept, content, color, oblong, sides, problems) if whole else None
