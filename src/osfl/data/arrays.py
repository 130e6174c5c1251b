"""Files of arrays in the MedMNIST layout: train_images, train_labels, and the same for val and test."""

from __future__ import annotations

import zipfile
import zlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from osfl.core.errors import DataError
from osfl.data.catalog import Sheet
from osfl.data.geometry import reshape
from osfl.data.source import Part, Problem, Source, finish, part_of
from osfl.data.split import hold_out_mask
from osfl.runtime.machine import available_memory

Arrays = Mapping[str, np.ndarray[Any, Any]]
LARGEST_FILE = 32 << 30  # bytes after decompression; the largest official file holds 16 GB
MOST_CLASSES = 10_000
TEST_SHARE = 0.2
WANTED = tuple(f"{part}_{what}" for part in ("train", "val", "test") for what in ("images", "labels"))


def open_npz(
    path: Path, sheet: Sheet | None, size: int | None, channels: int | None, problems: Iterable[Problem] = ()
) -> Source:
    """Open one `.npz`; every mistake in it is named in one error."""
    arrays = read_npz(path)
    return from_arrays(path.stem, arrays, sheet, size, channels, [*problems, *unknown_arrays(path)])


def unknown_arrays(path: Path) -> list[Problem]:
    """Arrays that nobody reads, such as patients: they would not be missed."""
    with zipfile.ZipFile(path) as archive:
        names = {member.removesuffix(".npy") for member in archive.namelist()}
    done = "not used; images of one person are kept together only if a CSV table or folders say so"
    return [Problem(path.stem, f"unknown array '{key}'", done) for key in sorted(names - set(WANTED))]


def open_npz_parts(path: Path, classes: int, size: int, channels: int) -> tuple[dict[str, Part], int]:
    """The parts that the file names, in this geometry, and the shorter side of its images; nothing is cut."""
    arrays = read_npz(path)
    _check(path.stem, arrays, classes)
    parts = {key: _part(arrays, key, size, channels) for key in ("train", "val", "test") if f"{key}_images" in arrays}
    return parts, min(arrays["train_images"].shape[1:3])


def read_npz(path: Path) -> dict[str, np.ndarray[Any, Any]]:
    """The arrays of the file; never unpickles, and refuses what would not fit in memory."""
    try:
        with zipfile.ZipFile(path) as archive:
            total = sum(member.file_size for member in archive.infolist())
        if total > (most := min(LARGEST_FILE, available_memory())):
            raise DataError(
                f"'{path.name}' holds {total:,} bytes",
                field="file",
                expected=f"at most {most:,}" + ("" if most == LARGEST_FILE else ", which this machine has memory for"),
                fix="Use fewer or smaller images, or a machine with more memory.",
            )
        with np.load(path, allow_pickle=False) as arrays:
            return {key: arrays[key] for key in WANTED if key in arrays.files}
    except (OSError, ValueError, EOFError, MemoryError, zipfile.BadZipFile, zlib.error) as error:
        raise DataError(
            f"'{path.name}' cannot be read as .npz: {error}", field="file", fix="Download or export the file again."
        ) from None


def from_arrays(
    name: str,
    arrays: Arrays,
    sheet: Sheet | None,
    size: int | None,
    channels: int | None,
    problems: Iterable[Problem] = (),
) -> Source:
    """A source from images (n, h, w[, c]) and labels (n,) or (n, 1); a missing test part is cut by class."""
    _check(name, arrays, None if sheet is None else len(sheet.classes))
    problems = list(problems)
    height, width = arrays["train_images"].shape[1:3]
    if size is None and height != width:
        size = max(height, width)
        problems.append(Problem(name, f"images are {height} × {width}, not square", f"resized to {size} × {size}"))
    parts = {key: _part(arrays, key, size, channels) for key in ("train", "val", "test") if f"{key}_images" in arrays}
    if "test" not in parts:
        parts["train"], parts["test"] = cut_test(parts["train"], name)
        problems.append(Problem(name, "no test part", f"a fixed {TEST_SHARE:.0%} of each class is used for testing"))
    classes = sheet.classes if sheet else _class_names(parts)
    name = sheet.name if sheet else name
    return finish(name, classes, parts["train"], parts.get("val"), parts["test"], sheet, problems, min(height, width))


