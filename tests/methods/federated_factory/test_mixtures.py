"""A mixture in the space of principal components: moments, groups, small classes."""

from dataclasses import replace

import pytest
import torch

from osfl.methods.federated_factory.factories import factory_for
from osfl.methods.federated_factory.mixtures import _mixture, supported_mixture
from tests.methods.federated_factory.conftest import TASK, TINY, pictures, quiet, rng


def test_a_mixture_of_one_component_has_the_moments_of_its_class() -> None:
    settings = replace(TINY, factory="mixture", mixture_components=1, mixture_prior=1e-9, mixture_dims=64)
    images = torch.randint(90, 160, (200, 1, 8, 8), generator=rng(), dtype=torch.uint8)
    factory = factory_for(settings, TASK)
    tensors = factory.fit(images, rng(), quiet)
    x = images.flatten(1).double() / 127.5 - 1
    assert torch.allclose(tensors["mean"][0].double(), x.mean(0), atol=1e-6)
    scale, basis = tensors["scales"][0].double(), tensors["basis"].double()
    covariance = basis.T @ scale @ scale.T @ basis
    assert torch.allclose(covariance, torch.cov(x.T, correction=0), atol=1e-4)
    made = factory.sample(tensors, 4000, rng(1)).flatten(1).double() / 127.5 - 1
    assert torch.allclose(made.mean(0), x.mean(0), atol=0.02)
    assert torch.allclose(made.std(0), x.std(0), rtol=0.1)


def test_copies_of_an_image_add_nothing() -> None:
    factory, images = factory_for(replace(TINY, factory="mixture"), TASK), pictures(30)
    one, other = (factory.fit(part, rng(), quiet) for part in (images, torch.cat([images, images[:20], images[:3]])))
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_a_component_of_few_images_is_fitted_again_with_fewer() -> None:
    """Nineteen points and one far away: two components would be those and it, so there is one. Two true groups stay two."""
    settings = replace(TINY, mixture_components=2, mixture_prior=1e-3, least=3)
    near = 0.1 * torch.randn((19, 2), generator=rng(), dtype=torch.float64)
    single = torch.cat([near, torch.full((1, 2), 50.0, dtype=torch.float64)])
    assert len(supported_mixture(single, settings, 20, rng(1))[0]) == 1
    apart = torch.cat([near, near + 50.0])
    weights, centers, _ = supported_mixture(apart, settings, 38, rng(1))
    assert sorted(weights.tolist()) == pytest.approx([0.5, 0.5]) and float((centers[0] - centers[1]).abs().min()) > 45


def test_a_mixture_finds_two_groups() -> None:
    images = torch.cat([pictures(50), 255 - pictures(50, 7)])
    factory = factory_for(replace(TINY, factory="mixture"), TASK)
    center = factory.sample(factory.fit(images, rng(), quiet), 200, rng(1))[:, 0, 4, 4].float()
    middle = ((center > 110) & (center < 140)).float().mean()
    assert middle < 0.1 and 0.3 < float((center > 127).float().mean()) < 0.7


@pytest.mark.parametrize("prior", [1e-9, 60.0])
def test_the_belief_about_a_component_is_as_wide_as_the_class(prior: float) -> None:
    """(n V + prior V) / (n + prior) = V: of one component, however strong the belief, the class' own covariance is left."""
    settings = replace(TINY, factory="mixture", mixture_components=1, mixture_prior=prior)
    images = torch.randint(90, 160, (40, 1, 8, 8), generator=rng(), dtype=torch.uint8)
    tensors = factory_for(settings, TASK).fit(images, rng(), quiet)
    x = images.flatten(1).double() / 127.5 - 1
    scale, basis = tensors["scales"][0].double(), tensors["basis"].double()
    inside = basis @ torch.cov(x.T, correction=0) @ basis.T
    assert torch.allclose(scale @ scale.T, inside, atol=1e-5)


def test_a_mixture_ends_where_its_parts_explain_themselves() -> None:
    """Weights and centers are those of the responsibilities that they imply, for groups of unequal size and width."""
    points = torch.cat([torch.randn((400, 2), generator=rng()), 0.3 * torch.randn((100, 2), generator=rng(1)) + 1.5]).double()
    settings = replace(TINY, mixture_prior=1e-6, mixture_iterations=500)
    weights, centers, scales, _ = _mixture(points, 2, settings, rng(2))
    parts = torch.distributions.MultivariateNormal(centers, scale_tril=scales)
    owned = (weights.log() + parts.log_prob(points[:, None])).softmax(1)
    assert torch.allclose(owned.mean(0), weights, atol=0.02)
    assert torch.allclose(owned.T @ points / owned.sum(0)[:, None], centers, atol=0.05)
    small = int(weights.argmin())
    assert abs(float(weights[small]) - 0.2) < 0.06 and abs(float(centers[small].mean()) - 1.5) < 0.1


def test_small_classes_get_few_directions_and_few_components() -> None:
    """At most two directions for every `least` images, and a component for each `least` of them."""
    for n, most_directions, most_components in ((4, 0, 1), (10, 2, 1), (19, 3, 1), (20, 4, 2), (60, 6, 3)):
        images = torch.randint(0, 256, (n, 1, 8, 8), generator=rng(), dtype=torch.uint8)
        tensors = factory_for(replace(TINY, factory="mixture", least=10), TASK).fit(images, rng(), quiet)
        assert int((tensors["basis"].abs().sum(1) > 0).sum()) <= most_directions
        assert 1 <= int((tensors["weights"] > 0).sum()) <= most_components
        assert float(tensors["weights"].sum()) == pytest.approx(1)


def test_an_image_unlike_all_others_has_no_component_and_no_direction() -> None:
    """With the published recipe it had both: center and mean plus direction were that image."""
    odd = torch.full((1, 1, 8, 8), 255, dtype=torch.uint8)
    images = torch.cat([pictures(59), odd])
    factory = factory_for(replace(TINY, factory="mixture", least=10), TASK)
    tensors = factory.fit(images, rng(), quiet)
    assert torch.all(tensors["weights"][tensors["weights"] > 0] * 60 >= 10)
    x = images.flatten(1).double() / 127.5 - 1
    scores = (x - tensors["mean"].double()) @ tensors["basis"].double().T
    p = scores.square()[:, scores.abs().sum(0) > 0]
    assert p.shape[1] and torch.all(p.sum(0).square() / p.square().sum(0) >= 10)
    read = factory.readable(tensors)
    assert float((read.candidates["component"].double() - x[-1]).norm(dim=1).min()) > 2


def test_samples_of_a_component_have_its_covariance() -> None:
    factory = factory_for(replace(TINY, factory="mixture", mixture_dims=2, mixture_components=1), TASK)
    basis = torch.zeros(2, 64)
    basis[0, 0] = basis[1, 1] = 1
    scale = torch.tensor([[[0.2, 0.0], [0.1, 0.05]]])
    one = {"weights": torch.ones(1), "centers": torch.zeros(1, 2), "scales": scale}
    tensors = {"mean": torch.zeros(1, 64), "basis": basis, **one}
    made = factory.sample(tensors, 20_000, rng()).flatten(1)[:, :2].double() / 127.5 - 1
    assert torch.allclose(torch.cov(made.T), (scale[0] @ scale[0].T).double(), atol=1e-3)
