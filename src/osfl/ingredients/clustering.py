"""Which clients resemble each other: k-means on their predictions, and two alternatives to compare it with.

Points are rows, clients sorted by name: then the order of arrival cannot matter. Groups are numbered by their first member.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn
from torch.nn import functional

from osfl.errors import TrainingError
from osfl.ingredients.ensembles import Map, fast_logits

PROBES = 256  # M noise images


def predictions(models: Sequence[nn.Module], image: tuple[int, int, int], rng: torch.Generator, map: Map) -> torch.Tensor:
    """P_i: what each model answers to the same noise images, as probabilities, flattened to (models, probes * classes).

    The paper leaves open whether logits or probabilities; the scale of logits differs between clients, so probabilities.
    """
    noise = torch.randn((PROBES, *image), generator=rng)
    return functional.softmax(fast_logits(models, noise, map=map).double(), -1).flatten(1)


def parameters(models: Sequence[nn.Module]) -> torch.Tensor:
    """All weights of each model as one row; the models must have one architecture."""
    rows = [torch.cat([p.detach().flatten().double() for p in model.parameters()]) for model in models]
    if len({len(row) for row in rows}) > 1:
        raise TrainingError(
            "clients of different architectures cannot be clustered by their parameters", field="clustering",
            fix="Use --set clustering=predictions.",
        )  # fmt: skip
    return torch.stack(rows)


def kmeans(points: torch.Tensor, k: int, rng: torch.Generator, starts: int = 10, rounds: int = 100) -> list[int]:
    """The best of several Lloyd descents from k-means++ starts. Equal points share a group, so there may be fewer than k."""
    _check(points, k)
    best, least = torch.zeros(len(points), dtype=torch.long), float("inf")
    for _ in range(starts):
        labels, spread = _descend(points, _spread_out(points, k, rng), rounds)
        if spread < least * (1 - 1e-9):  # a clear gain only, so that rounding never decides
            best, least = labels, spread
    return _renumber(best.tolist())


def hierarchical(points: torch.Tensor, k: int) -> list[int]:
    """Merge the two groups with the smallest mean distance until k are left (average linkage)."""
    _check(points, k)
    distance = torch.cdist(points, points, compute_mode="donot_use_mm_for_euclid_dist")
    groups = [[i] for i in range(len(points))]
    while len(groups) > k:
        pairs = [(i, j) for i in range(len(groups)) for j in range(i + 1, len(groups))]
        i, j = min(pairs, key=lambda pair: float(distance[groups[pair[0]]][:, groups[pair[1]]].mean()))
        groups[i] += groups.pop(j)
    of = {member: number for number, group in enumerate(groups) for member in group}
    return _renumber([of[i] for i in range(len(points))])


def members_of(labels: Sequence[int]) -> list[list[int]]:
    """Positions by group, in the order of the groups."""
    return [[i for i, label in enumerate(labels) if label == group] for group in range(max(labels) + 1)]


def centers(points: torch.Tensor, groups: Sequence[Sequence[int]]) -> torch.Tensor:
    return torch.stack([points[list(group)].mean(0) for group in groups])


def similarity(points: torch.Tensor, groups: Sequence[Sequence[int]]) -> torch.Tensor:
    """Weights (groups, groups) from the distances of centers: softmax of minus the distance, row by row."""
    middle = centers(points, groups)
    return functional.softmax(-torch.cdist(middle, middle, compute_mode="donot_use_mm_for_euclid_dist"), -1)


# --- k-means, piece by piece ---------------------------------------------------------------------------------------------


def _check(points: torch.Tensor, k: int) -> None:
    if not 1 <= k <= len(points):
        raise TrainingError(
            "there cannot be more clusters than clients", field="clusters", expected=f"1 to {len(points)}", got=k,
            fix="Lower --set clusters=..., or 0 for one that suits the number of clients.",
        )  # fmt: skip


def _squares(points: torch.Tensor, middle: torch.Tensor) -> torch.Tensor:
    """Squared distances (points, centers): |p|² + |m|² - 2 p·m, which is fast, and by differences where that cancels, so that
    equal points are exactly at zero."""
    size = points.square().sum(1)[:, None] + middle.square().sum(1)
    table = size - 2 * points @ middle.T
    row, column = (table < 1e-6 * size).nonzero().unbind(1)
    table[row, column] = (points[row] - middle[column]).square().sum(-1)
    return table


def _spread_out(points: torch.Tensor, k: int, rng: torch.Generator) -> torch.Tensor:
    """k-means++: each next center is drawn with probability proportional to the squared distance to the nearest so far."""
    chosen = [int(torch.randint(len(points), (), generator=rng))]
    gap = torch.full((len(points),), torch.inf, dtype=points.dtype)
    while len(chosen) < k:
        gap = torch.minimum(gap, _squares(points, points[chosen[-1:]])[:, 0])
        if float(gap.sum()) == 0:
            break
        chosen.append(int(torch.multinomial(gap, 1, generator=rng)))
    return points[chosen].clone()


def _descend(points: torch.Tensor, middle: torch.Tensor, rounds: int) -> tuple[torch.Tensor, float]:
    labels = torch.full((len(points),), -1)
    for _ in range(rounds):
        gap = _squares(points, middle)
        new = gap.argmin(1)
        for empty in sorted(set(range(len(middle))) - set(new.tolist())):
            _reseed(new, gap, empty)
        if torch.equal(new, labels):
            return labels, float(gap[torch.arange(len(points)), labels].sum())
        labels = new
        for group in sorted(set(labels.tolist())):
            middle[group] = points[labels == group].mean(0)
    return labels, float(_squares(points, middle)[torch.arange(len(points)), labels].sum())


def _reseed(labels: torch.Tensor, gap: torch.Tensor, empty: int) -> None:
    """An empty cluster takes the point that is farthest from its own center, if any is away from it."""
    own = gap[torch.arange(len(labels)), labels]
    shared = torch.tensor([int((labels == label).sum()) > 1 for label in labels.tolist()])
    own = own.where(shared, -1.0)
    farthest = int(own.argmax())
    if float(own[farthest]) > 0:
        labels[farthest] = empty


def _renumber(labels: Sequence[int]) -> list[int]:
    first = {label: number for number, label in enumerate(dict.fromkeys(labels))}
    return [first[label] for label in labels]
