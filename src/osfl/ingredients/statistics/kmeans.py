"""k-means++ with exact distances; groups are numbered by their first member."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from osfl.core.errors import TrainingError


def kmeans(points: torch.Tensor, k: int, rng: torch.Generator, starts: int = 10, rounds: int = 100) -> list[int]:
    """The best of several Lloyd descents from k-means++ starts. Equal points share a group, so there may be fewer than k."""
    check_cluster_count(points, k)
    best, least = torch.zeros(len(points), dtype=torch.long), float("inf")
    for _ in range(starts):
        labels, spread = _descend(points, _spread_out(points, k, rng), rounds)
        if spread < least * (1 - 1e-9):  # a clear gain only, so that rounding never decides
            best, least = labels, spread
    return renumber(best.tolist())


def check_cluster_count(points: torch.Tensor, k: int) -> None:
    if not 1 <= k <= len(points):
        raise TrainingError(
            "there cannot be more clusters than clients",
            field="clusters",
            expected=f"1 to {len(points)}",
            got=k,
            fix="Lower --set clusters=..., or 0 for one that suits the number of clients.",
        )


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


def renumber(labels: Sequence[int]) -> list[int]:
    first = {label: number for number, label in enumerate(dict.fromkeys(labels))}
    return [first[label] for label in labels]
