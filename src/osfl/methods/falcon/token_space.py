"""Where a client's generator works: its tokens standardized, or its sequences whitened; undone before anything leaves.

A space is one tensor, so that it can travel with a generator: (2, d), the mean token and the deviations; or
(classes + n, n) with n = (1 + L) d, the mean sequence of each class and the matrix M of `whitening`.
"""

from __future__ import annotations

import torch

from osfl.ingredients.statistics.gaussians import SMALL, whitening

FEW = 10  # sequences beyond one of each class, under which nothing is whitened


def standard_space(tokens: torch.Tensor) -> torch.Tensor:
    """Every dimension of the tokens (n, 1 + L, d) has mean 0 and variance 1, whatever its position."""
    return torch.stack([tokens.mean((0, 1)), tokens.std((0, 1)).nan_to_num(1.0).clamp_min(SMALL)])


def white_space(tokens: torch.Tensor, labels: torch.Tensor, classes: int) -> torch.Tensor:
    """Every class has mean 0, and a sequence about the identity as covariance, over all positions together.

    There a Gaussian with independent coordinates already describes what a full covariance does, and a generator has only to
    learn what differs from that. A class that the client lacks has the mean 0; nothing is drawn of it. Of too few sequences no
    covariance can be estimated, and what is drawn would be those very sequences: then this is the standard space.
    """
    rows = tokens.flatten(1)
    if len(rows) - len(set(labels.tolist())) < FEW:
        center, scale = standard_space(tokens).repeat(1, tokens.shape[1])
        return torch.cat([center.expand(classes, -1), scale.diag()])
    means = torch.stack([rows[labels == c].mean(0) for c in range(classes)]).nan_to_num(0.0)
    return torch.cat([means, whitening(rows - means[labels]).float()])


def into_space(tokens: torch.Tensor, labels: torch.Tensor, space: torch.Tensor) -> torch.Tensor:
    if len(space) == 2:
        return (tokens - space[0]) / space[1]
    means, matrix = _parts(space)
    off = (tokens.flatten(1) - means[labels]).double()
    z: torch.Tensor = off @ torch.linalg.inv(matrix.double())
    return z.float().view(tokens.shape)


def out_of_space(z: torch.Tensor, labels: torch.Tensor, space: torch.Tensor) -> torch.Tensor:
    if len(space) == 2:
        return z * space[1] + space[0]
    means, matrix = _parts(space)
    return (z.flatten(1) @ matrix + means[labels]).view(z.shape)


def _parts(space: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    classes = len(space) - space.shape[1]
    return space[:classes], space[classes:]
