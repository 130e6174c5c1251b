"""Choosing among candidate models by their answers on held-out images, and weighing the chosen ones.

The weights of an ensemble of logits minimize cross-entropy over the simplex. That is a convex problem in as many numbers as
there are members, so it is solved, not trained: projected gradient steps from the best single member, none of which goes up.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.nn import functional

from osfl.ingredients.statistics.simplex import project

STEPS = 200  # far more than it takes for a handful of members


@dataclass(frozen=True)
class Candidate:
    """A model that may join the ensemble."""

    name: str
    score: float  # accuracy on held-out images
    likeness: float  # cosine to the own model, for ties


def best(candidates: Sequence[Candidate], count: int) -> list[Candidate]:
    """The highest scores first; equal scores by likeness, then by name, so that order never matters."""
    return sorted(candidates, key=lambda c: (-c.score, -c.likeness, c.name))[:count]


def accuracy(logits: torch.Tensor, labels: torch.Tensor) -> float:
    """Share of right answers; logits (n, classes)."""
    return float((logits.argmax(-1) == labels).double().mean())


@dataclass(frozen=True)
class Vote:
    """What weights are judged by: CE of A_w = Σ_i w_i f_i, plus ρ ‖w - 1/K‖² where training images flatter a member."""

    logits: torch.Tensor  # (members, n, classes)
    labels: torch.Tensor
    evenness: float = 0.0  # ρ

    def loss(self, weights: torch.Tensor) -> torch.Tensor:
        uneven = ((weights - 1 / len(weights)) ** 2).sum()
        return functional.cross_entropy(torch.tensordot(weights, self.logits, 1), self.labels) + self.evenness * uneven

    def slope(self, weights: torch.Tensor) -> torch.Tensor:
        """∂CE/∂w_i = mean over images of ⟨softmax(A_w) - y, f_i⟩, and 2ρ (w_i - 1/K)."""
        wrong = torch.tensordot(weights, self.logits, 1).softmax(-1) - functional.one_hot(self.labels, self.logits.shape[-1])
        entropy: torch.Tensor = (wrong * self.logits).sum(-1).mean(-1)
        return entropy + 2 * self.evenness * (weights - 1 / len(weights))


def simplex_weights(logits: torch.Tensor, labels: torch.Tensor, evenness: float = 0.0) -> torch.Tensor:
    """The best weights (members,) on the simplex for logits (members, n, classes); with evenness 0, CE is never
    worse than that of the best member."""
    vote = Vote(logits.double(), labels, evenness)
    vertices = torch.eye(len(logits), dtype=torch.float64)
    losses = torch.stack([vote.loss(vertex) for vertex in vertices])
    weights, loss, step = vertices[int(losses.argmin())], losses.min(), 1.0
    for _ in range(STEPS):
        moved, step = _descend(vote, weights, loss, step)
        after = vote.loss(moved)
        if loss - after <= 1e-12 * (1 + loss):
            break
        weights, loss, step = moved, after, 2 * step
    return weights


def _descend(vote: Vote, weights: torch.Tensor, loss: torch.Tensor, step: float) -> tuple[torch.Tensor, float]:
    """One projected step, halved until it goes down by half of what its first-order model promises."""
    slope = vote.slope(weights)
    while step > 1e-12:
        moved = project(weights - step * slope)
        if vote.loss(moved) <= loss + 0.5 * (slope @ (moved - weights)):
            return moved, step
        step /= 2
    return weights, step
