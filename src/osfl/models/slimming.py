"""Networks without the filters that pruning has silenced: the same answers from fewer numbers.

A filter is silent when its weights and the scale and shift of the batch norm behind it are all zero. It then outputs exactly 0
whatever it sees, ReLU and pooling keep that, and its reader may lose the input. Our blocks say who reads whom
(`reads = (("conv1", "bn1", "conv2"), ...)`). What runs along a residual sum has many readers and stays.
"""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING

import torch
from torch import nn

from osfl.models.naming import load_named

if TYPE_CHECKING:
    from osfl.core.types import Tensors

Link = tuple[nn.Conv2d, nn.BatchNorm2d, nn.Conv2d | nn.Linear]  # the layer, the norm behind it, the layer that reads it


def slim(model: nn.Module) -> nn.Module:
    """A copy without silent filters and the inputs they fed; of each layer at least one filter stays."""
    thin = copy.deepcopy(model)
    for conv, norm, reader in links(thin).values():
        kept = (~_silent(conv, norm)).nonzero().flatten()
        _narrow((conv, norm, reader), kept if len(kept) else torch.zeros(1, dtype=torch.int64))
    return thin


def load_slim(model: nn.Module, tensors: Tensors, prefix: str) -> None:
    """Make the model as narrow as the tensors are, and load them; a full model's tensors load as they are."""
    for name, (conv, norm, reader) in links(model).items():
        given = tensors.get(f"{prefix}/{name}.weight")
        if given is not None and 0 < len(given) < conv.out_channels:
            _narrow((conv, norm, reader), torch.arange(len(given)))
    load_named(model, tensors, prefix)  # names the tensor that does not fit, if any


def links(model: nn.Module) -> dict[str, Link]:
    """Every layer whose filters have one reader, by the layer's name."""
    found = {}
    for prefix, block in model.named_modules():
        for conv, norm, reader in getattr(block, "reads", ()):
            parts = (block.get_submodule(conv), block.get_submodule(norm), block.get_submodule(reader))
            if isinstance(parts[1], nn.BatchNorm2d):  # the groups of a group norm would not fit fewer filters
                found[f"{prefix}.{conv}".lstrip(".")] = parts
    return found


def _silent(conv: nn.Conv2d, norm: nn.BatchNorm2d) -> torch.Tensor:
    return (conv.weight.flatten(1) == 0).all(1) & (norm.weight == 0) & (norm.bias == 0)


@torch.no_grad()
def _narrow(link: Link, kept: torch.Tensor) -> None:
    """Keep these filters of the speaker, and what belongs to them in the norm and in the reader."""
    conv, norm, reader = link
    width, kept = conv.out_channels, kept.to(conv.weight.device)
    conv.weight = nn.Parameter(conv.weight[kept].contiguous(memory_format=torch.channels_last))
    conv.out_channels = norm.num_features = len(kept)
    norm.weight, norm.bias = nn.Parameter(norm.weight[kept]), nn.Parameter(norm.bias[kept])
    assert norm.running_mean is not None and norm.running_var is not None
    norm.running_mean, norm.running_var = norm.running_mean[kept], norm.running_var[kept]
    if isinstance(reader, nn.Conv2d):
        reader.weight = nn.Parameter(reader.weight[:, kept].contiguous(memory_format=torch.channels_last))
        reader.in_channels = len(kept)
    else:  # a flattened map: the columns of a channel lie together, one a place
        by_channel = reader.weight.view(reader.out_features, width, -1)
        reader.weight = nn.Parameter(by_channel[:, kept].flatten(1))
        reader.in_features = reader.weight.shape[1]
