"""OneSum's classifiers in closed form, from class sums A_c, counts n_c and second moments G; nothing is trained.

N = sum n_c, mu = sum A_c / N, s^2 = diag(G) / N - mu^2, m_c = A_c / n_c, M_c = (m_c - mu) / s,
S_w = (G / N - sum_c (n_c / N) m_c m_c^T) / (s s^T).
lda: l_c(x) = w_c^T (x - mu) / s - w_c^T M_c / 2 with w_c = (S_w + lambda I)^-1 M_c. ridge: the regression of one-hot labels
(AFL). qda: a covariance for each class, drawn to S_w. The class prior is not in l_c; `Head.prior` has it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields

import torch
from torch import nn
from torch.nn import functional

from osfl.ingredients.statistics.gaussians import NEVER, SMALL, Statistics
from osfl.ingredients.statistics.shrinkage import Curve, generalized_cross_validation
from osfl.runtime.meter import spend


@dataclass(frozen=True)
class Moments:
    """What the totals say about features in units of their deviation; float64."""

    images: float  # N
    shares: torch.Tensor  # n_c / N, (classes,)
    mean: torch.Tensor  # mu, (d,)
    scale: torch.Tensor  # s, (d,)
    means: torch.Tensor  # M_c, (classes, d); zeros for a class that nobody has
    within: torch.Tensor  # S_w, (d, d)

    @property
    def between(self) -> torch.Tensor:
        """sum_c (n_c / N) M_c M_c^T: total covariance = within + between."""
        return (self.means * self.shares[:, None]).T @ self.means

    def curve(self) -> Curve:
        """GCV of the ridge regression on standardized features; B = (A / N - (n / N) mu^T) / s."""
        cross = self.means * self.shares[:, None]
        return generalized_cross_validation(self.within + self.between, cross, self.shares, self.images)


def moments(total: Statistics) -> Moments:
    """Of the sums of all sites."""
    images = float(total.counts.sum())
    shares, mean, means = total.counts / images, total.sums.sum(0) / images, total.means()
    scale = (total.gram.diagonal() / images - mean.square()).clamp_min(0).sqrt().clamp_min(SMALL)
    within = total.gram / images - (means * shares[:, None]).T @ means
    standard = torch.where(shares[:, None] > 0, (means - mean) / scale, torch.zeros_like(means))
    within = within / scale / scale[:, None]
    return Moments(images, shares, mean, scale, standard, (within + within.T) / 2)


@dataclass(frozen=True)
class Head:
    """A finished classifier on features: temperature * l_c(x) + prior_c. All tensors in float64."""

    weight: torch.Tensor  # (classes, d), on features as they are
    bias: torch.Tensor  # (classes,)
    prior: torch.Tensor  # (classes,), log of the classes' shares, or zeros; NEVER for a class that nobody has
    temperature: torch.Tensor  # (1,)
    factors: torch.Tensor | None = None  # qda: (classes, d, d), whose squares the quadratic part is

    def tensors(self) -> dict[str, torch.Tensor]:
        named = {f"head/{one.name}": getattr(self, one.name) for one in fields(self)}
        return {name: value for name, value in named.items() if value is not None}


def head_of(tensors: Mapping[str, torch.Tensor]) -> Head:
    return Head(**{one.name: tensors[f"head/{one.name}"] for one in fields(Head) if f"head/{one.name}" in tensors})


def log_prior(shares: torch.Tensor) -> torch.Tensor:
    """ln(n_c / N); finite for a class that nobody has, because an infinite number would be refused on the wire."""
    return torch.where(shares > 0, shares.clamp_min(1e-300).log(), torch.full_like(shares, NEVER))


def lda(found: Moments, shrinkage: float) -> Head:
    """Gaussian classes with one covariance."""
    weight = _solve(found.within, shrinkage, found.means.T).T
    return _linear(found, weight, -0.5 * (weight * found.means).sum(1), log_prior(found.shares))


def ridge(found: Moments, shrinkage: float) -> Head:
    """Ridge regression of one-hot labels with an intercept (analytic federated learning); its prior is in the scores."""
    cross = found.means * found.shares[:, None]
    weight = _solve(found.within + found.between, shrinkage, cross.T).T
    prior = torch.where(found.shares > 0, torch.zeros_like(found.shares), torch.full_like(found.shares, NEVER))
    return _linear(found, weight, found.shares, prior)


def qda(found: Moments, grams: torch.Tensor, total: Statistics, shrinkage: float) -> Head:
    """Gaussian classes with covariances of their own, C_c = (n_c S_c + d S_w) / (n_c + d) + lambda I: a class of few images
    keeps what all classes have in common. `grams` are the classes' second moments, (classes, d, d)."""
    d = len(found.mean)
    weights, biases, factors = [], [], []
    for c, count in enumerate(total.counts.tolist()):
        mean = found.means[c]
        covariance = found.within
        if count > 0:
            raw = grams[c] / count - torch.outer(total.sums[c], total.sums[c]) / count**2
            own = raw / found.scale / found.scale[:, None]
            covariance = (count * (own + own.T) / 2 + d * found.within) / (count + d)
        inverse = torch.cholesky_inverse(torch.linalg.cholesky(covariance + shrinkage * torch.eye(d, dtype=torch.float64)))
        root = torch.linalg.cholesky(inverse)  # inverse = root root^T
        weights.append(inverse @ mean)
        biases.append(-0.5 * mean @ inverse @ mean + root.diagonal().log().sum())
        factors.append(root / found.scale[:, None])
        spend(2.0 * d**3)
    shift = torch.stack([found.mean @ factor for factor in factors])  # the quadratic part is of x - mu, too
    head = _linear(found, torch.stack(weights), torch.stack(biases), log_prior(found.shares))
    # -|(x - mu) F|^2 / 2 = -|x F|^2 / 2 + (x F) . (mu F) - |mu F|^2 / 2
    weight = head.weight + torch.stack([factor @ moved for factor, moved in zip(factors, shift, strict=True)])
    bias = head.bias - 0.5 * shift.square().sum(1)
    return Head(weight, bias, head.prior, head.temperature, torch.stack(factors))


def _solve(covariance: torch.Tensor, shrinkage: float, right: torch.Tensor) -> torch.Tensor:
    """(S + lambda I)^-1 right; of least norm where that is singular."""
    matrix = covariance + shrinkage * torch.eye(len(covariance), dtype=covariance.dtype)
    spend(len(matrix) ** 3 / 3.0)
    factor, failed = torch.linalg.cholesky_ex(matrix)
    if int(failed) == 0:
        return torch.cholesky_solve(right, factor)
    found: torch.Tensor = torch.linalg.pinv(matrix, hermitian=True) @ right
    return found


def _linear(found: Moments, weight: torch.Tensor, bias: torch.Tensor, prior: torch.Tensor) -> Head:
    """Weights on standardized features as weights on features."""
    weight = weight / found.scale
    return Head(weight, bias - weight @ found.mean, prior, torch.ones(1, dtype=torch.float64))


class Classifier(nn.Module):
    """Features in, one logit a class out."""

    def __init__(self, head: Head) -> None:
        super().__init__()
        for one in fields(head):
            self.register_buffer(one.name, getattr(head, one.name))

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        x = features.double()
        scores = functional.linear(x, self.get_buffer("weight"), self.get_buffer("bias"))
        if self.factors is not None:
            scores = scores - 0.5 * torch.einsum("nd,cde->nce", x, self.get_buffer("factors")).square().sum(-1)
        return (self.get_buffer("temperature") * scores + self.get_buffer("prior")).float()
