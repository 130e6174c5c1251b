"""On how many images something rests, by hand."""

import pytest
import torch

from osfl.ingredients.statistics.support import effective_images


@pytest.mark.parametrize(
    ("shares", "rests_on"),
    [([1.0, 1.0, 1.0, 1.0], 4.0), ([5.0, 0.0, 0.0, 0.0], 1.0), ([2.0, 1.0, 1.0, 0.0], 16 / 6), ([0.0, 0.0, 0.0, 0.0], 0.0)],
)
def test_shares_of_images_are_added_up_and_squared(shares: list[float], rests_on: float) -> None:
    columns = torch.tensor([shares, [1.0, 1.0, 0.0, 0.0]], dtype=torch.float64).T
    assert effective_images(columns, 4).tolist() == pytest.approx([rests_on, 2.0])


def test_copies_of_an_image_are_one_image() -> None:
    """Two images and their mirrored copies: 0.5 + 0.5 of the first, 0.25 + 0.75 of the second."""
    shares = torch.tensor([[0.5], [0.25], [0.5], [0.75]], dtype=torch.float64)
    assert effective_images(shares, 2).tolist() == pytest.approx([2.0])
