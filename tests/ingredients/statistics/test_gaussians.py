"""Sums that add up whatever the partition, a classifier in closed form, and mixtures with known moments."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from sklearn.discriminant_analysis import LinearDiscriminantAnalysis
from sklearn.mixture import GaussianMixture

from osfl.core.seeds import torch_generator
from osfl.ingredients.statistics.gaussians import (
    NEVER,
    FeatureMixture,
    Statistics,
    components_for,
    fit_mixture,
    fit_supported,
    linear_classifier,
    packed,
    positive_semidefinite,
    solved,
    statistics,
    summed,
    unpacked,
    upper_triangle,
)


def samples(n: int = 300, d: int = 5, classes: int = 4) -> tuple[torch.Tensor, torch.Tensor]:
    rng = torch_generator(0, "samples", n, d)
    labels = torch.randint(classes, (n,), generator=rng)
    centers = 2 * torch.randn(classes, d, generator=rng, dtype=torch.float64)
    return centers[labels] + torch.randn(n, d, generator=rng, dtype=torch.float64), labels


def cut(x: torch.Tensor, y: torch.Tensor, parts: int, seed: int) -> list[Statistics]:
    order = torch.randperm(len(x), generator=torch_generator(seed, "cut"))
    return [statistics(x[index], y[index], 4) for index in torch.tensor_split(order, parts)]


@pytest.mark.parametrize("d", [1, 63, 64, 65, 130])
@pytest.mark.parametrize("dtype", [torch.float64, torch.int64])
@pytest.mark.parametrize("before", [(), (2, 3)], ids=str)
def test_a_triangle_is_folded_and_unfolded_to_the_bit(d: int, dtype: torch.dtype, before: tuple[int, ...]) -> None:
    """Beside the indices of the triangle, one number after the other; sizes around a block."""
    square = torch.randint(-(2**40), 2**40, (*before, d, d), generator=torch_generator(0, "square", d)).to(dtype)
    symmetric, (row, column) = square + square.mT, torch.triu_indices(d, d).unbind()
    folded = packed(symmetric)
    assert torch.equal(folded, symmetric[..., row, column]) and folded.dtype == dtype
    assert torch.equal(unpacked(folded), symmetric) and torch.equal(upper_triangle(folded), symmetric.triu())


def test_a_matrix_is_positive_semidefinite_by_its_upper_triangle() -> None:
    x = torch.randn(20, 30, generator=torch_generator(0, "few"), dtype=torch.float64)  # fewer rows than columns: some zeros
    gram = x.T @ x
    assert positive_semidefinite(gram.triu(), 1e-9)
    vector = torch.linalg.svd(x, full_matrices=True).Vh[-1]  # x has nothing in this direction
    worse = gram - 1e-6 * torch.outer(vector, vector)
    assert not positive_semidefinite(worse.triu(), 1e-9) and positive_semidefinite(worse.triu(), 1e-5)


@pytest.mark.parametrize("parts", [1, 2, 7, 300])
def test_any_partition_gives_the_same_sums(parts: int) -> None:
    x, y = samples()
    whole, found = statistics(x, y, 4), summed(cut(x, y, parts, parts))
    for name in ("sums", "gram", "counts"):
        assert torch.allclose(getattr(whole, name), getattr(found, name), atol=1e-10)
    integers = (x * 8).round()  # exact where numbers are integers
    assert torch.equal(statistics(integers, y, 4).gram, summed(cut(integers, y, parts, parts)).gram)


def test_the_classifier_does_not_depend_on_the_partition() -> None:
    x, y = samples()
    one = linear_classifier(statistics(x, y, 4), "total", 1e-4)
    for seed in range(3):
        other = linear_classifier(summed(cut(x, y, 5, seed)), "total", 1e-4)
        assert all(torch.allclose(a, b, atol=1e-9) for a, b in zip(one, other, strict=True))


def test_removing_a_client_is_subtracting() -> None:
    x, y = samples()
    parts = cut(x, y, 3, 0)
    without = summed(parts) - parts[1]
    assert torch.allclose(without.gram, (parts[0] + parts[2]).gram, atol=1e-10)


def test_within_classes_it_is_linear_discriminant_analysis() -> None:
    x, y = samples()
    weight, bias = linear_classifier(statistics(x, y, 4), "within", 0.0)
    theirs = LinearDiscriminantAnalysis(solver="lsqr").fit(x.numpy(), y.numpy())
    assert np.array_equal((x @ weight.T + bias).argmax(1).numpy(), theirs.predict(x.numpy()))


@pytest.mark.parametrize("covariance", ["total", "within"])
def test_answers_are_the_same_in_any_coordinates(covariance: str) -> None:
    x, y = samples()
    turn = torch.randn(5, 5, generator=torch_generator(1, "turn"), dtype=torch.float64)
    answers = []
    for z in (x, x @ turn + 3):
        weight, bias = linear_classifier(statistics(z, y, 4), covariance, 0.0)  # type: ignore[arg-type]
        answers.append((z @ weight.T + bias).argmax(1))
    assert torch.equal(*answers)


def test_an_absent_class_is_never_predicted() -> None:
    x, y = samples()
    weight, bias = linear_classifier(statistics(x[y != 2], y[y != 2], 4), "total", 1e-4)
    assert float(bias[2]) == NEVER and not bool(weight[2].any())
    assert 2 not in (100 * x @ weight.T + bias).argmax(1).tolist()


def test_fewer_samples_than_dimensions() -> None:
    x, y = samples(6, 40)
    for ridge in (0.0, 1e-4):
        weight, bias = linear_classifier(statistics(x, y, 4), "total", ridge)
        assert bool(weight.isfinite().all()) and bool(bias.isfinite().all())


def test_a_symmetric_matrix_travels_as_its_triangle() -> None:
    gram = statistics(*samples(), 4).gram
    gram = (gram + gram.T) / 2
    assert packed(gram).shape == (15,) and torch.equal(unpacked(packed(gram)), gram)


# --- mixtures --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", ["diag", "spherical", "full"])
def test_one_component_is_mean_and_variance(shape: str) -> None:
    x = samples()[0]
    found = fit_mixture(x, 1, shape, torch_generator(0, "fit"))  # type: ignore[arg-type]
    assert torch.allclose(found.means[0], x.mean(0), atol=1e-9)
    whole = torch.cov(x.T, correction=0)
    expected = {"diag": whole.diagonal(), "spherical": whole.diagonal().mean(), "full": whole}[shape]
    assert torch.allclose(found.spread[0], expected, atol=2e-6)


@pytest.mark.parametrize("shape", ["diag", "spherical", "full"])
def test_mixtures_are_as_likely_as_those_of_scikit_learn(shape: str) -> None:
    x = samples(600, 4, 3)[0]
    ours = fit_mixture(x, 3, shape, torch_generator(0, "fit"), tolerance=1e-6)  # type: ignore[arg-type]
    theirs = GaussianMixture(3, covariance_type=shape, random_state=0, tol=1e-6, max_iter=200).fit(x.numpy())
    kept = GaussianMixture(3, covariance_type=shape)
    kept.weights_, kept.means_, kept.covariances_ = ours.weights.numpy(), ours.means.numpy(), ours.spread.numpy()
    from sklearn.mixture._gaussian_mixture import _compute_precision_cholesky

    kept.precisions_cholesky_ = _compute_precision_cholesky(kept.covariances_, shape)
    assert kept.score(x.numpy()) > theirs.score(x.numpy()) - 0.05


@pytest.mark.parametrize("shape", ["diag", "spherical", "full"])
def test_samples_have_the_moments_of_the_mixture(shape: str) -> None:
    x = samples(400, 3, 2)[0]
    found = fit_mixture(x, 2, shape, torch_generator(0, "fit"))  # type: ignore[arg-type]
    drawn = found.sample(40_000, torch_generator(0, "draw"))
    assert torch.allclose(drawn.mean(0), x.mean(0), atol=0.06)
    if shape == "full":
        assert torch.allclose(torch.cov(drawn.T), torch.cov(x.T), atol=0.15)


def test_a_covariance_of_few_samples_survives_the_wire() -> None:
    x = samples(15, 16)[0]
    found = fit_mixture(x, 1, "full", torch_generator(0, "fit"))
    weights, means, spread = (part.half().double() for part in (found.weights, found.means, packed(found.spread)))
    assert float(torch.linalg.eigvalsh(unpacked(spread)).min()) < 0  # rounding has made it indefinite
    drawn = FeatureMixture(weights, means, unpacked(spread)).sample(40_000, torch_generator(0, "draw"))
    assert torch.allclose(torch.cov(drawn.T), torch.cov(x.T, correction=0), atol=0.2)


def test_supported_covariances_have_few_directions_and_the_same_variance() -> None:
    """Of 40 samples in 30 dimensions at most eight directions stand out; the trace is that of the samples."""
    x = samples(40, 30, 1)[0]
    found = fit_supported(x, 2, torch_generator(0, "fit"), least=3)
    values = torch.linalg.eigvalsh(found.spread[0]).flip(0)
    assert int(((values / values.median() - 1).abs() > 1e-3).sum()) <= 8 and float(values[-1]) > 0.01
    whole = (found.weights[:, None, None] * found.spread).sum(0).trace() + float(
        (found.weights * (found.means - found.weights @ found.means).square().sum(1)).sum()
    )
    assert float(whole) == pytest.approx(float(torch.cov(x.T, correction=0).trace()), rel=0.01)
    tiny = fit_supported(x[:4], 1, torch_generator(0, "fit"), least=3)  # no direction rests on ten
    assert torch.allclose(tiny.spread[0], tiny.spread[0, 0, 0] * torch.eye(30, dtype=torch.float64))


def test_directions_are_the_first_principal_ones() -> None:
    x = samples(300, 12, 3)[0] * torch.linspace(4, 0.2, 12)
    found = fit_mixture(x, 2, "full", torch_generator(0, "fit"))
    mean, directions = found.directions(3)
    expected = torch.linalg.eigh(torch.cov(x.T, correction=0))[1].flip(1)[:, :3]
    assert torch.allclose(mean[0], x.mean(0), atol=1e-6) and directions.shape == (3, 12)
    assert float(torch.linalg.svdvals(directions @ expected).min()) > 0.99


def test_small_classes_have_fewer_components() -> None:
    assert [components_for(n, 20) for n in (1, 2, 19, 20, 500)] == [1, 1, 1, 2, 20]
    one = fit_mixture(torch.ones(1, 3), 1, "diag", torch_generator(0, "one"))
    assert bool(one.sample(5, torch_generator(0, "draw")).isfinite().all())


def test_a_singular_matrix_gives_the_solution_of_least_norm() -> None:
    right = torch.tensor([[4.0], [0.0]], dtype=torch.float64)
    for second, wanted in ((0.0, 2.0), (1.0, 2.0)):
        found = solved(torch.tensor([[2.0, 0.0], [0.0, second]], dtype=torch.float64), right)
        assert found.flatten().tolist() == pytest.approx([wanted, 0.0])
