"""A robust total of sites' sums of features: the geometric median of the terms, each divided by its images.

Sites hold different classes, so terms are compared by class: the mean of each class by itself, and what features differ by
within classes. From the medians of these a total is made as if honest sites alone had sent it. No site has more than the
plan's share of the weight of a class, so that the others together outvote it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from osfl.ingredients.statistics.averaging import geometric_weights, robust_values
from osfl.ingredients.statistics.claimed_counts import capped
from osfl.ingredients.statistics.gaussians import Statistics, packed


def geometric_total(terms: Sequence[Statistics], share: float) -> Statistics:
    """Of terms whose grams are folded, as the total's is. Counts add up, capped; all terms are in memory together."""
    sizes = torch.stack([term.counts.sum() for term in terms])
    believed = capped(sizes, share) / sizes.clamp_min(1e-12)  # a site's whole term: its means stay
    counts = torch.stack([term.counts for term in terms]) * believed[:, None]  # (sites, classes)
    means = torch.stack([term.means() for term in terms])
    weights = capped(counts, share)
    weights = weights / weights.sum(0).clamp_min(1e-12)
    center = robust_values(means, weights[..., None], "geometric")
    some = [place for place, size in enumerate(sizes.tolist()) if size > 0]
    if not some:
        return terms[0]  # sums of no image, as all are
    spreads = [{"within": _within(terms[place])} for place in some]
    found = geometric_weights(spreads, capped(sizes, share)[some])
    within = sum((weight * one["within"] for weight, one in zip(found, spreads, strict=True)), torch.zeros(()))
    total = counts.sum(0)
    between = packed((center * total[:, None]).T @ center)
    return Statistics(center * total[:, None], between + within * total.sum(), total)


def _within(term: Statistics) -> torch.Tensor:
    """(G - sum_c n_c mu_c mu_c^T) / n, folded: what the features of a class differ by."""
    means = term.means()
    return (term.gram - packed((means * term.counts[:, None]).T @ means)) / term.counts.sum()
