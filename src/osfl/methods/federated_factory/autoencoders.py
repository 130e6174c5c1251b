"""A small variational autoencoder of one class; only its decoder travels.

Kingma and Welling, "Auto-Encoding Variational Bayes", ICLR 2014, with the variance of the pixels at its optimum, so that
nothing has to balance the two terms of the loss (Rybkin et al., "Simple and Effective VAE Training", ICML 2021).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import nn

from osfl.core.errors import TrainingError
from osfl.core.types import Contract
from osfl.ingredients.statistics.support import Readable, Support
from osfl.methods.federated_factory.symmetries import draw_turns, turned
from osfl.models.initial import initialize
from osfl.models.inputs import to_images, to_input
from osfl.models.naming import contract_of, load_named, named
from osfl.runtime.devices import ahead
from osfl.runtime.meter import spend
from osfl.runtime.precision import descend

if TYPE_CHECKING:
    from osfl.core.types import Tensors


@dataclass(frozen=True)
class VaeSettings(Support):
    """How an autoencoder learns. None of this is in the paper, whose generators are diffusion models."""

    vae_latent_dim: int = 16  # numbers that describe an image
    vae_width: int = 256  # of the two hidden layers on either side
    vae_steps: int = 1000  # Adam, falling to zero along a cosine
    vae_batch: int = 64  # images a step
    vae_lr: float = 2e-3  # learning rate at the beginning


class Vae:
    """Two hidden layers in, two hidden layers out."""

    def __init__(self, settings: VaeSettings, image: tuple[int, int, int], symmetry: str, device: torch.device) -> None:
        self.settings, self.image, self.symmetry, self.device = settings, image, symmetry, device

    def _decoder(self, rng: torch.Generator | None) -> nn.Sequential:
        s = self.settings
        return _layers([s.vae_latent_dim, s.vae_width, s.vae_width, math.prod(self.image)], rng).append(nn.Tanh())

    def contract(self) -> Contract:
        return {name.removeprefix("net/"): line for name, line in contract_of(self._decoder(None), "net").items()}

    def fit(
        self, images: torch.Tensor, rng: torch.Generator, progress: Callable[[int, int], None], kept: Path | None = None
    ) -> dict[str, torch.Tensor]:
        """uint8 images (n, channels, height, width) of one class -> the decoder."""
        s, pixels = self.settings, math.prod(self.image)
        encoder = _layers([pixels, s.vae_width, s.vae_width, 2 * s.vae_latent_dim], rng).to(self.device)
        decoder = self._decoder(rng).to(self.device)
        optimizer = torch.optim.Adam([*encoder.parameters(), *decoder.parameters()], s.vae_lr)
        total = torch.zeros((), device=self.device)
        known = images.to(self.device)
        for step, (picked, noise, *draws) in enumerate(ahead(self._steps(len(images), rng), self.device)):
            for group in optimizer.param_groups:
                group["lr"] = s.vae_lr * 0.5 * (1 + math.cos(math.pi * step / s.vae_steps))
            x = to_input(turned(known[picked], self.symmetry, draws), self.device).reshape(len(picked), pixels)
            mean, spread = encoder(x).chunk(2, 1)
            z = mean + noise * (spread / 2).exp()
            loss = vae_loss(x, decoder(z), mean, spread)
            descend(optimizer, loss)
            total += loss.detach()
        if not math.isfinite(float(total)):
            raise TrainingError(
                "the generator diverged (its loss is not finite)",
                field="vae_lr",
                got=s.vae_lr,
                fix="Lower it (`--set vae_lr=...`).",
            )
        weights = sum(p.numel() for p in [*encoder.parameters(), *decoder.parameters()])
        spend(6.0 * weights * s.vae_batch * s.vae_steps)
        progress(1, 1)
        return {name.removeprefix("net/"): value for name, value in named(decoder, "net").items()}

    def _steps(self, images: int, rng: torch.Generator) -> Iterator[Sequence[torch.Tensor]]:
        """What each step draws: which images, noise on what describes them, and how they are turned."""
        for _ in range(self.settings.vae_steps):
            picked = torch.randint(images, (self.settings.vae_batch,), generator=rng)
            turns = draw_turns(len(picked), self.symmetry, rng)
            yield picked, torch.randn((len(picked), self.settings.vae_latent_dim), generator=rng), *turns

    @torch.no_grad()
    def readable(self, tensors: Tensors) -> Readable:
        return Readable({"center": self._loaded(tensors)(torch.zeros(1, self.settings.vae_latent_dim))})

    def _loaded(self, tensors: Tensors) -> nn.Sequential:
        decoder = self._decoder(None)
        load_named(decoder, {f"net/{name}": value for name, value in tensors.items()}, "net")
        return decoder

    @torch.no_grad()
    def sample(self, tensors: Tensors, count: int, rng: torch.Generator) -> torch.Tensor:
        """`count` images as uint8."""
        decoder = self._loaded(tensors).to(self.device)
        z = torch.randn((count, self.settings.vae_latent_dim), generator=rng).to(self.device)
        spend(2.0 * count * sum(p.numel() for p in decoder.parameters()), makes=count)
        return to_images(decoder(z).reshape(-1, *self.image)).cpu()


def vae_loss(x: torch.Tensor, made: torch.Tensor, mean: torch.Tensor, spread: torch.Tensor) -> torch.Tensor:
    """-log N(x; made, v) with v the mean squared error, plus KL(N(mean, e^spread) || N(0, 1)); nats an image."""
    error = (x - made).square().mean()
    divergence = 0.5 * (mean.square() + spread.exp() - 1 - spread).sum(1).mean()
    return 0.5 * x.shape[1] * (error + 1e-6).log() + divergence


def _layers(sizes: list[int], rng: torch.Generator | None) -> nn.Sequential:
    parts: list[nn.Module] = []
    for inputs, outputs in pairwise(sizes):
        with torch.device("meta"):  # no draws from the global generator by torch's own defaults
            parts.append(nn.Linear(inputs, outputs))
        parts.append(nn.SiLU())
    model = nn.Sequential(*parts[:-1])
    model._apply(lambda t: torch.empty(t.shape, dtype=t.dtype))
    initialize(model, rng)
    return model
