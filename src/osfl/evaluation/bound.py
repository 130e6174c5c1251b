"""The theory of exchanged generators as a measurement: how wrong generators are, and what that can cost a classifier.

Where clients hold disjoint classes, KL(real ‖ synthetic) = Σ π_k ε_k with ε_k = KL(p_k ‖ generator k), and a classifier that
is best for the synthetic distribution has an excess risk of at most 2M √(½ Σ π_k ε_k) for a loss between 0 and M.

For images no KL can be computed. ε is estimated with Gaussians on the first few principal components of a feature space:
what a projection leaves out can only make KL larger, and features are not Gaussian. So the figure made of such ε is an
estimate of the bound, not a bound.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from osfl.evaluation.distances import estimated_divergence

DIMENSIONS = 8  # principal components: more would need more images a class than clients have
LEAST = 3 * DIMENSIONS  # samples of each kind, below which no covariance is estimated


def excess_risk_bound(weights: Sequence[float], errors: Sequence[float], loss: float = 1.0) -> float:
    """2M √(½ Σ π ε). With the 0-1 loss M = 1, and from 1 on the bound is vacuous. Unbiased estimates of ε may be
    negative; only a negative sum counts as 0, or chance would always add up to some error."""
    total = sum(w * e for w, e in zip(weights, errors, strict=True))
    return 2 * loss * math.sqrt(max(0.0, total) / 2)


def principal_axes(features: torch.Tensor, count: int = DIMENSIONS) -> torch.Tensor:
    """The directions (dimensions, at most `count`) in which features vary most, whatever their class."""
    centered = features - features.mean(0)
    if len(features) < features.shape[1]:
        rows: torch.Tensor = torch.linalg.svd(centered, full_matrices=False)[2]  # the same, faster for few samples
        return rows[:count].T
    vectors: torch.Tensor = torch.linalg.eigh(centered.T @ centered)[1]  # by eigenvalue, the largest last
    return vectors.flip(1)[:, :count]


def generative_error(real: torch.Tensor, synthetic: torch.Tensor, axes: torch.Tensor) -> float | None:
    """Estimated KL(real ‖ synthetic) in nats along the axes; None where there are too few samples for it, infinite for a
    generator that always draws the same image."""
    if min(len(real), len(synthetic)) < max(LEAST, 3 * axes.shape[1]):
        return None
    if _least_spread(synthetic @ axes) <= 1e-9 * _least_spread(real @ axes):  # beyond what float64 can invert
        return math.inf
    found = estimated_divergence(real @ axes, synthetic @ axes)
    return found if math.isfinite(found) else math.inf


def _least_spread(x: torch.Tensor) -> float:
    """The variance in the direction in which samples vary least."""
    return float(torch.linalg.svdvals(x - x.mean(0))[-1] ** 2) / len(x)


def label_divergence(real: Sequence[int], synthetic: Sequence[int]) -> float | None:
    """KL of the shares of classes, what a balanced pool adds where real data are not balanced; None = infinite."""
    total, made = sum(real), sum(synthetic)
    if any(r and not s for r, s in zip(real, synthetic, strict=True)):
        return None
    return sum(r / total * math.log(r / total / (s / made)) for r, s in zip(real, synthetic, strict=True) if r)
