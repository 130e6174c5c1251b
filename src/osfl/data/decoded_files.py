"""Many image files decoded at once, in threads (Pillow lets go of the interpreter), and kept on disk for next time."""

from __future__ import annotations

import hashlib
import io
import json
import os
import warnings
import zipfile
import zlib
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, Any

import numpy as np
import numpy.typing as npt
import PIL
from PIL import Image

from osfl.core.types import Progress, digest_of
from osfl.data.decode import BROKEN, Decoded, decode, full_scale
from osfl.data.kept import PIXELS, keep, kept, replaced
from osfl.data.layout import SKIPPED, person_key
from osfl.data.mapped import AT_ONCE, is_large, mapped, scratch, written
from osfl.data.reading import Reading
from osfl.data.source import Indices, Names, Pixels, Problem
from osfl.data.unusable import Unusable
from osfl.runtime.cache import cache_folder, cache_limit, trim, used

VERSION = 5  # of what decoding does; a change makes old caches unused
BATCH = 512  # files that are decoded before the next ones are begun: bounds the memory
_ARRAYS = ("images", "kept", "content", "color", "oblong", "sides", "places", "people")
THREADS = min(32, os.cpu_count() or 1)


@dataclass(frozen=True)
class Gallery:
    """The usable images of a list of files; arrays are aligned with `kept`."""

    images: Pixels  # (n, channels, size, size)
    kept: Indices  # (n,) positions in the list of files
    content: npt.NDArray[np.uint8]  # (n, 32) sha256 of the file, to find the same picture under two names
    color: npt.NDArray[np.bool_]
    oblong: npt.NDArray[np.bool_]
    sides: Indices  # (n,) shorter side of each file, in pixels
    places: Names  # (n,) which frame or slice of its file; mostly empty
    people: Indices  # (n,) numbers of the people that DICOM headers name, -1 where none is known
    problems: tuple[Problem, ...]
    name: str = ""  # sha256 of the images, where they are many and kept


def gallery(
    names: Sequence[str],
    stamps: Sequence[str],
    read: Callable[[str], bytes],
    size: int,
    channels: int | None,
    progress: Progress,
    reading: Reading = Reading(),
) -> Gallery:
    """Decoded now, or as decoded the last time these very files were asked for at this size."""
    key = digest_of(
        [VERSION, PIL.__version__, size, channels, reading.slices, reading.window, list(zip(names, stamps, strict=True))]
    )
    store = cache_folder() / "decoded" / f"{key}.npz"
    found = _load(store, progress) if cache_limit() else None
    if found is not None:
        used(store)
    else:
        found = _decode_all(names, read, size, channels, progress, reading)
        if found.images.nbytes < cache_limit():
            found = _save(store, found)
            trim()
    return found


def _decode_all(
    names: Sequence[str], read: Callable[[str], bytes], size: int, channels: int | None, progress: Progress, reading: Reading
) -> Gallery:
    """In threads, a batch of files after the other. Of many images the pixels go to a file as they come."""

    def one(name: str) -> tuple[bytes, list[Decoded]] | Problem:
        try:
            blob = read(name)
            return hashlib.sha256(blob).digest(), decode(blob, name, size, channels, reading)
        except Unusable as why:
            return Problem(name, why.reason, SKIPPED, why.detail)
        except (*BROKEN, zipfile.BadZipFile) as error:
            cause = getattr(error, "strerror", None) or str(error)  # without the path, which would differ from file to file
            return Problem(name, "unreadable", SKIPPED, cause)

    outcomes: list[tuple[bytes, list[Decoded]] | Problem] = []
    spool = scratch() if is_large(len(names), (channels or 3, size, size)) else None
    Image.init()  # loads the readers once, before the threads would do so together
    with warnings.catch_warnings(), ThreadPoolExecutor(THREADS) as pool:
        warnings.simplefilter("ignore")  # Pillow warns of what the report contains anyway
        for start in range(0, len(names), BATCH):
            for outcome in pool.map(one, names[start : start + BATCH]):
                outcomes.append(_spooled(outcome, spool) if spool else outcome)
                progress("decode images", len(outcomes), len(names))
    return _assemble(names, outcomes, size, channels, spool)


@dataclass(frozen=True)
class _Spooled:
    """Pixels of an image that wait in a file."""

    file: IO[bytes]
    place: int
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    largest: float

    def max(self) -> float:
        return self.largest

    def __array__(self, dtype: object = None, copy: bool | None = None) -> npt.NDArray[Any]:
        self.file.seek(self.place)
        found = np.frombuffer(self.file.read(int(np.prod(self.shape)) * self.dtype.itemsize), dtype=self.dtype)
        return found.reshape(self.shape)


def _spooled(outcome: tuple[bytes, list[Decoded]] | Problem, file: IO[bytes]) -> tuple[bytes, list[Decoded]] | Problem:
    """The same with its pixels appended to the file."""
    if isinstance(outcome, Problem):
        return outcome
    kept = []
    for decoded in outcome[1]:
        pixels, place = decoded.pixels, file.tell()
        file.write(np.ascontiguousarray(pixels).data)
        waiting: Any = _Spooled(file, place, pixels.shape, pixels.dtype, float(pixels.max()) if decoded.deep else 0.0)
        kept.append(replace(decoded, pixels=waiting))
    return outcome[0], kept


