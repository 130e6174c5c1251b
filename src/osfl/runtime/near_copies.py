"""Near-copies: images that differ so little that a statistic of all of them shows each (noise, compression, frames of a film).

Two images are near-copies where they are less than a quarter of the typical distance apart that images have to their nearest
other one. Typical is the median over images; an image's nearest other one is the nearest that is farther than a third of
the median distance of any two, so that near-copies do not set the measure even where most images have some. Near-copies of
near-copies are near-copies.

What is not found: turned, shifted or brighter copies, which are farther apart; and copies of one image that are more than
seven of ten images of a class, because then little else is there to measure by.

Memory: the rows three times (centered, sorted, and as given) and at most `_AT_ONCE` distances with what is made of them, below
200 MB however many rows there are.
"""

from __future__ import annotations

import numpy as np
import torch
from scipy.sparse import coo_array
from scipy.sparse.csgraph import connected_components

from osfl.runtime.meter import spend

SHARE = 1 / 4  # of the typical distance
_APART = 1 / 3  # of the median distance of any two
_SOME = 512  # rows of which all distances are looked at for the median
_TOGETHER = 1024  # rows whose distances are in memory at once, of more than 4,096 rows fewer
_AT_ONCE = 2**22  # distances in memory at once


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
        group[near] = near[_connected(x[near], share * typical)]
    return group


def without_near_copies(rows: torch.Tensor) -> torch.Tensor:
    """The places of rows that are no near-copy of one before, ascending."""
    return (near_copies(rows) == torch.arange(len(rows))).nonzero().flatten()


def _distances(x: torch.Tensor) -> tuple[torch.Tensor, float]:
    """Each row's distance to its nearest other row, and the typical one; 0 where all are alike."""
    n = len(x)
    apart = _APART * float(torch.pdist(x[torch.linspace(0, n - 1, min(n, _SOME)).long()]).median())
    nearest, farther = torch.empty(n), torch.empty(n)
    for part in _blocks(n):
        away = torch.cdist(x[part], x)
        away[torch.arange(len(part)), part] = torch.inf
        nearest[part] = away.amin(1)
        farther[part] = torch.where(away > apart, away, torch.inf).amin(1)
    spend(2.0 * n * n * x.shape[1])
    found = farther[farther.isfinite()]
    return nearest, float(found.median()) if len(found) else 0.0


def _connected(x: torch.Tensor, limit: float) -> torch.Tensor:
    """The first row of each row's connected part, (m,); rows (m, d) are linked that are less than `limit` apart.

    Parts grow block by block, and only links between different parts are looked at: a table of all would be m x m.
    """
    m = len(x)
    first = torch.arange(m)
    for part in _blocks(m):
        linked = (torch.cdist(x[part], x) < limit) & (first[part, None] != first)
        row, column = linked.nonzero(as_tuple=True)
        ends = torch.stack([torch.cat([part[row], torch.arange(m)]), torch.cat([column, first])]).numpy()
        _, number = connected_components(
            coo_array((np.ones(ends.shape[1], np.int8), tuple(ends)), shape=(m, m)), directed=False
        )
        number = torch.from_numpy(number).long()
        first = torch.full((m,), m).scatter_reduce(0, number, torch.arange(m), "amin")[number]
    return first


def _blocks(n: int) -> tuple[torch.Tensor, ...]:
    """Places of rows whose distances to all n are in memory at once."""
    return torch.split(torch.arange(n), max(1, min(_TOGETHER, _AT_ONCE // n)))
