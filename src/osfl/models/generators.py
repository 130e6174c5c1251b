"""Generators: noise (and a class) to images of any size, the small network of DAFL that DENSE and its heirs share.

Linear to a quarter of the image's side, two doublings with a 3x3 convolution each, a last 3x3 convolution. An image side
that is not a multiple of four is made a little larger and cut. Every weight comes from the generator of random numbers
that is passed in, because threads share torch's global one.
"""

from __future__ import annotations

import functools
import math
from typing import Literal

import torch
from torch import nn
from torch.nn import functional

from osfl.runtime.precision import mixed

Ending = Literal["sigmoid", "tanh+norm"]  # DENSE's, and DAFL's: what brings the last convolution to pixel values
Start = Literal["normal", "uniform"]  # N(0, 0.02) as in DENSE's code, or torch's usual bounds as in DAFL's


@functools.cache
def _taps(device: torch.device, dtype: torch.dtype) -> torch.Tensor:
    """Which taps fall on each of four places; made once for a device, which would wait for a copy in each pass."""
    with torch.inference_mode(False):
        return torch.tensor([[0, 0, 1], [0, 1, 1], [1, 1, 0], [1, 0, 0]], device=device, dtype=dtype)


class UpConv(nn.Conv2d):
    """Doubling by repetition and a 3x3 convolution, computed as one transposed convolution: 4 taps a pixel instead of 9.

    A repeated pixel is multiplied by several taps of the kernel, so they are added up beforehand. Same sums in another order:
    equal to about 1e-6, twice as fast in both directions on CPUs.
    """

    def __init__(self, channels: int, out: int) -> None:
        super().__init__(channels, out, 3, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        spread = _taps(x.device, x.dtype)
        kernel = torch.einsum("at,oitu,bu->ioab", spread, self.weight, spread)
        return functional.conv_transpose2d(x, kernel, self.bias, stride=2, padding=1)


class Generator(nn.Module):
    """(batch, noise) -> network inputs (batch, channels, height, width) in about [-1, 1].

    With classes it also takes labels; without labels the noise must end with their one-hot code already.
    """

    def __init__(
        self, image: tuple[int, int, int], latent_dim: int, width: int = 128, classes: int = 0, ending: Ending = "sigmoid"
    ) -> None:
        super().__init__()
        channels, self.height, self.width = image
        self.grid = (math.ceil(self.height / 4), math.ceil(self.width / 4))
        self.classes, self.ending = classes, ending
        self.linear = nn.Linear(latent_dim + classes, width * self.grid[0] * self.grid[1])
        self.norm0 = _norm(width)
        self.conv1 = UpConv(width, width)
        self.norm1 = _norm(width)
        self.conv2 = UpConv(width, max(1, width // 2))
        self.norm2 = _norm(max(1, width // 2))
        self.conv3 = nn.Conv2d(max(1, width // 2), channels, 3, padding=1)
        self.norm3 = _norm(channels, affine=False) if ending == "tanh+norm" else nn.Identity()

    @mixed
    def forward(self, z: torch.Tensor, labels: torch.Tensor | None = None) -> torch.Tensor:
        if labels is not None:
            z = torch.cat([z, functional.one_hot(labels, self.classes).to(z)], 1)
        x = self.linear(z).view(len(z), -1, *self.grid).contiguous(memory_format=torch.channels_last)
        x = functional.leaky_relu_(self.norm1(self.conv1(self.norm0(x))), 0.2)
        x = functional.leaky_relu_(self.norm2(self.conv2(x)), 0.2)
        x = self.conv3(x[:, :, : self.height, : self.width])
        if self.ending == "sigmoid":
            return 2 * torch.sigmoid(x) - 1  # the paper's [0, 1] in the units of our networks
        finished: torch.Tensor = self.norm3(torch.tanh(x))
        return finished


def _norm(channels: int, affine: bool = True) -> nn.BatchNorm2d:
    """Batch statistics always: a generator is never asked for a single image."""
    return nn.BatchNorm2d(channels, affine=affine, track_running_stats=False)


def build_generator(
    image: tuple[int, int, int],
    rng: torch.Generator | None,
    *,
    latent_dim: int,
    width: int = 128,
    classes: int = 0,
    ending: Ending = "sigmoid",
    start: Start = "normal",
) -> Generator:
    """A generator with its first weights drawn from `rng` only; zeros without it, to be loaded."""
    with torch.device("meta"):  # no draws from the global generator by torch's own defaults
        model = Generator(image, latent_dim, width, classes, ending)
    model._apply(lambda t: torch.empty(t.shape, dtype=t.dtype))  # type: ignore[no-untyped-call]
    for module in model.modules():
        _start(module, rng, start)
    return model.to(memory_format=torch.channels_last)  # type: ignore[call-overload,no-any-return]


@torch.no_grad()
def _start(module: nn.Module, rng: torch.Generator | None, start: Start) -> None:
    if isinstance(module, nn.BatchNorm2d) and module.affine:
        module.weight.fill_(1.0)
        if start == "normal" and rng is not None:
            module.weight.normal_(1.0, 0.02, generator=rng)
        module.bias.zero_()
    elif isinstance(module, (nn.Conv2d, nn.Linear)):
        assert module.bias is not None
        module.bias.zero_()
        if rng is None:
            module.weight.zero_()
        elif start == "normal":
            module.weight.normal_(0.0, 0.02, generator=rng)
        else:
            bound = 1.0 / math.sqrt(module.weight[0].numel())
            module.weight.uniform_(-bound, bound, generator=rng)
            module.bias.uniform_(-bound, bound, generator=rng)
