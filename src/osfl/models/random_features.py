"""Fixed random convolutions that describe an image without any published weights."""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import nn
from torch.nn import functional as F

from osfl.core.seeds import torch_generator

_CHANNELS = (3, 32, 64, 128)
_GRID = 2  # each layer is averaged over the cells of a 2x2 grid, so that place counts a little


class RandomFeatures(nn.Module):
    """Three 3x3 convolutions with ReLU, never trained and always the same; features from all three.

    Distances between such features follow texture, color and rough layout. They do not know what a picture shows, which
    is why every figure made with them names them.
    """

    def __init__(self, grid: int = _GRID) -> None:
        super().__init__()
        self.grid = grid
        rng = torch_generator(0, "random features")
        for index, (channels, out) in enumerate(pairwise(_CHANNELS)):
            scale = (2 / (9 * channels)) ** 0.5  # keeps the size of activations through ReLU
            self.register_buffer(f"weight{index}", torch.randn(out, channels, 3, 3, generator=rng) * scale)

    def features(self, x: torch.Tensor) -> torch.Tensor:  # (batch, 3, height, width) -> (batch, 896)
        found = []
        for index in range(len(_CHANNELS) - 1):
            x = F.relu(F.conv2d(x, self.get_buffer(f"weight{index}"), padding=1))
            found.append(F.adaptive_avg_pool2d(x, self.grid).flatten(1))
            x = F.avg_pool2d(x, 2)
        return torch.cat(found, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.features(x)
