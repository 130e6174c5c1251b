"""Features for sums with noise: few, whitened by public images and of bounded norm, so that little noise hides an image.

The public images are noise drawn from the plan's seed, whose amplitude falls with the frequency as that of photographs does:
nobody's images. z = B^T (phi - mu): mu is the mean of their features, B their first principal directions, each divided by its
deviation. Without this, what all images have in common takes most of the norm that noise has to cover.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import nn

from osfl.core.types import Dataset, Payload, Shard
from osfl.runtime.meter import spend

LEVELS = 2**15  # whole numbers on each side of zero; products of 2^23 images at the bound add up to 2^53 at most
_CHROMA = 0.35  # color beside brightness
_EACH = 2  # public images a dimension
_FLOOR = 1e-4  # of the mean variance: directions that public images hardly have are not blown up further


def public_images(dimensions: int, image: tuple[int, int, int], rng: torch.Generator) -> torch.Tensor:
    """uint8 (2 * dimensions, channels, height, width): 1/f noise of random brightness, contrast and tint."""
    count, (channels, height, width) = _EACH * dimensions, image
    across, down = torch.fft.rfftfreq(width, dtype=torch.float64), torch.fft.fftfreq(height, dtype=torch.float64)[:, None]
    amplitude = 1 / (across**2 + down**2).sqrt().clamp_min(1 / max(height, width))

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=rng, dtype=torch.float64)

    planes = torch.fft.irfft2(torch.fft.rfft2(draw(count, channels, height, width)) * amplitude, s=(height, width))
    planes[:, 1:] *= _CHROMA
    x = torch.einsum("nkhw,kc->nchw", planes, color_basis(channels))
    x = x / x.flatten(1).std(1).clamp_min(1e-12)[:, None, None, None]
    contrast = 0.1 + 0.5 * torch.rand(count, 1, 1, 1, generator=rng, dtype=torch.float64)
    x = x * contrast + 0.3 * draw(count, 1, 1, 1) + 0.15 * draw(count, channels, 1, 1)
    return ((x.clamp(-1, 1) + 1) * 127.5).round().to(torch.uint8)


def cosine_basis(side: int) -> torch.Tensor:
    """The orthonormal DCT-II: row u is the cosine of frequency u."""
    place, frequency = torch.arange(side, dtype=torch.float64), torch.arange(side, dtype=torch.float64)[:, None]
    rows = torch.cos(math.pi * (place + 0.5) * frequency / side) * math.sqrt(2 / side)
    rows[0] /= math.sqrt(2)
    return rows


def color_basis(channels: int) -> torch.Tensor:
    """Orthonormal rows: brightness, red against green, yellow against blue. Other numbers of channels: a cosine basis."""
    if channels != 3:
        return cosine_basis(channels)
    rows = torch.tensor([[1.0, 1.0, 1.0], [1.0, -1.0, 0.0], [1.0, 1.0, -2.0]], dtype=torch.float64)
    return torch.div(rows, rows.norm(dim=1, keepdim=True))


def projection(features: torch.Tensor, dimensions: int) -> tuple[torch.Tensor, torch.Tensor]:
    """mu (d,) and B (d, dimensions) of public images' features (n, d); public images have a squared norm of 1 in the mean."""
    mean = features.mean(0)
    values, vectors = torch.linalg.eigh((features - mean).T @ (features - mean) / len(features))
    spend(9.0 * len(mean) ** 3)
    values, vectors = values.flip(0).clamp_min(0), vectors.flip(1)[:, :dimensions]
    signs = vectors.gather(0, vectors.abs().argmax(0, keepdim=True)).sign()  # else it is up to the processor
    scale = (values[:dimensions] + _FLOOR * values.mean().clamp_min(1e-12)).rsqrt()
    return mean, vectors * signs * scale / dimensions**0.5


def public_map(
    dimensions: int, image: tuple[int, int, int], rng: torch.Generator, features: Callable[[torch.Tensor], torch.Tensor]
) -> Payload:
    """Mean and basis of public images' features, the same at every site."""
    mean, basis = projection(features(public_images(dimensions, image, rng)).double(), dimensions)
    return Payload({"mean": mean, "basis": basis})


def nobodys(images: torch.Tensor) -> Shard:
    """Public images as a shard, for methods that compute features of shards."""
    data, none = (Dataset(part, torch.zeros(len(part), dtype=torch.int64)) for part in (images, images[:0]))
    return Shard("public images", data, none)


class Projected(nn.Module):
    """Features (n, d) -> (n, dimensions) on the grid, none longer than `norm`."""

    def __init__(self, mean: torch.Tensor, basis: torch.Tensor, norm: float) -> None:
        super().__init__()
        self.norm = norm
        self.register_buffer("mean", mean)
        self.register_buffer("basis", basis)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return clipped((x.double() - self.get_buffer("mean")) @ self.get_buffer("basis"), self.norm)


def clipped(rows: torch.Tensor, norm: float) -> torch.Tensor:
    """Rows shortened to `norm` where they are longer, in steps of norm / 2^15. Rounded towards zero: still not longer."""
    step = norm / LEVELS
    shortened = rows * (norm / rows.norm(dim=1, keepdim=True).clamp_min(norm))
    whole = (shortened / step).trunc()
    beyond = whole.square().sum(1, keepdim=True) > LEVELS**2  # by the last bit of a division
    return torch.where(beyond, whole - whole.sign(), whole) * step
