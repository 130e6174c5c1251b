"""Which clients resemble each other: k-means on their predictions, and two alternatives to compare it with.

Points are rows, clients sorted by name: then the order of arrival cannot matter. Groups are numbered by their first member.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn
from torch.nn import functional

from osfl.core.errors import TrainingError
from osfl.core.types import RunMap
from osfl.ingredients.ensembles.ensemble import fast_logits
from osfl.ingredients.statistics.kmeans import check_cluster_count, renumber

PROBES = 256  # M noise images


def predictions(
    models: Sequence[nn.Module],
    image: tuple[int, int, int],
    rng: torch.Generator,
    run_map: RunMap,
    device: torch.device | None = None,
) -> torch.Tensor:
    """P_i: what each model answers to the same noise images, as probabilities, flattened to (models, probes * classes).

    The paper leaves open whether logits or probabilities; the scale of logits differs between clients, so probabilities.
    """
    noise = torch.randn((PROBES, *image), generator=rng)
    return functional.softmax(fast_logits(models, noise, run_map=run_map, device=device).cpu().double(), -1).flatten(1)


def parameters(models: Sequence[nn.Module]) -> torch.Tensor:
    """All weights of each model as one row; the models must have one architecture."""
    rows = [torch.cat([p.detach().cpu().flatten().double() for p in model.parameters()]) for model in models]
    if len({len(row) for row in rows}) > 1:
        raise TrainingError(
            "clients of different architectures cannot be clustered by their parameters",
            field="clustering",
            fix="Use --set clustering=predictions.",
        )
    return torch.stack(rows)


def hierarchical(points: torch.Tensor, k: int) -> list[int]:
    """Merge the two groups with the smallest mean distance until k are left (average linkage): HC, where points are weights,
    which are as far apart as the clients' updates, because all began at the same weights."""
    check_cluster_count(points, k)
    distance = torch.cdist(points, points, compute_mode="donot_use_mm_for_euclid_dist")
    groups = [[i] for i in range(len(points))]
    while len(groups) > k:
        pairs = [(i, j) for i in range(len(groups)) for j in range(i + 1, len(groups))]
        i, j = min(pairs, key=lambda pair: float(distance[groups[pair[0]]][:, groups[pair[1]]].mean()))
        groups[i] += groups.pop(j)
    of = {member: number for number, group in enumerate(groups) for member in group}
    return renumber([of[i] for i in range(len(points))])


def members_of(labels: Sequence[int]) -> list[list[int]]:
    """Positions by group, in the order of the groups."""
    return [[i for i, label in enumerate(labels) if label == group] for group in range(max(labels) + 1)]


def centers(points: torch.Tensor, groups: Sequence[Sequence[int]]) -> torch.Tensor:
    return torch.stack([points[list(group)].mean(0) for group in groups])


def similarity(points: torch.Tensor, groups: Sequence[Sequence[int]]) -> torch.Tensor:
    """Weights (groups, groups) from the distances of centers: softmax of minus the distance, row by row."""
    middle = centers(points, groups)
    return functional.softmax(-torch.cdist(middle, middle, compute_mode="donot_use_mm_for_euclid_dist"), -1)
