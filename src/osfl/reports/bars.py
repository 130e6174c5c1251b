"""Grouped horizontal bars for shares between 0 and 1, with error whiskers and one reference line."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from osfl.reports.svg import canvas, color, fit_middle, label, legend, line, tag, title, width_of
from osfl.reports.words import percent

Value = tuple[float | None, float | None]  # (share, error); None where it does not exist
_BAR, _GAP, _NUMBER = 16, 14, 62  # height of a bar, space between groups, room for a number at its right
_BOLDER = 1.12  # how much wider bold text is


def bars(
    groups: Mapping[str, Sequence[Value]], series: Sequence[str], *, what: str, width: float = 860,
    reference: tuple[str, float] | None = None, strong: str | None = None,
) -> str:  # fmt: skip
    """One group a name, one bar a series. On a narrow drawing the names stand above their bars."""
    stacked = width < 500
    names = 0.0 if stacked else min(240, max((_BOLDER * width_of(name, 13) for name in groups), default=0)) + 14
    span = width - names - _NUMBER
    head, top = legend(list(series), 0, 14, width)
    if reference:
        head += _reference(reference, names, top + 8, span)
        top += 22
    parts, stretches, y = [], [] if stacked else [(top - 2, top + 4)], top + 4
    for name, values in groups.items():
        if stacked:
            y += 17
        parts += _group(name, values, series, (names, y, span), stacked, bold=name == strong)
        stretches.append((y, y + len(series) * _BAR + (0 if stacked else _GAP)))  # never through a name above its bars
        y += len(series) * _BAR + _GAP
    rail = _marks(names, top, y - 4, span)
    if reference:
        x = names + span * _clip(reference[1])
        rail += [line(x, start, x, end, "reference", stroke_dasharray="5 3") for start, end in stretches]
    return canvas(width, y + 18, what, *head, *rail, *parts)


def _clip(share: float) -> float:
    return min(1.0, max(0.0, share))


def _group(
    name: str, values: Sequence[Value], series: Sequence[str], place: tuple[float, float, float], stacked: bool, bold: bool
) -> list[str]:
    left, top, span = place
    middle = top + len(series) * _BAR / 2 + 4
    at = (0.0, top - 5) if stacked else (0.0, middle)
    shown = fit_middle(name, 13, (left + span if stacked else left - 12) / _BOLDER)
    parts = [label(*at, shown, size=13, tip=name, class_="value strong" if bold else "value")]
    for index, (value, error) in enumerate(values):
        spot = (left, top + index * _BAR, span)
        parts.append(tag("g", *_bar(value, error, spot, index), title(_words(name, series[index], value, error))))
    return parts


def _words(name: str, series: str, value: float | None, error: float | None) -> str:
    return f"{name}, {series}: {percent(value)}" + (f" ± {percent(error)}" if error else "")


def _bar(value: float | None, error: float | None, place: tuple[float, float, float], index: int) -> list[str]:
    left, top, span = place
    if value is None:
        return [label(left + 6, top + 12, "not available", size=11, class_="muted")]
    end = left + span * _clip(value)
    shape = tag("rect", x=left, y=top + 1, width=max(1.0, end - left), height=_BAR - 2.5, rx=2, fill=color(index))
    parts, right = [shape], end
    if error:
        low, right = left + span * _clip(value - error), left + span * _clip(value + error)
        y = top + _BAR / 2
        parts += [line(low, y, right, y, "whisker")]
        parts += [line(x, y - 3, x, y + 3, "whisker") for x in (low, right)]
    parts.append(label(right + 6, top + 12, percent(value), size=11.5, class_="value"))
    return parts


def _reference(reference: tuple[str, float], left: float, y: float, span: float) -> list[str]:
    """The line's name, kept inside the drawing by choosing the side with room."""
    name, value = reference
    x, text = left + span * _clip(value), f"{name} {percent(value)}"
    half = width_of(text, 11) / 2
    center = min(max(x, half), left + span + _NUMBER - half)
    return [label(center, y, text, size=11, anchor="middle", class_="muted")]


def _marks(left: float, top: float, bottom: float, span: float) -> list[str]:
    parts = []
    for share in (0, 0.25, 0.5, 0.75, 1):
        x = left + span * share
        parts.append(line(x, top, x, bottom, "grid" if share else "axis"))
        anchor = "start" if left == 0 and not share else "middle"
        parts.append(label(x, bottom + 16, percent(share, 0), size=11, anchor=anchor, class_="muted"))
    return parts
