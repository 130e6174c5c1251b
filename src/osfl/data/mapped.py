"""Images that are many: on disk, and in memory only as far as somebody reads them.

Arrays of at least LARGE bytes are memory-mapped files. What a process reads of them is the system's file cache, which gives it
back when any program needs memory; only what is decoded or copied at once is the process' own. Nothing writes into them.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import IO, TYPE_CHECKING

import numpy as np

from osfl.data.source import Indices, Pixels
from osfl.runtime.cache import cache_folder

if TYPE_CHECKING:
    import torch

LARGE = 256 << 20  # bytes of images from which on they are mapped
AT_ONCE = 512  # images that are copied together


def is_large(count: int, shape: tuple[int, ...]) -> bool:
    """So many images of (channels, height, width)."""
    return count * int(np.prod(shape)) >= LARGE


def scratch() -> IO[bytes]:
    """A file without a name, gone when nobody has it open or mapped; in the cache's folder, because /tmp may be memory."""
    folder = cache_folder() / "decoded"
    folder.mkdir(parents=True, exist_ok=True)
    return tempfile.TemporaryFile(dir=folder)


def mapped(file: IO[bytes] | Path, shape: tuple[int, ...]) -> Pixels:
    """The file as an array. A write would stay in memory: pages are copied then, and the file is not changed."""
    return np.memmap(file, dtype=np.uint8, mode="c", shape=shape)


def written(rows: Iterable[Pixels], file: IO[bytes]) -> None:
    """Rows of pixels, one after the other."""
    for row in rows:
        file.write(np.ascontiguousarray(row).data)
    file.flush()


def picked(images: torch.Tensor, index: Indices) -> torch.Tensor:
    """The images at these places: a copy, of many images a mapped one; neighbors that lie together are not copied."""
    import torch

    if is_large(len(index), tuple(images.shape[1:])):
        return torch.from_numpy(picked_pixels(images.numpy(), index))
    return images[torch.from_numpy(np.ascontiguousarray(index, dtype=np.int64))]


def picked_pixels(images: Pixels, index: Indices) -> Pixels:
    """The same of an array."""
    if not is_large(len(index), images.shape[1:]):
        return images[index]
    first, last = int(index[0]), int(index[0]) + len(index)
    if np.array_equal(index, np.arange(first, last)):
        return images[first:last]
    with scratch() as file:
        written((images[index[start : start + AT_ONCE]] for start in range(0, len(index), AT_ONCE)), file)
        return mapped(file, (len(index), *images.shape[1:]))
