"""How alike two images are: peak signal-to-noise ratio and structural similarity, for batches of images in [0, 1]."""

from __future__ import annotations

import torch
from torch.nn import functional

_SIDE, _SIGMA = 11, 1.5  # of the window, as Wang et al. (2004)
_C1, _C2 = 0.01**2, 0.03**2
MOST = 100.0  # dB of equal images, whose ratio is infinite


def psnr(error: torch.Tensor) -> torch.Tensor:
    """-10 log10 of mean squared errors, in dB; at most `MOST`."""
    return (-10 * error.clamp_min(1e-30).log10()).clamp_max(MOST)


def squared_errors(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Mean squared error of each image of `a` with each of `b`, (len(a), len(b))."""
    x, y = a.flatten(1).double(), b.flatten(1).double()
    table = x.square().sum(1)[:, None] - 2 * x @ y.T + y.square().sum(1)
    return table.clamp_min(0) / x.shape[1]


def ssim(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Mean structural similarity of each pair of images (n, channels, height, width), over windows inside and channels.

    Moments are weighted by a Gaussian of 11 x 11 pixels with deviation 1.5, smaller where an image is smaller.
    """
    channels, side = a.shape[1], min(_SIDE, *a.shape[-2:])
    place = torch.arange(side, dtype=torch.float64) - (side - 1) / 2
    row = (-place.square() / (2 * _SIGMA**2)).exp()
    across = (row / row.sum()).expand(channels, 1, 1, side)  # the window is the product of two such rows

    def mean(x: torch.Tensor) -> torch.Tensor:
        return functional.conv2d(functional.conv2d(x, across, groups=channels), across.transpose(2, 3), groups=channels)

    x, y = a.double(), b.double()
    mx, my = mean(x), mean(y)
    vx, vy, cov = mean(x * x) - mx * mx, mean(y * y) - my * my, mean(x * y) - mx * my
    found = (2 * mx * my + _C1) * (2 * cov + _C2) / ((mx * mx + my * my + _C1) * (vx + vy + _C2))
    return found.flatten(1).mean(1)
