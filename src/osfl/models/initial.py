"""First weights, drawn only from a given generator: the global one is shared by threads and ties clients together."""

from __future__ import annotations

import math
from typing import Protocol, runtime_checkable

import torch
from torch import nn


@runtime_checkable
class StartsItself(Protocol):
    """A module that initializes its own parameters."""

    def initialize(self, rng: torch.Generator | None) -> None: ...


def initialize(model: nn.Module, rng: torch.Generator | None) -> None:
    """Fill every parameter and buffer; without a generator, weights are zero (they will be loaded)."""
    for name, module in model.named_modules():
        if not (module._parameters or module._buffers):
            continue
        _initialize_one(name, module, rng)


@torch.no_grad()
def _initialize_one(name: str, module: nn.Module, rng: torch.Generator | None) -> None:
    if isinstance(module, StartsItself):
        module.initialize(rng)
    elif isinstance(module, nn.Conv2d):
        _conv(module, rng)
    elif isinstance(module, nn.Linear):
        _uniform(module, rng)
    elif isinstance(module, (nn.BatchNorm2d, nn.GroupNorm, nn.LayerNorm)):
        _norm(module)
    else:  # a new kind of layer must not begin with whatever was in memory
        raise AssertionError(f"no rule to initialize {type(module).__name__} at '{name}'")


def draw_normal(tensor: torch.Tensor, std: float, rng: torch.Generator | None) -> None:
    """Normal, cut at two deviations, or zeros without a generator."""
    if rng is None:
        tensor.zero_()
        return
    # not trunc_normal_: its erfinv runs in parallel, and the last bits could depend on the number of threads
    nn.init.normal_(tensor, 0.0, std, generator=rng).clamp_(-2 * std, 2 * std)


def _conv(module: nn.Conv2d, rng: torch.Generator | None) -> None:
    """He initialization for ReLU, fan out."""
    if rng is None:
        module.weight.zero_()
    else:
        # not kaiming_normal_: it counts the fan of depthwise convolutions as if they were dense
        fan = module.out_channels // module.groups * module.kernel_size[0] * module.kernel_size[1]
        nn.init.normal_(module.weight, 0.0, math.sqrt(2.0 / fan), generator=rng)
    if module.bias is not None:
        module.bias.zero_()


def _uniform(module: nn.Linear, rng: torch.Generator | None) -> None:
    """Uniform within 1/sqrt(inputs), as torch's own default for linear layers."""
    bound = 1.0 / math.sqrt(module.in_features)
    for tensor in (module.weight, module.bias):
        if tensor is not None and rng is None:
            tensor.zero_()
        elif tensor is not None:
            nn.init.uniform_(tensor, -bound, bound, generator=rng)


def _norm(module: nn.BatchNorm2d | nn.GroupNorm | nn.LayerNorm) -> None:
    module.weight.fill_(1.0)
    module.bias.zero_()
    if isinstance(module, nn.BatchNorm2d):
        module.reset_running_stats()
