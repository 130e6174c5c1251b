"""Does a generator copy? Nearest training images of synthetic images, against those of real images it never saw.

The distance is the root mean square difference of thumbnails (pixels from 0 to 1, at most 16 a side), to all training
images of the class, turned and mirrored ones included: generators are often trained on such views.

A small ratio alone convicts nobody: smooth, average-looking images are near to everything. So an image counts as a copy only if
it is both less than half as far from a training image as held-out real images are, and less than half as far as from any
held-out image: an average-looking image is equally near to both sets, a copy only to the one it was made from.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn import functional as F

from osfl.evaluation.distances import nearest

SIDE = 16  # pixels of a thumbnail
LEAST = 10  # images of each kind, below which there is nothing to say
HALF = 0.5  # of the usual distance
TOLERATED = 0.05  # share of copies that does not raise a warning
COPIES, CLEAN, FEW = "copies", "no sign of copying", "too few to say"


@dataclass(frozen=True)
class Neighbors:
    """For each image: how far its nearest training image is, which one, and how that is turned to match."""

    distance: torch.Tensor  # (n,)
    place: torch.Tensor  # (n,) index of the training image
    turn: torch.Tensor  # (n,) the view of the query that matches best


@dataclass(frozen=True)
class Memorization:
    """What the distances of one class say."""

    verdict: str
    ratio: float | None  # median distance of synthetic images to training images, over that of held-out images
    copied: float | None  # share of synthetic images that count as copies


def verdict(synthetic: torch.Tensor, training: torch.Tensor, held_out: torch.Tensor) -> Memorization:
    """uint8 images (n, channels, height, width) of one class."""
    if min(len(synthetic), len(training), len(held_out)) < LEAST:
        return Memorization(FEW, None, None)
    to_training = closest(synthetic, training).distance
    usual = closest(held_out, training).distance.median()
    ratio = float(to_training.median() / usual.clamp_min(1e-12))
    bar = HALF * torch.minimum(usual, closest(synthetic, held_out).distance)
    copied = float((to_training < bar).double().mean())
    return Memorization(COPIES if copied > TOLERATED else CLEAN, ratio, copied)


def closest(queries: torch.Tensor, references: torch.Tensor) -> Neighbors:
    """The nearest reference of each query, over all views of the query."""
    there = _thumbnails(references)
    rows = []
    for view in views(queries):
        distance, place = nearest(_thumbnails(view), there)
        rows.append((distance / there.shape[1] ** 0.5, place))
    distances, places = torch.stack([row[0] for row in rows]), torch.stack([row[1] for row in rows])
    best, turn = distances.min(0)
    return Neighbors(best, places.gather(0, turn[None])[0], turn)


def views(images: torch.Tensor) -> list[torch.Tensor]:
    """The images turned and mirrored: 8 views of a square, 4 of other shapes; the first is the image itself."""
    turns = range(4) if images.shape[-1] == images.shape[-2] else (0, 2)
    turned = [torch.rot90(images, turn, (-2, -1)) for turn in turns]
    return turned + [view.flip(-1) for view in turned]


def _thumbnails(images: torch.Tensor) -> torch.Tensor:
    height, width = images.shape[-2:]
    small = images.float() / 255
    if max(height, width) > SIDE:
        small = F.interpolate(small, (min(height, SIDE), min(width, SIDE)), mode="area")
    return small.flatten(1)
