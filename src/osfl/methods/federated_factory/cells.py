"""The generative matrix: which client can make images of which class, and how many are asked of each.

Cells are always in the order of class and client, and every cell is sampled from a seed of its own. Then a cell that is
taken out leaves exactly the pool of a round that never had it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Literal, TypeAlias

import torch

from osfl.core.types import ClientId, Upload
from osfl.ingredients.statistics.claimed_counts import whole_counts
from osfl.ingredients.statistics.class_counts import shares

if TYPE_CHECKING:
    from osfl.core.types import Tensors

Prior = Literal["balanced", "empirical"]
Place: TypeAlias = tuple[int, ClientId]  # row and column: class and client


@dataclass(frozen=True)
class Cell:
    """A client's generator of one class, and how many images it has seen."""

    label: int
    client: ClientId
    seen: int
    held: Tensors | Callable[[], Tensors]  # the generator, or what reads it: those of many sites are more than memory holds

    @property
    def tensors(self) -> Tensors:
        return self.held() if callable(self.held) else self.held

    @property
    def place(self) -> Place:
        return self.label, self.client


def prefix(label: int) -> str:
    """Where an upload keeps the generator of a class."""
    return f"class-{label}/"


def cells_of(uploads: Sequence[Upload], classes: int) -> list[Cell]:
    """The cells that hold a generator, by class and client. A generator that has seen nothing is none."""
    found = []
    for place, upload in enumerate(uploads):
        counts = upload.payload.facts.get("class_counts", [1] * classes)
        for label in range(classes):
            holds = any(name.startswith(prefix(label)) for name in upload.payload.tensors)
            if holds and int(counts[label]) > 0:
                found.append(Cell(label, upload.client, int(counts[label]), partial(_generator, uploads, place, label)))
    return sorted(found, key=lambda cell: cell.place)


def _generator(uploads: Sequence[Upload], place: int, label: int) -> Tensors:
    return under(uploads[place].payload.tensors, prefix(label))


def under(tensors: Tensors, start: str) -> Tensors:
    """The tensors whose names begin so, without that beginning."""
    return {name.removeprefix(start): value for name, value in tensors.items() if name.startswith(start)}


def believed(cells: Sequence[Cell], share: float) -> list[Cell]:
    """The same cells with counts of which no client has more than `share`, in all and of a class (`claimed_counts`)."""
    clients, labels = sorted({cell.client for cell in cells}), sorted({cell.label for cell in cells})
    claimed = {cell.place: cell.seen for cell in cells}
    table = torch.tensor([[claimed.get((label, client), 0) for label in labels] for client in clients], dtype=torch.float64)
    counts = whole_counts(table.reshape(len(clients), len(labels)), share)
    found = {(label, client): counts[i][j] for i, client in enumerate(clients) for j, label in enumerate(labels)}
    return [replace(cell, seen=found[cell.place]) for cell in cells]


def quotas(cells: Iterable[Cell], per_class: int, prior: Prior = "balanced", share: float = 1.0) -> dict[Place, int]:
    """Q_{c,k} = N_c n_{c,k} / sum_j n_{c,j}, in whole images that sum to N_c exactly; n as `believed`.

    balanced: N_c = `per_class` for every class that anybody can make. empirical: the same total, by the classes' sizes.
    """
    rows: dict[int, list[Cell]] = {}
    for cell in believed(list(cells), share):
        rows.setdefault(cell.label, []).append(cell)
    labels = sorted(rows)
    sizes = [sum(cell.seen for cell in rows[label]) for label in labels]
    targets = [per_class] * len(labels) if prior == "balanced" else shares(per_class * len(labels), sizes)
    found: dict[Place, int] = {}
    for label, target in zip(labels, targets, strict=True):
        row = sorted(rows[label], key=lambda cell: cell.client)
        found |= dict(zip([cell.place for cell in row], shares(target, [cell.seen for cell in row]), strict=True))
    return found


def heatmap(cells: Sequence[Cell], asked: Mapping[Place, int], classes: Sequence[str], clients: Sequence[ClientId]) -> object:
    """The matrix as a figure: images asked of each generator, none where there is no generator."""
    values = [[float(asked.get((label, client), 0)) for client in clients] for label in range(len(classes))]
    return {
        "kind": "heatmap",
        "rows": list(classes),
        "columns": list(clients),
        "values": values,
        "row_title": "class",
        "column_title": "client",
        "note": f"{len(cells)} generators; the numbers are the images that each was asked for.",
    }
