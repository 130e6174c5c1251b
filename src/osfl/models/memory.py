"""Memory that a training needs, found by passes without numbers: the weights, and what autograd keeps for the backward pass."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import torch
from torch import nn

from osfl.models.flops import on_meta

_FEW, _MORE = 2, 4  # images in two passes: what every batch needs once is not in their difference
_PASSING = 1.1  # in the backward pass, a gradient exists beside the activations
_HALF = 0.6  # of the bytes with 16-bit floats: sums and normalizations keep 32
_known: dict[tuple[object, ...], TrainingMemory] = {}


@dataclass(frozen=True)
class TrainingMemory:
    """Bytes: the `weights` once, what a step keeps `once`, and for each image all activations, or with checkpointing."""

    weights: int
    once: float
    each: float
    checkpointed: float  # of one image, where what lies within blocks is computed again in the backward pass

    def fixed(self, copies: int) -> float:
        """`copies` of the weights: themselves, gradients, what the optimizer remembers, an average."""
        return copies * self.weights + self.once


def training_memory(
    model: nn.Module, image: tuple[int, ...], *, block: type[nn.Module] | None = None, half: bool = False
) -> TrainingMemory:
    """What a training of this model takes; `block`: the modules that activation checkpointing computes again."""
    key = (str(model), image, block, half, *((name, tuple(p.shape)) for name, p in model.named_parameters()))
    if key not in _known:
        few, more = (_kept(on_meta(model), (count, *image), block) for count in (_FEW, _MORE))
        factor = _PASSING * (_HALF if half else 1)
        each = {place: factor * (more[place] - few[place]) / (_MORE - _FEW) for place in more}
        blocks = [size for place, size in each.items() if place]
        total = sum(each.values())
        once = max(0.0, sum(few.values()) - sum(more[p] - few[p] for p in more) * _FEW / (_MORE - _FEW))
        weights = sum(p.numel() * p.element_size() for p in model.parameters())
        _known[key] = TrainingMemory(weights, once, total, total - sum(blocks) + max(blocks, default=0.0))
    return _known[key]


def _kept(model: nn.Module, shape: tuple[int, ...], block: type[nn.Module] | None) -> Counter[str]:
    """Bytes that autograd keeps in one forward pass, by the block that they are inside of ("": of none)."""
    sizes: Counter[str] = Counter()
    alive: dict[int, torch.Tensor] = {t.untyped_storage()._cdata: t for t in (*model.parameters(), *model.buffers())}
    inside = ""

    def note(tensor: torch.Tensor, place: str) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in alive:
            alive[storage._cdata] = tensor  # so that no other gets its place
            sizes[place] += storage.nbytes()
        return tensor

    def enter(name: str, given: tuple[object, ...]) -> None:
        nonlocal inside
        for one in given:  # a block's inputs are kept in any case
            if isinstance(one, torch.Tensor):
                note(one, "")
        inside = name

    def leave() -> None:
        nonlocal inside
        inside = ""

    for name, module in model.named_modules() if block else ():
        if isinstance(module, block or ()):
            module.register_forward_pre_hook(lambda _, given, name=name: enter(name, given))
            module.register_forward_hook(lambda *_: leave())
    x = torch.empty(shape, device="meta")
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: note(tensor, inside), lambda tensor: tensor):
        model.train()(x)
    return sizes
