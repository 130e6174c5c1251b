"""What the committed records say: cells, each with what its federation was like and what every method reached there.

`known.json` is made from benchmarks/records by `python -m benchmarks.advice`; a test compares them.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cache
from pathlib import Path
from typing import Literal, get_args

Kind = Literal["medical", "natural", "writing"]
KINDS: tuple[str, ...] = get_args(Kind)
FILE = Path(__file__).parent / "known.json"


@dataclass(frozen=True)
class Case:
    """What is known of a federation before it starts; None: not known, and then without effect."""

    sites: int | None = None
    images: int | None = None  # training images of all sites together
    classes: int | None = None
    share: float | None = None  # of the classes, how many a site effectively has: 1 is all alike, 1 / classes is one each
    side: int | None = None  # pixels of an image's side
    channels: int | None = None  # 1 gray, 3 RGB
    kind: Kind | None = None  # what the images show


@dataclass(frozen=True)
class Row:
    """What one method reached in one cell."""

    everyone: tuple[float, ...]  # accuracy on the global test set, a seed each
    own: tuple[float, ...]  # on a site's own distribution, mean over sites, a seed each
    upload: float  # bytes a site
    server: float | None  # seconds; None: not recorded
    site: float | None  # seconds of one site
    weights: str  # published weights that sites start from or encode with; empty: none
    epsilon: float | None = None  # of the differential privacy that it was reached with; None: without

    def values(self, personal: bool) -> tuple[float, ...]:
        return self.own if personal else self.everyone


@dataclass(frozen=True)
class Cell:
    """One federation of the records."""

    name: str
    title: str
    case: Case
    constant: float | None  # accuracy of always answering the most frequent class, on the test set
    rows: Mapping[str, Row]  # by label: method@setting=value


@cache
def known_cells() -> tuple[Cell, ...]:
    return tuple(cell_of(name, found) for name, found in json.loads(FILE.read_text(encoding="utf-8"))["cells"].items())


def cell_of(name: str, found: Mapping[str, object]) -> Cell:
    """A cell of the file."""
    rows = found["rows"]
    assert isinstance(rows, dict)
    made = {label: Row(**{**row, "everyone": tuple(row["everyone"]), "own": tuple(row["own"])}) for label, row in rows.items()}
    case = Case(**{one.name: found[one.name] for one in fields(Case)})  # type: ignore[arg-type]
    constant = found["constant"]
    assert constant is None or isinstance(constant, float)
    return Cell(name, str(found["title"]), case, constant, made)


def class_share(partition: str, sites: int, classes: int) -> float:
    """The share of the classes that a site effectively has, (sum n)^2 / (C sum n^2) for its class counts n, as the partition
    makes it. Dirichlet per class: each count is Beta(a, (N - 1) a), and the ratio of expectations is (a + 1/N) / (a + 1)."""
    kind, _, number = partition.partition(":")
    if kind == "silos":
        return 1 / classes
    if kind == "classes":
        return int(number) / classes
    if kind == "dirichlet":
        alpha = float(number)
        return max(1 / classes, (alpha + 1 / sites) / (alpha + 1))
    return 1.0


def counted_share(counts: Sequence[Sequence[int]]) -> float:
    """The same of counted images, (sites, classes): the mean over sites that have any."""
    shares = [sum(row) ** 2 / (len(row) * sum(n * n for n in row)) for row in counts if sum(row)]
    return sum(shares) / len(shares)


OTHER_CHANNELS, OTHER_KIND = 2.0, 3.0


def distance(one: Case, other: Case) -> float:
    """A doubling counts 1, of images, sites, classes, the share of classes a site has, or the side of an image; gray for color
    counts 2, another kind of picture 3. What one of them does not know counts nothing."""
    total = 0.0
    for name in ("sites", "images", "classes", "share", "side"):
        mine, theirs = getattr(one, name), getattr(other, name)
        if mine is not None and theirs is not None:
            total += abs(math.log2(mine / theirs))
    for name, price in (("channels", OTHER_CHANNELS), ("kind", OTHER_KIND)):
        mine, theirs = getattr(one, name), getattr(other, name)
        total += price * (mine is not None and theirs is not None and mine != theirs)
    return total
