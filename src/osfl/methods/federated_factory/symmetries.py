"""Mirrors and quarter turns: what a generator may assume about its class without seeing more of it."""

from __future__ import annotations

from typing import Literal

import torch

from osfl.ingredients.training.local import augment

Symmetry = Literal["none", "flip", "dihedral"]  # nothing; left-right mirror; mirror and quarter turns (cells, tissue)


def orbit(images: torch.Tensor, symmetry: str) -> torch.Tensor:
    """All images with all their mirrored and turned copies: once, twice or eight times as many."""
    if symmetry == "none":
        return images
    both = [images, images.flip(-1)]
    if symmetry == "flip":
        return torch.cat(both)
    return torch.cat([torch.rot90(one, turns, (-2, -1)) for one in both for turns in range(4)])


def turned(images: torch.Tensor, symmetry: str, rng: torch.Generator) -> torch.Tensor:
    """Each image mirrored or turned at random, (batch, channels, side, side)."""
    return augment(images, "flip+turn" if symmetry == "dihedral" else symmetry, rng)
