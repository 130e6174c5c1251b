"""Images that are many: on disk, and in memory only as far as somebody reads them.

Arrays of at least LARGE bytes are memory-mapped files. What a process reads of them is the system's file cache, which gives it
back when any program needs memory; only what is decoded or copied at once is the process' own. Nothing writes into them.
"""

from __future__ import annotations

import hashlib
import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from typing import IO, TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from osfl.core.types import Dataset, digest_of
from osfl.data.kept import PIXELS, keep, kept, known_digest
from osfl.data.source import Indices, Pixels
from osfl.runtime.cache import cache_folder, cache_limit, trim

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


class Picked(Dataset):
    """Images of a mapped file by their places in it. Splits of splits are places, too: nothing is copied before somebody asks
    for all images at once. `name`: sha256 of the file where it is kept, so that the copy and digests are kept, too."""

    def __init__(self, base: torch.Tensor, rows: Indices, labels: torch.Tensor, name: str = "") -> None:
        self.__dict__.update(base=base, rows=rows, labels=labels, name=name)

    @cached_property
    def images(self) -> torch.Tensor:
        import torch

        return torch.from_numpy(picked_pixels(self.__dict__["base"].numpy(), self.rows, self.__dict__["name"]))

    @property
    def rows(self) -> Indices:
        rows: Indices = self.__dict__["rows"]
        return rows

    @property
    def shape(self) -> tuple[int, ...]:
        return (len(self.rows), *self.__dict__["base"].shape[1:])

    def blocks(self) -> Iterator[torch.Tensor]:
        """All images, some at a time."""
        import torch

        for start in range(0, len(self), AT_ONCE):
            yield self.__dict__["base"][torch.from_numpy(self.rows[start : start + AT_ONCE])]

    def digest(self, compute: Callable[[], str]) -> str:
        """The digest of these images and labels, which reads no pixels where it is known."""
        if not (name := self.__dict__["name"]):
            return compute()
        facts = [repr(self.shape).encode(), self.rows.astype("<i8").tobytes(), self.labels.numpy().astype("<i8").tobytes()]
        return known_digest(name, hashlib.sha256(b"".join(hashlib.sha256(fact).digest() for fact in facts)).digest(), compute)

    def pick(self, index: Indices) -> Picked:
        import torch

        labels = self.labels[torch.from_numpy(np.ascontiguousarray(index, dtype=np.int64))]
        return Picked(self.__dict__["base"], self.rows[index], labels, self.__dict__["name"])

    def subset(self, index: torch.Tensor) -> Dataset:
        """Few images are read from the file, many stay places in it."""
        import torch

        found = self.pick(torch.arange(len(self))[index].numpy())
        return found if is_large(len(found), found.shape[1:]) else Dataset(found.images, found.labels)

    def __reduce__(self) -> tuple[type[Dataset], tuple[torch.Tensor, torch.Tensor]]:
        return Dataset, (self.images, self.labels)  # another process gets these images, not the whole file


def by_place(images: Pixels, rows: Indices, labels: npt.ArrayLike, name: str) -> Picked:
    """Some images of a mapped array."""
    import torch

    return Picked(torch.from_numpy(images), rows, torch.from_numpy(np.array(labels, dtype=np.int64)), name)


def shape_of(dataset: Dataset) -> tuple[int, ...]:
    """(n, channels, height, width), without a look at the pixels."""
    return dataset.shape if isinstance(dataset, Picked) else tuple(dataset.images.shape)


def subset(dataset: Dataset, index: Indices) -> Dataset:
    """The images at these places."""
    import torch

    if isinstance(dataset, Picked):
        return dataset.pick(index)
    pick = torch.from_numpy(np.ascontiguousarray(index, dtype=np.int64))
    return Dataset(picked(dataset.images, index), dataset.labels[pick])


def picked(images: torch.Tensor, index: Indices) -> torch.Tensor:
    """The images at these places: a copy, of many images a mapped one; neighbors that lie together are not copied."""
    import torch

    if is_large(len(index), tuple(images.shape[1:])):
        return torch.from_numpy(picked_pixels(images.numpy(), index))
    return images[torch.from_numpy(np.ascontiguousarray(index, dtype=np.int64))]


def picked_pixels(images: Pixels, index: Indices, name: str = "") -> Pixels:
    """The same of an array. With a name of the array's content the copy is kept in the cache, or found there."""
    if not is_large(len(index), images.shape[1:]):
        return images[index]
    first, last = int(index[0]), int(index[0]) + len(index)
    if np.array_equal(index, np.arange(first, last)):
        return images[first:last]
    shape = (len(index), *images.shape[1:])
    size = int(np.prod(shape))

    def rows() -> Iterator[Pixels]:
        return (images[index[start : start + AT_ONCE]] for start in range(0, len(index), AT_ONCE))

    if name and size < cache_limit():
        path = cache_folder() / "decoded" / f"{digest_of([name, hashlib.sha256(index.tobytes()).hexdigest()])}{PIXELS}"
        if (found := kept(path, shape)) is not None:
            return found[0]
        with suppress(OSError):  # a cache that cannot be written is no reason to stop
            keep(path, rows())
            trim()
            return mapped(path, shape)
    with scratch() as file:
        written(rows(), file)
        return mapped(file, shape)
