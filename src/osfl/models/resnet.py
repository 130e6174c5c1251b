"""ResNet-18 and ResNet-50 of any width, with a stem that keeps small images large."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import nn
from torch.nn import functional as F

from osfl.runtime.precision import mixed

SMALL_IMAGE = 64  # up to here the stem does not shrink the image, as is usual for CIFAR


class Shortcut(nn.Module):
    """A 1x1 convolution that brings the input of a block to the shape of its output."""

    folds: ClassVar = (("conv", "bn"),)

    def __init__(self, channels: int, out: int, stride: int) -> None:
        super().__init__()
        self.stride = stride
        self.conv = nn.Conv2d(channels, out, 1, bias=False)
        self.bn: nn.Module = nn.BatchNorm2d(out)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        # The same as a stride of the convolution. That one's backward pass overwrites memory that is not its own for
        # fewer than 8 channels in channels_last (oneDNN 3.12), and the process dies.
        if self.stride > 1:
            x = F.avg_pool2d(x, 1, self.stride)  # slices would need a copy, which has no gradients of single images
        y: torch.Tensor = self.bn(self.conv(x))
        return y


def _shortcut(channels: int, out: int, stride: int) -> nn.Module:
    return nn.Identity() if stride == 1 and channels == out else Shortcut(channels, out, stride)


class BasicBlock(nn.Module):
    """Two 3x3 convolutions (ResNet-18)."""

    expansion: ClassVar = 1
    folds: ClassVar = (("conv1", "bn1"), ("conv2", "bn2"))
    reads: ClassVar = (("conv1", "bn1", "conv2"),)  # see slimming.py

    def __init__(self, channels: int, width: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, width, 3, stride, padding=1, bias=False)
        self.bn1: nn.Module = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.bn2: nn.Module = nn.BatchNorm2d(width)
        self.shortcut = _shortcut(channels, width, stride)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = F.relu_(self.bn1(self.conv1(x)))
        return F.relu_(self.bn2(self.conv2(y)).add_(self.shortcut(x)))


class Bottleneck(nn.Module):
    """1x1, 3x3, 1x1 with four times the channels at the ends (ResNet-50; stride in the middle)."""

    expansion: ClassVar = 4
    folds: ClassVar = (("conv1", "bn1"), ("conv2", "bn2"), ("conv3", "bn3"))
    reads: ClassVar = (("conv1", "bn1", "conv2"), ("conv2", "bn2", "conv3"))

    def __init__(self, channels: int, width: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, width, 1, bias=False)
        self.bn1: nn.Module = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, stride, padding=1, bias=False)
        self.bn2: nn.Module = nn.BatchNorm2d(width)
        self.conv3 = nn.Conv2d(width, 4 * width, 1, bias=False)
        self.bn3: nn.Module = nn.BatchNorm2d(4 * width)
        self.shortcut = _shortcut(channels, 4 * width, stride)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = F.relu_(self.bn1(self.conv1(x)))
        y = F.relu_(self.bn2(self.conv2(y)))
        return F.relu_(self.bn3(self.conv3(y)).add_(self.shortcut(x)))


class ResNet(nn.Module):
    """Four stages of residual blocks, global average, linear head."""

    folds: ClassVar = (("conv1", "bn1"),)

    def __init__(
        self,
        image: tuple[int, int, int],
        classes: int,
        layers: Sequence[int],
        width: int = 64,
        bottleneck: bool = False,
    ) -> None:
        super().__init__()
        block: type[BasicBlock] | type[Bottleneck] = Bottleneck if bottleneck else BasicBlock
        self.small = max(image[1:]) <= SMALL_IMAGE
        kernel, stride = (3, 1) if self.small else (7, 2)
        self.conv1 = nn.Conv2d(image[0], width, kernel, stride, padding=kernel // 2, bias=False)
        self.bn1: nn.Module = nn.BatchNorm2d(width)
        channels, stages = width, []
        for index, count in enumerate(layers):
            out = width * 2**index
            strides = [1 if index == 0 else 2] + [1] * (count - 1)
            inputs = [channels] + [out * block.expansion] * (count - 1)
            stages.append(nn.Sequential(*(block(c, out, s) for c, s in zip(inputs, strides, strict=True))))
            channels = out * block.expansion
        self.layer1, self.layer2, self.layer3, self.layer4 = stages
        self.fc = nn.Linear(channels, classes)

    @mixed
    def features(self, x: torch.Tensor) -> torch.Tensor:  # (batch, channels, height, width) -> (batch, features)
        x = F.relu_(self.bn1(self.conv1(x)))
        if not self.small:
            x = F.max_pool2d(x, 3, 2, padding=1)
        x = self.layer4(self.layer3(self.layer2(self.layer1(x))))
        return x.mean((2, 3))

    @mixed
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.fc(self.features(x))
        return logits
