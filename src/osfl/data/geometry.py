"""Arrays of images brought to one size and number of channels. Pillow's resizing is integer arithmetic: same bytes
on every machine."""

from __future__ import annotations

import numpy as np
from PIL import Image

from osfl.core.errors import UsageError
from osfl.data.source import Pixels

SMALLEST, LARGEST = 4, 1024


def check_geometry(size: int | None, channels: int | None) -> None:
    problems = []
    if size is not None and not SMALLEST <= size <= LARGEST:
        problems.append(f"image size {size} is not between {SMALLEST} and {LARGEST} pixels")
    if channels not in (None, 1, 3):
        problems.append(f"{channels} channels are not possible: 1 is gray, 3 is RGB")
    if problems:
        raise UsageError(problems, field="size", fix="Leave them out to use the dataset's own geometry.")


def reshape(images: Pixels, size: int | None, channels: int | None) -> Pixels:
    """(n, h, w) or (n, h, w, c) to (n, channels, size, size); what is None stays as it is."""
    stack = images[..., None] if images.ndim == 3 else images
    n, height, width, native = stack.shape
    channels, target = channels or native, (size or height, size or width)
    if target == (height, width) and channels == native:
        return np.ascontiguousarray(stack.transpose(0, 3, 1, 2))
    out = np.empty((n, channels, *target), dtype=np.uint8)
    for row, pixels in zip(out, stack, strict=True):
        row[:] = _one(pixels, target, channels)
    return out


def _one(pixels: Pixels, target: tuple[int, int], channels: int) -> Pixels:
    """(h, w, c) to (channels, h', w'); gray from color by the usual luma weights."""
    picture = Image.fromarray(pixels[..., 0] if pixels.shape[-1] == 1 else pixels)
    picture = picture.convert("L" if channels == 1 else "RGB")
    height, width = target
    if picture.size != (width, height):
        picture = picture.resize((width, height), Image.Resampling.BILINEAR)  # antialiased when shrinking
    array = np.asarray(picture, dtype=np.uint8)
    return array[None] if channels == 1 else array.transpose(2, 0, 1)
