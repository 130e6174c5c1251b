"""Leakage across splits: probable patients in file names, and images that look the same in training and in test."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import PurePosixPath

import numpy as np
import numpy.typing as npt

from osfl.core.types import Dataset
from osfl.data.source import Part, Problem

# patient012_3, subj-7b, P0003 (left); and A123_1, 12_left: something with a number, then a view or a counter
_NAMED = re.compile(r"(?:^|[^a-z])(patient|pat|subject|subj|sub|case|person|pid|id|p|s)[-_ ]?0*(\d+)(?!\d)(?=.*[a-z0-9])", re.I)
_NUMBERED = re.compile(r"(.*\d[^-_ .]*)[-_ .]+([a-z]*\d{0,4})", re.I)
FEWEST = 3  # people; fewer are no pattern
SHARE = 0.8  # of the names that must follow it
REPEATED = 1.5  # images a person, at least
SAME_BITS = 12  # of 64 may differ between hashes of two pictures that look the same
SAME_SHAPE = 0.99  # correlation of their thumbnails, at least
_ROWS = 256  # training images compared at once


def name_problems(train: Part, test: Part | None) -> list[Problem]:
    """Whether file names seem to name patients that nobody asked to keep together."""
    if train.groups is not None or train.names is None:
        return []
    found = probable_people(train.names.tolist())
    if found is None:
        return []
    what = f"file names that look like patients: about {len(set(found) - {''})} people in {len(found)} training images"
    tested = probable_people(test.names.tolist()) if test is not None and test.names is not None else None
    both = sorted(set(found) & set(tested or ()) - {""})
    what += f", {len(both)} of them in the test part, too" if both else ""
    done = (
        "not used; if they are people, name them in a column (--group COLUMN) or in class/patient/* folders: "
        "with one person in training and test, scores are too good"
    )
    return [Problem("(all)", what, done)]


def probable_people(names: list[str]) -> list[str] | None:
    """Whom each file name seems to name, '' for none; None where names do not look like that."""
    found = [_person(PurePosixPath(name).stem) for name in names]
    some = [person for person in found if person]
    people = len(set(some))
    likely = len(some) >= SHARE * len(found) and people >= FEWEST and len(some) >= REPEATED * people
    return found if likely else None


def _person(stem: str) -> str:
    if named := _NAMED.search(stem):
        return f"{named.group(1)}{named.group(2)}".lower()
    numbered = _NUMBERED.fullmatch(stem)
    return numbered.group(1).lower() if numbered else ""


def near_duplicates(train: Part, test: Part) -> list[Problem]:
    """Test images that look like a training image: by a difference hash of 64 bits, confirmed on thumbnails.

    It finds copies that were compressed, scaled or brightened anew; it misses rotated, mirrored and cropped ones.
    """
    pairs = dict(reversed(list(_pairs(train.dataset, test.dataset))))  # the first training image for each test image
    done = "kept; scores on them are too good, so remove one of the two"
    return [
        Problem(_name(test, b), "a test image that looks like a training image", done, _name(train, a))
        for b, a in sorted(pairs.items())
    ]


def _name(part: Part, index: int) -> str:
    return str(part.names[index]) if part.names is not None else f"number {index}"


def _pairs(train: Dataset, test: Dataset) -> Iterator[tuple[int, int]]:
    """(test image, training image) for each pair that looks the same."""
    hashes, shapes = difference_hash(train)
    others, other_shapes = difference_hash(test)
    for start in range(0, len(hashes), _ROWS):
        apart = _bits(hashes[start : start + _ROWS, None] ^ others[None])  # (rows, test)
        rows, columns = np.nonzero(apart <= SAME_BITS)
        for some in range(0, len(rows), 4096):
            row, column = rows[some : some + 4096] + start, columns[some : some + 4096]
            same = (shapes[row] * other_shapes[column]).sum(1) >= SAME_SHAPE
            yield from zip(column[same].tolist(), row[same].tolist(), strict=True)


def difference_hash(images: Dataset) -> tuple[npt.NDArray[np.uint64], npt.NDArray[np.float32]]:
    """(n,) hashes, whether each cell of a 9 × 8 thumbnail is darker than its right neighbor; (n, 256) thumbnails of length 1.

    Plain images get a thumbnail of zeros, which correlates with nothing: they are alike without being copies.
    """
    from torch.nn.functional import interpolate

    hashes, shapes = [], []
    for start in range(0, len(images), 512):
        gray = images.images[start : start + 512].float().mean(1, keepdim=True)
        small = interpolate(gray, size=(8, 9), mode="area")[:, 0].numpy()
        bits = small[:, :, :-1] < small[:, :, 1:]
        hashes.append(np.packbits(bits.reshape(len(bits), -1), axis=1).view(np.uint64)[:, 0])
        shape = interpolate(gray, size=(16, 16), mode="area").flatten(1).numpy()
        shape = shape - shape.mean(1, keepdims=True)
        length = np.linalg.norm(shape, axis=1, keepdims=True)
        shapes.append(np.where(length > 16, shape / np.maximum(length, 1), 0))  # below one gray level on average: plain
    empty = np.empty(0, np.uint64), np.empty((0, 256), np.float32)
    return (np.concatenate(hashes), np.concatenate(shapes)) if hashes else empty


def _bits(values: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint8]:
    """How many bits are set."""
    if hasattr(np, "bitwise_count"):  # numpy 2
        return np.asarray(np.bitwise_count(values), dtype=np.uint8)
    return np.asarray(np.unpackbits(values[..., None].view(np.uint8), axis=-1).sum(-1), dtype=np.uint8)
