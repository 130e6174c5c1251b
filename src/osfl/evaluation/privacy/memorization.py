"""Does a generator copy? Nearest training images of synthetic images, against those of real images it never saw.

The distance is the root mean square difference of thumbnails (pixels from 0 to 1, at most 16 a side), to all training
images of the class, turned and mirrored ones included: generators are often trained on such views.

A small ratio is no proof: smooth, average-looking images are near to everything. So an image counts as a copy only if
it is both less than half as far from a training image as held-out real images are, and less than half as far as from any
held-out image: an average-looking image is equally near to both sets, a copy only to the one it was made from. By chance
some honest images count, too, the more the fewer ways a class has to vary. How many, held-out images say, judged by the same
rule; a class is accused when synthetic images exceed that clearly.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch.nn import functional as F

from osfl.evaluation.distances import nearest

SIDE = 16  # pixels of a thumbnail
LEAST = 10  # images of each kind, below which there is nothing to say
HALF = 0.5  # of the usual distance
TOLERATED = 0.05  # share of copies, beyond that of held-out images, that does not raise a warning
SURE = 3.0  # standard errors that this excess must be above zero
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
    floor: float | None  # share of held-out images that would count as copies


def verdict(synthetic: torch.Tensor, training: torch.Tensor, held_out: torch.Tensor) -> Memorization:
    """uint8 images (n, channels, height, width) of one class."""
    if min(len(synthetic), len(training), len(held_out)) < LEAST:
        return Memorization(FEW, None, None, None)
    made, real = closest(synthetic, training).distance, closest(held_out, training).distance
    usual = real.median()
    ratio = float(made.median() / usual.clamp_min(1e-12))
    copied = _copies(made, closest(synthetic, held_out).distance, usual)
    floor = _copies(real, closest(held_out, held_out, same=True).distance, usual)
    return Memorization(
        COPIES if copied - floor > _margin(copied, floor, len(made), len(real)) else CLEAN, ratio, copied, floor
    )


def _margin(copied: float, floor: float, made: int, real: int) -> float:
    """What the two shares may differ by without anybody copying; by chance as well as by choice."""
    share = (copied * made + floor * real) / (made + real)
    return max(TOLERATED, SURE * math.sqrt(share * (1 - share) * (1 / made + 1 / real)))


def _copies(to_training: torch.Tensor, to_held_out: torch.Tensor, usual: torch.Tensor) -> float:
    return float((to_training < HALF * torch.minimum(usual, to_held_out)).cpu().double().mean())


def closest(queries: torch.Tensor, references: torch.Tensor, *, same: bool = False) -> Neighbors:
    """The nearest reference of each query, over all views of the query; `same`: nobody is its own neighbor."""
    there = _thumbnails(references)
    rows = []
    for view in views(queries):
        distance, place = nearest(_thumbnails(view), there, same=same)
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
