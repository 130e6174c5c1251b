"""The one convention for what enters a model: float images in [-1, 1], NCHW, channels_last."""

from __future__ import annotations

import torch


def to_input(images: torch.Tensor, device: torch.device | str = "cpu") -> torch.Tensor:
    """uint8 images as model input: x / 127.5 - 1. Float images are taken to be in [-1, 1] already."""
    images = images.to(device)
    if images.dtype != torch.uint8:
        return images.to(torch.float32, memory_format=torch.channels_last)
    # in place, because the passes over memory are all that this costs
    return images.to(torch.float32, memory_format=torch.channels_last).div_(127.5).sub_(1.0)


def to_images(x: torch.Tensor) -> torch.Tensor:
    """Model input back as uint8 images, values outside [-1, 1] clipped."""
    return x.detach().add(1.0).mul_(127.5).round_().clamp_(0, 255).to(torch.uint8).contiguous()
