"""One-vs-rest classifiers from sums: the same as computed class by class from the features, and what small sums may show."""

from __future__ import annotations

import pytest
import torch

from osfl.core.types import Task
from osfl.ingredients.statistics.gaussians import NEVER, Statistics, folded_statistics, statistics, unpacked
from osfl.ingredients.statistics.one_vs_rest import hidden_few, images_in, log_odds, rows_of, targets

TASK = Task("chest", ("a", "b", "c"), (1, 8, 8), "multilabel")


def _data(n: int = 200, d: int = 6) -> tuple[torch.Tensor, torch.Tensor]:
    rng = torch.Generator().manual_seed(3)
    labels = (torch.rand(n, 3, generator=rng) < torch.tensor([0.5, 0.3, 0.1])).long()
    features = torch.randn(n, d, generator=rng, dtype=torch.float64) * torch.arange(1, d + 1)
    features[:, :3] += 2.0 * labels
    return features, labels


def _total(x: torch.Tensor, y: torch.Tensor) -> Statistics:
    return statistics(x, targets(y), rows_of(TASK))


def test_log_odds_are_those_of_two_gaussians_a_class() -> None:
    x, y = _data()
    weight, bias, _ = log_odds(_total(x, y), shrinkage=0.01)
    scale = x.std(0, correction=0)
    for c in range(3):
        z, has = (x - x.mean(0)) / scale, y[:, c] == 1
        one, rest = z[has], z[~has]
        within = sum(part.T.cov(correction=0) * len(part) for part in (one, rest)) / len(z) + 0.01 * torch.eye(6)
        direct = torch.linalg.solve(within, one.mean(0) - rest.mean(0))
        middle = direct @ (one.mean(0) + rest.mean(0)) / 2
        expected = z @ direct - middle + (len(one) / torch.tensor(len(rest)).double()).log()
        assert torch.allclose(x @ weight[c] + bias[c], expected, atol=1e-9)


def test_cross_validation_shrinks_more_where_images_are_few() -> None:
    few, many = (log_odds(_total(*_data(n, 20)))[2] for n in (40, 2000))
    assert few > many


def test_sums_do_not_depend_on_who_holds_what() -> None:
    x, y = _data()
    x = x.round()  # whole numbers add up exactly
    parts = [_total(x[index], y[index]) for index in torch.arange(200).split(63)]
    whole, added = _total(x, y), sum(parts[1:], start=parts[0])
    assert torch.equal(whole.sums, added.sums) and torch.equal(whole.counts, added.counts)
    folded = folded_statistics(x, targets(y), 4)
    assert torch.equal(folded.sums, whole.sums) and torch.equal(unpacked(folded.gram), whole.gram)
    assert images_in(whole.counts, TASK) == 200 and torch.equal(whole.counts[:3], y.sum(0).double())
    assert torch.allclose(whole.sums[3], x.sum(0))


def test_a_class_that_nobody_or_everybody_has() -> None:
    x, y = _data()
    y[:, 1], y[:, 2] = 0, 1
    weight, bias, _ = log_odds(_total(x, y), shrinkage=0.1)
    assert bias[1] == NEVER and bias[2] == -NEVER and not weight[1:].any() and weight[0].any()


@pytest.mark.parametrize("count, seen", [(0, 0), (2, 0), (3, 3), (7, 7), (8, 10), (10, 10)])
def test_a_sum_over_few_images_is_not_sent(count: int, seen: int) -> None:
    """With fewer than three images of a class, or without it, the class's row or what it lacks of all would show them."""
    labels = torch.zeros(10, 2, dtype=torch.int64)
    labels[:count, 0] = 1
    shown = hidden_few(labels, 3)
    assert int(shown[:, 0].sum()) == seen and int(labels[:, 0].sum()) == count  # the site's own labels stay
