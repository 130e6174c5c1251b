"""OneSum's closed forms against scikit-learn and against the densities that they stand for."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy.stats import multivariate_normal
from sklearn.discriminant_analysis import LinearDiscriminantAnalysis
from sklearn.linear_model import Ridge

from osfl.core.seeds import torch_generator
from osfl.ingredients.statistics.gaussians import NEVER, Statistics, statistics
from osfl.methods.onesum.head import Classifier, Head, head_of, lda, moments, qda, ridge

CLASSES, D = 4, 6


def samples(n: int = 400) -> tuple[torch.Tensor, torch.Tensor]:
    """Gaussian classes of unequal size with a common covariance that is not the identity, away from zero."""
    rng = torch_generator(0, "head", n)
    labels = torch.multinomial(torch.tensor([0.5, 0.3, 0.15, 0.05]), n, replacement=True, generator=rng)
    centers, mix = (torch.randn(k, D, generator=rng, dtype=torch.float64) for k in (CLASSES, D))
    return 3 + centers[labels] + torch.randn(n, D, generator=rng, dtype=torch.float64) @ mix, labels


def total(x: torch.Tensor, y: torch.Tensor) -> Statistics:
    return statistics(x, y, CLASSES)


def grams(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return torch.stack([x[y == c].T @ x[y == c] for c in range(CLASSES)])


def gaps(scores: np.ndarray) -> np.ndarray:
    """Differences to the first class: what decides."""
    return np.asarray(scores[:, 1:] - scores[:, :1])


def test_moments_of_four_numbers() -> None:
    """x = 1, 3 of one class and 5, 11 of the other: mu = 5, s^2 = 14, means 2 and 8, within (1 + 1 + 9 + 9) / 4 = 5."""
    x, y = torch.tensor([[1.0], [3.0], [5.0], [11.0]]), torch.tensor([0, 0, 1, 1])
    found = moments(statistics(x, y, 3))
    assert found.images == 4 and found.shares.tolist() == [0.5, 0.5, 0.0]
    assert found.mean.item() == 5 and found.scale.item() == pytest.approx(14**0.5)
    assert found.within.item() == pytest.approx(5 / 14)
    assert found.means[:, 0].tolist() == pytest.approx([-3 / 14**0.5, 3 / 14**0.5, 0])
    assert (found.within + found.between).item() == pytest.approx(1)


def test_lda_of_four_numbers_by_hand() -> None:
    """w = (5/14 + lambda)^-1 * (+-3 / sqrt 14), with lambda = 9/14: w = +-3 / sqrt 14; l(x) = w (x - 5) / sqrt 14 - 9/28."""
    x, y = torch.tensor([[1.0], [3.0], [5.0], [11.0]]), torch.tensor([0, 0, 1, 1])
    head = lda(moments(statistics(x, y, 2)), 9 / 14)
    assert head.weight[:, 0].tolist() == pytest.approx([-3 / 14, 3 / 14])
    scores = x.double() @ head.weight.T + head.bias
    assert scores[3].tolist() == pytest.approx([-18 / 14 - 9 / 28, 18 / 14 - 9 / 28])
    assert head.prior.tolist() == pytest.approx([np.log(0.5)] * 2)


@pytest.mark.parametrize("alpha", [0.0, 0.2, 0.7])
def test_lda_is_that_of_scikit_learn(alpha: float) -> None:
    """Its (1 - a) S_w + a tr(S_w) / d I is ours times (1 - a), with lambda = a / (1 - a) tr(S_w) / d."""
    x, y = samples()
    found = moments(total(x, y))
    standard = ((x - found.mean) / found.scale).numpy()
    theirs = LinearDiscriminantAnalysis(solver="lsqr", shrinkage=alpha).fit(standard, y.numpy())
    ours = lda(found, alpha / (1 - alpha) * float(found.within.trace()) / D)
    scores = (x @ ours.weight.T + ours.bias).numpy() / (1 - alpha) + ours.prior.numpy()
    assert np.allclose(gaps(scores), gaps(theirs.decision_function(standard)), atol=1e-8)
    answers = Classifier(
        ours if alpha == 0 else Head(ours.weight / (1 - alpha), ours.bias / (1 - alpha), ours.prior, torch.ones(1))
    )
    assert (answers(x).argmax(1).numpy() == theirs.predict(standard)).all()


def test_the_curve_of_the_sums_is_gcv_of_that_ridge_regression() -> None:
    """Residuals and degrees of freedom of scikit-learn's ridge on the standardized features, images in hand."""
    x, y = samples(60)
    found = moments(total(x, y))
    standard, labels = ((x - found.mean) / found.scale).numpy(), np.eye(CLASSES)[y.numpy()]
    values = np.linalg.eigvalsh(standard.T @ standard / len(x))
    curve = found.curve()
    for candidate, score in zip(curve.candidates.tolist()[::8], curve.scores.tolist()[::8], strict=True):
        theirs = Ridge(alpha=candidate * len(x)).fit(standard, labels)
        residual = ((labels - theirs.predict(standard)) ** 2).sum() / len(x)
        degrees = (values / (values + candidate)).sum() + 1
        assert score == pytest.approx(residual / (1 - degrees / len(x)) ** 2, rel=1e-6)
    assert np.allclose(curve.eigenvalues.numpy(), values[::-1])


