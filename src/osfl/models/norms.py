"""Batch norm's running statistics: a network that learned in few steps, or from other images, may have them wrong."""

from __future__ import annotations

import copy

import torch
from torch import nn

from osfl.models.inputs import to_input


def norms(model: nn.Module) -> list[nn.BatchNorm2d]:
    return [module for module in model.modules() if isinstance(module, nn.BatchNorm2d)]


@torch.no_grad()
def recalibrate_bn(model: nn.Module, images: torch.Tensor, batch: int = 128) -> None:
    """Statistics as the mean over these images (as networks take them, or uint8), in place; the model is left in evaluation
    mode. Running ones forget a tenth a step: after 20 steps an eighth is still the (0, 1) they began with, and the rest
    belongs to weights of long ago."""
    model.eval()
    layers = norms(model)
    if not layers:
        return
    momenta = [norm.momentum for norm in layers]
    device = next(model.parameters()).device
    for norm in layers:
        norm.reset_running_stats()
        norm.train()
    parts = [part for part in torch.split(images, batch) if len(part) > 1 or len(images) == 1]
    for count, part in enumerate(parts, 1):
        for norm in layers:
            norm.momentum = 1 / count  # a plain mean over the batches; torch would ask the device for their number
        model(to_input(part if len(part) > 1 else part.repeat(2, 1, 1, 1), device))
    for norm, momentum in zip(layers, momenta, strict=True):
        norm.momentum = momentum
    model.eval()


def recalibrated_bn(model: nn.Module, images: torch.Tensor, batch: int = 128) -> nn.Module:
    """A copy that sees these images as it saw the ones it learned from."""
    network = copy.deepcopy(model)
    recalibrate_bn(network, images, batch)
    return network
