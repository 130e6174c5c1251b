"""How large the cells of a grid are, and how rows, columns and numbers are written so that nothing overlaps."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from osfl.reports.svg import fit_middle, label, width_of, wrap
from osfl.reports.text import compact, count

Format = Callable[[float], str]
_MANY = 30  # from here on cells are dots: too many for numbers
_NAME_SIZE, _LYING_SIZE, _DOT = 11.5, 11.0, 5.0


@dataclass(frozen=True)
class Layout:
    """Where the cells are, and how their numbers are written."""

    left: float
    top: float
    cell: float  # width of a cell
    row: float  # height of a cell
    text_of: Format
    size: float  # of the numbers
    horizontal: bool  # column names are horizontal, on up to three lines, else upright

    def at(self, row: int, column: int) -> tuple[float, float]:
        return self.left + column * self.cell, self.top + row * self.row

    def base(self, row: int) -> float:
        """The base line of a text in a row."""
        return self.at(row, 0)[1] + self.row / 2 + 4


def exact(value: float) -> str:
    if value == int(value):
        return count(value)
    return f"{value:.1f}" if abs(value) >= 10 else f"{value:.3g}"


def plan_grid(
    rows: Sequence[str],
    columns: Sequence[str],
    values: Sequence[Sequence[float]],
    width: float,
    titled: bool = True,
    room: float = 150,
) -> Layout:
    """Cells as large as the width allows, within reason. Where they would be too small to read, the drawing is wider
    than asked and scrolls in its box. `room` is how wide the names of rows may be where there is much of it."""
    names = max((width_of(name, _NAME_SIZE) for name in rows), default=0)
    left = max(62.0, min(names, room if width > 500 else 78) + 10)
    dots = len(columns) > _MANY
    smallest = _DOT if dots else max(15.0, _widest(_short, 9, values) + 2)
    cell = min(88.0, max(smallest, (width - left - 6) / max(1, len(columns))))
    row = 28.0 if not dots else 16.0 if len(rows) <= _MANY else max(_DOT, cell)
    row = min(row, 16.0) if len(rows) > _MANY else row
    text_of, size = _number_style(values, cell) if row >= 15 else (_nothing, 9.0)
    wrapped = [wrap(name, _LYING_SIZE, cell - 3) for name in columns]
    flat = all(len(lines) == 1 for lines in wrapped)
    cut = any(line.endswith("…") for lines in wrapped for line in lines[: 1 if flat else 2])  # only a third line may be
    horizontal = not cut and (flat or cell >= 50)
    tallest = max((width_of(name, _NAME_SIZE) for name in columns), default=0)
    top = (26.0 if titled else 10.0) + (14 * max(map(len, wrapped), default=1) if horizontal else min(112.0, tallest + 4))
    return Layout(left, top, cell, row, text_of, size, horizontal)


def _widest(text_of: Format, size: float, values: Sequence[Sequence[float]]) -> float:
    return max((width_of(text_of(value), size) for row in values for value in row), default=0)


def _number_style(values: Sequence[Sequence[float]], cell: float) -> tuple[Format, float]:
    """In full where the widest number fits, else smaller, else shortened, else not at all."""
    for text_of, size in ((exact, 12.0), (exact, 10.5), (exact, 9.0), (_short, 10.0), (_short, 9.0)):
        if _widest(text_of, size, values) <= cell - 2:
            return text_of, size
    return _nothing, 9.0


def _short(value: float) -> str:
    return compact(value, digits=2)


def _nothing(value: float) -> str:
    return ""


def headings(rows: Sequence[str], columns: Sequence[str], layout: Layout, row_title: str, column_title: str) -> list[str]:
    """Names along both sides; where lines are too close, only every n-th is named."""
    parts = []
    if row_title:
        parts.append(label(0, layout.top - 8, row_title, size=11, class_="muted", room=layout.left - 6))
    if column_title:
        parts.append(label(layout.left, 11, column_title, size=11, class_="muted"))
    for r in range(0, len(rows), _every(layout.row)):
        place = (layout.left - 8, layout.base(r))
        shown = fit_middle(rows[r], _NAME_SIZE, layout.left - 8)
        parts.append(label(*place, shown, size=_NAME_SIZE, anchor="end", tip=rows[r] if shown != rows[r] else ""))
    return parts + (_horizontal_names(columns, layout) if layout.horizontal else _upright_names(columns, layout))


def _every(step: float) -> int:
    return max(1, -(-15 // max(1, int(step))))


def _horizontal_names(columns: Sequence[str], layout: Layout) -> list[str]:
    parts = []
    for c, name in enumerate(columns):
        lines = wrap(name, _LYING_SIZE, layout.cell - 3)
        middle = layout.at(0, c)[0] + layout.cell / 2
        for index, text in enumerate(lines):
            y = layout.top - 8 - 14 * (len(lines) - 1 - index)
            parts.append(label(middle, y, text, size=_LYING_SIZE, anchor="middle", tip=name if text.endswith("…") else ""))
    return parts


def _upright_names(columns: Sequence[str], layout: Layout) -> list[str]:
    parts = []
    for c in range(0, len(columns), _every(layout.cell)):
        middle = layout.at(0, c)[0] + layout.cell / 2 + 4
        parts.append(label(middle, layout.top - 6, columns[c], size=_NAME_SIZE, upright=True, room=min(112.0, layout.top - 8)))
    return parts
