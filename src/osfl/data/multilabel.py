"""Several labels of one image: how files name them, and labels as a matrix of 0 and 1, one column a class.

An item's label is one text in any case: its classes joined by '|', NOTHING where it shows none.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import numpy as np

from osfl.data.source import Indices

NOTHING = "-"
_NO_CLASS = (NOTHING, "none", "no finding", "no findings")
_YES, _NO = ("1", "1.0", "true"), ("0", "0.0", "false")
_MOSTLY = 0.9  # cells of a column that must be 0 or 1; rows with others are left out


def labels_in(cell: str) -> tuple[str, ...]:
    """`glioma|edema` as its classes, sorted; none for '-' and 'No Finding'."""
    found = {part.strip() for part in cell.split("|")}
    return tuple(sorted(part for part in found if part and part.lower() not in _NO_CLASS))


def joined(labels: Collection[str]) -> str:
    return "|".join(sorted(labels)) or NOTHING


def class_columns(header: Sequence[str], rows: Sequence[Mapping[str, str]], taken: Collection[str]) -> list[str]:
    """Columns of 0 and 1, one a class; fewer than two are no multi-label table."""
    found = []
    for column in header:
        cells = [row.get(column, "").lower() for row in rows]
        if column and column not in taken and cells and sum(cell in (*_YES, *_NO) for cell in cells) >= _MOSTLY * len(cells):
            found.append(column)
    return found if len(found) > 1 else []


def label_of(row: Mapping[str, str], columns: Mapping[str, str]) -> str | None:
    """The label that columns of 0 and 1 give a row, by the class of each column; None where a cell is neither."""
    cells = {name: row.get(column, "").lower() for column, name in columns.items()}
    if any(cell not in (*_YES, *_NO) for cell in cells.values()):
        return None
    return joined([name for name, cell in cells.items() if cell in _YES])


def label_matrix(labels: Sequence[str], classes: Sequence[str]) -> Indices:
    """(n, classes)"""
    number, matrix = {name: i for i, name in enumerate(classes)}, np.zeros((len(labels), len(classes)), dtype=np.int64)
    for row, label in enumerate(labels):
        matrix[row, [number[name] for name in labels_in(label)]] = 1
    return matrix


def rarest(matrix: Indices) -> Indices:
    """(n,) one number an image, for splits and partitions: its rarest class; images of none are one group more."""
    counts = matrix.sum(0)
    rank = np.argsort(np.argsort(counts, kind="stable"), kind="stable")  # 0: the rarest
    classes = matrix.shape[1]
    first: Indices = np.where(matrix > 0, rank, classes).min(1)
    return np.append(np.argsort(rank), classes)[first].astype(np.int64)
