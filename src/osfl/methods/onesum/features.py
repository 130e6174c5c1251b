"""OneSum's feature map without weights: fixed random convolutions drawn from the plan's seed, on a fixed grid of numbers.

h = (W * x) / sqrt(var_patch(x) + 0.1^2); the features are averages of relu(h - 1/2) and relu(-h - 1/2) over 3 x 3 cells, and a
7 x 7 thumbnail of x. Everything is computed in float64 and then rounded (`on_grid`), so that sums of features and of their
products are sums of whole numbers: exact in float64, in any order and however the images are divided among sites.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import lru_cache

import torch
from torch import nn
from torch.nn import functional

from osfl.core.types import ADDED, Json
from osfl.ingredients.statistics.public_map import LEVELS, color_basis, cosine_basis

SIDE = 5  # of a filter
CELLS = 3  # each map is averaged over 3 x 3 cells
_CONTRAST = 0.1  # deviation of a patch below which contrast is not stretched any further
_THRESHOLD = 0.5  # of both rectified maps
_TOGETHER = 8  # images at a time: their maps stay in the processor's cache, which is six times as fast as 256 at a time
_FILTER_LEVELS = 2.0**20
_CHROMA = 2.0  # how much more filters weigh color than brightness


@dataclass(frozen=True)
class RandomMap:
    """How images become features where no encoder is used; mixed into Settings."""

    filters: int = 64  # F, random filters of 5 x 5 pixels at each scale
    mean_color: float = field(default=1.0, metadata=ADDED)  # share of filters that see a patch's mean color; photographs: 0
    scales: int = 1  # image sides that filters look at: `side`, twice that, and so on
    side: int = 32  # larger images are reduced to this side (the largest scale: side * 2^(scales - 1)); smaller ones stay
    thumbnail: int = 7  # side of the thumbnail among the features; 0: none

    def width_for(self, channels: int) -> int:
        """d, the number of features of an image."""
        return self.scales * 2 * self.filters * CELLS**2 + self.thumbnail**2 * channels

    def sides(self, height: int, width: int) -> list[tuple[int, int]]:
        """The sizes at which filters look at an image, smallest first; no image is enlarged."""
        longest = max(height, width)
        wanted = [min(1.0, self.side * 2**k / longest) for k in range(self.scales)]
        return [(max(SIDE, round(height * share)), max(SIDE, round(width * share))) for share in wanted]

    def described(self, image: tuple[int, int, int]) -> Json:
        """All that the features depend on besides the images and the filters."""
        names = (self.filters, self.scales, self.side, self.thumbnail, SIDE, CELLS, _CONTRAST, _THRESHOLD, _CHROMA)
        return ["osfl random convolutions", 1, list(image), *names]


def draw_filters(count: int, channels: int, rng: torch.Generator, mean_color: float = 1.0) -> torch.Tensor:
    """W (count, channels, 5, 5) in float64: standard normal in DCT and opponent-color coordinates, without the mean brightness
    of the patch, each of unit norm. All but the share `mean_color`, evenly spread, are without its mean color, too."""
    coefficients = torch.randn(count, channels, SIDE, SIDE, generator=rng, dtype=torch.float64)
    coefficients[:, 1:] *= _CHROMA
    coefficients[:, 0, 0, 0] = 0
    steps = (torch.arange(count + 1, dtype=torch.float64) * mean_color).floor()
    coefficients[steps.diff() == 0, :, 0, 0] = 0
    coefficients /= coefficients.flatten(1).norm(dim=1)[:, None, None, None]
    dct, colors = cosine_basis(SIDE), color_basis(channels)
    filters = torch.einsum("fkuv,kc,uy,vx->fcyx", coefficients, colors, dct, dct)
    return (filters * _FILTER_LEVELS).round() / _FILTER_LEVELS  # the last bits of a logarithm differ between processors


class RandomConvolutions(nn.Module):
    """Images in [-1, 1], (n, channels, height, width) -> features (n, d) in float64, on the grid."""

    def __init__(self, filters: torch.Tensor, settings: RandomMap, bound: float) -> None:
        super().__init__()
        self.settings, self.bound = settings, bound
        self.register_buffer("filters", filters.double())  # (scales * F, channels, 5, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        # a program that is traced (`osfl export`) has no loop over parts
        if x.is_meta or torch.compiler.is_compiling() or len(x) <= _TOGETHER:
            return self._features(x)
        return torch.cat([self._features(part) for part in torch.split(x, _TOGETHER)])

    def _features(self, x: torch.Tensor) -> torch.Tensor:
        scales = torch.split(self.get_buffer("filters"), self.settings.filters)
        found = []
        for filters, size in zip(scales, self.settings.sides(*x.shape[-2:]), strict=True):
            found += self._maps(_reduced(x, size).double(), filters)
        if self.settings.thumbnail:
            found.append(functional.adaptive_avg_pool2d(x.double(), self.settings.thumbnail))
        return on_grid(torch.cat([part.flatten(1) for part in found], 1), self.bound)

    def _maps(self, x: torch.Tensor, filters: torch.Tensor) -> list[torch.Tensor]:
        """Both rectified maps of every filter, averaged over the cells: two of (n, F, 9).

        With u = W * x and the contrast c, relu(u / c - t) = max(u, t c) / c - t: the division is part of the mean over a cell,
        a product of matrices, with the nine cells as rows: as columns it takes half as long again. Whole maps are read and
        written three times, which takes less time than the convolution.
        """
        rows, columns = (patch_means(side).to(x.device) for side in x.shape[-2:])
        mean, squares = (rows @ part @ columns.T for part in (x.mean(1), x.square().mean(1)))
        contrast = ((squares - mean.square()).clamp_min(0) + _CONTRAST**2).sqrt()[:, None]  # (n, 1, height, width)
        u = functional.conv2d(x.contiguous(), filters)
        cells = cell_means(*contrast.shape[-2:]).to(x.device) / contrast.flatten(2)  # (n, 9, positions)
        least = _THRESHOLD * contrast
        above, below = (cells @ part.flatten(2).mT for part in (torch.maximum(u, least), torch.minimum(u, -least)))
        return [above.mT - _THRESHOLD, -below.mT - _THRESHOLD]


@lru_cache(maxsize=64)
def patch_means(side: int) -> torch.Tensor:
    """The matrix (side - 4, side) that takes the mean of each five neighbors."""
    return torch.eye(side, dtype=torch.float64).unfold(1, SIDE, 1).mean(-1).T


@lru_cache(maxsize=64)
def cell_means(height: int, width: int) -> torch.Tensor:
    """The matrix (9, height * width) that takes the mean over each of 3 x 3 cells, as adaptive pooling does."""
    rows, columns = (
        functional.adaptive_avg_pool1d(torch.eye(side, dtype=torch.float64)[:, None], CELLS)[:, 0] for side in (height, width)
    )
    return torch.einsum("ha,wb->abhw", rows, columns).reshape(CELLS**2, height * width)


def _reduced(x: torch.Tensor, size: tuple[int, int]) -> torch.Tensor:
    if tuple(x.shape[-2:]) == size:
        return x
    return functional.interpolate(x, size, mode="bilinear", align_corners=False, antialias=x.device.type != "meta")


def on_grid(features: torch.Tensor, bound: float) -> torch.Tensor:
    """Features rounded to multiples of bound / 2^15 and clipped to [-bound, bound], in float64."""
    step = bound / LEVELS
    return (features.double() / step).round_().clamp_(-LEVELS, LEVELS).mul_(step)


class OnGrid(nn.Module):
    """Features as they were summed."""

    def __init__(self, bound: float) -> None:
        super().__init__()
        self.bound = bound

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return on_grid(x, self.bound)


class Mirrored(nn.Module):
    """The mean features of an image and of what the symmetry makes of it."""

    def __init__(self, features: nn.Module, symmetry: str) -> None:
        super().__init__()
        self.features, self.symmetry = features, symmetry

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found = [self.features(copy) for copy in mirrored(x, self.symmetry)]
        return torch.stack(found).mean(0) if len(found) > 1 else found[0]


def mirrored(images: torch.Tensor, symmetry: str) -> Iterator[torch.Tensor]:
    """The images, and what a symmetry makes of them: mirrored left to right, or also turned by quarters."""
    for turned in [images.rot90(k, (-2, -1)) for k in range(4)] if symmetry == "square" else [images]:
        yield turned
        if symmetry != "none":
            yield turned.flip(-1)
