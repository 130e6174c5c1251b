"""OneSum's random convolutions against a plain computation, patch by patch, and on a grid that makes sums exact."""

from __future__ import annotations

import math
from itertools import pairwise

import numpy as np
import pytest
import torch

from osfl.core.seeds import torch_generator
from osfl.ingredients.statistics.gaussians import folded_statistics, statistics, unpacked
from osfl.ingredients.statistics.public_map import LEVELS, color_basis, cosine_basis
from osfl.methods.onesum.features import (
    RandomConvolutions,
    RandomMap,
    cell_means,
    draw_filters,
    on_grid,
    patch_means,
)

SMALL = RandomMap(filters=2, thumbnail=0)


def pixels(n: int, channels: int, height: int, width: int) -> torch.Tensor:
    """Images in [-1, 1], as uint8 pixels become them."""
    images = torch.randint(0, 256, (n, channels, height, width), generator=torch_generator(0, "pixels", n, channels, height))
    return images.float() / 127.5 - 1


def network(channels: int, settings: RandomMap = SMALL, bound: float = 8.0) -> RandomConvolutions:
    filters = draw_filters(settings.filters * settings.scales, channels, torch_generator(0, "filters", channels))
    return RandomConvolutions(filters, settings, bound)


def plain(x: np.ndarray, filters: np.ndarray) -> np.ndarray:
    """The two rectified maps of one image, patch by patch, averaged over 3 x 3 equal cells."""
    height, width = x.shape[1:]
    h = np.zeros((len(filters), height - 4, width - 4))
    for top in range(height - 4):
        for left in range(width - 4):
            patch = x[:, top : top + 5, left : left + 5]
            h[:, top, left] = (filters * patch).sum((1, 2, 3)) / math.sqrt(patch.var() + 0.01)
    maps = np.concatenate([np.maximum(h - 0.5, 0), np.maximum(-h - 0.5, 0)])
    cell_h, cell_w = (height - 4) // 3, (width - 4) // 3
    pooled: np.ndarray = maps.reshape(len(maps), 3, cell_h, 3, cell_w).mean((2, 4))
    return pooled.ravel()


@pytest.mark.parametrize("channels", [1, 3])
def test_features_are_those_of_the_formula(channels: int) -> None:
    x, net = pixels(2, channels, 13, 10), network(channels)
    found = net(x)
    for image, row in zip(x.double().numpy(), found.numpy(), strict=True):
        expected = plain(image, net.get_buffer("filters").numpy())
        assert np.abs(row - expected).max() <= 0.5 * 8 / LEVELS + 1e-12


def test_the_thumbnail_is_the_mean_of_pixels_and_comes_last() -> None:
    x = pixels(2, 3, 14, 14)
    found = network(3, RandomMap(filters=2, thumbnail=7))(x)[:, -147:].reshape(2, 3, 7, 7)
    assert torch.allclose(found, x.double().reshape(2, 3, 7, 2, 7, 2).mean((3, 5)), atol=8 / LEVELS)


def test_bases_are_orthonormal() -> None:
    for basis in (cosine_basis(5), cosine_basis(2), color_basis(3), color_basis(1)):
        assert torch.allclose(basis @ basis.T, torch.eye(len(basis), dtype=torch.float64), atol=1e-12)
    assert torch.allclose(color_basis(3)[0], torch.full((3,), 3**-0.5, dtype=torch.float64))


@pytest.mark.parametrize(("mean_color", "color"), [(1.0, 25 * 4 / 24), (0.0, 4.0)])
def test_filters_have_unit_norm_no_mean_and_twice_the_color(mean_color: float, color: float) -> None:
    """`color`: energy beside that of brightness; 25 coefficients of twice the size against 24, or 24 against 24."""
    filters = draw_filters(2000, 3, torch_generator(0, "many"), mean_color)
    assert torch.allclose(filters.flatten(1).norm(dim=1), torch.ones(2000, dtype=torch.float64), atol=1e-4)
    assert float(filters.flatten(1).sum(1).abs().max()) < 1e-3
    energy = torch.einsum("fcyx,kc->fkyx", filters, color_basis(3)).square().sum((2, 3)).mean(0)
    assert 0.95 * color < float(energy[1] / energy[0]) < 1.05 * color
    assert float(draw_filters(200, 1, torch_generator(0, "gray")).flatten(1).sum(1).abs().max()) < 1e-3


