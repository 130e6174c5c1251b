"""Averaging named tensors, as FedAvg does with models."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch


def average(members: Sequence[Mapping[str, torch.Tensor]], weights: Sequence[float]) -> dict[str, torch.Tensor]:
    """Weighted mean of floating point tensors, BN statistics included; integer buffers are the first member's.

    Summed in float64 in the order given: callers pass clients sorted by name, so arrival order changes nothing.
    """
    total = float(sum(weights))
    if not members or total <= 0:
        raise ValueError("average needs members with positive total weight")
    mean: dict[str, torch.Tensor] = {}
    for name, first in members[0].items():
        if not first.is_floating_point():
            mean[name] = first.clone()
            continue
        sums = torch.zeros_like(first, dtype=torch.float64)
        for member, weight in zip(members, weights, strict=True):
            sums += member[name].to(torch.float64) * (weight / total)
        mean[name] = sums.to(first.dtype)
    return mean
