"""A small convolutional network: the fastest model here, for images from 8 px."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import nn
from torch.nn import functional as F

from osfl.runtime.precision import mixed

_LARGEST_GRID = 4  # beyond 4x4 the map is averaged down, or the head would outweigh the convolutions


def halve(x: torch.Tensor) -> torch.Tensor:
    """The largest of each 2x2 square. Without gradients by plain comparisons: the same bits, twice as fast on CPUs."""
    if x.requires_grad:
        return F.max_pool2d(x, 2)
    height, width = x.shape[2] // 2 * 2, x.shape[3] // 2 * 2
    rows = torch.maximum(x[:, :, :height:2], x[:, :, 1:height:2])
    return torch.maximum(rows[..., :width:2], rows[..., 1:width:2])


class Stage(nn.Module):
    """Convolution, batch norm, halving, ReLU."""

    folds: ClassVar = (("conv", "bn"),)  # see folding.py

    def __init__(self, channels: int, width: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(channels, width, 3, padding=1, bias=False)
        self.bn: nn.Module = nn.BatchNorm2d(width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        # max and ReLU commute exactly, values and gradients alike; ReLU after pooling has a quarter of the work
        return F.relu_(halve(self.bn(self.conv(x))))


class Cnn(nn.Module):
    """Three stages of width w, 2w, 4w and a linear head on the flattened map."""

    reads: ClassVar = (  # see slimming.py
        ("stages.0.conv", "stages.0.bn", "stages.1.conv"),
        ("stages.1.conv", "stages.1.bn", "stages.2.conv"),
        ("stages.2.conv", "stages.2.bn", "head"),
    )

    def __init__(self, image: tuple[int, int, int], classes: int, width: int = 32) -> None:
        super().__init__()
        channels, height, breadth = image
        self.stages = nn.Sequential(Stage(channels, width), Stage(width, 2 * width), Stage(2 * width, 4 * width))
        self.grid = (min(height // 8, _LARGEST_GRID), min(breadth // 8, _LARGEST_GRID))
        self.head = nn.Linear(4 * width * self.grid[0] * self.grid[1], classes)

    @mixed
    def features(self, x: torch.Tensor) -> torch.Tensor:  # (batch, channels, height, width) -> (batch, features)
        x = self.stages(x)
        if x.shape[-2:] != self.grid:
            x = F.adaptive_avg_pool2d(x, self.grid)
        return x.flatten(1)

    @mixed
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.head(self.features(x))
        return logits
