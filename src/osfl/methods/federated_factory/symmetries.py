"""Mirrors and quarter turns: what a generator may assume about its class without seeing more of it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch

from osfl.ingredients.training.local import changed, draw_changes

Symmetry = Literal["none", "flip", "dihedral"]  # nothing; left-right mirror; mirror and quarter turns (cells, tissue)


def orbit(images: torch.Tensor, symmetry: str) -> torch.Tensor:
    """All images with all their mirrored and turned copies: once, twice or eight times as many."""
    if symmetry == "none":
        return images
    both = [images, images.flip(-1)]
    if symmetry == "flip":
        return torch.cat(both)
    return torch.cat([torch.rot90(one, turns, (-2, -1)) for one in both for turns in range(4)])


def draw_turns(count: int, symmetry: str, rng: torch.Generator) -> list[torch.Tensor]:
    """Which of so many images are mirrored, and by how many quarters each is turned."""
    return draw_changes((count,), _augmentation(symmetry), rng)


def turned(images: torch.Tensor, symmetry: str, drawn: Sequence[torch.Tensor]) -> torch.Tensor:
    """Each image (batch, channels, side, side) mirrored or turned as was drawn for it."""
    return changed(images, _augmentation(symmetry), drawn)


def _augmentation(symmetry: str) -> str:
    return "flip+turn" if symmetry == "dihedral" else symmetry
