"""From features back to images: the network of a reconstruction attack."""

from __future__ import annotations

import math
from itertools import pairwise

import torch
from torch import nn
from torch.nn import functional

from osfl.models.generators import UpConv
from osfl.models.initial import initialize

START = 4  # side of the first feature map
_GROUPS = 8  # of channels that are normalized together


class TokenDecoder(nn.Module):
    """Features (batch, inputs) and their classes -> what an image (batch, channels, side, side) differs by from the mean of
    its class; side = 4, 8, 16, ...

    A linear layer to 4 x 4, then doublings with a normalized 3x3 convolution each, halving the channels. It begins with zero:
    an attacker that has learned nothing yet outputs the mean image, and nothing saturates.
    """

    def __init__(self, inputs: int, classes: int, channels: int, side: int, width: int) -> None:
        super().__init__()
        self.classes, self.width = classes, width
        doublings = int(math.log2(side // START))
        widths = [max(16, width >> step) for step in range(doublings + 1)]
        self.start = nn.Linear(inputs + classes, widths[0] * START * START)
        self.grow = nn.ModuleList(UpConv(a, b) for a, b in pairwise(widths))
        self.end = nn.Conv2d(widths[-1], channels, 3, padding=1)

    def forward(self, features: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        known = torch.cat([features, functional.one_hot(labels, self.classes).to(features)], 1)
        x = functional.leaky_relu(self.start(known), 0.2).view(len(known), self.width, START, START)
        for doubled in self.grow:
            x = functional.leaky_relu(functional.group_norm(doubled(x), _GROUPS), 0.2)
        difference: torch.Tensor = self.end(x)
        return difference


def build_decoder(inputs: int, classes: int, channels: int, side: int, rng: torch.Generator, width: int = 128) -> TokenDecoder:
    """With first weights drawn from `rng` only."""
    with torch.device("meta"):  # no draws from the global generator by torch's own defaults
        model = TokenDecoder(inputs, classes, channels, side, width)
    model._apply(lambda t: torch.empty(t.shape, dtype=t.dtype))  # type: ignore[no-untyped-call]
    initialize(model, rng)
    nn.init.zeros_(model.end.weight)
    return model
