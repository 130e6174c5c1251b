"""The bound on Gaussian toy factories, where both sides can be computed."""

from __future__ import annotations

import math

import pytest
import torch

from osfl.evaluation.bound import excess_risk_bound, generative_error, label_divergence, principal_axes
from tests.evaluation.divergence import gaussian_divergence

FLOAT = torch.float64
# Three clients with a class each: share, real (mean, deviation), generator (mean, deviation).
SILOS = [(0.5, (-2.0, 1.0), (-1.5, 1.2)), (0.3, (0.5, 0.8), (0.6, 0.7)), (0.2, (3.0, 1.5), (2.0, 1.5))]
LINE = torch.linspace(-15, 15, 30001, dtype=FLOAT)
STEP = float(LINE[1] - LINE[0])


def density(mean: float, deviation: float) -> torch.Tensor:
    return torch.exp(-0.5 * ((LINE - mean) / deviation) ** 2) / (deviation * math.sqrt(2 * math.pi))


def joints() -> tuple[torch.Tensor, torch.Tensor]:
    """p(x, y) on the line, rows = classes: of real images, and of generated ones."""
    return (
        torch.stack([share * density(*real) for share, real, _ in SILOS]),
        torch.stack([share * density(*made) for share, _, made in SILOS]),
    )


def exact_errors() -> list[float]:
    def moments(pair: tuple[float, float]) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.tensor([pair[0]], dtype=FLOAT), torch.tensor([[pair[1] ** 2]], dtype=FLOAT)

    return [gaussian_divergence(*moments(real), *moments(made)) for _, real, made in SILOS]


def test_errors_of_disjoint_classes_add_up_to_the_error_of_the_union() -> None:
    real, made = joints()
    union = float((real * (real.clamp_min(1e-300) / made.clamp_min(1e-300)).log()).sum() * STEP)
    assert union == pytest.approx(sum(s[0] * e for s, e in zip(SILOS, exact_errors(), strict=True)), rel=1e-6)


def test_the_excess_risk_of_the_best_synthetic_classifier_is_below_the_bound() -> None:
    real, made = joints()
    risk_best = 1 - float(real.max(0).values.sum() * STEP)
    risk_synthetic = 1 - float(real.gather(0, made.argmax(0)[None]).sum() * STEP)
    bound = excess_risk_bound([s[0] for s in SILOS], exact_errors())
    assert 0 < risk_synthetic - risk_best <= bound < 1
    assert bound == pytest.approx(2 * math.sqrt(0.5 * sum(s[0] * e for s, e in zip(SILOS, exact_errors(), strict=True))))


def test_the_bound_estimated_from_samples_comes_close_to_the_exact_one() -> None:
    rng = torch.Generator().manual_seed(0)

    def sample(pair: tuple[float, float]) -> torch.Tensor:
        return torch.randn(20000, 1, generator=rng, dtype=FLOAT) * pair[1] + pair[0]

    drawn = [(sample(real), sample(made)) for _, real, made in SILOS]
    axes = principal_axes(torch.cat([real for real, _ in drawn]), 1)
    errors = [generative_error(real, made, axes) for real, made in drawn]
    assert errors == pytest.approx(exact_errors(), abs=0.02)
    found = [error for error in errors if error is not None]
    assert excess_risk_bound([s[0] for s in SILOS], found) == pytest.approx(
        excess_risk_bound([s[0] for s in SILOS], exact_errors()), rel=0.03
    )


def test_few_samples_give_no_error_and_a_constant_generator_an_infinite_one() -> None:
    rng = torch.Generator().manual_seed(0)
    real, axes = torch.randn(100, 12, generator=rng, dtype=FLOAT), torch.eye(12, dtype=FLOAT)[:, :8]
    assert generative_error(real, real[:23], axes) is None
    assert generative_error(real, torch.ones(100, 12, dtype=FLOAT), axes) == math.inf
    almost = torch.full((100, 12), 0.1, dtype=FLOAT) + 1e-12 * real  # what rounding leaves of a constant
    assert generative_error(real, almost, axes) == math.inf


def test_chance_does_not_add_up_to_an_error() -> None:
    assert excess_risk_bound([0.5, 0.5], [-0.1, 0.05]) == 0
    assert excess_risk_bound([1.0], [0.5], loss=3) == pytest.approx(3)


def test_axes_follow_the_largest_spread() -> None:
    x = torch.tensor([[0.0, 9.0, 0.1], [0.0, -9.0, 0.0], [1.0, 0.0, 0.1], [-1.0, 0.0, 0.0]], dtype=FLOAT)
    axes = principal_axes(x, 1)
    assert axes.shape == (3, 1) and abs(float(axes[1, 0])) == pytest.approx(1, abs=1e-3)
    few, many = (principal_axes(torch.cat([x] * copies)[:, [0, 1, 2, 0, 1]], 2) for copies in (1, 2))
    assert torch.allclose(few @ few.T, many @ many.T, atol=1e-9)  # both ways of computing them


def test_a_balanced_pool_of_unbalanced_classes() -> None:
    assert label_divergence([10, 30], [5, 15]) == pytest.approx(0)
    assert label_divergence([10, 30], [20, 20]) == pytest.approx(0.25 * math.log(0.5) + 0.75 * math.log(1.5))
    assert label_divergence([10, 30, 0], [20, 20, 7]) is not None
    assert label_divergence([10, 30], [0, 20]) is None
