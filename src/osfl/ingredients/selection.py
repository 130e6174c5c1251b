"""Choosing among candidate models by their answers on held-out images, and weighing the chosen ones.

The weights of an ensemble of logits minimize cross-entropy over the simplex. That is a convex problem in as many numbers as
there are members, so it is solved, not trained: projected gradient steps from the best single member, none of which goes up.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.nn import functional

from osfl.ingredients.simplex import project

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


def ensemble_loss(weights: torch.Tensor, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """CE of A_w = Σ_i w_i f_i for logits (members, n, classes)."""
    return functional.cross_entropy(torch.tensordot(weights, logits, 1), labels)


def simplex_weights(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """argmin over the simplex of the cross-entropy of Σ_i w_i f_i; never above that of the best member. (members,) float64."""
    logits = logits.double()
    vertices = torch.eye(len(logits), dtype=torch.float64)
    losses = torch.stack([ensemble_loss(vertex, logits, labels) for vertex in vertices])
    weights, loss, step = vertices[int(losses.argmin())], losses.min(), 1.0
    for _ in range(STEPS):
        moved, after, step = _descend(weights, loss, step, logits, labels)
        if loss - after <= 1e-12 * (1 + loss):
            break
        weights, loss, step = moved, after, 2 * step
    return weights


def _descend(
    weights: torch.Tensor, loss: torch.Tensor, step: float, logits: torch.Tensor, labels: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, float]:
    """One projected step, halved until it goes down as far as its first-order model promises half of."""
    slope = _slope(weights, logits, labels)
    while step > 1e-12:
        moved = project(weights - step * slope)
        after = ensemble_loss(moved, logits, labels)
        if after <= loss + 0.5 * (slope @ (moved - weights)):
            return moved, after, step
        step /= 2
    return weights, loss, step


def _slope(weights: torch.Tensor, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """∂CE/∂w_i = mean over images of ⟨softmax(A_w) - y, f_i⟩."""
    wrong = torch.tensordot(weights, logits, 1).softmax(-1) - functional.one_hot(labels, logits.shape[-1])
    slope: torch.Tensor = (wrong * logits).sum(-1).mean(-1)
    return slope
