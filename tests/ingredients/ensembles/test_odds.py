"""Classifiers as one from the classes that each knows: by hand-made numbers."""

from __future__ import annotations

import math

import pytest
import torch

from osfl.core.seeds import torch_generator
from osfl.ingredients.ensembles.ensemble import combine, weights_for
from osfl.ingredients.ensembles.odds import from_odds, odds, rebalanced, softened


def test_answers_are_freed_of_what_a_client_saw_most() -> None:
    """One client saw class a nine times as often as b, and never c: b must gain a factor of nine on a."""
    counts = torch.tensor([[90.0, 10.0, 0.0]])
    freed = rebalanced(torch.tensor([[[2.0, 1.0, 5.0]]]), counts, 1.0)[0, 0]
    assert float(freed[1] - freed[0]) == pytest.approx(1.0 - 2.0 + math.log(9.0), abs=1e-5)
    assert freed[2] < freed[:2].min() - 10
    logits = torch.randn(2, 3, 3)
    assert rebalanced(logits, torch.ones(2, 3), 0.0) is logits
    torch.testing.assert_close(rebalanced(logits, torch.ones(2, 3), 1.0).softmax(-1), logits.softmax(-1))


def test_votes_soften_to_all_that_have_seen_a_class() -> None:
    counts = torch.tensor([[16.0, 0.0, 1.0], [1.0, 81.0, 4.0]])
    assert softened(counts, 1.0) is counts
    assert softened(counts, 0.5).tolist() == [[4, 0, 1], [1, 9, 2]]
    assert softened(counts, 0.0).tolist() == [[1, 0, 1], [1, 1, 1]]


def test_odds_chain_over_classes_that_clients_share() -> None:
    """One client compares a with b, one b with c, and one knows c alone and takes everything for it."""
    votes = torch.tensor([[4.0, 4.0, 0.0], [0.0, 4.0, 4.0], [0.0, 0.0, 90.0]])
    logits = torch.tensor([[[2.0, 0.0, 9.0]], [[9.0, 1.0, 0.0]], [[0.0, 0.0, 50.0]]])
    together = from_odds(logits, votes, torch.zeros(1, 3))[0]
    assert together.argmax() == 0 and together[0] > together[1] + 0.5 and together[1] > together[2] + 0.1
    louder = from_odds(logits + torch.tensor([0.0, 0.0, 40.0]) * (votes[:, None] == 90), votes, torch.zeros(1, 3))[0]
    torch.testing.assert_close(louder, together)  # however sure the last one is


def test_odds_are_the_mean_of_logits_where_all_know_all_or_nobody_compares() -> None:
    logits = torch.randn(4, 5, 3, generator=torch_generator(0, "z"))
    mean = logits.mean(0)
    for votes in (torch.full((4, 3), 7.0), torch.eye(4)[:, :3]):
        torch.testing.assert_close(from_odds(logits, votes, mean).softmax(-1), mean.softmax(-1), rtol=1e-4, atol=1e-5)


def test_who_knows_one_class_does_not_outvote_who_can_tell() -> None:
    """Two clients tell a from b; a third has seen a hundred times as much of b, and nothing else."""
    counts = torch.tensor([[20.0, 20.0], [20.0, 20.0], [0.0, 4000.0]])
    logits = torch.tensor([[[3.0, 0.0]], [[2.0, 0.0]], [[-9.0, 9.0]]])
    assert combine(logits, "class_count", weights_for("class_count", counts)).argmax() == 1
    assert combine(logits, "odds", weights_for("odds", counts)).argmax() == 0
    torch.testing.assert_close(combine(logits, "odds", counts), odds(logits, counts))


def test_gradients_reach_whoever_answers_and_the_weights_of_who_boosts_them() -> None:
    logits = torch.randn(3, 4, 3, generator=torch_generator(0, "z")).requires_grad_()
    counts, weights = torch.tensor([[5.0, 0.0, 2.0], [1.0, 9.0, 0.0], [3.0, 3.0, 3.0]]), torch.ones(3).requires_grad_()
    odds(logits, counts, weights).square().sum().backward()
    assert logits.grad is not None and weights.grad is not None
    assert bool(logits.grad.isfinite().all()) and bool(weights.grad.isfinite().all()) and float(weights.grad.abs().max()) > 0


def test_odds_free_half_of_what_was_seen_most_and_soften_votes_to_their_roots() -> None:
    logits = torch.randn(3, 5, 3, generator=torch_generator(0, "z"))
    counts = torch.tensor([[64.0, 1.0, 0.0], [4.0, 4.0, 100.0], [0.0, 9.0, 1.0]])
    expected = from_odds(rebalanced(logits, counts, 0.5), counts.sqrt(), logits.mean(0))
    torch.testing.assert_close(odds(logits, counts), expected)


def test_what_is_stated_of_an_image_does_not_depend_on_others() -> None:
    logits, counts = torch.randn(2, 4, 3, generator=torch_generator(0, "z")), torch.tensor([[5.0, 0.0, 2.0], [1.0, 9.0, 0.0]])
    torch.testing.assert_close(rebalanced(logits, counts, 0.5)[:1, :1], rebalanced(logits[:1, :1], counts[:1], 0.5))
