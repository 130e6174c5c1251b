"""Near-copies: images that differ so little that a statistic of all of them shows each (noise, compression, frames of a film).

Two images are near-copies where they are less than a quarter of the typical distance apart that images have to their nearest
other one. Typical is the median over images; an image's nearest other one is the nearest that is farther than a third of
the median distance of any two, so that near-copies do not set the measure even where most images have some. Near-copies of
near-copies are near-copies.

What is not found: turned, shifted or brighter copies, which are farther apart; and copies of one image that are more than
seven of ten images of a class, because then little else is there to measure by.
"""

from __future__ import annotations

import torch

from osfl.runtime.meter import spend

SHARE = 1 / 4  # of the typical distance
_APART = 1 / 3  # of the median distance of any two
_SOME = 512  # rows of which all distances are looked at for the median
_TOGETHER = 1024  # rows whose distances are in memory at once


def near_copies(rows: torch.Tensor, share: float = SHARE) -> torch.Tensor:
    """For each of the rows (n, ...) the first row that it is a copy or a near-copy of, (n,); else its own place."""
    if not len(rows):
        return torch.arange(0)
    x, alike = torch.unique(rows.flatten(1).float().cpu(), dim=0, return_inverse=True)
    group = _groups(x - x.mean(0), share)[alike]
    first = torch.full((len(x),), len(rows)).scatter_reduce(0, group, torch.arange(len(rows)), "amin")
    return first[group]


def _groups(x: torch.Tensor, share: float) -> torch.Tensor:
    """A number for each of different rows (n, d), equal within a group of near-copies."""
    group = torch.arange(len(x))
    if len(x) < 3:  # no other image to measure by
        return group
    nearest, typical = _distances(x)
    near = (nearest < share * typical).nonzero().flatten()
    if len(near):
        linked = torch.cdist(x[near], x[near]) < share * typical
        group[near] = near[_connected(linked | linked.T)]
    return group


def without_near_copies(rows: torch.Tensor) -> torch.Tensor:
    """The places of rows that are no near-copy of one before, ascending."""
    return (near_copies(rows) == torch.arange(len(rows))).nonzero().flatten()


def _distances(x: torch.Tensor) -> tuple[torch.Tensor, float]:
    """Each row's distance to its nearest other row, and the typical one; 0 where all are alike."""
    n = len(x)
    apart = _APART * float(torch.pdist(x[torch.linspace(0, n - 1, min(n, _SOME)).long()]).median())
    nearest, farther = torch.empty(n), torch.empty(n)
    for part in torch.split(torch.arange(n), _TOGETHER):
        away = torch.cdist(x[part], x)
        away[torch.arange(len(part)), part] = torch.inf
        nearest[part] = away.amin(1)
        farther[part] = torch.where(away > apart, away, torch.inf).amin(1)
    spend(2.0 * n * n * x.shape[1])
    found = farther[farther.isfinite()]
    return nearest, float(found.median()) if len(found) else 0.0


def _connected(linked: torch.Tensor) -> torch.Tensor:
    """The first row of each row's connected part, (m,), of a symmetric table of links (m, m)."""
    m = len(linked)
    first = torch.arange(m)
    while True:
        seen = torch.where(linked, first[None], m).amin(1).minimum(first)
        seen = seen[seen]
        if torch.equal(seen, first):
            return first
        first = seen
