"""Grouped horizontal bars for shares between 0 and 1, with error whiskers and one reference line."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from osfl.reports.svg import canvas, color, fit_middle, label, legend, line, tag, title, width_of
from osfl.reports.text import percent

Value = tuple[float | None, float | None]  # (share, error); None where it does not exist
_BAR, _GAP, _NUMBER = 16, 14, 62  # height of a bar, space between groups, room for a number at its right
_BOLDER = 1.12  # how much wider bold text is


@dataclass(frozen=True)
class Rail:
    """Where shares lie from left to right; without space at the left, names stand above their bars."""

    left: float
    span: float

    @property
    def stacked(self) -> bool:
        return self.left == 0

    def x(self, share: float) -> float:
        return self.left + self.span * min(1.0, max(0.0, share))


def bars(
    groups: Mapping[str, Sequence[Value]],
    series: Sequence[str],
    *,
    what: str,
    width: float = 860,
    reference: tuple[str, float] | None = None,
    strong: str | None = None,
) -> str:
    """One group a name, one bar a series; the group called `strong` has its name in bold."""
    names = min(240, max((_BOLDER * width_of(name, 13) for name in groups), default=0)) + 14
    left = 0.0 if width < 500 else names
    rail = Rail(left, width - left - _NUMBER)
    head, top = legend(list(series), 0, 14, width)
    if reference:
        head.append(_reference_name(reference, rail, top + 8))
        top += 22
    shapes, texts, tops, y = [], [], [], top + 4
    for name, values in groups.items():
        y += 17 if rail.stacked else 0
        tops.append(y)
        middle = y - 9 if rail.stacked else y + len(series) * _BAR / 2
        texts.append(_name(name, middle, rail, bold=name == strong))
        for index, (value, error) in enumerate(values):
            tip = f"{name}, {series[index]}: {percent(value)}" + (f" ± {percent(error)}" if error else "")
            shapes.append(_bar(value, error, rail, y + index * _BAR, color(index), tip))
            texts.append(_number(value, error, rail, y + index * _BAR))
        y += len(series) * _BAR + _GAP
    marks = _marks(rail, top, y - 4)
    lines = _reference_line(reference[1], rail, tops, len(series) * _BAR) if reference else []
    return canvas(width, y + 18, what, *head, *marks, *shapes, *lines, *texts)


def _name(name: str, middle: float, rail: Rail, bold: bool) -> str:
    room = (rail.span if rail.stacked else rail.left - 12) / _BOLDER
    return label(0, middle + 4, fit_middle(name, 13, room), size=13, tip=name, class_="value strong" if bold else "value")


def _bar(value: float | None, error: float | None, rail: Rail, top: float, fill: str, tip: str) -> str:
    if value is None:
        return ""
    width = max(1.0, rail.x(value) - rail.left)
    parts = [tag("rect", x=rail.left, y=top + 1, width=width, height=_BAR - 2.5, rx=2, fill=fill)]
    if error:
        low, high, y = rail.x(value - error), rail.x(value + error), top + _BAR / 2
        parts.append(line(low, y, high, y, "whisker"))
        parts += [line(x, y - 3, x, y + 3, "whisker") for x in (low, high)]
    return tag("g", *parts, title(tip))


def _number(value: float | None, error: float | None, rail: Rail, top: float) -> str:
    if value is None:
        return label(rail.left + 6, top + 12, "not available", size=11, class_="muted")
    return label(rail.x(value + (error or 0)) + 6, top + 12, percent(value), size=11.5, class_="value")


def _reference_name(reference: tuple[str, float], rail: Rail, y: float) -> str:
    """Above its line, moved aside where it would leave the drawing."""
    text = f"{reference[0]} {percent(reference[1])}"
    half = width_of(text, 11) / 2
    center = min(max(rail.x(reference[1]), half), rail.x(1) + _NUMBER - half)
    return label(center, y, text, size=11, anchor="middle", class_="muted")


def _reference_line(share: float, rail: Rail, tops: Sequence[float], height: float) -> list[str]:
    """Over the bars and the gaps between them, but never through a name that stands above its bars."""
    x, more = rail.x(share), 1 if rail.stacked else _GAP / 2
    return [line(x, top - more, x, top + height + more, "reference", stroke_dasharray="4 3") for top in tops]


def _marks(rail: Rail, top: float, bottom: float) -> list[str]:
    parts = []
    for share in (0, 0.25, 0.5, 0.75, 1):
        x = rail.x(share)
        parts.append(line(x, top, x, bottom, "grid" if share else "axis"))
        anchor = "start" if rail.stacked and not share else "middle"
        parts.append(label(x, bottom + 16, percent(share, 0), size=11, anchor=anchor, class_="muted"))
    return parts
