"""Differences by client, largest first: bars above a line for those who gain, below it for those who lose."""

from __future__ import annotations

from collections.abc import Mapping

from osfl.reports.axes import Frame, linear, room_for
from osfl.reports.svg import canvas, color, label, line, tag, title, width_of
from osfl.reports.text import points

_HEIGHT, _SIZE = 210.0, 11.0
_NAMED = 15  # pixels a bar needs to have its name below it
_UP, _DOWN = 0, 1  # of the palette


def ranked(gains: Mapping[str, float], *, what: str, y_label: str, width: float = 860) -> str:
    """One bar a client, sorted; the picture is read from left to right: who gains most, where it ends, who loses most."""
    names = sorted(gains, key=lambda name: (-gains[name], name))
    axis = linear([0.0, *gains.values()])
    marks = [f"{100 * mark:+.3g}" if mark else "0" for mark in axis.marks]
    left = room_for(marks)
    frame = Frame(left, 30, width - left - 8, _HEIGHT, axis, axis)
    parts = [label(4, 14, y_label, size=12, class_="muted", room=width - 8)]
    for mark, text in zip(axis.marks, marks, strict=True):
        y = _height(frame, mark)
        parts.append(line(frame.left, y, frame.left + frame.width, y, "grid" if mark else "axis"))
        parts.append(label(frame.left - 8, y + 4, text, size=_SIZE, anchor="end", class_="muted"))
    step = frame.width / max(1, len(names))
    parts += [_bar(frame, index, step, name, gains[name]) for index, name in enumerate(names) if gains[name]]
    below = _names(frame, step, names) if step >= _NAMED else []
    room = max((width_of(name, _SIZE) for name in names), default=0.0) + 8 if below else 12.0
    return canvas(width, frame.bottom + room, what, *parts, *below)


def _height(frame: Frame, gain: float) -> float:
    return frame.top + frame.height * (1 - frame.y.share(gain))


def _bar(frame: Frame, index: int, step: float, name: str, gain: float) -> str:
    zero, end = _height(frame, 0.0), _height(frame, gain)
    thick = max(1.0, step * 0.78)
    shape = tag(
        "rect",
        x=frame.left + step * index + (step - thick) / 2,
        y=min(zero, end),
        width=thick,
        height=max(1.0, abs(end - zero)),
        rx=min(2.0, thick / 4),
        fill=color(_UP if gain > 0 else _DOWN),
    )
    return tag("g", shape, title(f"{name}: {'+' if gain > 0 else ''}{points(gain)}"))


def _names(frame: Frame, step: float, names: list[str]) -> list[str]:
    """Upright, each ending below its bar."""
    places = [frame.left + step * (index + 0.5) + 4 for index in range(len(names))]
    return [
        label(x, frame.bottom + 6, name, size=_SIZE, anchor="end", upright=True, class_="muted")
        for x, name in zip(places, names, strict=True)
    ]
