"""A ranking of the methods for a case, from the cells that are near: how far behind the best of the same cells each one was.

Accuracies of different images cannot be compared, differences within a cell can. Each cell within `REACH` counts with 2^-d for
its distance d. A method's score is the weighted mean of what it was behind the best method of each of its cells; as if one
more cell at distance `REACH` had it `UNKNOWN` behind, so that who was measured far away only does not win by that.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from osfl.evaluation.advice.known import Case, Cell, Row, distance
from osfl.evaluation.advice.needs import Wants, excluded

REACH = 6.0  # cells farther away are not used: six doublings
NEAR = 3.0  # beyond it, say that the cells are far
UNKNOWN = 0.10  # behind the best, for want of evidence


@dataclass(frozen=True)
class Evidence:
    """What one cell says of one method."""

    cell: str
    distance: float
    accuracy: float  # mean over seeds
    behind: float  # the best that is not excluded, in the same cell

    @property
    def weight(self) -> float:
        return 2**-self.distance


@dataclass(frozen=True)
class Ranked:
    """A method with what to expect of it, and from which cells."""

    label: str
    score: float  # behind the best, at most 0
    accuracy: float
    low: float  # of the seeds' values in these cells, the weighted 10th percentile
    high: float  # and the 90th
    upload: float  # bytes a site, in the nearest cell; and so are the seconds
    server: float | None  # None: not recorded
    site: float | None
    weights: str
    evidence: tuple[Evidence, ...]  # nearest first


@dataclass(frozen=True)
class Advice:
    variants: tuple[Ranked, ...]  # all that are not excluded, the best first
    excluded: dict[str, str]  # method -> why, where no variant is left
    nearest: tuple[tuple[float, Cell], ...]  # all cells with their distance, nearest first

    @property
    def ranked(self) -> tuple[Ranked, ...]:
        """Of each method the best variant."""
        best: dict[str, Ranked] = {}
        for one in self.variants:
            best.setdefault(method_of(one.label), one)
        return tuple(best.values())

    @property
    def known(self) -> bool:
        return bool(self.nearest) and self.nearest[0][0] <= REACH


def advise(case: Case, wants: Wants, cells: Sequence[Cell]) -> Advice:
    """Methods for a case, the best first."""
    nearest = tuple(sorted(((distance(case, cell.case), cell) for cell in cells), key=lambda one: (one[0], one[1].name)))
    within = _asked_about([(d, cell) for d, cell in nearest if d <= REACH], wants)
    first: dict[str, Row] = {}  # what a variant needed in its nearest cell
    for _, cell in within:
        for label, row in cell.rows.items():
            first.setdefault(label, row)
    why = {label: excluded(label, wants, row) for label, row in first.items()}
    found = [_ranked(label, within, wants, why) for label in first if not why[label]]
    variants = tuple(sorted(found, key=lambda one: (-one.score, -one.accuracy, one.label)))
    left = {method_of(one.label) for one in variants}
    out = {method_of(label): reason for label, reason in reversed(why.items()) if method_of(label) not in left}
    return Advice(variants, dict(sorted(out.items())), nearest)


def _asked_about(cells: Sequence[tuple[float, Cell]], wants: Wants) -> list[tuple[float, Cell]]:
    """Rows with differential privacy where it is wanted; of methods that have none near, the others, to be excluded by name."""
    private = {method_of(label) for _, cell in cells for label, row in cell.rows.items() if row.epsilon is not None}
    private &= set() if wants.epsilon is None else private

    def asked(label: str, row: Row) -> bool:
        return (row.epsilon is not None) == (method_of(label) in private)

    return [(d, replace(cell, rows={label: row for label, row in cell.rows.items() if asked(label, row)})) for d, cell in cells]


def method_of(label: str) -> str:
    return label.partition("@")[0]


def _ranked(label: str, within: Sequence[tuple[float, Cell]], wants: Wants, why: dict[str, str]) -> Ranked:
    evidence, values = [], []
    for d, cell in within:
        if label not in cell.rows:
            continue
        mine = cell.rows[label].values(wants.personal)
        best = max(_mean(row.values(wants.personal)) for other, row in cell.rows.items() if not why[other])
        evidence.append(Evidence(cell.name, d, _mean(mine), best - _mean(mine)))
        values += [(value, evidence[-1].weight / len(mine)) for value in mine]
    total = sum(one.weight for one in evidence)
    prior = 2**-REACH
    row = next(cell.rows[label] for _, cell in within if label in cell.rows)
    return Ranked(
        label,
        -(sum(one.weight * one.behind for one in evidence) + prior * UNKNOWN) / (total + prior),
        sum(one.weight * one.accuracy for one in evidence) / total,
        quantile(values, 0.1),
        quantile(values, 0.9),
        row.upload,
        row.server,
        row.site,
        row.weights,
        tuple(evidence),
    )


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def quantile(values: Sequence[tuple[float, float]], at: float) -> float:
    """The smallest of the (value, weight) pairs up to which lies this share of the weight."""
    ordered, total, so_far = sorted(values), sum(weight for _, weight in values), 0.0
    for value, weight in ordered:
        so_far += weight
        if so_far >= at * total:
            return value
    return ordered[-1][0]
