"""Batch norm's running statistics, which may be wrong after few steps or for other images; and group norm, which has none."""

from __future__ import annotations

import copy
from typing import TypeVar

import torch
from torch import nn

from osfl.models.inputs import to_input

Model = TypeVar("Model", bound=nn.Module)


def with_group_norm(model: Model, groups: int) -> Model:
    """The same network with group norm in the place of each batch norm, which mixes the images of a batch; 0: as it is."""
    if groups:
        for module in list(model.modules()):
            for name, child in list(module.named_children()):
                if isinstance(child, nn.BatchNorm2d):
                    setattr(module, name, nn.GroupNorm(groups, child.num_features))
    return model


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
