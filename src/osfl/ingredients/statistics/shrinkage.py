"""How much to shrink a covariance, from sums alone: generalized cross-validation of the ridge regression that they define.

Regressing the one-hot labels on the features with the penalty N lambda has the mean squared residual RSS(lambda) and
df(lambda) = sum_i e_i / (e_i + lambda) + 1 degrees of freedom (the 1 is the intercept); GCV = RSS / (1 - df / N)^2 estimates
its error on an image that was left out (Golub, Heath and Wahba, 1979). No image is needed for that, only the totals.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from osfl.ingredients.statistics.gaussians import Covariance, Statistics
from osfl.runtime.meter import spend

CANDIDATES = tuple(10.0 ** (k / 8) for k in range(-40, 17))  # 1e-5 to 100, eight a decade


@dataclass(frozen=True)
class Curve:
    """GCV over the candidates, and the eigenvalues that it was computed from."""

    candidates: torch.Tensor  # lambda, ascending, (k,)
    scores: torch.Tensor  # GCV(lambda), (k,)
    eigenvalues: torch.Tensor  # e, descending, (d,)

    @property
    def best(self) -> float:
        """The first minimum, from the largest candidate on. Where images occur twice, GCV falls again to zero as shrinkage goes
        to zero and all images are met exactly, copies included; that says nothing about new images."""
        scores = self.scores.tolist()
        place = len(scores) - 1
        while place > 0 and scores[place - 1] < scores[place]:
            place -= 1
        return float(self.candidates[place])


def generalized_cross_validation(
    covariance: torch.Tensor,
    cross: torch.Tensor,
    shares: torch.Tensor,
    images: float,
    *,
    candidates: tuple[float, ...] = CANDIDATES,
) -> Curve:
    """GCV from the total covariance (d, d), the covariance of one-hot labels with features (classes, d), the classes' shares
    (classes,) and the number of images. A candidate with as many degrees of freedom as images is not chosen.
    """
    values, vectors = torch.linalg.eigh(covariance)
    spend(9.0 * len(values) ** 3)
    values = values.clamp_min(0)
    z = (cross @ vectors).square()  # (classes, d)
    grid = torch.tensor(candidates, dtype=covariance.dtype)[:, None, None]
    inverse = 1 / (values + grid)  # (k, 1, d)
    variances = shares * (1 - shares)  # (classes,)
    residuals = variances - 2 * (z * inverse).sum(-1) + (z * values * inverse.square()).sum(-1)  # (k, classes)
    degrees = (values * inverse).sum((1, 2)) + 1
    left = 1 - degrees / images
    scores = residuals.clamp_min(0).sum(1) / left.square()
    scores = torch.where(left > 0, scores, torch.full_like(scores, torch.inf))
    return Curve(grid.flatten(), scores, values.flip(0))


def gcv_ridge(total: Statistics, covariance: Covariance) -> float:
    """The ridge of `linear_classifier` that GCV chooses, as a share of the mean variance of the covariance in use.

    Features are taken in units of their common deviation, so that candidates mean the same for every encoder.
    """
    images = float(total.counts.sum())
    mean, means, shares = total.sums.sum(0) / images, total.means(), total.counts / images
    whole = total.gram / images - torch.outer(mean, mean)
    within = total.gram / images - (means * shares[:, None]).T @ means
    unit = float(whole.trace()) / len(whole)
    cross = shares[:, None] * (means - mean)
    best = generalized_cross_validation((whole + whole.T) / (2 * unit), cross / unit**0.5, shares, images).best
    used = float((within if covariance == "within" else whole).trace())
    return best * float(whole.trace()) / max(used, 1e-300)
