"""Whether networks grew from one start: only then is the mean of their weights a network, too."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch

APART = 0.5  # below it, the mean of weights is hardly one of the networks any more


def kinship(members: Sequence[Mapping[str, torch.Tensor]]) -> list[float]:
    """For each network the cosine between its weight matrices and the mean of the others': near 1 where all were fine-tuned
    from one file, near 0 where each began at random weights of its own. A network alone is its own kin."""
    names = sorted(name for name, value in members[0].items() if value.is_floating_point() and value.ndim > 1)
    if len(members) == 1 or not names:
        return [1.0] * len(members)
    total = {name: torch.stack([member[name].double() for member in members]).sum(0) for name in names}
    return [_cosine(member, {name: total[name] - member[name] for name in names}) for member in members]


def _cosine(one: Mapping[str, torch.Tensor], others: Mapping[str, torch.Tensor]) -> float:
    along = sum(float((one[name].double() * others[name]).sum()) for name in others)
    own, theirs = (sum(float(side[name].double().square().sum()) for name in others) for side in (one, others))
    return along / max(math.sqrt(own * theirs), 1e-30)
