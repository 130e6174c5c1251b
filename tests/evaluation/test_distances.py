"""Distances against closed forms, and estimators against the average over everything that could have been drawn."""

from __future__ import annotations

import itertools
import math

import pytest
import torch

from osfl.evaluation.distances import estimated_divergence, frechet, kernel_distance, nearest
from tests.evaluation.divergence import gaussian_divergence

FLOAT = torch.float64


def with_moments(mean: torch.Tensor, cov: torch.Tensor, samples: int) -> torch.Tensor:
    """Points whose sample mean and covariance are exactly these."""
    rng = torch.Generator().manual_seed(samples)
    x = torch.randn(samples, len(mean), generator=rng, dtype=FLOAT)
    x = x - x.mean(0)
    root = torch.linalg.cholesky(x.T @ x / (samples - 1))
    white: torch.Tensor = torch.linalg.solve_triangular(root, x.T, upper=False).T
    shape: torch.Tensor = torch.linalg.cholesky(cov)
    return white @ shape.T + mean


def covariance(seed: int, size: int) -> torch.Tensor:
    x = torch.randn(size, 2 * size, generator=torch.Generator().manual_seed(seed), dtype=FLOAT)
    return x @ x.T / (2 * size) + 0.1 * torch.eye(size, dtype=FLOAT)


def closed_frechet(mean1: torch.Tensor, cov1: torch.Tensor, mean2: torch.Tensor, cov2: torch.Tensor) -> float:
    """By the symmetric root: tr (C1^½ C2 C1^½)^½."""
    values, vectors = torch.linalg.eigh(cov1)
    root = vectors * values.clamp_min(0).sqrt() @ vectors.T
    cross = torch.linalg.eigvalsh(root @ cov2 @ root).clamp_min(0).sqrt().sum()
    return float((mean1 - mean2).square().sum() + cov1.trace() + cov2.trace() - 2 * cross)


@pytest.mark.parametrize("samples", [7, 50])
def test_frechet_is_the_closed_form_of_gaussians(samples: int) -> None:
    mean1, mean2 = torch.arange(5, dtype=FLOAT), torch.ones(5, dtype=FLOAT)
    cov1, cov2 = covariance(1, 5), covariance(2, 5)
    found = frechet(with_moments(mean1, cov1, samples), with_moments(mean2, cov2, samples + 3))
    assert found == pytest.approx(closed_frechet(mean1, cov1, mean2, cov2), rel=1e-9)


def test_frechet_of_one_dimension_by_hand() -> None:
    a, b = torch.tensor([[0.0], [2.0]], dtype=FLOAT), torch.tensor([[3.0], [7.0]], dtype=FLOAT)  # N(1, 2), N(5, 8)
    assert frechet(a, b) == pytest.approx(16 + 2 + 8 - 2 * math.sqrt(2 * 8))


def test_frechet_with_fewer_samples_than_dimensions() -> None:
    rng = torch.Generator().manual_seed(0)
    a, b = torch.randn(6, 20, generator=rng, dtype=FLOAT), torch.randn(9, 20, generator=rng, dtype=FLOAT)
    wanted = closed_frechet(a.mean(0), torch.cov(a.T), b.mean(0), torch.cov(b.T))
    assert frechet(a, b) == pytest.approx(wanted, rel=1e-5)  # roots of zero eigenvalues blur the check, not the result
    assert frechet(a, a) == pytest.approx(0, abs=1e-9)
    assert frechet(a, a + 1) == pytest.approx(20)


def test_kernel_distance_is_unbiased() -> None:
    """Averaged over every pair of samples that two small distributions can give, it is exactly their distance."""
    first, second = torch.tensor([[0.0, 1.0], [2.0, -1.0]], dtype=FLOAT), torch.tensor([[1.0, 1.0], [0.5, 3.0]], dtype=FLOAT)

    def kernel(x: torch.Tensor, y: torch.Tensor) -> float:
        return float((x @ y / 2 + 1) ** 3)

    def mean(a: torch.Tensor, b: torch.Tensor) -> float:
        return sum(kernel(x, y) for x in a for y in b) / (len(a) * len(b))

    true = mean(first, first) + mean(second, second) - 2 * mean(first, second)
    draws = list(itertools.product(range(2), repeat=3))
    found = [kernel_distance(first[list(i)], second[list(j)]) for i in draws for j in draws]
    assert sum(found) / len(found) == pytest.approx(true, rel=1e-12)
    same = [kernel_distance(first[list(i)], first[list(j)]) for i in draws for j in draws]
    assert sum(same) / len(same) == pytest.approx(0, abs=1e-12) and min(same) < 0


def test_divergence_by_hand() -> None:
    zero, one = torch.zeros(1, dtype=FLOAT), torch.ones(1, dtype=FLOAT)
    found = gaussian_divergence(zero, torch.eye(1, dtype=FLOAT), one, 4 * torch.eye(1, dtype=FLOAT))
    assert found == pytest.approx(0.5 * (0.25 + 0.25 - 1 + math.log(4)))


def test_estimated_divergence_is_unbiased_for_gaussians() -> None:
    """With 20 samples in 3 dimensions, sample moments alone would be off by about 0.6 nats."""
    mean1, mean2 = torch.zeros(3, dtype=FLOAT), torch.tensor([0.5, 0.0, -0.3], dtype=FLOAT)
    cov1, cov2 = covariance(3, 3), covariance(4, 3)
    true = gaussian_divergence(mean1, cov1, mean2, cov2)
    rng = torch.Generator().manual_seed(0)
    roots = torch.linalg.cholesky(cov1), torch.linalg.cholesky(cov2)

    def draw(mean: torch.Tensor, root: torch.Tensor) -> torch.Tensor:
        return torch.randn(20, 3, generator=rng, dtype=FLOAT) @ root.T + mean

    pairs = [(draw(mean1, roots[0]), draw(mean2, roots[1])) for _ in range(2000)]
    found = torch.tensor([estimated_divergence(a, b) for a, b in pairs], dtype=FLOAT)
    plain = torch.tensor([gaussian_divergence(a.mean(0), torch.cov(a.T), b.mean(0), torch.cov(b.T)) for a, b in pairs])
    error = float(found.std() / len(found) ** 0.5)
    assert abs(float(found.mean()) - true) < 4 * error < 0.1
    assert float(plain.mean()) - true > 8 * error


def test_nearest_is_exact_for_copies_and_skips_itself() -> None:
    rng = torch.Generator().manual_seed(0)
    x = torch.randn(600, 4, generator=rng)
    distance, place = nearest(x[5:8], x)
    assert distance.tolist() == [0, 0, 0] and place.tolist() == [5, 6, 7]
    other, others = nearest(x, x, same=True)
    table = torch.cdist(x, x).fill_diagonal_(torch.inf)
    assert torch.allclose(other, table.min(1).values, atol=1e-4) and bool((others != torch.arange(600)).all())
