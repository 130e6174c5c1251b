"""Clouds of unnamed points in a plane without units: colour tells groups, shape tells kinds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from osfl.reports.axes import Frame, linear
from osfl.reports.svg import PALETTE, Attribute, canvas, color, label, legend, tag, title, width_of

Points = Sequence[Sequence[float]]
_HEIGHT = 0.62  # of the width
_SIZE = 11.5


def cloud(series: Mapping[str, Mapping[str, Points]], *, what: str, width: float = 860) -> str:
    """group -> kind -> points (x, y). The first kind is drawn as rings, the second as full diamonds.

    The axes of an embedding mean nothing, so there are none. With more groups than colours, each also has its number.
    """
    kinds = list(dict.fromkeys(kind for group in series.values() for kind in group))
    places = [point for group in series.values() for points in group.values() for point in points]
    numbered = len(series) > len(PALETTE)
    names = [f"{index + 1} {name}" if numbered else name for index, name in enumerate(series)]
    head, top = legend(names, 0, 14, width)
    key, top = _key(kinds, top + 2, width)
    x, y = linear([point[0] for point in places]), linear([point[1] for point in places])
    frame = Frame(10, top + 6, width - 20, max(260.0, width * _HEIGHT), x, y)
    border = tag("rect", x=frame.left - 10, y=frame.top - 4, width=frame.width + 20, height=frame.height + 8, rx=6,
                 fill="none", class_="grid", stroke="currentColor")  # fmt: skip
    parts = [border]
    for index, (name, group) in enumerate(series.items()):
        marks = [_mark(frame, point, kinds.index(kind), index) for kind, points in group.items() for point in points]
        number = _number(frame, group, index) if numbered else ""
        parts.append(tag("g", *marks, number, title(name)))
    return canvas(width, frame.bottom + 8, what, *head, *key, *parts)


def _key(kinds: Sequence[str], y: float, width: float) -> tuple[list[str], float]:
    parts, left = [], 0.0
    for index, kind in enumerate(kinds):
        parts.append(_shape(left + 6, y - 4, index, "currentColor"))
        parts.append(label(left + 17, y, kind, size=12, room=width - left - 17))
        left += width_of(kind, 12) + 34
    return parts, y + 12


def _mark(frame: Frame, point: Sequence[float], kind: int, group: int) -> str:
    return _shape(*frame.at(point[0], point[1]), kind, color(group))


def _shape(x: float, y: float, kind: int, ink: str) -> str:
    if kind == 0:
        return tag("circle", cx=x, cy=y, r=3.2, fill="none", stroke=ink, stroke_width=1.3)
    look: dict[str, Attribute] = {"fill": ink, "fill_opacity": 0.8}
    corners = f"{x:.1f},{y - 4:.1f} {x + 4:.1f},{y:.1f} {x:.1f},{y + 4:.1f} {x - 4:.1f},{y:.1f}"
    return tag("polygon", points=corners, **look)


def _number(frame: Frame, group: Mapping[str, Points], index: int) -> str:
    """At the group's point nearest to its middle, so that it lies on the cloud and not between two."""
    points = [point for points in group.values() for point in points]
    if not points:
        return ""
    middle = [sum(point[axis] for point in points) / len(points) for axis in (0, 1)]
    best = min(points, key=lambda point: (point[0] - middle[0]) ** 2 + (point[1] - middle[1]) ** 2)
    x, y = frame.at(best[0], best[1])
    return label(x, y + 4, str(index + 1), size=_SIZE, anchor="middle", class_="value strong")
