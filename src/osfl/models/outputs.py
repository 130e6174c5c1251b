"""From what a classifier puts out to probabilities: one class an image, or several."""

from __future__ import annotations

import torch

from osfl.core.types import Kind


def to_probabilities(logits: torch.Tensor, kind: Kind) -> torch.Tensor:
    """(images, classes); multi-label: of each class on its own, so that a row need not add up to 1."""
    return logits.sigmoid() if kind == "multilabel" else logits.softmax(-1)
