"""Floating point operations of a model for one sample, counted by torch's own formulas without computing anything."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, TypeAlias

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

_Pass: TypeAlias = Callable[[nn.Module, torch.Tensor], None]
_BATCH = 2  # batch norm needs two in training mode
_known: dict[tuple[object, ...], float] = {}


def forward_flops(model: nn.Module, image_shape: tuple[int, ...]) -> float:
    """FLOPs of one forward pass of one image (channels, height, width); a multiply-add counts as two."""
    return _cached("forward", model, image_shape, _forward)


def training_flops(model: nn.Module, image_shape: tuple[int, ...]) -> float:
    """FLOPs of forward and backward of one image, with gradients for the parameters that require them."""
    return _cached("training", model, image_shape, _forward_backward)


def inversion_flops(model: nn.Module, image_shape: tuple[int, ...]) -> float:
    """FLOPs of forward and backward of one image when its pixels are optimized and the weights are frozen."""
    return _cached("inversion", model, image_shape, _forward_backward_to_pixels)


def _cached(what: str, model: nn.Module, shape: tuple[int, ...], run: _Pass) -> float:
    tensors = [(n, tuple(p.shape), p.requires_grad) for n, p in [*model.named_parameters(), *model.named_buffers()]]
    key = (what, shape, str(model), *tensors)
    if key not in _known:
        x = torch.empty((_BATCH, *shape), device="meta")
        with _Counter() as counter:
            run(on_meta(model), x)
        _known[key] = counter.total / _BATCH
    return _known[key]


def on_meta(model: nn.Module) -> nn.Module:
    # a memo entry for each tensor makes deepcopy take the meta twin instead of copying the weights
    twins: dict[int, object] = {}
    for parameter in model.parameters():
        twin = torch.empty_like(parameter, device="meta")
        twins[id(parameter)] = nn.Parameter(twin, requires_grad=parameter.requires_grad)
    for buffer in model.buffers():
        twins[id(buffer)] = torch.empty_like(buffer, device="meta")
    return copy.deepcopy(model, twins)


def _forward(model: nn.Module, x: torch.Tensor) -> None:
    with torch.no_grad():
        model.eval()(x)


def _forward_backward(model: nn.Module, x: torch.Tensor) -> None:
    out = model.train()(x)
    if out.requires_grad:
        out.sum().backward()


def _forward_backward_to_pixels(model: nn.Module, x: torch.Tensor) -> None:
    model.eval().requires_grad_(False)(x.requires_grad_()).sum().backward()


class _Counter(TorchDispatchMode):
    """Adds up what passes in this thread. torch's FlopCounterMode has hooks on the modules of all threads at once."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.total = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func.overloadpacket is torch.ops.aten.convolution_backward:
            self.total += _convolution_backward(*args, **(kwargs or {}))
        elif (formula := flop_registry.get(func.overloadpacket)) is not None:
            self.total += formula(*args, **(kwargs or {}), out_val=out)
        return out


def _convolution_backward(grad: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, *rest: Any) -> int:
    """Each gradient costs as much as the forward pass. torch's formula overlooks groups: 14 times too much for EfficientNet."""
    transposed, wanted = rest[4], rest[7]
    once = 2 * (x if transposed else grad).numel() * weight[0].numel()
    return once * (int(wanted[0]) + int(wanted[1]))
