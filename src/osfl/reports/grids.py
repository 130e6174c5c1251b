"""Tables of colored cells: the label heat map over clients, the confusion matrix, and differences above and below zero."""

from __future__ import annotations

import math
from collections.abc import Sequence

from osfl.reports.grid_layout import Layout, exact, headings, plan_grid
from osfl.reports.svg import canvas, label, tag, title, width_of
from osfl.reports.text import percent

HEAT, LOSS = "var(--heat,#0a3190)", "var(--loss,#8f3a06)"
_INK_FLIPS = 0.62  # from here on the opposite ink reads better: both have a contrast above 4.2 there, light and dark
_LONG_NAMES = 230.0  # variants of a method differ where their names end
_RIGHT = 62.0  # room for the column of accuracies beside a confusion matrix


def heatmap(
    rows: Sequence[str],
    columns: Sequence[str],
    values: Sequence[Sequence[float]],
    *,
    what: str,
    width: float = 860,
    row_title: str = "",
    column_title: str = "",
    unit: str = "",
    root: bool = False,
) -> str:
    """Values by row and column; color runs from nothing at zero to full at the largest value. With `root` it follows
    the square root, so that small counts still differ from 0 beside a large one."""
    top = max((abs(value) for row in values for value in row), default=0) or 1.0
    layout = plan_grid(rows, columns, values, width, titled=bool(column_title))
    parts = headings(rows, columns, layout, row_title, column_title)
    for r, row in enumerate(values):
        for c, value in enumerate(row):
            strength = math.sqrt(abs(value) / top) if root else abs(value) / top
            tip = f"{rows[r]}, {columns[c]}: {exact(value)} {unit}".rstrip()
            parts.append(_cell(layout, (r, c), strength, layout.text_of(value), tip))
    bottom = layout.at(len(rows), 0)[1]
    middle = exact(round(top / 4)) if root and top >= 8 else ""
    scale, right = _scale(layout.left, bottom + 16, ("0", middle, f"{exact(top)} {unit}".rstrip()))
    return canvas(max(layout.at(0, len(columns))[0] + 6, right), bottom + 46, what, *parts, *scale, scales=False)


def differences(
    rows: Sequence[str],
    columns: Sequence[str],
    values: Sequence[Sequence[float]],
    *,
    what: str,
    width: float = 860,
    row_title: str = "",
    column_title: str = "",
    unit: str = "",
) -> str:
    """One color above zero, another below it; both follow the square root: a small gain is seen beside a large loss."""
    top = max((abs(value) for row in values for value in row), default=0) or 1.0
    layout = plan_grid(rows, columns, values, width, titled=bool(column_title), room=_LONG_NAMES)
    parts = headings(rows, columns, layout, row_title, column_title)
    for r, row in enumerate(values):
        for c, value in enumerate(row):
            tip = f"{rows[r]}, {columns[c]}: {'+' if value > 0 else ''}{exact(value)} {unit}".rstrip()
            fill = LOSS if value < 0 else HEAT
            parts.append(_cell(layout, (r, c), math.sqrt(abs(value) / top), layout.text_of(value), tip, fill))
    bottom = layout.at(len(rows), 0)[1]
    worst, best = min(0.0, *(min(row) for row in values)), max(0.0, *(max(row) for row in values))
    ends = [(LOSS, worst, f"{exact(worst)} {unit}".rstrip()), (HEAT, best, f"+{exact(best)} {unit}".rstrip())]
    right = layout.at(0, len(columns))[0] + 6
    for fill, end, text_of in ends:
        if end:
            drawn, edge = _scale(layout.left, bottom + 16, ("0", "", text_of), fill, math.sqrt(abs(end) / top))
            parts, right, bottom = [*parts, *drawn], max(right, edge), bottom + 20
    return canvas(right, bottom + 16, what, *parts, scales=False)


def confusion(
    names: Sequence[str],
    counts: Sequence[Sequence[float]],
    *,
    what: str,
    width: float = 860,
    right: Sequence[float | None] = (),
) -> str:
    """Rows are the truth, columns the answer; color is the share of the row. `right` adds each row's accuracy."""
    layout = plan_grid(names, names, counts, width - (_RIGHT if right else 0))
    parts = headings(names, names, layout, "truth", "answer")
    for r, row in enumerate(counts):
        total = sum(row) or 1.0
        for c, value in enumerate(row):
            if value or layout.cell >= 12:  # with a hundred classes, empty cells are left to the background
                tip = f"{names[r]} answered as {names[c]}: {exact(value)} ({percent(value / total)} of the row)"
                parts.append(_cell(layout, (r, c), value / total, layout.text_of(value), tip))
    bottom, edge = layout.at(len(names), 0)[1], layout.at(0, len(names))[0]
    if right and layout.row >= 14:
        parts.append(label(edge + 8, layout.top - 8, "right", size=11, class_="muted"))
        parts += [label(edge + 8, layout.base(r), percent(v), size=11.5) for r, v in enumerate(right)]
        edge += _RIGHT
    scale, end = _scale(layout.left, bottom + 16, ("0\N{NO-BREAK SPACE}%", "", "100\N{NO-BREAK SPACE}%"))
    return canvas(max(edge + 6, end), bottom + 46, what, _frame(layout, len(names)), *parts, *scale, scales=False)


def _cell(layout: Layout, place: tuple[int, int], strength: float, text: str, tip: str, fill: str = HEAT) -> str:
    x, y = layout.at(*place)
    gap = 1.5 if layout.cell >= 12 else 0.0
    shape = tag(
        "rect",
        x=x,
        y=y,
        width=layout.cell - gap,
        height=layout.row - gap,
        rx=2 if gap else 0,
        fill=fill,
        fill_opacity=round(_opacity(strength, dot=not gap), 3),
    )
    ink = "onheat" if strength >= _INK_FLIPS else "zero" if strength == 0 else "oncell"
    middle = (x + (layout.cell - gap) / 2, y + (layout.row - gap) / 2 + 0.36 * layout.size)
    text_of = label(*middle, text, size=layout.size, anchor="middle", class_=ink) if text else ""
    return tag("g", shape, text_of, title(tip))


def _opacity(strength: float, dot: bool) -> float:
    """Cells are tinted even when empty, to be seen as cells; a dot is not, but shows from the first count on."""
    return (0.12 + 0.88 * strength if strength else 0.0) if dot else 0.04 + 0.96 * strength


def _frame(layout: Layout, count: int) -> str:
    """A border around dots, which would float without it; cells with gaps need none."""
    if layout.cell >= 12:
        return ""
    side = {"width": layout.cell * count, "height": layout.row * count}
    return tag("rect", x=layout.left, y=layout.top, fill="none", class_="grid", stroke="currentColor", **side)


def _scale(x: float, y: float, marks: tuple[str, str, str], fill: str = HEAT, full: float = 1.0) -> tuple[list[str], float]:
    """The color scale up to `full` with what its ends (and its middle) stand for; returns the x where it ends too."""
    low, middle, high = marks
    start = x + width_of(low, 11) + 8
    steps = [
        tag("rect", x=start + 12 * i, y=y, width=12, height=12, fill=fill, fill_opacity=round(0.04 + 0.96 * full * i / 8, 3))
        for i in range(9)
    ]
    texts = [label(x, y + 10, low, size=11, class_="muted"), label(start + 116, y + 10, high, size=11, class_="muted")]
    if middle:
        texts.append(label(start + 54, y + 26, middle, size=11, anchor="middle", class_="muted"))
    return steps + texts, start + 120 + width_of(high, 11)
