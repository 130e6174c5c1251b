"""Averaging tensors of models, answers or sums, and robust averages, in which some malicious members do not matter much.

Robust averages keep the plain one's weights (claimed sizes, capped), so that a site of many images still counts more. Yin et
al. 2018 have the coordinate-wise rules, Pillutla et al. 2022 the geometric median. Where sites differ they cost accuracy.
A plan asks for one with `judging.combine`, in every method that has it (`Method.robust`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Literal

import torch

Combine = Literal["mean", "median", "trimmed", "geometric"]
ROBUST: tuple[Combine, ...] = ("median", "trimmed", "geometric")
TRIMMED = 0.25  # of the weight, at each end
_STEPS, _NEAR = 50, 1e-9  # of Weiszfeld's iteration; no distance counts as less
_TIE = 1e-6  # weights in single precision that halve exactly do so up to this


def average(members: Iterable[Mapping[str, torch.Tensor]], weights: Sequence[float]) -> dict[str, torch.Tensor]:
    """Weighted mean of floating point tensors, BN statistics included; integer buffers are the first member's.

    Summed in float64 in the order given: callers pass clients sorted by name, so arrival order changes nothing. Members are
    taken one after the other, so those that come from an iterator are never in memory together.
    """
    total = float(sum(weights))
    if not weights or total <= 0:
        raise ValueError("average needs members with positive total weight")
    sums: dict[str, torch.Tensor] = {}
    kinds: dict[str, torch.dtype] = {}
    for member, weight in zip(members, weights, strict=True):
        for name, value in member.items():
            if name not in kinds:
                kinds[name] = value.dtype
                sums[name] = torch.zeros_like(value, dtype=torch.float64) if value.is_floating_point() else value.clone()
            if kinds[name].is_floating_point:
                sums[name] += value.to(torch.float64) * (weight / total)
    return {name: value.to(kinds[name]) for name, value in sums.items()}


def combined(members: Iterable[Mapping[str, torch.Tensor]], weights: Sequence[float], how: Combine) -> dict[str, torch.Tensor]:
    """Named tensors by the plan's rule. Only the mean takes members one after the other."""
    return average(members, weights) if how == "mean" else robust_average(list(members), weights, how)


def robust_average(
    members: Sequence[Mapping[str, torch.Tensor]], weights: Sequence[float], how: Combine
) -> dict[str, torch.Tensor]:
    """Floating point tensors combined by the rule, in float64; integer buffers are the first member's."""
    share = torch.tensor(weights, dtype=torch.float64)
    share = geometric_weights(members, share) if how == "geometric" else share / share.sum()
    found = {}
    for name, first in members[0].items():
        if not first.is_floating_point():
            found[name] = first.clone()
            continue
        values = torch.stack([member[name].double() for member in members])
        if how == "geometric":
            found[name] = torch.tensordot(share, values, 1).to(first.dtype)
        else:
            found[name] = robust_values(values, share.view(-1, *[1] * first.ndim), how).to(first.dtype)
    return found


def robust_values(values: torch.Tensor, weights: torch.Tensor, how: Combine) -> torch.Tensor:
    """Values (members, ...) as one by a robust rule; weights with as many axes, which sum to one over the members, or to zero
    where nobody has any. The geometric median is that of the last axis' vectors, each member with one weight for all of one."""
    if how == "geometric":
        return _geometric(values, weights)
    return _between(values, weights.expand_as(values), *((0.5, 0.5) if how == "median" else (TRIMMED, 1 - TRIMMED)))


def _geometric(values: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """By Weiszfeld's iteration, for each vector of (members, ..., d) by itself."""
    fixed, found = values.detach(), weights[..., :1]
    for _ in range(_STEPS):
        center = (found * fixed).sum(0)
        apart = (fixed - center).norm(dim=-1, keepdim=True).clamp_min(_NEAR)
        found = weights[..., :1] / apart
        found = found / found.sum(0).clamp_min(torch.finfo(found.dtype).tiny)  # nobody may have any weight
    return (found * values).sum(0)


def _between(values: torch.Tensor, share: torch.Tensor, low: float, high: float) -> torch.Tensor:
    """The mean of what lies between two shares of the weight, at each coordinate of (members, ...); the median where both are
    one half."""
    ordered, places = values.sort(0)
    weights = share.gather(0, places)
    upto = weights.cumsum(0)
    if low == high:
        first = (upto >= low - _TIE).int().argmax(0, keepdim=True)
        last = (upto > low + _TIE).int().argmax(0, keepdim=True)  # another one only where the weight halves exactly
        return (ordered.gather(0, first) + ordered.gather(0, last)).squeeze(0) / 2
    kept = (upto.clamp(low, high) - (upto - weights).clamp(low, high)).clamp_min(0)
    return (ordered * kept).sum(0) / kept.sum(0).clamp_min(1e-12)


def geometric_weights(members: Sequence[Mapping[str, torch.Tensor]], share: torch.Tensor) -> torch.Tensor:
    """The members' weights in the point of least weighted distance to all of them (Weiszfeld), which lies between them."""
    names = [name for name, tensor in members[0].items() if tensor.is_floating_point()]
    flat = torch.stack([torch.cat([member[name].double().flatten() for name in names]) for member in members])
    products, found = flat @ flat.T, share / share.sum()  # distances to a mixture follow from these
    for _ in range(_STEPS):
        apart = (products.diagonal() - 2 * products @ found + found @ products @ found).clamp_min(_NEAR**2).sqrt()
        found = share / apart
        found = found / found.sum()
    return found
