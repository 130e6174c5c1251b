"""Gaussians in feature space: sufficient statistics with a classifier in closed form (FedCGS), and mixtures (FedPFT)."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

import torch
from scipy.linalg.lapack import dpotrf

from osfl.core.types import Probed
from osfl.ingredients.statistics.kmeans import kmeans
from osfl.ingredients.statistics.support import effective_images, supported_directions
from osfl.runtime.meter import spend

Covariance = Literal["total", "within"]
Shape = Literal["diag", "spherical", "full"]
NEVER = -1e9  # logit of a class that nobody has; finite, because an infinite number would be refused on the wire
SMALL = 1e-4  # the least deviation that features are divided by
ON = 10  # samples that a direction of a full covariance rests on at least
FLOOR = 1e-6  # of variances: below 6e-8 a 16-bit float is zero
_BLOCK = 64  # rows of a triangle that are mirrored at a time: a block and its mirror stay in the processor's cache


# --- statistics that add up --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Statistics:
    """Sums over samples, in float64. Adding two is the same as taking them of both sets: any partition gives one total."""

    sums: torch.Tensor  # A_c = sum of x, (classes, d)
    gram: torch.Tensor  # B = sum of x x^T, (d, d)
    counts: torch.Tensor  # n_c, (classes,)

    def __add__(self, other: Statistics) -> Statistics:
        return Statistics(self.sums + other.sums, self.gram + other.gram, self.counts + other.counts)

    def means(self) -> torch.Tensor:
        """mu_c, (classes, d); zeros where there is nothing. Counts may be fractions, where the weight of a site was capped."""
        return self.sums / torch.where(self.counts > 0, self.counts, 1.0)[:, None]

    def __mul__(self, factor: float) -> Statistics:
        return self if factor == 1 else Statistics(self.sums * factor, self.gram * factor, self.counts * factor)

    def __sub__(self, other: Statistics) -> Statistics:
        return Statistics(self.sums - other.sums, self.gram - other.gram, self.counts - other.counts)


def statistics(features: torch.Tensor, labels: torch.Tensor, classes: int, chunk: int = 4096) -> Statistics:
    """Of features (n, d), computed where they are, and given on the CPU; in chunks, so that memory does not grow with n.

    An image is in the sums of its class, or of each of its classes where labels are (n, classes) of 0 and 1.
    """
    d, device = features.shape[1], features.device
    sums = torch.zeros(classes, d, dtype=torch.float64, device=device)
    gram = torch.zeros(d, d, dtype=torch.float64, device=device)
    for x, y in zip(torch.split(features, chunk), torch.split(labels.to(device), chunk), strict=True):
        wide = x.double()
        _add_to(sums, y, wide)
        gram.addmm_(wide.T, wide)
    spend(2.0 * len(features) * d * d)
    return Statistics(sums.cpu(), gram.cpu(), _counted(labels, classes))


def _add_to(sums: torch.Tensor, labels: torch.Tensor, wide: torch.Tensor) -> torch.Tensor:
    """Each row of features to the sums of its class, or of all its classes where labels are (n, classes) of 0 and 1."""
    return sums.index_add_(0, labels, wide) if labels.ndim == 1 else sums.addmm_(labels.T.double(), wide)


def _counted(labels: torch.Tensor, classes: int) -> torch.Tensor:
    return (torch.bincount(labels, minlength=classes) if labels.ndim == 1 else labels.sum(0)).double()


def folded_statistics(features: torch.Tensor, labels: torch.Tensor, classes: int) -> Statistics:
    """The same with the gram folded, as `packed` does it: half the memory of partial sums.

    A symmetric rank-n update (numpy calls BLAS' syrk where both factors are one matrix) takes seven tenths of the time. Its
    bits differ from a product's, unless features are whole numbers, whose sums are exact.
    """
    if features.device.type != "cpu":  # numpy knows no other
        whole = statistics(features, labels, classes)
        return Statistics(whole.sums, packed(whole.gram), whole.counts)
    wide = features.double()
    square = wide.numpy()
    spend(1.0 * len(features) * square.shape[1] ** 2)
    sums = _add_to(torch.zeros(classes, square.shape[1], dtype=torch.float64), labels, wide)
    return Statistics(sums, packed(torch.from_numpy(square.T @ square)), _counted(labels, classes))


def linear_classifier(total: Statistics, covariance: Covariance, ridge: float) -> tuple[torch.Tensor, torch.Tensor]:
    """W (classes, d) and b (classes,) of the Gaussian classifier with one covariance for all classes; nothing is trained.

    w_c = S^-1 mu_c, b_c = -mu_c^T S^-1 mu_c / 2 + ln(n_c / N). S is the covariance of all samples ("total", as the public
    code has it) or within classes ("within", linear discriminant analysis); ridge * tr(S)/d is added on its diagonal.
    Means are taken from the overall mean, which shifts all logits of a sample alike and keeps them small.
    """
    n, d = float(total.counts.sum()), total.gram.shape[0]
    present = total.counts > 0
    means, mean = total.means(), total.sums.sum(0) / n
    if covariance == "total":
        spread = (total.gram - n * torch.outer(mean, mean)) / max(n - 1, 1)
    else:
        spread = (total.gram - (means * total.counts[:, None]).T @ means) / max(n - float(present.sum()), 1)
    spread = (spread + spread.T) / 2
    spread.diagonal().add_(ridge * float(spread.trace()) / d)
    off = means - mean
    weight = solved(spread, off.T).T
    bias = -weight @ mean - 0.5 * (weight * off).sum(1) + (total.counts / n).clamp_min(1e-300).log()
    spend(d**3 / 3.0)
    weight = torch.where(present[:, None], weight, torch.zeros_like(weight))
    return weight, torch.where(present, bias, torch.full_like(bias, NEVER))


def solved(matrix: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """S^-1 right; where S is singular (fewer samples than dimensions and no ridge) the solution of least norm."""
    factor, failed = torch.linalg.cholesky_ex(matrix)
    if int(failed) == 0:
        return torch.cholesky_solve(right, factor)
    found: torch.Tensor = torch.linalg.pinv(matrix, hermitian=True) @ right
    return found


def probed_means(total: Statistics) -> Probed:
    """What sums say about their classes: the means, and how much samples differ within classes. The gram may be folded."""
    present = total.counts > 0
    if not bool(present.any()):
        return Probed(tuple(total.counts.tolist()))
    means, n = total.means()[present], total.counts[present]
    variance = (_diagonal(total.gram) - (n[:, None] * means.square()).sum(0)) / n.sum()
    return Probed(tuple(total.counts.tolist()), None, means, present.nonzero().flatten(), variance.clamp_min(0))


def _diagonal(gram: torch.Tensor) -> torch.Tensor:
    if gram.ndim == 2:
        return gram.diagonal()
    d = (math.isqrt(8 * len(gram) + 1) - 1) // 2
    steps = torch.arange(d, 0, -1)  # row i of the triangle begins with its diagonal and has d - i entries
    return gram[steps.cumsum(0) - steps]


def packed(symmetric: torch.Tensor) -> torch.Tensor:
    """The upper triangle of (..., d, d) as (..., d (d + 1) / 2): all values of a symmetric matrix."""
    return torch.cat([row[..., i:] for i, row in enumerate(symmetric.unbind(-2))], -1)


def unpacked(triangle: torch.Tensor) -> torch.Tensor:
    """The symmetric matrices (..., d, d) whose upper triangle this is."""
    whole = upper_triangle(triangle)
    for start in range(0, whole.shape[-1], _BLOCK):
        end = start + _BLOCK
        rows, own = whole[..., start:end, end:], whole[..., start:end, start:end]
        whole[..., end:, start:end] = rows.mT
        own += own.triu(1).mT
    return whole


def upper_triangle(triangle: torch.Tensor) -> torch.Tensor:
    """The same with zeros below the diagonal."""
    d = (math.isqrt(8 * triangle.shape[-1] + 1) - 1) // 2
    where = torch.ones(d, d, dtype=torch.bool, device=triangle.device).triu_()
    return triangle.new_zeros(*triangle.shape[:-1], d, d).masked_scatter_(where, triangle)


def positive_semidefinite(upper: torch.Tensor, slack: float) -> bool:
    """Whether a symmetric matrix is, once `slack` is added to its diagonal; the upper triangle alone is read, and overwritten.

    By LAPACK in the matrix's own memory, which takes two thirds of the time of torch's factor.
    """
    upper.diagonal().add_(slack)
    return not dpotrf(upper.numpy().T, lower=True, clean=False, overwrite_a=True)[1]


def summed(parts: Iterable[Statistics]) -> Statistics:
    """One after the other: no more than two are in memory."""
    total: Statistics | None = None
    for part in parts:
        total = part if total is None else total + part
    assert total is not None
    return total


# --- a space in which a covariance is the identity ---------------------------------------------------------------------------


def shrunk_covariance(off: torch.Tensor) -> torch.Tensor:
    """Covariance of centered rows (n, d), drawn to a multiple of the identity by as much as Ledoit and Wolf (2004) compute.

    The weight is b^2 / d^2: how far single samples are from their mean covariance, over how far that is from the target.
    """
    n, d = off.shape
    plain = off.T @ off / n
    target = torch.eye(d, dtype=off.dtype) * (plain.trace() / d)
    apart = (plain - target).square().sum()
    noise = (off.square().sum(1).square().sum() / n - plain.square().sum()) / n
    weight = float((noise / apart).clamp(0, 1)) if float(apart) > 0 else 1.0
    return (1 - weight) * plain + weight * target


def whitening(off: torch.Tensor) -> torch.Tensor:
    """M (d, d) such that centered rows times M^-1 have about the identity as covariance; float64.

    M = S^1/2 diag(s): s are the deviations, S is the shrunk covariance of rows / s. The symmetric root is the one that
    turns nothing, so each coordinate stays what it was.
    """
    wide = off.double()
    scale = wide.square().mean(0).sqrt().clamp_min(SMALL)
    return _root(shrunk_covariance(wide / scale)) * scale


# --- mixtures --------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class FeatureMixture:
    """K Gaussians: weights (K,), means (K, d) and variances: (K, d) diag, (K,) spherical, (K, d, d) full."""

    weights: torch.Tensor
    means: torch.Tensor
    spread: torch.Tensor

    def sample(self, count: int, rng: torch.Generator) -> torch.Tensor:
        """(count, d)"""
        which = torch.multinomial(self.weights, count, replacement=True, generator=rng)
        noise = torch.randn((count, self.means.shape[1]), generator=rng, dtype=self.means.dtype)
        if self.spread.ndim == 3:
            roots = _root(self.spread)
            spend(2.0 * noise.numel() * self.means.shape[1], makes=count)
            off = torch.empty_like(noise)
            for k in range(len(self.weights)):
                off[which == k] = noise[which == k] @ roots[k]
        else:
            deviation = self.spread.sqrt()
            spend(2.0 * noise.numel(), makes=count)
            off = noise * (deviation[which] if self.spread.ndim == 2 else deviation[which, None])
        return self.means[which] + off

    def directions(self, most: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The mean (1, d) and the first principal directions (k, d) of a mixture with full covariances: at most so many, and
        half of all, as an attacker who knows the number of samples would take them. By orthogonal iteration."""
        mean = self.weights @ self.means / self.weights.sum()
        off = self.means - mean
        whole = (self.weights[:, None, None] * self.spread).sum(0) + (off * self.weights[:, None]).T @ off
        d = len(mean)
        basis = torch.randn((d, max(1, min(most, d // 2))), generator=torch.Generator().manual_seed(0), dtype=whole.dtype)
        for _ in range(3):
            basis = torch.linalg.qr(whole @ basis).Q
        spend(6.0 * d * d * basis.shape[1])
        return mean[None], basis.T


def _root(spread: torch.Tensor) -> torch.Tensor:
    """The symmetric square root. As 16-bit floats a covariance of few samples is not quite positive definite any more, so
    what is below the floor of variances is lifted there."""
    values, vectors = torch.linalg.eigh(spread)
    root: torch.Tensor = (vectors * values.clamp_min(FLOOR).sqrt().unsqueeze(-2)) @ vectors.transpose(-1, -2)
    return root


def components_for(count: int, most: int) -> int:
    """A class of few images gets fewer Gaussians, never none (the public code drops such classes)."""
    return max(1, min(most, count // 10))


PRIOR = 10.0  # samples' worth of belief that a full covariance is that within components


def fit_supported(
    x: torch.Tensor, k: int, rng: torch.Generator, *, least: int, tolerance: float = 1e-3, iterations: int = 200
) -> FeatureMixture:
    """At most k Gaussians with full covariances that may be sent: n samples lie exactly in the n - 1 principal directions of
    their covariance, from which each of them could be computed.

    The mixture is fitted in principal directions that rest on enough samples (`supported_directions`; on ten, or `least` if
    that is more), each covariance drawn to the one within components; all other directions share one variance.
    """
    mean = x.double().mean(0)
    off = x.double() - mean
    basis = supported_directions(off, off.shape[1], max(least, ON), len(off))
    points = off @ basis.T
    rest = (float(off.square().sum()) - float(points.square().sum())) / len(off) / max(off.shape[1] - len(basis), 1)
    outside = torch.eye(off.shape[1], dtype=off.dtype, device=off.device) - basis.T @ basis
    found = FeatureMixture(points.new_ones(1), points.new_zeros(1, len(basis)), points.new_zeros(1, len(basis), len(basis)))
    if len(basis):
        found = fit_mixture(points, k, "full", rng, least=least, tolerance=tolerance, iterations=iterations, prior=PRIOR)
    spread = basis.T @ found.spread @ basis + max(rest, FLOOR) * outside
    return FeatureMixture(found.weights, mean + found.means @ basis, spread)


def fit_mixture(
    x: torch.Tensor,
    k: int,
    shape: Shape,
    rng: torch.Generator,
    *,
    least: int = 1,
    tolerance: float = 1e-3,
    iterations: int = 200,
    prior: float = 0.0,
) -> FeatureMixture:
    """At most k Gaussians for features (n, d), fitted anew with fewer until each rests on at least `least` samples. `prior`:
    so many samples' worth of belief that a full covariance is the one within components."""
    while True:
        found, owned = _fitted(x, k, shape, rng, tolerance, iterations, prior)
        rests_on = torch.minimum(effective_images(owned.T, len(x)), owned.sum(1))
        enough = int((rests_on >= least - 1e-6).sum())
        if least <= 1 or k == 1 or enough == k:
            return found
        k = max(1, min(enough, k - 1))


def _fitted(
    x: torch.Tensor, k: int, shape: Shape, rng: torch.Generator, tolerance: float, iterations: int, prior: float
) -> tuple[FeatureMixture, torch.Tensor]:
    """Expectation maximization from a k-means start, on features (n, d) in float64; variances are at least FLOOR. Also the
    shares (K, n) of the samples that the components were computed from.

    Sums and densities are matrix products with x and its squares side by side (see `_powers`), so no (n, K, d) array is made.
    Shares lie by component, (K, n): products with so few rows are twice as fast as with so few columns.
    """
    center = x.double().mean(0)
    x = x.double() - center  # products of centered numbers lose fewer digits
    start = torch.nn.functional.one_hot(torch.tensor(kmeans(x.cpu(), k, rng, starts=1)), k).T.double()
    powers, owned = _powers(x, shape), start.to(x.device)
    before = -math.inf
    for _ in range(iterations):
        used = owned
        weights, means, spread = _maximized(powers, owned, shape, prior)
        logs = _log_density(powers, means, spread).add_(weights.log()[:, None])
        spend(4.0 * powers.numel() * k * (x.shape[1] if shape == "full" else 1))
        total = logs.logsumexp(0)
        likelihood, owned = float(total.mean()), logs.sub_(total).exp_()
        if abs(likelihood - before) < tolerance:
            break
        before = likelihood
    return FeatureMixture(weights, means + center, spread), used


def _powers(x: torch.Tensor, shape: Shape) -> torch.Tensor:
    """All that EM asks of samples (n, d): [x, x^2] for diag, [x, |x|^2] for spherical, x for full."""
    if shape == "full":
        return x
    return torch.cat([x, x.square() if shape == "diag" else x.square().sum(1, keepdim=True)], 1)


def _maximized(
    powers: torch.Tensor, owned: torch.Tensor, shape: Shape, prior: float = 0.0
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Weights, means and variances of samples that the components own in these shares, (K, n)."""
    mass = owned.sum(1).clamp_min(1e-10)
    weights, averages = mass / mass.sum(), owned @ powers / mass[:, None]
    if shape == "full":
        offs = (powers - mean for mean in averages)
        spread = torch.stack([(off * w[:, None]).T @ off / m for off, w, m in zip(offs, owned, mass, strict=True)])
        if prior:
            within = (spread * weights[:, None, None]).sum(0)
            spread = (spread * mass[:, None, None] + prior * within) / (mass + prior)[:, None, None]
        spread.diagonal(dim1=1, dim2=2).add_(FLOOR)
        return weights, averages, spread
    if shape == "diag":
        means, squares = averages.tensor_split(2, 1)
        return weights, means, (squares - means.square()).clamp_min(FLOOR)
    means, lengths = averages[:, :-1], averages[:, -1]
    return weights, means, ((lengths - means.square().sum(1)) / means.shape[1]).clamp_min(FLOOR)


def _log_density(powers: torch.Tensor, means: torch.Tensor, spread: torch.Tensor) -> torch.Tensor:
    """log N(x; mean_k, spread_k), (K, n)."""
    d = means.shape[1]
    if spread.ndim == 3:
        factors = torch.linalg.cholesky(spread)
        white = torch.stack(
            [
                torch.linalg.solve_triangular(factor.mT, powers - mean, upper=True, left=False).square_().sum(1)
                for factor, mean in zip(factors, means, strict=True)
            ]
        )
        logdet = 2 * factors.diagonal(dim1=1, dim2=2).log().sum(1)
        whole: torch.Tensor = -0.5 * (white + (logdet + d * math.log(2 * math.pi))[:, None])
        return whole
    inverse = 1 / (spread if spread.ndim == 2 else spread[:, None])
    logdet = -inverse.log().sum(1) * (d / inverse.shape[1])
    constant = -0.5 * ((means.square() * inverse).sum(1) + logdet + d * math.log(2 * math.pi))
    return torch.addmm(constant[:, None], torch.cat([means * inverse, -0.5 * inverse], 1), powers.T)