def cut_test(part: Part, name: str) -> tuple[Part, Part]:
    """(train, test) by class; the same cut whatever the seed."""
    held = hold_out_mask(part.strata, TEST_SHARE, 0, "test")
    if not held.any():
        raise DataError(f"'{name}' has too few images to cut a test part", expected="at least 2 in a class")
    return part.subset(np.flatnonzero(~held)), part.subset(np.flatnonzero(held))


def _part(arrays: Arrays, key: str, size: int | None, channels: int | None) -> Part:
    labels = arrays[f"{key}_labels"]
    return part_of(reshape(arrays[f"{key}_images"], size, channels), labels if _several(labels) else labels.reshape(-1))


def _several(labels: np.ndarray[Any, Any]) -> bool:
    """One column a class: an image may be of several."""
    return labels.ndim == 2 and labels.shape[1] > 1


def _class_names(parts: Mapping[str, Part]) -> tuple[str, ...]:
    if parts["train"].labels.ndim == 2:
        return tuple(str(i) for i in range(parts["train"].labels.shape[1]))
    return tuple(str(i) for i in range(max(int(part.labels.max()) for part in parts.values() if len(part)) + 1))


def _check(name: str, arrays: Arrays, classes: int | None) -> None:
    mistakes = [] if "train_images" in arrays else ["there is no 'train_images'"]
    for key in ("train", "val", "test"):
        images, labels = arrays.get(f"{key}_images"), arrays.get(f"{key}_labels")
        if images is None and labels is None:
            continue
        if images is None or labels is None:
            mistakes.append(f"'{key}_images' and '{key}_labels' must come together")
            continue
        mistakes += _image_mistakes(key, images) + _label_mistakes(key, labels, len(images), classes)
    if not mistakes and len({arrays[k].shape[1:] for k in arrays if k.endswith("images")}) > 1:
        mistakes.append("the parts differ in image size")
    if not mistakes and len({_several(arrays[k]) and arrays[k].shape[1] for k in arrays if k.endswith("labels")}) > 1:
        mistakes.append("the parts differ in how many columns their labels have")
    if mistakes:
        raise DataError(
            f"'{name}' is not in the MedMNIST layout: " + "; ".join(mistakes),
            field="arrays",
            fix="Expected uint8 images (n, h, w) or (n, h, w, 3) and integer labels (n,), (n, 1) or, multi-label, "
            "(n, classes) of 0 and 1.",
        )


def _image_mistakes(key: str, images: np.ndarray[Any, Any]) -> list[str]:
    mistakes = []
    if images.dtype != np.uint8:
        mistakes.append(f"'{key}_images' is {images.dtype}, expected uint8")
    if images.ndim not in (3, 4) or (images.ndim == 4 and images.shape[3] not in (1, 3)):
        mistakes.append(f"'{key}_images' has shape {list(images.shape)}, expected (n, h, w) or (n, h, w, 3)")
    if 0 in images.shape:
        mistakes.append(f"'{key}_images' is empty")
    return mistakes


def _label_mistakes(key: str, labels: np.ndarray[Any, Any], images: int, classes: int | None) -> list[str]:
    if _several(labels):
        return _column_mistakes(key, labels, images, classes)
    if labels.ndim not in (1, 2) or not np.issubdtype(labels.dtype, np.integer):
        return [f"'{key}_labels' is {labels.dtype} of shape {list(labels.shape)}, expected integers (n,) or (n, 1)"]
    if labels.size != images:
        return [f"{images} '{key}_images' but {labels.size} '{key}_labels'"]
    low, high = (int(labels.min()), int(labels.max())) if labels.size else (0, 0)
    if low < 0 or high >= (classes or MOST_CLASSES):
        return [f"'{key}_labels' are in {low}..{high}, expected 0..{(classes or MOST_CLASSES) - 1}"]
    return []


def _column_mistakes(key: str, labels: np.ndarray[Any, Any], images: int, classes: int | None) -> list[str]:
    """Of multi-label labels."""
    if len(labels) != images:
        return [f"{images} '{key}_images' but {len(labels)} rows of '{key}_labels'"]
    if labels.shape[1] != (classes or labels.shape[1]):
        return [f"'{key}_labels' has {labels.shape[1]} columns, expected {classes}, one a class"]
    if not np.isin(labels, (0, 1)).all():
        return [f"'{key}_labels' has {labels.shape[1]} columns (multi-label), expected 0 and 1 in them"]
    return []