def test_where_images_count_alike_gcv_is_the_error_of_leaving_out_each_in_turn() -> None:
    """By brute force: as many regressions as images, each without one. Rows of a circulant matrix all have one leverage,
    and there GCV is that error exactly; elsewhere it takes the mean leverage for each."""
    n = 24
    steps = 2 * np.pi * np.outer(np.arange(n), [1, 2, 5]) / n
    x = torch.tensor(np.hstack([np.cos(steps), np.sin(steps)]) * [3, 2, 1, 3, 2, 1])
    y = torch.multinomial(torch.ones(CLASSES), n, replacement=True, generator=torch_generator(0, "circulant"))
    found = moments(total(x, y))
    standard, labels = ((x - found.mean) / found.scale).numpy(), np.eye(CLASSES)[y.numpy()]
    curve, errors = found.curve(), []
    for candidate in curve.candidates.tolist()[::8]:
        left = [np.delete(np.arange(n), i) for i in range(n)]
        fits = [Ridge(alpha=candidate * n, tol=1e-12).fit(standard[rest], labels[rest]) for rest in left]
        answers = np.vstack([fit.predict(standard[i : i + 1]) for i, fit in enumerate(fits)])
        errors.append(float(((answers - labels) ** 2).sum() / n))
    assert np.allclose(curve.scores.numpy()[::8], errors, rtol=1e-6)


@pytest.mark.parametrize("shrinkage", [1e-3, 0.3])
def test_ridge_is_that_of_scikit_learn(shrinkage: float) -> None:
    x, y = samples()
    found = moments(total(x, y))
    standard = ((x - found.mean) / found.scale).numpy()
    theirs = Ridge(alpha=shrinkage * len(x)).fit(standard, np.eye(CLASSES)[y.numpy()])
    ours = ridge(found, shrinkage)
    assert np.allclose((x @ ours.weight.T + ours.bias).numpy(), theirs.predict(standard), atol=1e-9)
    assert ours.prior.tolist() == [0] * CLASSES


def test_qda_is_the_density_of_each_class() -> None:
    x, y = samples()
    whole = total(x, y)
    found, shrinkage = moments(whole), 0.1
    head = qda(found, grams(x, y), whole, shrinkage)
    standard = ((x - found.mean) / found.scale).numpy()
    expected = np.zeros((len(x), CLASSES))
    for c in range(CLASSES):
        own = standard[y.numpy() == c]
        covariance = (len(own) * np.cov(own.T, bias=True) + D * found.within.numpy()) / (len(own) + D) + shrinkage * np.eye(D)
        expected[:, c] = multivariate_normal(own.mean(0), covariance).logpdf(standard) + np.log(len(own) / len(x))
    scores = Classifier(head)(x).double().numpy()
    assert np.allclose(gaps(scores), gaps(expected), atol=1e-3)  # logits are float32


@pytest.mark.parametrize("kind", ["lda", "ridge", "qda"])
def test_a_class_that_nobody_has_is_never_the_answer(kind: str) -> None:
    x, y = samples()
    y = torch.where(y == 1, torch.zeros_like(y), y)
    whole = total(x, y)
    found = moments(whole)
    head = qda(found, grams(x, y), whole, 0.1) if kind == "qda" else (lda if kind == "lda" else ridge)(found, 0.1)
    logits = Classifier(head)(x)
    assert bool(logits.isfinite().all()) and 1 not in logits.argmax(1).tolist() and head.prior[1].item() == NEVER


def test_more_dimensions_than_images_and_constant_features() -> None:
    x, y = samples(8)
    x = torch.cat([x, torch.full((8, 10), 2.0, dtype=torch.float64), x.repeat(1, 2)], 1)
    for shrinkage in (0.0, 0.1):
        head = lda(moments(statistics(x, y, CLASSES)), shrinkage)
        assert bool(Classifier(head)(x).isfinite().all())


def test_a_head_travels_by_name() -> None:
    x, y = samples()
    head = lda(moments(total(x, y)), 0.1)
    assert set(head.tensors()) == {"head/weight", "head/bias", "head/prior", "head/temperature"}
    again = head_of(head.tensors())
    assert torch.equal(again.weight, head.weight) and again.factors is None
    softer = Head(head.weight, head.bias, head.prior, torch.tensor([0.5], dtype=torch.float64))
    expected = 0.5 * (x @ head.weight.T + head.bias) + head.prior
    assert torch.allclose(Classifier(softer)(x).double(), expected, atol=1e-4)
