"""The public feature map of private rounds: whitened by images of nobody, and never longer than the norm."""

from __future__ import annotations

import pytest
import torch

from osfl.core.seeds import torch_generator
from osfl.ingredients.statistics.public_map import LEVELS, Projected, clipped, projection, public_images


@pytest.mark.parametrize("image", [(1, 8, 8), (3, 28, 28), (3, 20, 31)])
def test_public_images_come_from_the_seed_alone_and_fall_off_with_frequency(image: tuple[int, int, int]) -> None:
    one, again, other = (public_images(16, image, torch_generator(seed, "public")) for seed in (0, 0, 1))
    assert torch.equal(one, again)
    assert not torch.equal(one, other)
    assert (one.dtype, tuple(one.shape)) == (torch.uint8, (32, *image))
    power = torch.fft.rfft2(one.double() - one.double().mean((-2, -1), keepdim=True)).abs().square().mean((0, 1))
    assert float(power[1, 1]) > 4 * float(power[image[1] // 2, image[2] // 2])


def test_the_projection_whitens() -> None:
    rng = torch.Generator().manual_seed(0)
    features = torch.randn(500, 12, generator=rng, dtype=torch.float64) @ torch.diag(torch.linspace(5, 1, 12).double()) + 3
    mean, basis = projection(features, 4)
    found = (features - mean) @ basis
    covariance = found.T @ found / len(found)
    assert torch.allclose(covariance, torch.eye(4, dtype=torch.float64) / 4, atol=1e-3)
    assert torch.allclose(found.mean(0), torch.zeros(4, dtype=torch.float64), atol=1e-9)
    assert bool((basis.gather(0, basis.abs().argmax(0, keepdim=True)) > 0).all())  # signs are not up to the processor


@pytest.mark.parametrize("norm", [0.1, 1.0, 2.5])
def test_no_row_is_longer_than_the_norm_in_whole_steps(norm: float) -> None:
    rng = torch.Generator().manual_seed(1)
    rows = torch.cat([torch.randn(2000, 7, generator=rng, dtype=torch.float64) * scale for scale in (1e-3, 1, 1e6)])
    rows = torch.cat([rows, torch.eye(7, dtype=torch.float64) * norm, -torch.eye(7, dtype=torch.float64) * 9])
    steps = clipped(rows, norm) / (norm / LEVELS)
    whole = steps.round()
    assert torch.allclose(steps, whole, rtol=1e-14, atol=0)
    assert float(whole.square().sum(1).max()) <= LEVELS**2
    long = rows.norm(dim=1) > norm
    assert float(whole[long].norm(dim=1).min()) > LEVELS - 8  # shortened to the norm, not beyond
    short = ~long
    assert torch.allclose(clipped(rows, norm)[short], rows[short], atol=norm / LEVELS)


def test_features_are_centered_projected_and_shortened() -> None:
    public = Projected(torch.tensor([1.0, 2.0]).double(), torch.tensor([[2.0], [0.0]]).double(), 1.0)
    assert public(torch.tensor([[1.25, 9.0], [7.0, 2.0]])).flatten().tolist() == [0.5, 1.0]