@pytest.mark.parametrize(("mean_color", "seeing"), [(0.0, 0), (0.25, 2), (0.5, 4), (1.0, 8)])
def test_a_share_of_the_filters_sees_the_mean_color(mean_color: float, seeing: int) -> None:
    red = torch.tensor([1.0, -1.0, 0.0], dtype=torch.float64)[:, None, None]
    filters = draw_filters(8, 3, torch_generator(0, "some"), mean_color)
    found = ((filters * red).sum((1, 2, 3)).abs() > 1e-3).nonzero().flatten().tolist()
    assert len(found) == seeing and all(b - a == 8 // seeing for a, b in pairwise(found))
    gray = torch_generator(0, "gray")
    assert torch.equal(draw_filters(8, 1, gray, mean_color), draw_filters(8, 1, torch_generator(0, "gray"), 1.0))


def test_brightness_and_contrast_hardly_matter_where_there_is_contrast() -> None:
    x, net = pixels(4, 3, 13, 13), network(3)
    assert torch.allclose(net(0.5 * x + 0.2), net(x), atol=0.05)
    assert float(net(torch.full((1, 3, 13, 13), 0.3)).abs().max()) == 0  # a constant image has no contrast


def test_an_image_has_the_same_bits_alone_and_among_others() -> None:
    x, net = pixels(37, 3, 28, 28), network(3, RandomMap(filters=8))
    whole = net(x)
    assert torch.equal(whole, torch.cat([net(part) for part in torch.split(x, 5)]))
    assert torch.equal(whole[3:4], net(x[3:4]))


def test_features_lie_on_the_grid_and_their_sums_are_exact() -> None:
    found = network(3, RandomMap(filters=8))(pixels(50, 3, 28, 28)) * (LEVELS / 8)
    assert torch.equal(found, found.round()) and float(found.abs().max()) <= LEVELS
    gram = found.T @ found
    order = torch.randperm(50, generator=torch_generator(0, "order"))
    assert torch.equal(gram, sum((part.T @ part for part in found[order].split(7)), torch.zeros_like(gram)))
    exact = found.long().numpy().astype(object)
    assert gram[3, 40].item() == int((exact[:, 3] * exact[:, 40]).sum())


def test_the_grid_rounds_and_clips() -> None:
    step = 8 / LEVELS
    found = on_grid(torch.tensor([0.4 * step, 0.6 * step, -0.6 * step, 9.0, -100.0]), 8.0)
    assert found.tolist() == [0.0, step, -step, 8.0, -8.0]
    assert torch.equal(on_grid(found, 8.0), found)


@pytest.mark.parametrize("image", [(1, 8, 8), (3, 28, 28), (3, 5, 9), (1, 200, 120), (2, 64, 64)])
@pytest.mark.parametrize("scales", [1, 3])
def test_any_size_and_number_of_channels(image: tuple[int, int, int], scales: int) -> None:
    settings = RandomMap(filters=2, scales=scales)
    found = network(image[0], settings)(pixels(2, *image))
    assert found.shape == (2, settings.width_for(image[0])) and bool(found.isfinite().all())


def test_large_images_are_reduced_and_small_ones_stay() -> None:
    settings = RandomMap(scales=2, side=32)
    assert settings.sides(28, 28) == [(28, 28), (28, 28)]
    assert settings.sides(200, 100) == [(32, 16), (64, 32)]
    assert settings.sides(48, 48) == [(32, 32), (48, 48)]
    assert RandomMap().width_for(3) == 1299 and RandomMap(thumbnail=0).width_for(3) == 1152
    assert RandomMap().described((3, 28, 28)) != RandomMap(side=16).described((3, 28, 28))


def test_folded_sums_of_whole_numbers_are_those_of_a_plain_product() -> None:
    rng = torch_generator(0, "folded")
    x, y = torch.randint(-LEVELS, LEVELS, (50, 7), generator=rng).double(), torch.randint(0, 3, (50,), generator=rng)
    folded, plain = folded_statistics(x, y, 4), statistics(x, y, 4)
    assert torch.equal(unpacked(folded.gram), plain.gram) and torch.equal(plain.gram, x.T @ x)
    assert torch.equal(folded.sums, plain.sums) and folded.counts.tolist() == plain.counts.tolist()


@pytest.mark.parametrize(("height", "width"), [(24, 24), (9, 7), (1, 4)])
def test_cells_and_patches_are_those_of_pooling(height: int, width: int) -> None:
    maps = torch.rand(2, 3, height, width, dtype=torch.float64, generator=torch_generator(0, "maps", height, width))
    expected = torch.nn.functional.adaptive_avg_pool2d(maps, 3).flatten(2)
    assert torch.allclose(maps.flatten(2) @ cell_means(height, width).T, expected, atol=1e-14)
    wide = torch.rand(2, 1, height + 4, width + 4, dtype=torch.float64, generator=torch_generator(0, "wide", height, width))
    found = patch_means(height + 4) @ wide[:, 0] @ patch_means(width + 4).T
    assert torch.allclose(found, torch.nn.functional.avg_pool2d(wide, 5, stride=1)[:, 0], atol=1e-14)
