"""The closed form that estimates of a divergence are compared with."""

from __future__ import annotations

import torch
from torch import Tensor


def gaussian_divergence(mean1: Tensor, cov1: Tensor, mean2: Tensor, cov2: Tensor) -> float:
    """KL(N(mean1, cov1) ‖ N(mean2, cov2)) in nats, in closed form."""
    gap = mean2 - mean1
    ratio = torch.linalg.solve(cov2, cov1).trace()
    shift = gap @ torch.linalg.solve(cov2, gap)
    return float(0.5 * (ratio + shift - len(gap) + torch.logdet(cov2) - torch.logdet(cov1)))
