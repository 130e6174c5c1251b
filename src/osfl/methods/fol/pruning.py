"""Structured pruning: whole filters (rows of a layer's weight) that a group lasso drives to exactly zero.

A gate α_i in front of a filter W_i enters a network only as the product V_i = α_i W_i, so it is folded into the weights. A
subgradient never reaches zero; the proximal step of γ Σ_i ‖V_i‖ after each optimizer step does: V_i ← V_i max(0, 1 - ηγ/‖V_i‖).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn

Masks = Mapping[str, torch.Tensor]  # layer name -> True for each filter that is pruned


@dataclass(frozen=True)
class Layer:
    """A layer of filters, and the batch norm behind it if there is one."""

    name: str
    module: nn.Conv2d | nn.Linear
    norm: nn.BatchNorm2d | None

    @property
    def weight(self) -> torch.Tensor:  # (filters, ...)
        return self.module.weight

    def filter_tensors(self) -> list[torch.Tensor]:
        """All tensors with an entry for each filter, without which it has no output: weights, bias, scale and shift."""
        norm = [self.norm.weight, self.norm.bias] if self.norm is not None else []
        return [t for t in (self.module.weight, self.module.bias, *norm) if t is not None]


def layers_of(model: nn.Module) -> list[Layer]:
    """Convolutions and linear layers in the order of the model; the last linear one is the classifier's head."""
    behind = {
        id(getattr(block, conv)): getattr(block, norm)
        for block in model.modules()
        for conv, norm in getattr(block, "folds", ())
        if hasattr(block, conv)
    }
    found = [(name, module) for name, module in model.named_modules() if isinstance(module, (nn.Conv2d, nn.Linear))]
    return [Layer(name, module, behind.get(id(module))) for name, module in found]


def prunable(model: nn.Module) -> list[Layer]:
    """All layers but the head: a class must not lose its logit."""
    return layers_of(model)[:-1]


@torch.no_grad()
def shrink(weight: torch.Tensor, threshold: float) -> None:
    """The proximal step of ηγ Σ_i ‖V_i‖, in place: each filter's norm falls by ηγ, to zero at most; directions stay."""
    norms = torch.linalg.vector_norm(weight, dim=tuple(range(1, weight.ndim)), keepdim=True)
    weight.mul_((1 - threshold / norms.clamp_min(torch.finfo(weight.dtype).tiny)).clamp_min(0))


@torch.no_grad()
def pull(weight: torch.Tensor, anchor: torch.Tensor, strength: float) -> None:
    """The proximal step of ηλ ‖V - W‖² with strength ηλ, in place: towards the anchor, and never past it however strong."""
    weight.add_(anchor, alpha=2 * strength).div_(1 + 2 * strength)


def silence(model: nn.Module) -> dict[str, torch.Tensor]:
    """Filters without weights lose bias, scale and shift as well, and say exactly 0 from now on; gives their masks."""
    masks = {layer.name: (layer.weight.flatten(1) == 0).all(1) for layer in prunable(model)}
    hold(prunable(model), masks)
    return masks


@torch.no_grad()
def hold(layers: Sequence[Layer], masks: Masks) -> None:
    """Keep pruned filters silent, whatever an optimizer has done to them. After each step, so it asks the device nothing."""
    for layer in layers:
        pruned = masks[layer.name]
        for tensor in layer.filter_tensors():
            tensor.masked_fill_(pruned.view(-1, *[1] * (tensor.ndim - 1)), 0)


def pruned_share(masks: Masks) -> float:
    """Pruned filters among all that might have been."""
    total = sum(mask.numel() for mask in masks.values())
    return sum(int(mask.sum()) for mask in masks.values()) / total if total else 0.0
