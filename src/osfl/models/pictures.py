"""A uint8 image as text that a page can hold."""

from __future__ import annotations

import base64
import io

import torch
from PIL import Image


def png(pixels: torch.Tensor, scale: int = 1) -> str:
    """A uint8 image (channels, height, width), enlarged without smoothing, as a PNG in base64."""
    array = pixels.permute(1, 2, 0).numpy()
    picture = Image.fromarray(array[..., 0] if array.shape[-1] == 1 else array)
    picture = picture.resize((picture.width * scale, picture.height * scale), Image.Resampling.NEAREST)
    buffer = io.BytesIO()
    picture.save(buffer, "PNG", optimize=True)
    return base64.b64encode(buffer.getvalue()).decode()
