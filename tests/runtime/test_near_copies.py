"""Images that differ by little noise count as one; images as different as any others do not."""

from __future__ import annotations

import pytest
import torch

from osfl.core.seeds import torch_generator
from osfl.runtime.meter import peak_memory, reset_peak_memory
from osfl.runtime.near_copies import near_copies, without_near_copies


def images(n: int, seed: int = 0) -> torch.Tensor:
    return torch.randn((n, 1, 8, 8), generator=torch_generator(seed, "images"))


def noisy(image: torch.Tensor, copies: int, noise: float) -> torch.Tensor:
    return image + noise * torch.randn((copies, *image.shape), generator=torch_generator(1, "noise"))


def test_different_images_are_no_near_copies() -> None:
    rows = images(60)
    assert near_copies(rows).tolist() == list(range(60)) and len(without_near_copies(rows[:0])) == 0
    alike = 0.3 * images(60) + images(1, 2)  # a class whose images have much in common
    assert len(without_near_copies(alike)) == 60


@pytest.mark.parametrize("noise", [0.0, 0.02, 0.15])
def test_copies_with_noise_are_one_image(noise: float) -> None:
    rows = torch.cat([images(20), noisy(images(20)[3], 30, noise)])
    assert near_copies(rows).tolist() == [*range(20), *[3] * 30]
    assert without_near_copies(rows).tolist() == list(range(20))


def test_copies_of_all_images_do_not_set_the_measure() -> None:
    """Twelve images, ten copies of each: an image's nearest other one is a copy for all of them."""
    rows = torch.cat([noisy(image, 10, 0.1) for image in images(12)])
    assert near_copies(rows).tolist() == [10 * (i // 10) for i in range(120)]


def test_near_copies_of_near_copies_are_one_group() -> None:
    """A film: each frame is near to the next, the last one far from the first."""
    step = images(1, 3)[0]
    film = torch.stack([images(1)[0] + 0.15 * i * step for i in range(8)])
    rows = torch.cat([film, images(30, 4)])
    assert near_copies(rows)[:8].tolist() == [0] * 8 and len(without_near_copies(rows)) == 31


def test_too_few_to_compare() -> None:
    one = images(1)
    assert near_copies(torch.cat([one, one])).tolist() == [0, 0] and near_copies(one.repeat(5, 1, 1, 1)).tolist() == [0] * 5
    assert near_copies(torch.cat([one, one + 0.001])).tolist() == [0, 1]  # nothing else to measure by


def test_many_are_compared_in_blocks_with_the_same_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    """Films whose frames lie in different blocks, and single images, in any order; against a table of all distances."""
    step = 0.1 * images(40, 3)
    films = torch.cat([images(40)[i] + step[i] * torch.arange(4).reshape(-1, 1, 1, 1) for i in range(40)])
    rows = torch.cat([films, images(60, 4)])[torch.randperm(220, generator=torch_generator(5, "order"))]
    whole = near_copies(rows)
    assert len(whole.unique()) == 100
    for at_once in (1, 220 * 7, 220 * 64):
        monkeypatch.setattr("osfl.runtime.near_copies._AT_ONCE", at_once)
        assert torch.equal(near_copies(rows), whole)
    links = torch.cdist(rows.flatten(1), rows.flatten(1)) < 0.2 * torch.pdist(rows.flatten(1)).median()
    expected = [min(reached(links, start)) for start in range(220)]
    assert whole.tolist() == expected


def reached(links: torch.Tensor, start: int) -> set[int]:
    found, waiting = {start}, [start]
    while waiting:
        fresh = set(links[waiting.pop()].nonzero().flatten().tolist()) - found
        found |= fresh
        waiting += fresh
    return found


def test_memory_is_bounded_where_all_are_near_copies() -> None:
    """A table of all distances of 8,000 rows takes 256 MB, and looking through its links more."""
    rows = torch.cat([noisy(image, 800, 0.05).flatten(1)[:, :16] for image in images(10)])
    reset_peak_memory()
    before = peak_memory()
    assert near_copies(rows).tolist() == [800 * (i // 800) for i in range(8_000)]
    assert peak_memory() - before < 200e6
