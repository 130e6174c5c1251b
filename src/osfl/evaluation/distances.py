"""Distances between two samples of features: Fréchet, kernel, Kullback-Leibler of Gaussians, nearest neighbor.

Features are float64 tensors (samples, dimensions). All are exact computations; what is estimated is what a finite sample
says about the distribution behind it, and each function says how.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

Tensor = torch.Tensor
_CHUNK = 512  # rows of a distance table that are in memory at once


def frechet(a: Tensor, b: Tensor) -> float:
    """|m1 - m2|² + tr(C1 + C2 - 2 (C1 C2)^½), the squared Fréchet distance of two Gaussians with these moments.

    With C = RᵀR, the eigenvalues of C1 C2 are the squared singular values of R1 R2ᵀ: no matrix root, and no trouble with
    covariances of fewer samples than dimensions. From few samples it is too large, even between samples of the same
    distribution; read it beside the distance of two real samples of the same size.
    """
    gap = a.mean(0) - b.mean(0)
    left, right = _root(a), _root(b)
    cross = torch.linalg.svdvals(left @ right.T).sum()
    return max(0.0, float(gap @ gap + left.square().sum() + right.square().sum() - 2 * cross))


def _root(x: Tensor) -> Tensor:
    """A matrix R with RᵀR = covariance of the rows, with as few rows as possible."""
    centered = (x - x.mean(0)) / math.sqrt(len(x) - 1)
    if len(x) <= x.shape[1]:
        return centered
    root: Tensor = torch.linalg.qr(centered, mode="r")[1]
    return root


def kernel_distance(a: Tensor, b: Tensor) -> float:
    """Squared maximum mean discrepancy with the kernel (x·y / dimensions + 1)³, by its unbiased estimator.

    Unbiased for any number of samples, so it may be negative where the two distributions are the same.
    """
    return _discrepancy(a, b, _cubic)


def gaussian_discrepancy(a: Tensor, b: Tensor, squared_width: float) -> float:
    """Squared maximum mean discrepancy with the kernel exp(-|x - y|² / squared_width), by its unbiased estimator."""
    return _discrepancy(a, b, lambda x, y: (-squared_distances(x, y) / squared_width).exp())


def median_squared_distance(x: Tensor) -> float:
    """The median over all pairs of different samples: the usual width of a Gaussian kernel. 0 if most are copies."""
    row, column = torch.triu_indices(len(x), len(x), 1).unbind()
    return float(squared_distances(x, x)[row, column].median()) if len(row) else 0.0


def squared_distances(a: Tensor, b: Tensor) -> Tensor:
    """(len(a), len(b)), never negative."""
    return (a.square().sum(1)[:, None] - 2 * a @ b.T + b.square().sum(1)).clamp_min(0)


def _discrepancy(a: Tensor, b: Tensor, kernel: Callable[[Tensor, Tensor], Tensor]) -> float:
    return float(_inside(a, kernel) + _inside(b, kernel) - 2 * kernel(a, b).mean())


def _inside(x: Tensor, kernel: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
    """The mean over pairs of different samples; a pair of a sample with itself would be the bias."""
    table = kernel(x, x)
    return (table.sum() - table.diagonal().sum()) / (len(x) * (len(x) - 1))


def _cubic(a: Tensor, b: Tensor) -> Tensor:
    table = a @ b.T / a.shape[1] + 1
    return table * table * table  # five times faster than ** 3


def estimated_divergence(a: Tensor, b: Tensor) -> float:
    """KL(A ‖ B) in nats from samples, unbiased if both are Gaussian; may be negative where they are the same.

    Putting sample moments into the closed form is too large by about (parameters / samples) nats. Known expectations
    of the Wishart distribution take that away: E[S⁻¹] = ν/(ν-d-1) C⁻¹ and E[ln|S|] = ln|C| + Σ ψ((ν+1-i)/2) + d ln(2/ν).
    """
    (n, d), m = a.shape, len(b)
    gap = b.mean(0) - a.mean(0)
    first, second = _covariance(a), _covariance(b)
    shrink = (m - 1 - d - 1) / (m - 1)
    ratio = shrink * torch.linalg.solve(second, first).trace()
    shift = shrink * (gap @ torch.linalg.solve(second, gap)) - ratio / n - d / m
    logs = torch.logdet(second) - _log_bias(m, d) - torch.logdet(first) + _log_bias(n, d)
    return float(0.5 * (ratio + shift - d + logs))


def _covariance(x: Tensor) -> Tensor:
    centered = x - x.mean(0)
    return centered.T @ centered / (len(x) - 1)


def _log_bias(samples: int, dimensions: int) -> float:
    """How far ln|S| of so many samples is from ln|C| on average."""
    freedom = samples - 1
    halves = (freedom + 1 - torch.arange(1, dimensions + 1, dtype=torch.float64)) / 2
    return float(torch.digamma(halves).sum()) + dimensions * math.log(2 / freedom)


def nearest(queries: Tensor, references: Tensor, *, same: bool = False) -> tuple[Tensor, Tensor]:
    """Euclidean distance of each query to its nearest reference, and which one; `same`: nobody is its own neighbor."""
    places = []
    for start in range(0, len(queries), _CHUNK):
        rows = queries[start : start + _CHUNK]
        table = references.square().sum(1) - 2 * rows @ references.T  # + |row|², which changes no order
        if same:
            place = torch.arange(len(rows), device=rows.device)
            table[place, start + place] = torch.inf
        places.append(table.argmin(1))
    place = torch.cat(places) if places else torch.zeros(0, dtype=torch.int64, device=queries.device)
    return (queries - references[place]).square().sum(1).sqrt(), place  # exact, also for copies
