"""Synthetic images as pictures for the report."""

from __future__ import annotations

import base64
import io
from collections.abc import Sequence

import torch
from PIL import Image

from osfl.models.inputs import to_images
from osfl.protocol import Json


def gallery(inputs: torch.Tensor, captions: Sequence[str], note: str = "", scale: int = 3) -> Json:
    """Network inputs (n, channels, height, width) in [-1, 1] as a gallery figure."""
    pixels = to_images(inputs.detach().cpu())
    images = [{"png": _png(pixels[i], scale), "caption": caption} for i, caption in enumerate(captions)]
    return {"kind": "gallery", "images": images, "note": note}


def by_class(inputs: torch.Tensor, labels: torch.Tensor, classes: Sequence[str], each: int = 3, note: str = "") -> Json:
    """The first few images of each class that has any."""
    chosen = [int(i) for c in range(len(classes)) for i in torch.nonzero(labels == c).flatten()[:each]]
    return gallery(inputs[chosen], [classes[int(labels[i])] for i in chosen], note)


def _png(pixels: torch.Tensor, scale: int) -> str:
    """A uint8 image (channels, height, width), enlarged without smoothing, as base64."""
    array = pixels.permute(1, 2, 0).numpy()
    picture = Image.fromarray(array[..., 0] if array.shape[-1] == 1 else array)
    picture = picture.resize((picture.width * scale, picture.height * scale), Image.Resampling.NEAREST)
    buffer = io.BytesIO()
    picture.save(buffer, "PNG", optimize=True)
    return base64.b64encode(buffer.getvalue()).decode()
