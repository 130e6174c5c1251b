"""Whether a network answers with numbers that can be used. Finite weights do not promise it: a scaled layer is enough."""

from __future__ import annotations

import torch
from torch import nn

from osfl.seeds import torch_generator

SANE = 1e6  # no answer of a network that has learned something is so large


def sane(logits: torch.Tensor) -> bool:
    """What is no number is not below any."""
    return bool((logits.abs() < SANE).all())


@torch.no_grad()
def loudest(model: nn.Module, image: tuple[int, int, int]) -> float:
    """The largest number with which a network in evaluation mode answers two images of noise, always the same ones."""
    noise = torch.rand((2, *image), generator=torch_generator(0, "noise")) * 2 - 1
    return float(model(noise).abs().nan_to_num(nan=float("inf")).max())
