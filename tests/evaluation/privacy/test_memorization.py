"""A generator that copies is caught, however it turns its copies; one that does not is not."""

from __future__ import annotations

import pytest
import torch

from osfl.evaluation.privacy.memorization import CLEAN, COPIES, FEW, _margin, closest, verdict, views

SIDE = 12


def blobs(count: int, seed: int) -> torch.Tensor:
    """Images from a Gaussian with eight directions of variation, as uint8 (count, 1, 12, 12)."""
    fixed = torch.Generator().manual_seed(99)
    basis = torch.nn.functional.interpolate(torch.randn(1, 8, 4, 4, generator=fixed), (SIDE, SIDE), mode="bicubic")[0]
    draw = torch.randn(count, 8, generator=torch.Generator().manual_seed(seed))
    pixels = 128 + 16 * torch.einsum("nk,khw->nhw", draw, basis)
    return pixels.round().clamp(0, 255).to(torch.uint8)[:, None]


def lines(count: int, seed: int) -> torch.Tensor:
    """Images that vary in one way only, their brightness: many come close to each other by chance."""
    shade = torch.rand(count, generator=torch.Generator().manual_seed(seed)) * 200 + 20
    return (shade[:, None, None, None] * torch.linspace(0.2, 1, SIDE)).expand(-1, 1, SIDE, -1).round().to(torch.uint8)


@pytest.fixture(scope="module")
def real() -> tuple[torch.Tensor, torch.Tensor]:
    return blobs(300, seed=1), blobs(120, seed=2)


def noisy(images: torch.Tensor, deviation: float) -> torch.Tensor:
    noise = torch.randn(images.shape, generator=torch.Generator().manual_seed(5)) * deviation
    return (images.float() + noise).round().clamp(0, 255).to(torch.uint8)


def test_an_honest_gaussian_factory_is_not_accused(real: tuple[torch.Tensor, torch.Tensor]) -> None:
    found = verdict(blobs(150, seed=3), *real)
    assert found.verdict == CLEAN and found.ratio == pytest.approx(1, abs=0.15)
    assert found.copied == pytest.approx(found.floor, abs=0.03)


def test_chance_neighbors_are_reported_from_copies() -> None:
    training, held_out = lines(60, 1), lines(60, 2)
    honest = verdict(lines(150, 3), training, held_out)
    assert honest.verdict == CLEAN and honest.copied is not None and honest.copied > 0.1  # the rule alone would accuse it
    assert verdict(training, training, held_out).verdict == COPIES


@pytest.mark.parametrize("turn", range(8))
def test_copies_are_caught_even_turned(real: tuple[torch.Tensor, torch.Tensor], turn: int) -> None:
    found = verdict(views(real[0][:100])[turn], *real)
    assert found.verdict == COPIES and found.copied == 1 and found.ratio == 0


def test_noise_does_not_hide_copies(real: tuple[torch.Tensor, torch.Tensor]) -> None:
    found = verdict(noisy(real[0][:100], 4), *real)
    assert found.verdict == COPIES and found.ratio is not None and 0 < found.ratio < 0.5


def test_a_factory_that_copies_now_and_then_is_caught(real: tuple[torch.Tensor, torch.Tensor]) -> None:
    mixed = torch.cat([real[0][:15], blobs(135, seed=3)])
    found = verdict(mixed, *real)
    assert found.verdict == COPIES and found.copied == pytest.approx(0.1, abs=0.03)
    assert found.ratio is not None and found.ratio > 0.8  # the median alone would have missed it


def test_average_images_are_near_to_all_and_no_copies(real: tuple[torch.Tensor, torch.Tensor]) -> None:
    mean = real[0].float().mean(0, keepdim=True).repeat(50, 1, 1, 1).round().to(torch.uint8)
    found = verdict(noisy(mean, 1), *real)
    assert found.verdict == CLEAN and found.ratio is not None and found.ratio < 1


@pytest.mark.parametrize("counts", [(9, 300, 120), (100, 9, 120), (100, 300, 9), (0, 300, 120)])
def test_too_few_images_get_no_verdict(real: tuple[torch.Tensor, torch.Tensor], counts: tuple[int, int, int]) -> None:
    found = verdict(blobs(100, 3)[: counts[0]], real[0][: counts[1]], real[1][: counts[2]])
    assert found.verdict == FEW and found.ratio is None and found.copied is None


def test_neighbors_name_the_image_and_its_turn(real: tuple[torch.Tensor, torch.Tensor]) -> None:
    training = real[0]
    found = closest(views(training[7:9])[6], training)
    assert found.place.tolist() == [7, 8] and found.distance.tolist() == [0, 0]
    for i, query in enumerate(views(training[7:9])[6]):
        assert torch.equal(views(query[None])[int(found.turn[i])][0], training[7 + i])


def test_oblong_images_have_four_views() -> None:
    images = blobs(3, 0)[..., :8]
    assert len(views(images)) == 4 and all(view.shape == images.shape for view in views(images))
    assert closest(images.flip(-1), images).distance.tolist() == [0, 0, 0]


def test_distances_are_root_mean_squares_of_pixels_from_0_to_1() -> None:
    black, gray = torch.zeros(2, 3, 40, 40, dtype=torch.uint8), torch.full((1, 3, 40, 40), 51, dtype=torch.uint8)
    assert closest(black, gray).distance.tolist() == pytest.approx([0.2, 0.2])
    half = black.clone()
    half[..., :20] = 255
    assert float(closest(half, black[:1]).distance[0]) == pytest.approx(0.5**0.5)


def test_the_ratio_is_of_medians(real: tuple[torch.Tensor, torch.Tensor]) -> None:
    """Synthetic images over held-out ones, each to its nearest training image."""
    made = blobs(150, seed=3)
    wanted = closest(made, real[0]).distance.median() / closest(real[1], real[0]).distance.median()
    assert verdict(made, *real).ratio == pytest.approx(float(wanted))


def test_an_excess_within_chance_accuses_nobody() -> None:
    """5 points are tolerated; beyond, three standard errors of the pooled share."""
    assert _margin(0.0, 0.0, 100, 100) == 0.05
    assert _margin(0.5, 0.3, 100, 50) == pytest.approx(3 * (13 / 30 * 17 / 30 * (1 / 100 + 1 / 50)) ** 0.5)
