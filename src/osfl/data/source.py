"""What an opened dataset is: parts of images (many images are in mapped files), whom they show, what was wrong with the files.

torch is imported where tensors are made, so that checking a command line stays quick.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from osfl.core.types import Dataset, Kind, canonical

if TYPE_CHECKING:
    from osfl.data.catalog import Sheet

Names = npt.NDArray[np.str_]
Indices = npt.NDArray[np.int64]
Pixels = npt.NDArray[np.uint8]


@dataclass(frozen=True)
class Problem:
    """One thing that was wrong with a file (or with the whole dataset), and what was done about it."""

    path: str  # as the user would find it: relative to the folder, the archive or the CSV
    what: str  # the same words for the same cause, so that findings can be counted
    done: str
    detail: str = ""  # what differs from file to file, such as the decoder's message


@dataclass(frozen=True)
class Part:
    """Images that are used for one purpose, in a fixed order."""

    dataset: Dataset
    domains: Names | None = None  # (n,) where each image was taken or drawn: a site, a style
    groups: Names | None = None  # (n,) whom it shows: images of one patient must not be split up
    names: Names | None = None  # (n,) of the files; for messages only

    def __len__(self) -> int:
        return len(self.dataset)

    @property
    def labels(self) -> Indices:
        """(n,), or multi-label (n, classes)."""
        labels: Indices = self.dataset.labels.numpy()
        return labels

    @property
    def strata(self) -> Indices:
        """(n,) what splits and partitions spread evenly: the label, or the rarest of an image's labels."""
        from osfl.data.multilabel import rarest

        return self.labels if self.labels.ndim == 1 else rarest(self.labels)

    def subset(self, index: Indices) -> Part:
        from osfl.data.mapped import subset

        kept = subset(self.dataset, index)
        domains = None if self.domains is None else self.domains[index]
        groups = None if self.groups is None else self.groups[index]
        names = None if self.names is None else self.names[index]
        return Part(kept, domains, groups, names)


@dataclass(frozen=True)
class Source:
    """A dataset as opened: its test part is fixed here, before anything is known of clients or seeds."""

    name: str
    classes: tuple[str, ...]
    image: tuple[int, int, int]  # (channels, height, width)
    train: Part
    test: Part
    val: Part | None = None
    digest: str = ""  # of geometry, pixels, labels, domains and groups
    sheet: Sheet | None = None
    problems: tuple[Problem, ...] = ()
    native: int = 0  # median side of the images as they were given, in pixels; 0: not known

    @property
    def kind(self) -> Kind:
        return "multiclass" if self.train.labels.ndim == 1 else "multilabel"


def together(datasets: Iterable[Dataset]) -> Dataset:
    """One dataset of several, in their order."""
    import torch

    found = list(datasets)
    return Dataset(torch.cat([one.images for one in found]), torch.cat([one.labels for one in found]))


def part_of(
    images: Pixels,
    labels: npt.ArrayLike,
    domains: Names | None = None,
    groups: Names | None = None,
    names: Names | None = None,
) -> Part:
    """A part from arrays; images are (n, channels, height, width)."""
    import torch

    tensor = torch.from_numpy(np.require(images, requirements=["C", "W"]))  # copies what is read-only: torch cannot
    target = torch.from_numpy(np.array(labels, dtype=np.int64))
    return Part(Dataset(tensor, target), domains, groups, names)


def content_digest(dataset: Dataset, *, read: bool = False) -> str:
    """sha256 of shape, pixels and labels: equal exactly when the images and labels are. Of many images that are kept it is
    noted (osfl.data.kept); `read`: computed from the pixels all the same."""
    from osfl.data.mapped import Picked

    if isinstance(dataset, Picked) and not read:
        return dataset.digest(lambda: _digest_of_pixels(dataset))
    return _digest_of_pixels(dataset)


def _digest_of_pixels(dataset: Dataset) -> str:
    from osfl.data.mapped import Picked, shape_of

    digest = hashlib.sha256(canonical(list(shape_of(dataset))))
    for block in dataset.blocks() if isinstance(dataset, Picked) else (dataset.images,):
        pixels: Pixels = block.contiguous().numpy()
        digest.update(pixels.reshape(-1).data if len(block) else b"")  # no copy: datasets can be large
    digest.update(dataset.labels.numpy().astype("<i8").tobytes())
    return digest.hexdigest()


def source_digest(classes: Sequence[str], parts: Iterable[Part | None]) -> str:
    """Of everything that can change a result: classes, geometry, content of each part, domains and groups."""
    facts: list[object] = [list(classes)]
    for part in parts:
        if part is None:
            facts.append(None)
            continue
        names = [None if column is None else column.tolist() for column in (part.domains, part.groups)]
        facts.append([content_digest(part.dataset), *names])
    return hashlib.sha256(canonical(facts)).hexdigest()


def finish(
    name: str,
    classes: Sequence[str],
    train: Part,
    val: Part | None,
    test: Part,
    sheet: Sheet | None = None,
    problems: Iterable[Problem] = (),
    native: int = 0,
) -> Source:
    """A source with its digest taken."""
    from osfl.data.mapped import shape_of

    _, channels, height, width = shape_of(train.dataset)
    digest = source_digest(classes, (train, val, test))
    image = (int(channels), int(height), int(width))
    return Source(name, tuple(classes), image, train, test, val, digest, sheet, tuple(problems), native)
