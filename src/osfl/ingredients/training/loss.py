"""What a classifier is trained to lower: it follows from the shape of the labels."""

from __future__ import annotations

import torch
from torch.nn import functional


def classification_loss(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Cross-entropy, mean over the images; of multi-label labels (n, classes) the binary one, summed over the classes."""
    if labels.ndim == 1:
        return functional.cross_entropy(logits, labels)
    return functional.binary_cross_entropy_with_logits(logits, labels.to(logits), reduction="sum") / len(labels)
