"""Weights that are not negative and sum to one: the exact projection, and how such weights learn from inner products.

The outer problem of bi-level distillation is solved with one exact step. With G' = G - η Σ_j w_j g_j (plain SGD), the
validation loss of G' depends on w_j only through that line, so ∂L_val/∂w_j = -η ⟨∇L_val(G'), g_j⟩ without second derivatives.
"""

from __future__ import annotations

import torch


def project(v: torch.Tensor) -> torch.Tensor:
    """The nearest point of the simplex {w : w ≥ 0, Σ w = 1} to v (k,), exactly, by sorting."""
    falling = v.sort(descending=True).values
    places = torch.arange(1, len(v) + 1, dtype=v.dtype, device=v.device)
    shift = (1 - falling.cumsum(0)) / places
    last = (places * (falling + shift > 0)).argmax(0, keepdim=True)  # ρ; the first place always qualifies
    return (v + shift.gather(0, last)).clamp_min(0)
