"""The features that OneSum sums: random convolutions or a frozen encoder, mirrored, on the grid, and projected where asked.

All sites compute the same map. `_digest` names it, and the server refuses sums of another one.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from functools import lru_cache, partial

import torch
from torch import nn

from osfl.core.errors import TrainingError
from osfl.core.method import Context
from osfl.core.seeds import torch_generator
from osfl.core.types import Dataset, Shard, digest_of
from osfl.ingredients.statistics.public_map import LEVELS, Projected, nobodys, public_map
from osfl.ingredients.tokens.encoding import OnTokens, Pooled, TokenMethod, pooled, tokens_digest
from osfl.methods.onesum.features import Mirrored, OnGrid, RandomConvolutions, draw_filters, mirrored, on_grid
from osfl.models.flops import forward_flops
from osfl.models.inputs import to_input
from osfl.runtime.devices import exact
from osfl.runtime.meter import spend


@lru_cache(maxsize=8)
def _drawn(seed: int, count: int, channels: int, mean_color: float) -> torch.Tensor:
    """Every upload names the filters that it was made with, so that they are asked for once a site."""
    return draw_filters(count, channels, torch_generator(seed, "onesum", "filters"), mean_color)


class FeatureMap(TokenMethod):
    """From images to the vectors that are summed; OneSum adds what is done with the sums."""

    def width(self) -> int:
        """d of what is summed."""
        return min(self.settings.dimensions, self._base_width()) or self._base_width()

    def _base_width(self) -> int:
        s = self.settings
        return int(s.width_for(self.task.image[0]) if s.features == "random" else s.width(s.tokens))

    def _step(self) -> float:
        s = self.settings
        return float((s.norm if s.dimensions else s.reach()) / LEVELS)

    def encode(self, images: torch.Tensor, ctx: Context) -> torch.Tensor:
        """Features of any images, the mean over their mirrors, (n, d)."""
        shard = Shard("", Dataset(images, torch.zeros(len(images), dtype=torch.int64)), Dataset(images[:0], torch.zeros(0)))
        return self._features(shard.train, shard, ctx).reshape(self.settings.vectors(), len(images), -1).mean(0)

    def _features(self, data: Dataset, shard: Shard, ctx: Context) -> torch.Tensor:
        """Features of images and then of their mirrors, (vectors * n, d) on the grid."""
        if not self.settings.dimensions:
            return self._base_features(data, shard, ctx)
        projected: torch.Tensor = Projected(*self._projection(ctx), self.settings.norm)(self._mean_features(data, shard, ctx))
        return projected

    def _mean_features(self, data: Dataset, shard: Shard, ctx: Context) -> torch.Tensor:
        """The mean over an image and its mirrors, (n, d)."""
        return self._base_features(data, shard, ctx).reshape(self.settings.copies(), len(data), -1).mean(0)

    def _base_features(self, data: Dataset, shard: Shard, ctx: Context) -> torch.Tensor:
        images = torch.cat(list(mirrored(data.images, self.settings.symmetry)))
        if self.settings.features == "encoder":
            tokens = self.encoded(Dataset(images, data.labels), shard, ctx)
            return self._checked(on_grid(pooled(tokens, self.settings.tokens), self.settings.reach()), shard)
        network = self._random_map(self._filters(ctx))
        spend(forward_flops(network, self.task.image) * len(images))
        device = exact(ctx.device)
        with torch.inference_mode():
            features: torch.Tensor = network.to(device)(to_input(images, device))
            return features.cpu()

    def _checked(self, features: torch.Tensor, shard: Shard) -> torch.Tensor:
        """Finite features, most within the bound: clipping is for outliers, and beyond it features would lose what they say."""
        reach = self.settings.reach()
        if not bool(features.isfinite().all()):
            raise TrainingError(
                "the encoder gives features that are not numbers",
                client=shard.client,
                field="encoder",
                expected="finite features",
                got=f"{int((~features.isfinite()).any(1).sum())} of {len(features)} images with NaN",
                fix="Look at these images and the encoder's file; `osfl ls encoders` lists others.",
            )
        beyond = float((features.abs() >= reach).double().mean())
        if beyond > 0.001:
            raise TrainingError(
                "the encoder's features are beyond the bound that the plan agrees on",
                client=shard.client,
                field="bound",
                expected=f"within {reach:g}",
                got=f"{beyond:.1%} beyond it",
                fix=f"Agree on a larger bound in the plan (`--set bound={4 * reach:g}`).",
            )
        return features

    def _projection(self, ctx: Context) -> tuple[torch.Tensor, torch.Tensor]:
        """Mean and basis of public images' features, the same at every site."""

        def features(images: torch.Tensor) -> torch.Tensor:
            nobody = nobodys(images)
            return self._mean_features(nobody.train, nobody, ctx)

        rng = ctx.generator("onesum", "public images")
        make = partial(public_map, self.width(), self.task.image, rng, features)
        made = ctx.get_or_compute(["osfl onesum projection", 1, self._digest(ctx), ctx.device.type], make)
        return made.tensors["mean"], made.tensors["basis"]

    def _filters(self, ctx: Context) -> torch.Tensor:
        s = self.settings
        return _drawn(ctx.plan.seed, s.filters * s.scales, self.task.image[0], s.mean_color).clone()

    def _random_map(self, filters: torch.Tensor) -> RandomConvolutions:
        return RandomConvolutions(filters, self.settings, self.settings.reach())

    def _feature_network(self, tensors: Mapping[str, torch.Tensor]) -> list[nn.Module]:
        """The same map as modules, images in, for the model of a release."""
        if self.settings.features == "random":
            features: nn.Module = self._random_map(tensors["map/filters"])
        else:
            features = OnTokens(self.tokenizer(), Pooled(OnGrid(self.settings.reach()), self.settings.tokens))
        steps: list[nn.Module] = [Mirrored(features, self.settings.symmetry)]
        if self.settings.dimensions:
            steps.append(Projected(tensors["map/mean"], tensors["map/basis"], self.settings.norm))
        return steps

    def _map_tensors(self, ctx: Context) -> dict[str, torch.Tensor]:
        filters = {"map/filters": self._filters(ctx)} if self.settings.features == "random" else {}
        if not self.settings.dimensions:
            return filters
        mean, basis = self._projection(ctx)
        return {**filters, "map/mean": mean, "map/basis": basis}

    def _digest(self, ctx: Context) -> str:
        """Names everything that features depend on besides the images."""
        s = self.settings
        more = [self.width(), s.norm, ctx.plan.seed] if s.dimensions else []
        if s.features == "encoder":
            return digest_of(["osfl onesum", tokens_digest(s), s.tokens, s.reach(), s.symmetry, *more])
        filters = hashlib.sha256(self._filters(ctx).numpy().tobytes()).hexdigest()
        return digest_of(["osfl onesum", s.described(self.task.image), filters, s.reach(), s.symmetry, *more])

    def _pixels(self) -> int:
        """How many of the features are a thumbnail; they come last."""
        plain = self.settings.features == "random" and not self.settings.dimensions
        return self.settings.thumbnail**2 * self.task.image[0] if plain else 0

    def _maps(self) -> int:
        """How many features come from filters."""
        plain = self.settings.features == "random" and not self.settings.dimensions
        return self.width() - self._pixels() if plain else 0

    def _thumbnails(self, means: torch.Tensor) -> torch.Tensor | None:
        side, pixels = self.settings.thumbnail, self._pixels()
        return means[:, -pixels:].reshape(-1, self.task.image[0], side, side) if pixels else None
