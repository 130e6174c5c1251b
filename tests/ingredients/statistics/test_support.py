"""On how many images something rests, by hand."""

import pytest
import torch

from osfl.ingredients.statistics.support import effective_images, rows_that_show


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


@pytest.mark.parametrize("copies", [1, 2, 5])
def test_near_copies_of_an_image_do_not_hide_it_in_second_moments(copies: int) -> None:
    """One image alone has the last feature; m near-copies of it have it m times, and the row shows the same image."""
    rng = torch.Generator().manual_seed(0)
    rows = torch.randn(30, 12, generator=rng, dtype=torch.float64)
    rows[:, -1] = 0
    rows[3, -1] = 2.0
    noise = 1e-3 * torch.randn(copies - 1, 12, generator=rng, dtype=torch.float64)
    many = torch.cat([rows, rows[3] + noise])
    read, shown = rows_that_show(many.T @ many, many)
    assert shown.tolist() == [3]
    torch.testing.assert_close(read[0], rows[3], atol=0.02, rtol=0)