def _assemble(
    names: Sequence[str],
    outcomes: Sequence[tuple[bytes, list[Decoded]] | Problem],
    size: int,
    channels: int | None,
    spool: IO[bytes] | None,
) -> Gallery:
    problems = [outcome for outcome in outcomes if isinstance(outcome, Problem)]
    files = [(i, *outcome) for i, outcome in enumerate(outcomes) if not isinstance(outcome, Problem)]
    problems += [
        Problem(names[i], *note) for i, _, inside in files for note in dict.fromkeys(n for d in inside for n in d.notes)
    ]
    good = [(i, content, decoded) for i, content, inside in files for decoded in inside]
    people, about = number_people([decoded.person for _, _, decoded in good])
    planes = channels or (3 if any(decoded.color for _, _, decoded in good) else 1)
    largest = max((float(decoded.pixels.max()) for _, _, decoded in good if decoded.deep), default=1.0)
    images = _stacked([decoded for _, _, decoded in good], (planes, size, size), 255 / full_scale(largest), spool)
    return Gallery(
        images,
        np.array([i for i, _, _ in good], dtype=np.int64),
        np.array([list(content) for _, content, _ in good], dtype=np.uint8).reshape(len(good), 32),
        np.array([decoded.color for _, _, decoded in good], dtype=np.bool_),
        np.array([decoded.oblong for _, _, decoded in good], dtype=np.bool_),
        np.array([decoded.side for _, _, decoded in good], dtype=np.int64),
        np.array([decoded.place for _, _, decoded in good], dtype=np.str_),
        people,
        (*problems, *about),
    )


def _stacked(good: Sequence[Decoded], shape: tuple[int, int, int], scale: float, spool: IO[bytes] | None) -> Pixels:
    """All pictures as one array; gray ones repeated where others have colors, deep ones scaled to bytes."""

    def row(decoded: Decoded) -> Pixels:
        pixels: npt.NDArray[Any] = np.asarray(decoded.pixels)
        shades = np.rint(pixels * scale).astype(np.uint8) if decoded.deep else pixels.astype(np.uint8, copy=False)
        return np.broadcast_to(shades, shape)

    if spool is None or not good:
        images = np.empty((len(good), *shape), dtype=np.uint8)
        for place, decoded in zip(images, good, strict=True):
            place[:] = row(decoded)
        return images
    with spool, scratch() as file:
        spool.flush()
        if all(decoded.pixels.shape == shape and not decoded.deep for decoded in good):
            return mapped(spool, (len(good), *shape))  # as they came
        written(map(row, good), file)
        return mapped(file, (len(good), *shape))


def number_people(found: Sequence[tuple[str, ...]]) -> tuple[Indices, list[Problem]]:
    """Patient number, study and series of each image as a number from 0 on: the first of them that tells images apart.

    The values themselves are not kept, not even as hashes, which could be guessed.
    """
    none = np.full(len(found), -1, dtype=np.int64)
    for level, what in enumerate(("patient numbers", "studies", "series")):
        values = [person_key(person[level]) if person else "" for person in found]  # however a patient number is written
        different = {value: number for number, value in enumerate(dict.fromkeys(filter(None, values)))}
        if len(different) < 2:
            continue
        note = f"{what} in DICOM headers name {len(different)} people in {len(values)} images"
        done = "images of one person are kept together; the values are not kept"
        if level:
            done += "; all patient numbers are the same (anonymized?), so one person may count as several"
        return np.array([different.get(value, -1) for value in values], dtype=np.int64), [Problem("(all)", note, done)]
    return none, []


def _save(store: Path, found: Gallery) -> Gallery:
    """A cache that cannot be written is no reason to stop. Many images are a file of their own, which is then mapped."""
    text = json.dumps([[p.path, p.what, p.done, p.detail] for p in found.problems])
    arrays = {key: getattr(found, key) for key in _ARRAYS}
    arrays["problems"] = np.frombuffer(text.encode(), dtype=np.uint8)
    large, pixels = is_large(len(found.images), found.images.shape[1:]), store.with_suffix(PIXELS)
    try:
        store.parent.mkdir(parents=True, exist_ok=True)
        if large:
            images = arrays.pop("images")
            arrays["shape"] = np.array(images.shape)
            name = keep(pixels, (images[i : i + AT_ONCE] for i in range(0, len(images), AT_ONCE)))
            found = replace(found, images=mapped(pixels, images.shape), name=name)
        replaced(store, lambda out: np.savez(out, **arrays))
        return found
    except OSError:
        return found


def _load(store: Path, progress: Progress) -> Gallery | None:
    """None for a cache that is absent or damaged: each array in .npz has a checksum, and mapped images their sha256."""
    try:
        with np.load(io.BytesIO(store.read_bytes()), allow_pickle=False) as arrays:
            problems = tuple(Problem(*row) for row in json.loads(arrays["problems"].tobytes()))
            images, name = (arrays["images"], "") if "images" in arrays else _whole(store, arrays["shape"], progress)
            rest = [arrays[key] for key in _ARRAYS[1:]]
    except (OSError, ValueError, KeyError, TypeError, EOFError, zipfile.BadZipFile, zlib.error):
        return None
    places_of_files, content, color, oblong, sides, places, people = rest
    whole = {len(images)} == {len(column) for column in rest}
    return Gallery(images, places_of_files, content, color, oblong, sides, places, people, problems, name) if whole else None


def _whole(store: Path, shape: npt.NDArray[np.int64], progress: Progress) -> tuple[Pixels, str]:
    found = kept(store.with_suffix(PIXELS), tuple(shape.tolist()), progress)
    if found is None:
        raise ValueError("not the images that were written")
    return found
