"""Synthetic images as pictures for the report."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from osfl.core.types import Json
from osfl.models.inputs import to_images
from osfl.models.pictures import png


def gallery(inputs: torch.Tensor, captions: Sequence[str], note: str = "", scale: int = 3) -> Json:
    """Network inputs (n, channels, height, width) in [-1, 1] as a gallery figure."""
    pixels = to_images(inputs.detach().cpu())
    images = [{"png": png(pixels[i], scale), "caption": caption} for i, caption in enumerate(captions)]
    return {"kind": "gallery", "images": images, "note": note}


def by_class(inputs: torch.Tensor, labels: torch.Tensor, classes: Sequence[str], each: int = 3, note: str = "") -> Json:
    """The first few images of each class that has any."""
    chosen = [int(i) for c in range(len(classes)) for i in torch.nonzero(labels == c).flatten()[:each]]
    return gallery(inputs[chosen], [classes[int(labels[i])] for i in chosen], note)
