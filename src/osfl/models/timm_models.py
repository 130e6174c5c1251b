"""Networks of timm by name, `timm:resnet18`, where timm is installed: `pip install 'osfl[timm]'` (it brings torchvision).

Only the network is timm's. First weights follow from the plan's seed, or from a file that the plan names (`pretrained`): its
tensors are then called `network.` and timm's own name.
"""

from __future__ import annotations

import importlib
from types import ModuleType
from typing import Any

import torch
from torch import nn

from osfl.core.errors import UsageError


class TimmNetwork(nn.Module):
    """A classifier of timm's, asked as ours are."""

    def __init__(self, network: Any) -> None:
        super().__init__()
        self.network = network

    def features(self, x: torch.Tensor) -> torch.Tensor:
        """What the last layer sees, (batch, width)."""
        pooled: torch.Tensor = self.network.forward_head(self.network.forward_features(x), pre_logits=True)
        return pooled

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.network(x)
        return logits


def build_timm(name: str, classes: int, image: tuple[int, int, int]) -> TimmNetwork:
    """timm's network of this name for these images; transformers are built for their size."""
    timm = _timm()
    if not timm.is_model(name):
        near = ", ".join(timm.list_models(f"*{name.partition('.')[0][:8]}*")[:3])
        raise UsageError(
            f"timm {timm.__version__} has no network {name!r}",
            field="architecture",
            fix=f"Names begin with timm: and are those of timm.list_models(){f', such as {near}' if near else ''}.",
        )
    options = {"pretrained": False, "num_classes": classes, "in_chans": image[0]}
    try:
        return TimmNetwork(timm.create_model(name, img_size=image[1:], **options))
    except TypeError:  # it takes any size
        return TimmNetwork(timm.create_model(name, **options))


def _timm() -> ModuleType:
    try:
        return importlib.import_module("timm")
    except ImportError as error:  # or torchvision, which timm imports
        raise UsageError(
            f"timm cannot be used here: {error}",
            field="architecture",
            fix="Install it with: pip install 'osfl[timm]', or choose one of `osfl ls architectures`.",
        ) from None
