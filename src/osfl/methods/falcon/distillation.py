"""FALCON's server: what its student minimizes, and the noise that its sequences may get."""

from __future__ import annotations

import torch
from torch.nn import functional


def student_loss(
    logits: torch.Tensor, labels: torch.Tensor, teacher: torch.Tensor, alpha: float, temperature: float
) -> torch.Tensor:
    """(1 - α) CE(softmax(z), y) + α T² KL(p_T || softmax(z / T)) of the student's logits z (Eq. 11 to 13), batch mean.

    p_T (n, classes) are probabilities. With α = 0 nothing but cross-entropy is computed.
    """
    hard = functional.cross_entropy(logits, labels)
    if not alpha:
        return hard
    log_q = functional.log_softmax(logits / temperature, -1)
    soft = functional.kl_div(log_q, teacher, reduction="batchmean")
    return (1 - alpha) * hard + alpha * temperature**2 * soft


def noised(sequences: torch.Tensor, std: float, rng: torch.Generator) -> torch.Tensor:
    """Every number of every token plus normal noise of this deviation, drawn anew at each call; nothing is drawn for 0."""
    return sequences + std * torch.randn(sequences.shape, generator=rng) if std else sequences
