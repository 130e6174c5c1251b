"""Tables of coloured cells: the label heat map over clients and the confusion matrix."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from osfl.reports.svg import canvas, fit, label, line, tag, title, width_of
from osfl.reports.words import compact, count, percent

HEAT = "var(--heat,#14559b)"
_INK_FLIPS = 0.62  # from this strength on, text in a cell is written in the page's opposite ink
_SMALLEST = 5.0


@dataclass(frozen=True)
class Layout:
    """Where the cells are."""

    left: float
    top: float
    cell: float  # width of a cell
    row: float  # height of a cell

    def at(self, row: int, column: int) -> tuple[float, float]:
        return self.left + column * self.cell, self.top + row * self.row


def heatmap(
    rows: Sequence[str], columns: Sequence[str], values: Sequence[Sequence[float]], *, what: str, width: float = 860,
    row_title: str = "", column_title: str = "", unit: str = "",
) -> str:  # fmt: skip
    """Values by row and column; colour runs from nothing at zero to full at the largest value."""
    top_value = max((abs(value) for row in values for value in row), default=0) or 1.0
    layout = _layout(rows, columns, width)
    parts = _headings(rows, columns, layout, row_title, column_title)
    words = _cell_text(values, layout)
    for r, row in enumerate(values):
        for c, value in enumerate(row):
            tip = f"{rows[r]}, {columns[c]}: {_exact(value)} {unit}".rstrip()
            parts.append(_cell(layout, r, c, abs(value) / top_value, words(value), tip))
    bottom = layout.at(len(rows), 0)[1]
    parts += _scale(layout.left, bottom + 18, "0", f"{_exact(top_value)} {unit}".rstrip())
    return canvas(_right(layout, columns), bottom + 44, what, *parts, scales=False)


def confusion(
    names: Sequence[str], counts: Sequence[Sequence[float]], *, what: str, width: float = 860,
    right: Sequence[float | None] = (),
) -> str:  # fmt: skip
    """Rows are the truth, columns the answer; colour is the share of the row. `right` adds each row's accuracy."""
    layout = _layout(names, names, width - (58 if right else 0))
    parts = _headings(names, names, layout, "true class", "answer")
    words = _cell_text(counts, layout)
    for r, row in enumerate(counts):
        total = sum(row) or 1.0
        for c, value in enumerate(row):
            if value or layout.cell >= 16:  # with a hundred classes, empty cells are left to the background
                tip = f"{names[r]} answered as {names[c]}: {_exact(value)} ({percent(value / total)} of the row)"
                parts.append(_cell(layout, r, c, value / total, words(value), tip))
    bottom, edge = layout.at(len(names), 0)[1], layout.at(0, len(names))[0]
    parts.append(_outline(layout, len(names)))
    if right and layout.row >= 12:
        parts.append(label(edge + 10, layout.top - 8, "right", size=11, class_="muted"))
        parts += [label(edge + 10, _base(layout, r), percent(v), size=11) for r, v in enumerate(right)]
    parts += _scale(layout.left, bottom + 18, "0 % of the row", "100 %")
    return canvas(_right(layout, names) + (58 if right else 0), bottom + 44, what, *parts, scales=False)


def _layout(rows: Sequence[str], columns: Sequence[str], width: float) -> Layout:
    """Cells as large as the width allows, within reason; small ones make the drawing wider than asked, and it scrolls."""
    names = min(160 if width > 500 else 84, max((width_of(name, 12) for name in rows), default=0)) + 12
    cell = (width - names - 4) / max(1, len(columns))
    smallest = 24.0 if len(columns) <= 30 else _SMALLEST
    cell = min(64.0, max(smallest, cell))
    square = len(rows) > 30 or len(columns) > 30
    row = max(_SMALLEST, cell) if square else 26.0
    lying = all(width_of(name, 11) <= cell - 4 for name in columns)
    top = 38.0 if lying else 38.0 + min(110, max(width_of(name, 11) for name in columns))
    return Layout(max(names, 70.0), top, cell, row)


def _right(layout: Layout, columns: Sequence[str]) -> float:
    return max(layout.at(0, len(columns))[0] + 4, layout.left + 210)


def _base(layout: Layout, row: int) -> float:
    return layout.at(row, 0)[1] + layout.row / 2 + 4


def _headings(
    rows: Sequence[str], columns: Sequence[str], layout: Layout, row_title: str, column_title: str
) -> list[str]:
    """Names along both sides; where lines are too close, only every n-th is named."""
    parts = [label(0, layout.top - 8, row_title, size=11, class_="muted", room=layout.left - 4)] if row_title else []
    if column_title:
        parts.append(label(layout.left, 12, column_title, size=11, class_="muted"))
    every = max(1, round(13 / layout.row + 0.49))
    for r in range(0, len(rows), every):
        parts.append(label(layout.left - 8, _base(layout, r), rows[r], anchor="end", room=layout.left - 12))
    lying = all(width_of(name, 11) <= layout.cell - 4 for name in columns)
    every = 1 if lying else max(1, round(13 / layout.cell + 0.49))
    for c in range(0, len(columns), every):
        middle = layout.at(0, c)[0] + layout.cell / 2
        if lying:
            parts.append(label(middle, layout.top - 8, columns[c], size=11, anchor="middle"))
        else:
            parts.append(label(middle + 4, layout.top - 7, columns[c], size=11, upright=True, room=layout.top - 26))
    return parts


def _cell_text(values: Sequence[Sequence[float]], layout: Layout) -> Callable[[float], str]:
    """How numbers are written in cells: in full where the widest fits, else shortened, else not at all."""
    everything = [value for row in values for value in row]
    for words in (_exact, compact):
        if layout.row >= 18 and all(width_of(words(value), 11) <= layout.cell - 1 for value in everything):
            return words
    return lambda value: ""


def _exact(value: float) -> str:
    if value == int(value):
        return count(value)
    return f"{value:.1f}" if abs(value) >= 10 else f"{value:.3g}"


def _cell(layout: Layout, row: int, column: int, strength: float, text: str, tip: str) -> str:
    x, y = layout.at(row, column)
    gap = 1.0 if layout.cell >= 12 else 0.0
    shape = tag(
        "rect", x=x, y=y, width=layout.cell - gap, height=layout.row - gap, class_="cell" if gap else "dot",
        fill=HEAT, fill_opacity=round(0.03 * bool(gap) + 0.97 * strength, 3),
    )  # fmt: skip
    ink = "onheat" if strength >= _INK_FLIPS else "zero" if strength == 0 else ""
    words = label(x + (layout.cell - gap) / 2, y + layout.row / 2 + 3.5, text, size=11, anchor="middle", class_=ink)
    return tag("g", shape, words if text else "", title(tip))


def _outline(layout: Layout, count_: int) -> str:
    width, height = layout.cell * count_, layout.row * count_
    return tag(
        "rect",
        x=layout.left,
        y=layout.top,
        width=width,
        height=height,
        fill="none",
        class_="grid",
        stroke="currentColor",
    )


def _scale(x: float, y: float, low: str, high: str) -> list[str]:
    """The colour scale, from none to full."""
    low = fit(low, 11, 90)
    start = x + width_of(low, 11) + 4
    steps = [
        tag("rect", x=start + 12 * i, y=y, width=12, height=10, fill=HEAT, fill_opacity=round(0.03 + 0.97 * i / 7, 3))
        for i in range(8)
    ]
    ends = [label(x, y + 9, low, size=11, class_="muted"), label(start + 102, y + 9, high, size=11, class_="muted")]
    return [*steps, line(start, y + 10.5, start + 96, y + 10.5, "grid"), *ends]
