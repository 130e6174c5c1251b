"""What a denoiser knows of its images before its network has learned anything: the best linear denoiser.

EDM (Karras et al., NeurIPS 2022, Table 1) writes D(x; s) = c_skip x + c_out F(c_in x, c_noise). c_skip x is the best linear
denoiser of images about which only one deviation is known, and c_out^2 its error, so that the network always learns a
target of unit variance. The same argument with the mean and covariance of a class gives `Gaussian`: the network learns only
what two moments cannot say, and before its first step sampling draws from the class' Gaussian instead of from white noise.
"""

from __future__ import annotations

import torch
from torch import nn


class White(nn.Module):
    """EDM's own: mean 0 and the same deviation in every direction. `sigma` is a noise level for each image, (batch,)."""

    def __init__(self, std: float = 0.5) -> None:
        super().__init__()
        self.std = std

    def linear(self, x: torch.Tensor, sigma: torch.Tensor) -> torch.Tensor:
        """The best linear guess of the clean images (c_skip x)."""
        return (self.std**2 / (_wide(sigma) ** 2 + self.std**2)) * x

    def error(self, sigma: torch.Tensor) -> torch.Tensor:
        """Its mean squared error a pixel (c_out^2), (batch,)."""
        return (sigma * self.std) ** 2 / (sigma**2 + self.std**2)

    def scaled(self, x: torch.Tensor, sigma: torch.Tensor) -> torch.Tensor:
        """What the network sees: unit variance at every noise level (c_in x)."""
        return x / (_wide(sigma) ** 2 + self.std**2).sqrt()

    def noised(self, noise: torch.Tensor, sigma: float) -> torch.Tensor:
        """Standard normal numbers -> images as they are at this noise level."""
        return noise * sigma  # images are lost in noise this high


class Gaussian(nn.Module):
    """The same for a mean, the variances in some principal directions, and one variance for all others: one class.

    Unused directions are zeros, so that the size of an upload reveals nothing about a class.
    """

    mean: torch.Tensor
    basis: torch.Tensor
    variances: torch.Tensor

    def __init__(self, image: tuple[int, int, int], directions: int) -> None:
        super().__init__()
        pixels = image[0] * image[1] * image[2]
        directions = min(directions, pixels)
        self.register_buffer("mean", torch.empty(1, pixels))
        self.register_buffer("basis", torch.empty(directions, pixels))  # rows of length 1
        self.register_buffer("variances", torch.empty(directions + 1))  # the last is that of every direction not in the basis

    def initialize(self, rng: torch.Generator | None) -> None:
        for tensor in (self.mean, self.basis):
            tensor.zero_()
        self.variances.fill_(1.0)

    @torch.no_grad()
    def know(self, mean: torch.Tensor, basis: torch.Tensor, variances: torch.Tensor, rest: float) -> None:
        """Fewer directions than the maximum are fine."""
        used = len(basis)
        self.basis.zero_()
        self.mean.copy_(mean)
        self.basis[:used] = basis
        self.variances.fill_(rest)
        self.variances[:used] = variances

    def linear(self, x: torch.Tensor, sigma: torch.Tensor) -> torch.Tensor:
        off = x.flatten(1) - self.mean
        kept = self.variances / (self.variances + sigma[:, None] ** 2)  # of each direction, (batch, directions + 1)
        rest = kept[:, -1:]
        found = self.mean + rest * off + ((off @ self.basis.T) * (kept[:, :-1] - rest)) @ self.basis
        return _like(found, x)

    def error(self, sigma: torch.Tensor) -> torch.Tensor:
        noise = sigma[:, None] ** 2
        left = self.variances * noise / (self.variances + noise)
        return (left * self._counts()).sum(1) / self.mean.numel()

    def scaled(self, x: torch.Tensor, sigma: torch.Tensor) -> torch.Tensor:
        total = (self.variances * self._counts()).sum() / self.mean.numel()
        return _like((x.flatten(1) - self.mean) / (sigma[:, None] ** 2 + total).sqrt(), x)

    def noised(self, noise: torch.Tensor, sigma: float) -> torch.Tensor:
        """Exact for a Gaussian, so sampling may begin wherever the class looks like one."""
        spread = (self.variances + sigma**2).sqrt()
        flat = noise.flatten(1)
        found = self.mean + spread[-1] * flat + ((flat @ self.basis.T) * (spread[:-1] - spread[-1])) @ self.basis
        return _like(found, noise)

    def _counts(self) -> torch.Tensor:
        """How many directions have each variance; a row of zeros in the basis is none, and counts with the others."""
        used = self.basis.square().sum(1).round()
        return torch.cat([used, self.mean.numel() - used.sum()[None]])


def _wide(sigma: torch.Tensor) -> torch.Tensor:
    return sigma[:, None, None, None]


def _like(flat: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """Rows as images again; channels last, as convolutions on a CPU like them."""
    return flat.reshape(x.shape).contiguous(memory_format=torch.channels_last)
