"""Drawn signs: strokes of invented characters, for a small ViT to start from where no file of real images can go along.

A sign is a few curves, most of which begin where the one before ended. Each drawing of it is shaken, turned, slanted and moved
a little, with a pen of its own width. Nothing is taken from any alphabet and no dataset is read, so that weights which learned
to tell signs apart may go wherever the program goes.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from osfl.core.seeds import torch_generator
from osfl.core.types import Dataset
from osfl.data.geometry import reshape

STROKES, DOTS = 4, 12  # at most so many curves a sign, drawn as so many dots each
_AT_ONCE = 2048


@dataclass(frozen=True)
class Drawing:
    """One recipe, named completely in the record. Lengths are of a paper from -1 to 1."""

    signs: int = 256
    drawings: int = 192  # of each sign
    side: int = 8  # pixels of the paper, before it is stretched
    thinnest: float = 0.1  # pen
    thickest: float = 0.22
    shake: float = 0.08  # of each control point
    turn: float = 0.1  # radians
    slant: float = 0.12
    grow: float = 0.12
    move: float = 0.1


@dataclass(frozen=True)
class Signs:
    """What is drawn."""

    points: torch.Tensor  # (signs, STROKES, 3, 2) x and y of the control points of quadratic curves
    there: torch.Tensor  # (signs, STROKES) which strokes a sign has

    def take(self, index: torch.Tensor) -> Signs:
        return Signs(self.points[index], self.there[index])


def invented(count: int, rng: torch.Generator) -> Signs:
    """Signs within a box that is higher than wide."""
    points = torch.rand(count, STROKES, 3, 2, generator=rng) * 2 - 1
    joined = torch.rand(count, STROKES, generator=rng) < 0.75
    for k in range(1, STROKES):
        points[:, k, 0] = torch.where(joined[:, k, None], points[:, k - 1, 2], points[:, k, 0])
    there = torch.arange(STROKES) < torch.randint(1, STROKES + 1, (count, 1), generator=rng)
    low, high = (sign * _farthest(sign * points, there) for sign in (-1, 1))
    box = torch.tensor([0.65, 0.95]) * (0.7 + 0.3 * torch.rand(count, 2, generator=rng))  # some are thin, some are flat
    half = ((high - low) / 2).clamp(min=0.3)  # a stroke straight down stays one
    return Signs((points - _each((low + high) / 2)) / _each(half) * _each(box), there)


def _farthest(points: torch.Tensor, there: torch.Tensor) -> torch.Tensor:
    """How far right and down the strokes reach, (n, 2)."""
    return points.masked_fill(~there[:, :, None, None], -torch.inf).flatten(1, 2).amax(1)


def _each(values: torch.Tensor) -> torch.Tensor:
    """(n, 2) for every control point of every stroke."""
    return values[:, None, None]


def draw(signs: Signs, recipe: Drawing, rng: torch.Generator) -> torch.Tensor:
    """One drawing of each, (n, side, side) from 0 to 255."""
    ways = _hands(len(signs.points), recipe, rng)
    points = signs.points + recipe.shake * torch.randn(signs.points.shape, generator=rng)
    points = points @ ways[:, None].transpose(-1, -2) + _each(recipe.move * torch.randn(len(points), 2, generator=rng))
    t = torch.linspace(0, 1, DOTS)
    dots = torch.einsum("kd,nskj->nsdj", torch.stack([(1 - t) ** 2, 2 * t * (1 - t), t**2]), points)
    dots = dots.masked_fill(~signs.there[:, :, None, None], 1e3).flatten(1, 2)  # (n, STROKES * DOTS, 2); absent: far away
    pixels = (torch.arange(recipe.side) + 0.5) / recipe.side * 2 - 1
    right, down = (dots[..., axis, None] - pixels for axis in (0, 1))  # (n, dots, side)
    nearest = (down[..., :, None].square() + right[..., None, :].square()).amin(1).sqrt()  # (n, side, side)
    pen = recipe.thinnest + (recipe.thickest - recipe.thinnest) * torch.rand(len(points), 1, 1, generator=rng)
    ink = ((pen - nearest) * recipe.side / 2 + 0.5).clamp(0, 1)  # a pixel that the pen half covers is half as light
    return (ink * 255).round().to(torch.uint8)


def _hands(count: int, recipe: Drawing, rng: torch.Generator) -> torch.Tensor:
    """How each hand turns, slants and stretches what it writes, (n, 2, 2)."""
    turn, slant = (size * torch.randn(count, generator=rng) for size in (recipe.turn, recipe.slant))
    turned = torch.stack([turn.cos(), -turn.sin(), turn.sin(), turn.cos()], -1).view(count, 2, 2)
    slanted = torch.eye(2).repeat(count, 1, 1)
    slanted[:, 0, 1] = slant
    return turned @ slanted * (1 + recipe.grow * torch.randn(count, 1, 2, generator=rng))


def drawn_signs(side: int, recipe: Drawing = Drawing()) -> Dataset:
    """Every sign so often, each a class of its own, stretched to images of this side as small scans are."""
    signs = invented(recipe.signs, torch_generator(0, "signs", "invented"))
    labels, rng = torch.arange(recipe.signs).repeat_interleave(recipe.drawings), torch_generator(0, "signs", "drawn")
    papers = torch.cat([draw(signs.take(part), recipe, rng) for part in labels.split(_AT_ONCE)])
    images = reshape(np.asarray(papers), side, 1)
    return Dataset(torch.from_numpy(images), labels)
