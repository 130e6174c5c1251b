"""Choosing and weighing members."""

import torch

from osfl.methods.fol.selection import Candidate, Vote, accuracy, best, simplex_weights


def members(count: int, n: int = 40, classes: int = 4, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    rng = torch.Generator().manual_seed(seed)
    labels = torch.randint(classes, (n,), generator=rng)
    right = torch.nn.functional.one_hot(labels, classes).float()
    return 2 * right + 2 * torch.randn(count, n, classes, generator=rng), labels


def ensemble_loss(weights: torch.Tensor, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """CE of the weighted sum, written out once more."""
    return torch.nn.functional.cross_entropy((weights[:, None, None] * logits).sum(0), labels)


def test_ties_go_to_the_more_alike_then_to_the_name_in_any_order() -> None:
    a, b, c, d = (Candidate("a", 0.8, 0.1), Candidate("b", 0.8, 0.7), Candidate("c", 0.9, -0.5), Candidate("d", 0.8, 0.7))
    assert best([a, b, c, d], 3) == best([d, c, b, a], 3) == [c, b, d]
    assert best([a, b, c, d], 1) == [c]
    assert best([a], 3) == [a]


def test_accuracy_counts_right_answers() -> None:
    assert accuracy(torch.eye(3), torch.tensor([0, 1, 0])) == 2 / 3


def test_weights_are_on_the_simplex_and_no_member_is_better_alone() -> None:
    for seed in range(8):
        logits, labels = members(4, seed=seed)
        weights = simplex_weights(logits, labels)
        assert bool((weights >= 0).all()) and abs(float(weights.sum()) - 1) < 1e-9
        alone = [float(ensemble_loss(v, logits.double(), labels)) for v in torch.eye(4, dtype=torch.float64)]
        assert float(ensemble_loss(weights, logits.double(), labels)) <= min(alone)


def test_weights_are_optimal_among_three_members() -> None:
    logits, labels = members(3, seed=3)
    found = float(ensemble_loss(simplex_weights(logits, labels), logits.double(), labels))
    grid = [(i / 50, j / 50) for i in range(51) for j in range(51 - i)]
    tried = [float(ensemble_loss(torch.tensor([a, b, 1 - a - b]).double(), logits.double(), labels)) for a, b in grid]
    assert found <= min(tried) + 1e-6
    assert found < min(tried[0], tried[50], tried[-1])  # mixing does help here


def test_one_member_has_all_the_weight_and_a_useless_one_none() -> None:
    logits, labels = members(1)
    assert simplex_weights(logits, labels).tolist() == [1.0]
    right = 5 * torch.nn.functional.one_hot(labels, 4).float()
    assert simplex_weights(torch.stack([right, -right]), labels).tolist() == [1.0, 0.0]


def test_copies_of_a_member_change_nothing() -> None:
    logits, labels = members(1)
    twice = logits.repeat(2, 1, 1).double()
    assert torch.allclose(
        ensemble_loss(simplex_weights(twice, labels), twice, labels),
        ensemble_loss(torch.ones(1).double(), logits.double(), labels),
    )


def test_the_slope_is_that_of_the_loss() -> None:
    logits, labels = members(3)
    vote = Vote(logits.double(), labels, 0.7)
    weights = torch.tensor([0.2, 0.5, 0.3], dtype=torch.float64, requires_grad=True)
    (expected,) = torch.autograd.grad(vote.loss(weights), weights)
    assert torch.allclose(vote.slope(weights.detach()), expected)


def test_evenness_leads_from_the_best_weights_to_equal_ones() -> None:
    logits, labels = members(3, seed=3)
    spreads = [float(simplex_weights(logits, labels, rho).std()) for rho in (0.0, 1.0, 10.0, 1e4)]
    assert spreads == sorted(spreads, reverse=True) and spreads[0] > 0.05
    assert torch.allclose(simplex_weights(logits, labels, 1e4), torch.full((3,), 1 / 3, dtype=torch.float64), atol=1e-3)
