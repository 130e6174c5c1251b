"""Quotas of the generative matrix and the product of experts."""

import math

import torch

from osfl.ingredients.statistics.class_counts import shares
from osfl.methods.federated_factory.cells import Cell, quotas
from osfl.methods.federated_factory.experts import product_of_experts
from tests.methods.federated_factory.conftest import rng


def cell(label: int, client: str, seen: int) -> Cell:
    return Cell(label, client, seen, {})


def test_shares_sum_exactly_and_stay_within_one() -> None:
    for seed in range(50):
        weights = torch.randint(0, 40, (7,), generator=rng(seed)).tolist()
        total = int(torch.randint(1, 500, (1,), generator=rng(seed + 99)))
        if not sum(weights):
            continue
        cut = shares(total, weights)
        assert sum(cut) == total
        assert all(abs(part - total * weight / sum(weights)) < 1 for part, weight in zip(cut, weights, strict=True))
        assert all(part == 0 for part, weight in zip(cut, weights, strict=True) if weight == 0)
    assert shares(10, [1, 1, 1]) == [4, 3, 3] and shares(5, [0, 0]) == [0, 0]


def test_quotas_are_for_cells_that_exist_and_ignore_the_order_of_arrival() -> None:
    cells = [cell(0, "a", 10), cell(0, "b", 30), cell(2, "b", 7)]
    asked = quotas(cells, 100)
    assert asked == {(0, "a"): 25, (0, "b"): 75, (2, "b"): 100}
    assert quotas(list(reversed(cells)), 100) == asked
    assert quotas(cells[:2], 100) == {(0, "a"): 25, (0, "b"): 75}  # as if class 2 had never been there
    natural = quotas(cells, 100, "empirical")
    assert sum(natural.values()) == 200 and natural[2, "b"] == 30


def test_product_of_experts() -> None:
    logits = torch.randn((4, 9, 5), generator=rng(), dtype=torch.float64)
    one = product_of_experts(logits[:1], 1e-12)
    assert torch.allclose(one, logits[0].log_softmax(-1), atol=1e-9)  # of one expert, that expert
    same = product_of_experts(logits[:1].expand(3, -1, -1), 1e-12)
    assert torch.allclose(same, (3 * logits[0].log_softmax(-1)).log_softmax(-1), atol=1e-9)
    assert torch.equal(same.argmax(-1), logits[0].argmax(-1))
    several = product_of_experts(logits, 1e-12)
    assert torch.allclose(product_of_experts(logits[[2, 0, 3, 1]], 1e-12), several, atol=1e-12)
    assert torch.allclose(several.exp().sum(-1), torch.ones(9, dtype=torch.float64))


def test_one_expert_cannot_veto() -> None:
    """Probability 0 on the true class costs at most 27.63 = -ln 1e-12, which two others can outvote."""
    sure = torch.tensor([[[0.0, 1e4]]], dtype=torch.float64)  # exp(-1e4) is 0
    others = torch.tensor([[[20.0, 0.0]]], dtype=torch.float64).expand(2, -1, -1)
    answer = product_of_experts(torch.cat([sure, others]), 1e-12)
    assert int(answer.argmax()) == 0
    worst = product_of_experts(sure.expand(6, -1, -1), 1e-12)
    assert bool(torch.isfinite(worst).all()) and float(worst.abs().max()) <= 6 * 27.632


def test_each_expert_is_clamped_before_the_sum() -> None:
    """What one expert can take is ln 1e-12, what six can take is six times that."""
    floor = -math.log(1e-12)
    sure = torch.tensor([[[0.0, 1e4]]], dtype=torch.float64)
    others = torch.tensor([[[20.0, 0.0]]], dtype=torch.float64).expand(2, -1, -1)
    first, second = product_of_experts(torch.cat([sure, others]), 1e-12)[0].tolist()
    assert math.isclose(first - second, 2 * 20 - floor, rel_tol=1e-9)
    first, second = product_of_experts(sure.expand(6, -1, -1), 1e-12)[0].tolist()
    assert math.isclose(second - first, 6 * floor, rel_tol=1e-9)


def test_the_product_is_summed_in_double() -> None:
    """A thousand experts that nearly agree: what is left over is not lost in single precision."""
    logits = torch.randn((1000, 3, 4), generator=rng()) * 5
    exact = product_of_experts(logits.double(), 1e-12)
    found = product_of_experts(logits, 1e-12)
    assert found.dtype == torch.float32 and torch.equal(found, exact.float())
