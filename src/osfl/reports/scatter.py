"""Named points over (logarithmic) axes of cost, each named beside itself without overlapping."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from osfl.reports.axes import Frame, draw_axes, linear, logarithmic, room_for, within_shares
from osfl.reports.svg import canvas, color, fit_middle, label, legend, line, tag, title, width_of
from osfl.reports.text import compact

_NAME_ROOM = 32  # pixels of width a name needs on average; where there is less, points are numbered
Box = tuple[float, float, float, float]  # left, top, right, bottom


@dataclass(frozen=True)
class Point:
    name: str
    x: float
    y: float
    error: float | None = None
    kind: int = 0  # color and shape


def scatter(
    points: Sequence[Point],
    *,
    what: str,
    width: float = 860,
    x_label: str = "",
    y_label: str = "",
    log_x: bool = True,
    x_format: Callable[[float], str] = compact,
    y_format: Callable[[float], str] = compact,
    log_y: bool = False,
    share_y: bool = False,
    kinds: Sequence[str] = (),
) -> str:
    """Points with their names. A log axis keeps a place for zero at its start. `kinds` names what colors stand for;
    with `share_y` nothing is above 100 %."""
    across = logarithmic([p.x for p in points]) if log_x else linear([p.x for p in points])
    up = logarithmic([p.y for p in points]) if log_y else linear([p.y for p in points])
    up = within_shares(up) if share_y else up
    y_names = [y_format(mark) for mark in up.marks]
    left = room_for(y_names)
    head, top = legend(list(kinds), 0, 14, width) if kinds else ([], 8.0)
    frame = Frame(left, top + 26, width - left - 34, max(300.0, 14.0 * len(points)), across, up)
    parts = head + draw_axes(frame, [x_format(mark) for mark in across.marks], y_names, x_label, y_label)
    parts += [_mark(frame, point, f"{point.name}: {y_format(point.y)} at {x_format(point.x)}") for point in points]
    if len(points) * _NAME_ROOM <= width:
        return canvas(width, frame.bottom + 52, what, *parts, *_names(frame, points, [p.name for p in points]))
    parts += _names(frame, points, [str(index + 1) for index in range(len(points))])
    key, bottom = _key(points, frame.bottom + 66, width)
    return canvas(width, bottom, what, *parts, *key)


def _key(points: Sequence[Point], top: float, width: float) -> tuple[list[str], float]:
    """The names behind the numbers, in columns."""
    columns = max(2, int(width // 200))
    rows, room = -(-len(points) // columns), width / columns
    parts = []
    for index, point in enumerate(points):
        text = fit_middle(f"{index + 1}\N{NO-BREAK SPACE} {point.name}", 11.5, room - 10)
        place = (index // rows * room, top + index % rows * 18)
        parts.append(label(*place, text, size=11.5, tip=point.name))
    return parts, top + rows * 18


def _mark(frame: Frame, point: Point, tip: str) -> str:
    x, y = frame.at(point.x, point.y)
    parts = []
    if point.error:
        low, high = (frame.at(point.x, point.y + sign * point.error)[1] for sign in (-1, 1))
        low, high = min(low, frame.bottom), max(high, frame.top)
        parts.append(line(x, low, x, high, "whisker"))
    if point.kind % 2:
        corners = f"{x:.1f},{y - 6:.1f} {x + 6:.1f},{y:.1f} {x:.1f},{y + 6:.1f} {x - 6:.1f},{y:.1f}"
        parts.append(tag("polygon", points=corners, fill=color(point.kind), class_="mark"))
    else:
        parts.append(tag("circle", cx=x, cy=y, r=5, fill=color(point.kind), class_="mark"))
    return tag("g", *parts, title(tip))


def _names(frame: Frame, points: Sequence[Point], names: Sequence[str]) -> list[str]:
    """Each name takes the nearest free place; a thin line leads to it when that is not close."""
    dots = [frame.at(point.x, point.y) for point in points]
    taken: list[Box] = [(x - 7, y - 7, x + 7, y + 7) for x, y in dots]
    parts = []
    for point, name, (x, y) in zip(points, names, dots, strict=True):
        text = fit_middle(name, 11.5, min(180, frame.width * 0.42))
        box = _free_place(frame, (x, y), width_of(text, 11.5), taken)
        if box is None:  # the tooltip still names the point
            continue
        taken.append(box)
        if abs(box[1] + 7 - y) > 12:
            parts.append(line(x, y, box[0] if box[0] > x else box[2], box[1] + 8, "leader"))
        parts.append(label(box[0] + 1, box[3] - 3.5, text, size=11.5, class_="value", tip=point.name))
    return parts


def _free_place(frame: Frame, dot: tuple[float, float], width: float, taken: Sequence[Box]) -> Box | None:
    x, y = dot
    for shift in sorted(range(-140, 141, 7), key=abs):
        for left in (x + 9, x - 11 - width):
            box = (left, y + shift - 8, left + width + 2, y + shift + 7)
            inside = box[0] >= frame.left and box[2] <= frame.left + frame.width + 18
            inside = inside and box[1] >= frame.top - 8 and box[3] <= frame.bottom - 2
            if inside and not any(_overlap(box, other) for other in taken):
                return box
    return None


def _overlap(a: Box, b: Box) -> bool:
    return a[0] < b[2] and b[0] < a[2] and a[1] < b[3] and b[1] < a[3]
