"""The images that generators are judged by: synthetic, training and held-out ones of each class, and a sample of each.

Only the sample is embedded, and no more real images than there are synthetic ones, so that the cost does not grow with the
data.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from osfl.core.types import Dataset, RunMap, Shard
from osfl.evaluation.embedding import Space

Draw = Callable[..., torch.Generator]  # ctx.generator
MOST = 200  # images of a kind and class that are looked at
IN_ALL = 1600  # images of a kind, over all classes
KINDS = ("synthetic", "training", "held_out")


@dataclass(frozen=True)
class Kind:
    """All images of one class and kind, and a sample of them."""

    images: torch.Tensor  # uint8 (n, channels, height, width)
    sample: torch.Tensor  # indices into `images`, in random order
    features: torch.Tensor  # (embedded, dimensions) of the first images of the sample
    owners: Sequence[str] = ()  # whose each image is; training images only

    @property
    def shown(self) -> torch.Tensor:
        return self.images[self.sample]


ByKind = Mapping[str, Kind]


def per_class(classes: int) -> int:
    """How many images of each class and kind are looked at."""
    return max(10, min(MOST, IN_ALL // max(1, classes)))


def collect(
    pool: Dataset,
    shards: Sequence[Shard],
    held_out: Dataset,
    classes: Sequence[str],
    space: Space,
    *,
    draw: Draw,
    device: torch.device,
    run_map: RunMap,
) -> dict[str, dict[str, Kind]]:
    """class -> kind -> images. Samples are drawn by class and kind, so that nobody's draw depends on another's images."""
    shards = sorted(shards, key=lambda shard: shard.client)
    cap = per_class(len(classes))

    def kind(images: torch.Tensor, what: str, name: str, made: int, owners: Sequence[str] = ()) -> Kind:
        sample = torch.randperm(len(images), generator=draw("judge", what, name))[:cap]
        chosen = images[sample[:made]]
        features = space.embed(chosen, device, run_map) if len(chosen) else torch.zeros(0, 1, dtype=torch.float64)
        return Kind(images, sample, features, owners)

    found = {}
    for label, name in enumerate(classes):
        own = {shard.client: shard.train.images[shard.train.labels == label] for shard in shards}
        owners = [client for client, images in own.items() for _ in range(len(images))]
        synthetic = pool.images[pool.labels == label]
        found[name] = {
            "synthetic": kind(synthetic, "synthetic", name, cap),
            "training": kind(torch.cat(list(own.values())), "training", name, len(synthetic), owners),
            "held_out": kind(held_out.images[held_out.labels == label], "held_out", name, len(synthetic)),
        }
    return found
