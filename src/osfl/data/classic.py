"""The usual benchmark files, read in memory: idx (MNIST family), CIFAR's binary records, SVHN's .mat."""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from osfl.core.errors import DataError
from osfl.core.types import Progress
from osfl.data.arrays import from_arrays
from osfl.data.catalog import Sheet
from osfl.data.places import find_file, obtain
from osfl.data.source import Pixels, Problem, Source

Array = np.ndarray[Any, Any]
LARGEST_MEMBER = 1 << 30  # bytes after decompression
CIFAR_SIDE = 32
TAR_BLOCK = 512
# layout -> (training records, test records, label bytes before the pixels); of CIFAR-100's two labels the last is fine
CIFAR_FILES = {
    "cifar10": ([f"data_batch_{i}.bin" for i in range(1, 6)], ["test_batch.bin"], 1),
    "cifar100": (["train.bin"], ["test.bin"], 2),
}


def open_classic(sheet: Sheet, size: int | None, channels: int | None, progress: Progress) -> Source:
    """One of the layouts idx, cifar10, cifar100, svhn, from disk or downloaded."""
    reader = {"idx": _open_idx, "svhn": _open_svhn}.get(sheet.layout, _open_cifar)
    try:
        arrays, problems = reader(sheet, progress)
    except (OSError, EOFError, ValueError, zlib.error) as error:
        raise DataError(
            f"the files of '{sheet.name}' cannot be read: {error}", field="file", fix="Download them again."
        ) from None
    return from_arrays(sheet.name, arrays, sheet, size, channels, problems)


def _open_idx(sheet: Sheet, progress: Progress) -> tuple[dict[str, Array], list[Problem]]:
    arrays, problems = {}, []
    for key, file in zip(("train_images", "train_labels", "test_images", "test_labels"), sheet.files, strict=True):
        unpacked = find_file(sheet, file.name.removesuffix(".gz"))
        if unpacked is None:
            unpacked, doubts = obtain(sheet, file, progress)
            problems += doubts
        arrays[key] = read_idx(unpacked)
    return arrays, problems


def read_idx(path: Path) -> Pixels:
    """An array of bytes: two zeros, type 8, number of dimensions, their lengths as big-endian int32, then values."""
    blob = _bounded(path)
    dimensions = blob[3] if len(blob) > 4 and blob[:3] == b"\0\0\x08" else 0
    start = 4 + 4 * dimensions
    if not 1 <= dimensions <= 3 or len(blob) < start:
        raise ValueError(f"'{path.name}' is not an idx file of bytes")
    shape = [int.from_bytes(blob[4 + 4 * i : 8 + 4 * i], "big") for i in range(dimensions)]
    values = np.frombuffer(blob, dtype=np.uint8, offset=start)
    if values.size != int(np.prod(shape, dtype=object)):
        raise ValueError(f"'{path.name}' declares shape {shape} but holds {values.size} values")
    return values.reshape(shape)


def _bounded(path: Path) -> bytes:
    with path.open("rb") as raw:
        blob = (gzip.GzipFile(fileobj=raw) if path.suffix == ".gz" else raw).read(LARGEST_MEMBER + 1)
    if len(blob) > LARGEST_MEMBER:
        raise ValueError(f"'{path.name}' is larger than {LARGEST_MEMBER:,} bytes")
    return blob


def _open_cifar(sheet: Sheet, progress: Progress) -> tuple[dict[str, Array], list[Problem]]:
    train, test, width = CIFAR_FILES[sheet.layout]
    blobs, problems = _cifar_blobs(sheet, [*train, *test], progress)
    arrays: dict[str, Array] = {}
    for key, names in (("train", train), ("test", test)):
        arrays[f"{key}_images"], arrays[f"{key}_labels"] = read_cifar(b"".join(blobs[n] for n in names), width)
    return arrays, problems


def _cifar_blobs(sheet: Sheet, names: list[str], progress: Progress) -> tuple[dict[str, bytes], list[Problem]]:
    """The record files by name, unpacked on disk or inside the archive (which is never unpacked)."""
    unpacked = {name: find_file(sheet, name) for name in names}
    if all(unpacked.values()):
        return {name: _bounded(path) for name, path in unpacked.items() if path}, []
    path, problems = obtain(sheet, sheet.files[0], progress)
    blobs = {name: blob for name, blob in tar_files(_bounded(path)) if name in names}
    if missing := sorted(set(names) - set(blobs)):
        raise ValueError(f"'{path.name}' lacks {', '.join(missing)}")
    return blobs, problems


def tar_files(blob: bytes) -> Iterator[tuple[str, bytes]]:
    """Plain files of a tar by their last name. Reading is all this can do: no links, no paths, nothing on disk."""
    start = 0
    while start + TAR_BLOCK <= len(blob) and blob[start]:  # the archive ends with blocks of zeros
        header = blob[start : start + TAR_BLOCK]
        size = int(header[124:136].strip(b"\0 ") or b"0", 8)
        start += TAR_BLOCK
        if header[156:157] in (b"0", b"\0"):
            yield header[:100].split(b"\0")[0].decode("utf-8", "replace").rsplit("/", 1)[-1], blob[start : start + size]
        start += -(-max(size, 0) // TAR_BLOCK) * TAR_BLOCK


def read_cifar(blob: bytes, label_bytes: int) -> tuple[Pixels, Pixels]:
    """Records of labels and 3 × 32 × 32 pixels, to images (n, 32, 32, 3) and labels (n,)."""
    record = label_bytes + 3 * CIFAR_SIDE * CIFAR_SIDE
    if not blob or len(blob) % record:
        raise ValueError(f"{len(blob)} bytes are not a whole number of records of {record} bytes")
    rows = np.frombuffer(blob, dtype=np.uint8).reshape(-1, record)
    images = rows[:, label_bytes:].reshape(-1, 3, CIFAR_SIDE, CIFAR_SIDE).transpose(0, 2, 3, 1)
    return images, rows[:, label_bytes - 1]


def _open_svhn(sheet: Sheet, progress: Progress) -> tuple[dict[str, Array], list[Problem]]:
    arrays: dict[str, Array] = {}
    problems: list[Problem] = []
    for key, file in zip(("train", "test"), sheet.files, strict=True):
        path, doubts = obtain(sheet, file, progress)
        arrays[f"{key}_images"], arrays[f"{key}_labels"] = read_svhn(path)
        problems += doubts
    return arrays, problems


def read_svhn(path: Path) -> tuple[Array, Array]:
    """X is (32, 32, 3, n), y is 1..10 where 10 means the digit zero."""
    from scipy.io import loadmat
    from scipy.io.matlab import MatReadError

    try:
        content = loadmat(path, variable_names=["X", "y"])
    except (MatReadError, NotImplementedError, TypeError, KeyError) as error:
        raise ValueError(f"'{path.name}': {error}") from None
    if "X" not in content or "y" not in content:
        raise ValueError(f"'{path.name}' holds no X and y")
    labels = np.asarray(content["y"]).reshape(-1).astype(np.int64)
    return np.asarray(content["X"]).transpose(3, 0, 1, 2), np.where(labels == 10, 0, labels)
