"""A frame with two axes, and where a value lies in it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from osfl.reports.svg import label, line, width_of
from osfl.reports.text import compact


@dataclass(frozen=True)
class Axis:
    """A range of values with its marks; on a log axis values of zero sit at the start, apart from the rest."""

    low: float
    high: float
    marks: tuple[float, ...]
    log: bool = False
    zero: bool = False  # a log axis that also has to show zero

    def share(self, value: float) -> float:
        """Where a value lies, from 0 to 1."""
        if not self.log:
            return (value - self.low) / ((self.high - self.low) or 1.0)
        start = 0.12 if self.zero else 0.0
        if value <= 0:
            return 0.03
        spread = math.log10(self.high / self.low) or 1.0
        return start + (1 - start) * math.log10(value / self.low) / spread


def linear(values: Sequence[float], count: int = 5) -> Axis:
    """Round marks that enclose the values; whole ones where all values are whole: there is no half epoch."""
    low, high = (min(values), max(values)) if values else (0.0, 1.0)
    if high - low < 1e-12:
        low, high = low - (abs(low) or 1) * 0.1, high + (abs(high) or 1) * 0.1
    step = _round_step((high - low) / count)
    if all(float(value).is_integer() for value in values):
        step = 5.0 if step == 2.5 else max(1.0, step)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    marks = tuple(round(index * step, 12) for index in range(first, last + 1))
    return Axis(marks[0], marks[-1], marks)


def within_shares(axis: Axis, whole: float = 1.0) -> Axis:
    """An axis of shares ends at 0 % and at 100 %, which is `whole`: there is nothing beyond."""
    marks = tuple(mark for mark in axis.marks if -1e-9 <= mark <= whole * (1 + 1e-9))
    return Axis(max(0.0, axis.low), min(whole, axis.high), marks)


def logarithmic(values: Sequence[float]) -> Axis:
    """Powers of ten that enclose the positive values."""
    positive = [value for value in values if value > 0] or [1.0]
    first, last = math.floor(math.log10(min(positive))), math.ceil(math.log10(max(positive)) + 1e-9)
    last = max(last, first + 1)
    marks = tuple(10.0**power for power in range(first, last + 1))
    return Axis(marks[0], marks[-1], marks, log=True, zero=len(positive) < len(values))


def _round_step(rough: float) -> float:
    power = 10.0 ** math.floor(math.log10(rough))
    return next(step * power for step in (1, 2, 2.5, 5, 10) if step * power >= rough - 1e-12 * power)


@dataclass(frozen=True)
class Frame:
    """The drawing area inside the axes, in pixels."""

    left: float
    top: float
    width: float
    height: float
    x: Axis
    y: Axis

    def at(self, x: float, y: float) -> tuple[float, float]:
        return self.left + self.width * self.x.share(x), self.top + self.height * (1 - self.y.share(y))

    @property
    def bottom(self) -> float:
        return self.top + self.height


def draw_axes(frame: Frame, x_names: Sequence[str], y_names: Sequence[str], x_label: str, y_label: str) -> list[str]:
    """Grid lines, marks and axis titles. The y title is written above the axis, where it can be read without turning."""
    parts = [label(4, frame.top - 14, y_label, size=12, class_="muted", room=frame.left + frame.width)]
    for mark, name in [*([(0.0, "0")] if frame.y.zero else []), *zip(frame.y.marks, y_names, strict=True)]:
        y = frame.at(frame.x.low, mark)[1]
        parts.append(line(frame.left, y, frame.left + frame.width, y, "grid"))
        parts.append(label(frame.left - 8, y + 4, name, size=11, anchor="end", class_="muted"))
    parts += _x_marks(frame, x_names)
    middle = frame.left + frame.width / 2
    parts.append(label(middle, frame.bottom + 40, x_label, size=12, anchor="middle", class_="muted", room=frame.width))
    return parts


def _x_marks(frame: Frame, names: Sequence[str]) -> list[str]:
    parts, taken = [], -math.inf
    marks = list(zip(frame.x.marks, names, strict=True))
    if frame.x.zero:
        marks.insert(0, (0.0, "0"))
    for mark, name in marks:
        x, half = frame.at(mark, frame.y.low)[0], width_of(name, 11) / 2
        parts.append(line(x, frame.top, x, frame.bottom, "grid"))
        if x - half > taken + 6:  # a mark without room keeps its line and loses its number
            parts.append(label(x, frame.bottom + 18, name, size=11, anchor="middle", class_="muted"))
            taken = x + half
    return parts


def mark_names(axis: Axis) -> list[str]:
    """Short, but with digits enough that no two marks are called the same."""
    labels = [[compact(mark, digits) for mark in axis.marks] for digits in (3, 4, 5, 6)]
    return next((names for names in labels if len(set(names)) == len(names)), labels[-1])


def room_for(names: Sequence[str]) -> float:
    """The space that y marks need at the left."""
    return max((width_of(name, 11) for name in names), default=0) + 14
