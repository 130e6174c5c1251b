"""Any torch dataset as the images of a simulation: anything with a length whose items are (image, label)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import torch

from osfl.core.errors import DataError
from osfl.core.types import Dataset
from osfl.data.arrays import TEST_SHARE
from osfl.data.source import Part, Source, finish
from osfl.data.split import hold_out_mask


class Items(Protocol):
    def __len__(self) -> int: ...
    def __getitem__(self, index: int, /) -> Any: ...


def from_torch(train: Items, test: Items | None = None, *, classes: Sequence[str] = (), name: str = "custom") -> Source:
    """Read torch datasets into memory, as uint8; without `test` a fifth of each class is the test part.

    Images: tensors (channels, height, width) or (height, width), floats from 0 to 1 or uint8; PIL images; arrays. Without
    `classes` their names are those of the dataset, or numbers.
    """
    named = [str(one) for one in classes or getattr(train, "classes", ())]
    parts = _halves(Part(_read(train, "train"))) if test is None else [Part(_read(train, "train")), Part(_read(test, "test"))]
    highest = max(int(part.dataset.labels.max()) for part in parts)
    named = named or [str(label) for label in range(highest + 1)]
    if highest >= len(named):
        raise DataError(f"there is a label {highest}, and {len(named)} classes", field="classes", fix="Name every class.")
    if parts[0].dataset.images.shape[1:] != parts[1].dataset.images.shape[1:]:
        shapes = [list(part.dataset.images.shape[1:]) for part in parts]
        raise DataError("training and test images differ in shape", field="dataset", expected=shapes[0], got=shapes[1])
    return finish(name, named, parts[0], None, parts[1])


def _halves(whole: Part) -> list[Part]:
    held = hold_out_mask(whole.strata, TEST_SHARE, 0, "test")
    if not held.any():
        raise DataError("one image cannot be trained on and tested", field="dataset", fix="Give (train, test), or more images.")
    return [whole.subset(np.flatnonzero(~held)), whole.subset(np.flatnonzero(held))]


def _read(items: Items, part: str) -> Dataset:
    if not len(items):
        raise DataError(f"the {part} dataset is empty", field="dataset")
    images, labels = [], []
    for index in range(len(items)):
        image, label = items[index][:2]
        images.append(_pixels(image, f"{part} image {index}"))
        labels.append(int(label))
    shapes = {tuple(image.shape) for image in images}
    if len(shapes) > 1 or min(labels) < 0:
        what = f"{part} images have several shapes: {sorted(shapes)[:3]}" if len(shapes) > 1 else f"a {part} label is negative"
        raise DataError(what, field="dataset", fix="Resize them to one shape in the dataset's transform; labels begin at 0.")
    return Dataset(torch.stack(images), torch.tensor(labels))


def _pixels(image: Any, where: str) -> torch.Tensor:
    tensor = image if isinstance(image, torch.Tensor) else torch.from_numpy(_array(image))
    tensor = tensor[None] if tensor.ndim == 2 else tensor
    if tensor.ndim != 3 or tensor.shape[0] not in (1, 3):
        raise DataError(f"{where} has shape {list(tensor.shape)}", field="dataset", expected="1 or 3 channels, height, width")
    if tensor.dtype == torch.uint8:
        return tensor
    low, high = float(tensor.min()), float(tensor.max())
    if not 0 <= low <= high <= 1:
        raise DataError(
            f"{where} has values from {low:.3g} to {high:.3g}",
            field="dataset",
            expected="floats from 0 to 1, or uint8",
            fix="Leave Normalize out of the transform: networks here scale pixels themselves.",
        )
    return (tensor * 255).round().to(torch.uint8)


def _array(image: Any) -> Any:
    """PIL images and arrays have their channels last."""
    found = np.array(image)
    return found.transpose(2, 0, 1).copy() if found.ndim == 3 and found.shape[2] in (1, 3) else found
