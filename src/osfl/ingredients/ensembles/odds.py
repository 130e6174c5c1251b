"""The ensemble rule `odds`: each classifier contributes only what it outputs for the classes that it was trained on.

A client whose images are nearly all of one class takes everything for that class. In a mean of probabilities, even one that is
weighted by class, it outvotes clients that know better; here only the differences between classes that it has seen count.
"""

from __future__ import annotations

import torch

from osfl.ingredients.statistics.claimed_counts import capped
from osfl.runtime.devices import wide

_FAR = 20.0  # below all other logits of a client
_TIE = 0.03  # how much the mean of logits counts beside the odds, as a share of the votes of a class
_POWER, _FREED = 0.5, 0.5  # of `softened` and `rebalanced`; chosen on validation images, see docs/methods/references.md


def odds(logits: torch.Tensor, counts: torch.Tensor, weights: torch.Tensor | None = None, share: float = 1.0) -> torch.Tensor:
    """Members' logits (members, batch, classes) as one, (batch, classes), by how many images of each class each has seen;
    `weights` (members,) give some more weight. Of the votes for a class nobody has more than `share` by counts."""
    votes = capped(softened(counts, _POWER), share)
    votes = votes if weights is None else weights.view(-1, 1) * votes
    return from_odds(rebalanced(logits, counts, _FREED), votes, logits.mean(0))


def softened(votes: torch.Tensor, power: float) -> torch.Tensor:
    """Weights to a power between 0, alike for all that have any, and 1, as they are: with large powers, whoever has one large
    class and takes everything for it outvotes all others."""
    return votes if power == 1 else torch.where(votes > 0, votes.clamp_min(1e-12) ** power, 0.0)


def rebalanced(logits: torch.Tensor, counts: torch.Tensor, strength: float) -> torch.Tensor:
    """z_kc - strength · log(n_kc / n_k), (clients, batch, classes): what a client would say had it seen its classes equally
    often, at strength 1. A client that saw one class only takes everything for it; classes it never saw are left far behind.
    """
    if not strength:
        return logits
    share = (counts / counts.sum(1, keepdim=True)).to(logits)[:, None]
    freed = logits - strength * share.clamp_min(1e-3).log()
    return torch.where(share > 0, freed, freed.amin(-1, keepdim=True) - _FAR)


def from_odds(logits: torch.Tensor, votes: torch.Tensor, otherwise: torch.Tensor) -> torch.Tensor:
    """All clients as one, (batch, classes), from the outputs of each for the classes that it has votes for (clients, classes).

    The scores s minimize Σ_k Σ_c v_kc (s_c - z_kc - a_k)² + ρ Σ_c (s_c - m_c)². Each client has an a_k of its own for every
    image, so that only differences between classes it knows count; one that knows a single class contributes nothing. What
    nobody compares follows `otherwise`, m.
    """
    votes, z, m = (part.to(wide(logits.device)) for part in (votes, logits, otherwise))
    share = votes / votes.sum(1, keepdim=True).clamp_min(1e-12)  # (clients, classes)
    pull = _TIE * votes.sum(0).mean()  # ρ
    evidence = (votes[:, None] * (z - (share[:, None] * z).sum(-1, keepdim=True))).sum(0)
    normal = torch.diag(votes.sum(0) + pull) - votes.T @ share
    right = evidence + pull * (m - m.mean(-1, keepdim=True))
    scores: torch.Tensor = torch.linalg.solve(normal, right.T).T
    return scores.to(logits.dtype)
