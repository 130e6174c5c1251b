"""Whether a network answers with numbers that can be used. Finite weights do not promise it: a scaled layer is enough."""

from __future__ import annotations

import torch
from torch import nn

from osfl.core.seeds import torch_generator

SANE = 1e6  # no answer of a network that has learned something is so large


def sane(logits: torch.Tensor) -> bool:
    """What is no number is not below any."""
    return bool((logits.abs() < SANE).all())


def loudest(model: nn.Module, image: tuple[int, int, int]) -> float:
    """The largest number with which a network in evaluation mode answers two images of noise."""
    return largest(on_noise(model, image))


@torch.no_grad()
def on_noise(model: nn.Module, image: tuple[int, int, int]) -> torch.Tensor:
    """What a network in evaluation mode answers to two images of noise, always the same ones: (2, classes)."""
    noise = torch.rand((2, *image), generator=torch_generator(0, "noise")) * 2 - 1
    device = next((parameter.device for parameter in model.parameters()), noise.device)
    answered: torch.Tensor = model(noise.to(device)).cpu()
    return answered


def largest(logits: torch.Tensor) -> float:
    """What is no number counts as infinite."""
    return float(logits.abs().nan_to_num(nan=float("inf")).max())


@torch.no_grad()
def indifferent(model: nn.Module, image: tuple[int, int, int], noise: torch.Tensor) -> bool:
    """Whether a network answers everything alike: two images of noise (`noise` are its outputs), and a black and a white one,
    which are asked for only where noise makes no difference."""
    if not _alike(noise):
        return False
    plain = torch.stack([torch.full(image, -1.0), torch.full(image, 1.0)])
    return _alike(torch.cat([noise, model(plain)]))


def _alike(logits: torch.Tensor) -> bool:
    """Up to rounding: (images, classes)."""
    return bool((logits - logits[:1]).abs().max() <= 1e-5 * logits.abs().max())
