"""Which networks come from the same initial weights (groups with a common start): only those can be averaged."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

APART = 0.5  # a cosine below it: the mean of both is hardly either of them


def cosines(members: Sequence[Mapping[str, torch.Tensor]]) -> torch.Tensor:
    """Between the weight matrices of each two networks, (n, n): near 1 where both were fine-tuned from one file, near 0 where
    each began at random weights of its own."""
    gram = torch.zeros(len(members), len(members), dtype=torch.float64)
    for name, first in (members[0] if members else {}).items():
        if first.is_floating_point() and first.ndim > 1:
            rows = torch.stack([member[name].flatten().double() for member in members])
            gram += rows @ rows.T
    norms = gram.diagonal().clamp(min=1e-30).sqrt()
    found: torch.Tensor = gram / norms.outer(norms)
    return found


def groups_of_one_start(near: torch.Tensor) -> list[int]:
    """The number of each network's group, from 1 in the order given; a network close to one of a group belongs to it."""
    found = [0] * len(near)
    for i in range(len(near)):
        if not found[i]:
            number, waiting = max(found) + 1, [i]
            while waiting:
                one = waiting.pop()
                found[one] = number
                waiting += [j for j in range(len(near)) if not found[j] and float(near[one, j]) >= APART]
    return found
