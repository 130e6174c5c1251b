"""A product of experts: everybody's log-probabilities added up, none of them allowed to veto."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import nn


def product_of_experts(logits: torch.Tensor, floor: float) -> torch.Tensor:
    """log p(y|x) = sum_k max(log p_k(y|x), log floor) - log Z, for logits (experts, batch, classes).

    Each expert is clamped before the sum, so that one that is wrongly sure costs at most log floor.
    """
    summed = logits.double().log_softmax(-1).clamp_min(math.log(floor)).sum(0)
    return summed.log_softmax(-1).to(logits.dtype)


class ProductOfExperts(nn.Module):
    """Experts of any architectures as one classifier; `forward` gives log-probabilities."""

    def __init__(self, experts: Sequence[nn.Module], floor: float) -> None:
        super().__init__()
        self.experts = nn.ModuleList(experts)  # a plain list would escape eval(), to() and modules()
        self.floor = floor

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return product_of_experts(torch.stack([expert(x) for expert in self.experts]), self.floor)
