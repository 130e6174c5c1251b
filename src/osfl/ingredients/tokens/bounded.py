"""An image's tokens as one vector of bounded length, so that little noise hides an image: for private rounds of token methods.

The vector is whitened by public images, which nobody owns (`osfl.ingredients.statistics.public_map`), shortened to `norm`, and
then scaled so that a coordinate of the longest ones has a mean square of 1. Finished classifiers do the same to what they see.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import nn

from osfl.core.method import Context
from osfl.core.types import ADDED, Dataset, Payload, Plan, Shard
from osfl.ingredients.statistics.private_gaussians import NoisyGaussianMethod, SiteGaussians, images_to_sum, site_gaussians
from osfl.ingredients.statistics.public_map import LEVELS, Projected, nobodys, public_map
from osfl.ingredients.tokens.encoding import TokenMethod, pooled, tokens_digest
from osfl.ingredients.training.local import not_positive, too_low

MEAN, BASIS = "public/mean", "public/basis"  # in a release


@dataclass(frozen=True)
class Bounding:
    """Mixed into Settings of methods that can send noisy Gaussians of features."""

    dimensions: int = field(default=0, metadata=ADDED)  # at most so many, whitened by public images; 0: tokens as they are
    norm: float = field(default=0.125, metadata=ADDED)  # of `dimensions`: longer vectors are shortened; public images have 1


class Bounded(nn.Module):
    """Tokens (n, 1 + L, d) -> (n, 1, dimensions)."""

    def __init__(self, mean: torch.Tensor, basis: torch.Tensor, norm: float, how: str) -> None:
        super().__init__()
        self.public, self.how, self.scale = Projected(mean, basis, norm), how, basis.shape[1] ** 0.5 / norm

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.public(pooled(tokens, self.how)) * self.scale
        return found.float()[:, None]


class BoundedTokenMethod(NoisyGaussianMethod, TokenMethod):
    """A token method that learns from bounded vectors where its setting `dimensions` is not 0."""

    def how(self) -> str:
        """How an image's tokens become one vector."""
        return str(getattr(self.settings, "tokens", "concat"))

    def shape(self) -> tuple[int, int]:
        """Tokens of an image that the method learns from, and their width."""
        s = self.settings
        if s.dimensions:
            return 1, min(s.dimensions, s.width(self.how()))
        return 1 + s.regions(), s.width()

    def problems(self, clients: int) -> list[str]:
        found = [*too_low(self.settings, {"dimensions": 0}), *not_positive(self.settings, "norm")]
        return [*super().problems(clients), *found]

    def privacy_problems(self, plan: Plan) -> list[str]:
        found = self.gaussian_problems(plan)
        if not self.settings.dimensions:
            found.append("setting 'dimensions': [privacy] needs features of bounded norm; set dimensions=64")
        return found

    def encoded(self, data: Dataset, shard: Shard, ctx: Context) -> torch.Tensor:
        return self._bounded(super().encoded(data, shard, ctx), ctx)

    def encode(self, images: torch.Tensor, ctx: Context) -> torch.Tensor:
        return self._bounded(super().encode(images, ctx), ctx)

    def site_gaussians(self, shard: Shard, ctx: Context) -> SiteGaussians:
        """Noisy Gaussians of all images of a site, in the vectors of `encoded`."""
        data, scale = images_to_sum(shard, ctx.plan), self.shape()[1] ** 0.5
        whole = (self.encoded(data, shard, ctx).flatten(1).double() * (LEVELS / scale)).round()
        found = site_gaussians(whole, data.labels, self.task.classes, ctx.plan)
        return SiteGaussians(found.counts, found.means * scale, found.covariance * scale**2)

    def map_tensors(self, ctx: Context) -> dict[str, torch.Tensor]:
        """What a finished classifier needs to see images as it learned them; nothing where it learned from plain tokens."""
        if not self.settings.dimensions:
            return {}
        encoded, s = super().encoded, self.settings

        def features(images: torch.Tensor) -> torch.Tensor:
            nobody = nobodys(images)
            return pooled(encoded(nobody.train, nobody, ctx), self.how())

        rng = ctx.generator("bounded tokens", "public images")
        make = partial(public_map, self.shape()[1], self.task.image, rng, features)
        names: Sequence[object] = [tokens_digest(s), self.how(), self.shape()[1], list(self.task.image), ctx.plan.seed]
        made = ctx.get_or_compute(["osfl bounded tokens", 1, *names, ctx.device.type], make).tensors
        return {MEAN: made["mean"], BASIS: made["basis"]}

    def _bounded(self, tokens: torch.Tensor, ctx: Context) -> torch.Tensor:
        if not self.settings.dimensions:
            return tokens
        made = self.map_tensors(ctx)
        found: torch.Tensor = Bounded(made[MEAN], made[BASIS], self.settings.norm, self.how())(tokens.cpu())
        return found

    def seeing(self, head: nn.Module, payload: Payload) -> nn.Module:
        """A head on bounded vectors as a head on the tokenizer's tokens."""
        if not self.settings.dimensions:
            return head
        return nn.Sequential(Bounded(payload.tensors[MEAN], payload.tensors[BASIS], self.settings.norm, self.how()), head)
