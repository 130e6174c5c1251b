"""Inception-v3 as the Fréchet inception distance is computed with: features of images in [-1, 1] at 299 px, 2,048 numbers.

The layers and their names are those of the PyTorch ports of the 2015 network. Two details are that network's and not
torchvision's: averages leave the padding out, and the last block takes the maximum where the others average.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TypeAlias

import torch
from torch import nn
from torch.nn import functional as F

SIDE = 299
FEATURES = 2048
UNUSED = ("fc.", "AuxLogits.")  # what the files hold beside the features
Pool: TypeAlias = Callable[[torch.Tensor], torch.Tensor]

_average: Pool = partial(F.avg_pool2d, kernel_size=3, stride=1, padding=1, count_include_pad=False)
_largest: Pool = partial(F.max_pool2d, kernel_size=3, stride=1, padding=1)
_halve: Pool = partial(F.max_pool2d, kernel_size=3, stride=2)


class _Conv(nn.Module):
    def __init__(self, into: int, out: int, kernel: int | tuple[int, int] = 1, stride: int = 1, pad: bool = True) -> None:
        super().__init__()
        sides = (kernel, kernel) if isinstance(kernel, int) else kernel
        padding = (sides[0] // 2, sides[1] // 2) if pad else 0
        self.conv = nn.Conv2d(into, out, sides, stride, padding, bias=False)
        self.bn = nn.BatchNorm2d(out, eps=0.001)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.relu(self.bn(self.conv(x)), inplace=True)


class _Block(nn.Module):
    """Branches side by side: each a chain of layers by name; a chain may start with a pool and end in two halves."""

    def __init__(self, chains: dict[str, list[_Conv]], pool: Pool = _average, keeps: bool = False) -> None:
        super().__init__()
        self.pool, self.keeps = pool, keeps  # `keeps`: the pooled input itself is the last branch
        self.chains: list[tuple[str, list[str]]] = []
        for chain, layers in chains.items():
            names = _names(chain, layers)
            self.chains.append((chain, names))
            for name, layer in zip(names, layers, strict=True):
                self.add_module(name, layer)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found = [self._follow(chain, names, x) for chain, names in self.chains]
        return torch.cat([*found, self.pool(x)] if self.keeps else found, 1)

    def _follow(self, chain: str, names: list[str], x: torch.Tensor) -> torch.Tensor:
        x = self.pool(x) if chain == "branch_pool" else x
        halves = [name for name in names if name.endswith(("a", "b"))]
        for name in names[: len(names) - len(halves)]:
            x = self.get_submodule(name)(x)
        return torch.cat([self.get_submodule(name)(x) for name in halves], 1) if halves else x


def _names(chain: str, layers: list[_Conv]) -> list[str]:
    """`branch_1`, `branch_2`; two halves of one step are `2a` and `2b`; a single layer has no number."""
    if len(layers) == 1:
        return [chain]
    halves = layers[-1].conv.kernel_size in ((3, 1), (1, 3))
    plain = len(layers) - 2 * halves
    return [*(f"{chain}_{i + 1}" for i in range(plain)), *(f"{chain}_{plain + 1}{half}" for half in "ab" if halves)]


def _fives(into: int, pooled: int) -> _Block:
    return _Block(
        {
            "branch1x1": [_Conv(into, 64)],
            "branch5x5": [_Conv(into, 48), _Conv(48, 64, 5)],
            "branch3x3dbl": [_Conv(into, 64), _Conv(64, 96, 3), _Conv(96, 96, 3)],
            "branch_pool": [_Conv(into, pooled)],
        }
    )


def _sevens(inner: int) -> _Block:
    flat, tall = (1, 7), (7, 1)
    return _Block(
        {
            "branch1x1": [_Conv(768, 192)],
            "branch7x7": [_Conv(768, inner), _Conv(inner, inner, flat), _Conv(inner, 192, tall)],
            "branch7x7dbl": [
                _Conv(768, inner),
                _Conv(inner, inner, tall),
                _Conv(inner, inner, flat),
                _Conv(inner, inner, tall),
                _Conv(inner, 192, flat),
            ],
            "branch_pool": [_Conv(768, 192)],
        }
    )


def _halves(into: int, pool: Pool) -> _Block:
    flat, tall = (1, 3), (3, 1)
    return _Block(
        {
            "branch1x1": [_Conv(into, 320)],
            "branch3x3": [_Conv(into, 384), _Conv(384, 384, flat), _Conv(384, 384, tall)],
            "branch3x3dbl": [_Conv(into, 448), _Conv(448, 384, 3), _Conv(384, 384, flat), _Conv(384, 384, tall)],
            "branch_pool": [_Conv(into, 192)],
        },
        pool,
    )


class Inception(nn.Module):
    """Up to the last average: what is compared."""

    def __init__(self) -> None:
        super().__init__()
        self.Conv2d_1a_3x3 = _Conv(3, 32, 3, 2, pad=False)
        self.Conv2d_2a_3x3 = _Conv(32, 32, 3, pad=False)
        self.Conv2d_2b_3x3 = _Conv(32, 64, 3)
        self.Conv2d_3b_1x1 = _Conv(64, 80)
        self.Conv2d_4a_3x3 = _Conv(80, 192, 3, pad=False)
        self.Mixed_5b, self.Mixed_5c, self.Mixed_5d = _fives(192, 32), _fives(256, 64), _fives(288, 64)
        self.Mixed_6a = _Block(
            {
                "branch3x3": [_Conv(288, 384, 3, 2, pad=False)],
                "branch3x3dbl": [_Conv(288, 64), _Conv(64, 96, 3), _Conv(96, 96, 3, 2, pad=False)],
            },
            _halve,
            keeps=True,
        )
        self.Mixed_6b, self.Mixed_6c, self.Mixed_6d, self.Mixed_6e = map(_sevens, (128, 160, 160, 192))
        self.Mixed_7a = _Block(
            {
                "branch3x3": [_Conv(768, 192), _Conv(192, 320, 3, 2, pad=False)],
                "branch7x7x3": [
                    _Conv(768, 192),
                    _Conv(192, 192, (1, 7)),
                    _Conv(192, 192, (7, 1)),
                    _Conv(192, 192, 3, 2, pad=False),
                ],
            },
            _halve,
            keeps=True,
        )
        self.Mixed_7b, self.Mixed_7c = _halves(1280, _average), _halves(2048, _largest)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = _halve(self.Conv2d_2b_3x3(self.Conv2d_2a_3x3(self.Conv2d_1a_3x3(x))))
        x = _halve(self.Conv2d_4a_3x3(self.Conv2d_3b_1x1(x)))
        x = self.Mixed_5d(self.Mixed_5c(self.Mixed_5b(x)))
        x = self.Mixed_6e(self.Mixed_6d(self.Mixed_6c(self.Mixed_6b(self.Mixed_6a(x)))))
        x = self.Mixed_7c(self.Mixed_7b(self.Mixed_7a(x)))
        return x.mean((2, 3))
