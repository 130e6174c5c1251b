"""Generalized cross-validation from sums against the hat matrix, and against leaving images out one by one."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from osfl.core.seeds import torch_generator
from osfl.ingredients.statistics.gaussians import Covariance, statistics
from osfl.ingredients.statistics.shrinkage import CANDIDATES, Curve, gcv_ridge, generalized_cross_validation

Arrays = tuple[np.ndarray, np.ndarray]


def data(n: int = 60, d: int = 12, classes: int = 3) -> Arrays:
    """Centered features, and one-hot labels that follow them with noise; classes are of unequal size."""
    rng = torch_generator(0, "gcv", n, d)
    x = torch.randn(n, d, generator=rng, dtype=torch.float64) * torch.logspace(0, -1.5, d, dtype=torch.float64)
    noise = torch.randn(n, classes, generator=rng, dtype=torch.float64)
    scores = x[:, :classes] * 2 + noise + torch.tensor([1.0, 0.5, -0.5])[:classes]
    return (x - x.mean(0)).numpy(), np.eye(classes)[scores.argmax(1).numpy()]


def curve(x: np.ndarray, y: np.ndarray, candidates: tuple[float, ...] = CANDIDATES) -> Curve:
    n = len(x)
    cross = (y - y.mean(0)).T @ x / n
    second, mixed, means = (torch.from_numpy(part) for part in (x.T @ x / n, cross, y.mean(0)))
    return generalized_cross_validation(second, mixed, means, n, candidates=candidates)


def hat(x: np.ndarray, shrinkage: float) -> np.ndarray:
    n, d = x.shape
    return np.asarray(x @ np.linalg.solve(x.T @ x + n * shrinkage * np.eye(d), x.T) + np.ones((n, n)) / n)


def test_the_curve_is_that_of_the_hat_matrix() -> None:
    x, y = data()
    grid = (1e-4, 1e-2, 0.3, 5.0)
    for shrinkage, score in zip(grid, curve(x, y, grid).scores.tolist(), strict=True):
        h = hat(x, shrinkage)
        residuals = float(((y - h @ y) ** 2).sum(1).mean())
        assert score == pytest.approx(residuals / (1 - np.trace(h) / len(x)) ** 2, rel=1e-9)


def test_it_estimates_what_leaving_images_out_one_by_one_finds() -> None:
    x, y = data()
    grid = (0.003, 0.01, 0.03, 0.1, 0.3, 1.0)
    left_out = []
    for shrinkage in grid:
        errors = []
        for i in range(len(x)):
            rest = np.arange(len(x)) != i
            mean, target = x[rest].mean(0), y[rest].mean(0)
            off = x[rest] - mean
            w = np.linalg.solve(off.T @ off + len(x) * shrinkage * np.eye(x.shape[1]), off.T @ (y[rest] - target))
            errors.append(((y[i] - target - (x[i] - mean) @ w) ** 2).sum())
        left_out.append(float(np.mean(errors)))
    found = curve(x, y, grid)
    assert np.allclose(found.scores.numpy(), left_out, rtol=0.03)
    assert found.best == grid[int(np.argmin(left_out))]


def test_as_many_degrees_of_freedom_as_images_are_never_chosen() -> None:
    """Twelve images in sixty dimensions: without shrinkage they are met exactly, and the score means nothing."""
    x, y = data(12, 60)
    found = curve(x, y, (1e-12, 0.1))
    assert found.scores[0].item() == float("inf") or found.best == 0.1
    assert found.best == 0.1


def test_images_that_occur_twice_do_not_talk_it_out_of_shrinkage() -> None:
    """Forty images in sixty dimensions, a quarter of them twice: met exactly, they make the score fall to zero."""
    x, y = data(40, 60)
    twice = np.concatenate([np.arange(40), np.arange(10)])
    x, y = x[twice] - x[twice].mean(0), y[twice]
    found = curve(x, y)
    assert found.scores[0] < 0.5 * found.scores.max() and found.scores[0] < found.scores[-1]
    assert 0.01 < found.best < 100
    place = found.candidates.tolist().index(found.best)
    assert found.scores[place] <= found.scores[place - 1] and found.scores[place] <= found.scores[place + 1]


def test_shrinkage_falls_with_the_number_of_images() -> None:
    best = []
    for n in (40, 400, 4000):
        x, y = data(n, 12)
        best.append(curve(x, y).best)
    assert best[0] > best[1] > best[2]


def test_eigenvalues_are_descending_and_candidates_wide() -> None:
    x, y = data()
    found = curve(x, y)
    assert (np.diff(found.eigenvalues.numpy()) <= 0).all() and len(found.eigenvalues) == 12
    assert min(CANDIDATES) <= 1e-5 and max(CANDIDATES) >= 100 * 0.999


@pytest.mark.parametrize("covariance", ["total", "within"])
def test_the_ridge_of_a_gaussian_classifier_is_chosen_in_common_units(covariance: Covariance) -> None:
    """What is added to the diagonal is the best lambda times the mean variance of all features, whatever their unit."""
    drawn, y = data(300, 12)
    x = torch.from_numpy(drawn) + 2
    labels = torch.from_numpy(y.argmax(1))
    total = statistics(x, labels, 3)
    found = gcv_ridge(total, covariance)
    assert gcv_ridge(statistics(1000 * x, labels, 3), covariance) == pytest.approx(found)
    centered = (x - x.mean(0)).numpy()
    unit = float((centered**2).sum(1).mean()) / 12
    best = curve(centered / unit**0.5, y).best
    used = (
        centered
        if covariance == "total"
        else np.concatenate([centered[y[:, c] == 1] - centered[y[:, c] == 1].mean(0) for c in range(3)])
    )
    assert found * float((used**2).sum(1).mean()) / 12 == pytest.approx(best * unit)


def test_an_eigenvalue_that_rounding_made_negative_is_none() -> None:
    """At a candidate of its size its inverse would be infinite."""
    cross, shares = torch.tensor([[0.2, 0.0], [-0.2, 0.0]]), torch.tensor([0.5, 0.5])
    below, none = (torch.tensor([[1.0, 0.0], [0.0, least]], dtype=torch.float64) for least in (-1e-6, 0.0))
    found, wanted = (
        generalized_cross_validation(one, cross.double(), shares.double(), 20, candidates=(1e-6, 0.1)) for one in (below, none)
    )
    assert bool(found.scores.isfinite().all())
    torch.testing.assert_close(found.scores, wanted.scores)
