"""Weights of clusters learn from inner products: one exact step of the outer problem of bi-level distillation."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from osfl.ingredients.statistics.simplex import project
from osfl.runtime.devices import wide


def hypergradient(
    validation: torch.Tensor, sources: Sequence[torch.Tensor], lr: float, total: torch.Tensor | None = None, clip: float = 0.0
) -> torch.Tensor:
    """∂L_val/∂w_j = -η ⟨g_val, g_j⟩ for flat gradients: g_val taken after the inner step, g_j before it.

    Where the step was cut to the length `clip`, G' = G - η c u with u = g / |g| and g = Σ w_j g_j (`total`), and u only
    turns with w: ∂L_val/∂w_j = -η c/|g| (⟨g_val, g_j⟩ - ⟨g_val, u⟩⟨u, g_j⟩).
    """
    exact = wide(validation.device)
    val, each = validation.to(exact), [source.to(exact) for source in sources]
    along = torch.stack([(val * source).sum() for source in each])
    if total is not None and clip:
        size = total.to(exact).norm()
        unit = total.to(exact) / size
        turns = torch.stack([(unit * source).sum() for source in each])
        along = torch.where(size > clip, (clip / size) * (along - (val * unit).sum() * turns), along)
    return -lr * along


def learn(weights: torch.Tensor, gradient: torch.Tensor, step: float, raw: bool = False) -> torch.Tensor:
    """One projected descent step. Inner products scale with τ² and the number of parameters, so unless `raw` the step is
    `step` in the largest component, whatever the scale."""
    scale = 1.0 if raw else gradient.abs().max() + 1e-12
    return project(weights - step * gradient / scale)
