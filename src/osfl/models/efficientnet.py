"""EfficientNet-Lite0: inverted residuals with ReLU6, no squeeze-excite; named as in the pretrained file.

TensorFlow pads "same" at run time and, with stride 2, more on the far side; torch's symmetric padding would shift every
map by a pixel, so the convolutions pad by themselves.
"""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import nn
from torch.nn import functional as F

from osfl.runtime.precision import mixed

FEATURES = 1280
# repeats, kernel, stride of the first, expansion, channels out
_STAGES = (
    (1, 3, 1, 1, 16),
    (2, 3, 2, 6, 24),
    (2, 5, 2, 6, 40),
    (3, 3, 2, 6, 80),
    (3, 5, 1, 6, 112),
    (4, 5, 2, 6, 192),
    (1, 3, 1, 6, 320),
)


def _norm(channels: int) -> nn.Module:
    return nn.BatchNorm2d(channels, eps=1e-3, momentum=0.01)  # TensorFlow's epsilon, and its momentum 0.99


class SameConv(nn.Conv2d):
    """A square convolution whose output has ceil(size / stride) pixels a side, for any size."""

    def __init__(self, channels: int, out: int, kernel: int, stride: int = 1, groups: int = 1) -> None:
        # with stride 1 torch's own padding is the same and costs no copy of the input
        padding = kernel // 2 if stride == 1 else 0
        super().__init__(channels, out, kernel, stride, padding, groups=groups, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.stride[0] > 1:
            top, bottom = self._pad(x.shape[2])
            left, right = self._pad(x.shape[3])
            x = F.pad(x, (left, right, top, bottom))
        return super().forward(x)

    def _pad(self, size: int) -> tuple[int, int]:
        stride, kernel = self.stride[0], self.kernel_size[0]
        total = max((-(-size // stride) - 1) * stride + kernel - size, 0)
        return total // 2, total - total // 2


class Inverted(nn.Module):
    """Widen, filter each channel, narrow; added to the input where the shapes agree."""

    folds: ClassVar = (("_expand_conv", "_bn0"), ("_depthwise_conv", "_bn1"), ("_project_conv", "_bn2"))

    def __init__(self, channels: int, out: int, kernel: int, stride: int, expansion: int) -> None:
        super().__init__()
        wide = channels * expansion
        self.expands, self.adds = expansion > 1, stride == 1 and channels == out
        if self.expands:
            self._expand_conv = SameConv(channels, wide, 1)
            self._bn0 = _norm(wide)
        self._depthwise_conv = SameConv(wide, wide, kernel, stride, groups=wide)
        self._bn1 = _norm(wide)
        self._project_conv = SameConv(wide, out, 1)
        self._bn2 = _norm(out)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = F.relu6(self._bn0(self._expand_conv(x)), inplace=True) if self.expands else x
        y = F.relu6(self._bn1(self._depthwise_conv(y)), inplace=True)
        y = self._bn2(self._project_conv(y))
        out: torch.Tensor = y + x if self.adds else y
        return out


class EfficientNetLite(nn.Module):
    """Sixteen inverted residuals between a strided stem and a 1x1 head; 1,280 features after global average."""

    folds: ClassVar = (("_conv_stem", "_bn0"), ("_conv_head", "_bn1"))

    def __init__(self, image: tuple[int, int, int], classes: int) -> None:
        super().__init__()
        self._conv_stem = SameConv(image[0], 32, 3, 2)
        self._bn0 = _norm(32)
        channels, blocks = 32, []
        for repeats, kernel, stride, expansion, out in _STAGES:
            for index in range(repeats):
                blocks.append(Inverted(channels, out, kernel, stride if index == 0 else 1, expansion))
                channels = out
        self._blocks = nn.Sequential(*blocks)
        self._conv_head = SameConv(channels, FEATURES, 1)
        self._bn1 = _norm(FEATURES)
        self._fc = nn.Linear(FEATURES, classes)

    def blocks(self, x: torch.Tensor) -> torch.Tensor:
        """The last block's output at each place: (batch, 320, height / 32, width / 32)."""
        y: torch.Tensor = self._blocks(F.relu6(self._bn0(self._conv_stem(x)), inplace=True))
        return y

    @mixed
    def features(self, x: torch.Tensor) -> torch.Tensor:  # (batch, channels, height, width) -> (batch, 1280)
        return F.relu6(self._bn1(self._conv_head(self.blocks(x))), inplace=True).mean((2, 3))

    @mixed
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self._fc(self.features(x))
        return logits
