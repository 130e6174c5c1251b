"""The numbers behind a drawing as rows of a table, head first: what a CSV file of a figure holds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

Row: TypeAlias = Sequence[str | float | None]
Table: TypeAlias = Sequence[Row]


def grid_table(rows: Sequence[str], columns: Sequence[str], values: Sequence[Sequence[float]], corner: str = "") -> Table:
    found: list[Row] = [[name, *row] for name, row in zip(rows, values, strict=True)]
    return [[corner, *columns], *found]


def bars_table(groups: Mapping[str, Sequence[tuple[float | None, float | None]]], series: Sequence[str]) -> Table:
    """(value, error) of each bar."""
    head = [text for name in series for text in (name, f"{name}, standard deviation")]
    rows: list[Row] = [[name, *(x for pair in values for x in pair)] for name, values in groups.items()]
    return [["", *head], *rows]


def curves_table(x: Sequence[float], series: Mapping[str, Sequence[float | None]], x_label: str) -> Table:
    rows: list[Row] = [list(row) for row in zip(x, *series.values(), strict=True)]
    return [[x_label or "x", *series], *rows]


def histogram_table(bins: Sequence[float], series: Mapping[str, Sequence[float]]) -> Table:
    rows: list[Row] = [list(row) for row in zip(bins[:-1], bins[1:], *series.values(), strict=True)]
    return [["from", "to", *series], *rows]


def cloud_table(series: Mapping[str, Mapping[str, Sequence[Sequence[float]]]]) -> Table:
    rows: list[Row] = [
        [group, kind, *point] for group, kinds in series.items() for kind, points in kinds.items() for point in points
    ]
    return [["group", "kind", "x", "y"], *rows]


def rows_table(head: Sequence[str], rows: Sequence[Any], keys: Sequence[str]) -> Table:
    """Some attributes of objects, or some keys of mappings."""
    values: list[Row] = [[row[key] if isinstance(row, Mapping) else getattr(row, key) for key in keys] for row in rows]
    return [head, *values]
