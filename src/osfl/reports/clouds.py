"""Scatter plots without units, such as t-SNE: color shows the group, shape the kind of a point."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from osfl.reports.axes import Frame, linear
from osfl.reports.svg import PALETTE, Attribute, canvas, color, label, legend, tag, title, width_of

Points = Sequence[Sequence[float]]
_HEIGHT = 0.62  # of the width
_SIZE = 11.5
_SHORT = 4  # letters of a name that can stand in a cloud


def cloud(series: Mapping[str, Mapping[str, Points]], *, what: str, width: float = 860) -> str:
    """group -> kind -> points (x, y). The first kind is drawn as rings, the second as full diamonds.

    The axes of an embedding mean nothing, so there are none. With more groups than colors, each is also marked by its number,
    or by its name where all are short.
    """
    kinds = list(dict.fromkeys(kind for group in series.values() for kind in group))
    places = [point for group in series.values() for points in group.values() for point in points]
    numbered = len(series) > len(PALETTE)
    short = all(len(name) <= _SHORT for name in series)  # digits, say: a second number would only confuse
    marks_of = list(series) if short else [str(index + 1) for index in range(len(series))]
    names = [f"{mark} {name}" if numbered and not short else name for mark, name in zip(marks_of, series, strict=True)]
    head, top = legend(names, 0, 14, width)
    key, top = _key(kinds, top + 2, width)
    x, y = linear([point[0] for point in places]), linear([point[1] for point in places])
    frame = Frame(10, top + 6, width - 20, max(260.0, width * _HEIGHT), x, y)
    border = tag(
        "rect",
        x=frame.left - 10,
        y=frame.top - 4,
        width=frame.width + 20,
        height=frame.height + 8,
        rx=6,
        fill="none",
        class_="grid",
        stroke="currentColor",
    )
    parts = [border]
    for index, (name, group) in enumerate(series.items()):
        marks = [_mark(frame, point, kinds.index(kind), index) for kind, points in group.items() for point in points]
        parts.append(tag("g", *marks, title(name)))
    if numbered:
        parts += _texts(frame, dict(zip(marks_of, series.values(), strict=True)))
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


def _texts(frame: Frame, groups: Mapping[str, Mapping[str, Points]]) -> list[str]:
    """Each at the point nearest to the middle of the group's first kind, so that it lies on a cloud: the kinds of a group may
    be far apart. Left out where another one stands."""
    parts: list[str] = []
    taken: list[tuple[float, float, float]] = []
    for text, group in groups.items():
        points = next((points for points in group.values() if points), ())
        if not points:
            continue
        middle = [sum(point[axis] for point in points) / len(points) for axis in (0, 1)]
        best = min(points, key=lambda p, m=middle: (p[0] - m[0]) ** 2 + (p[1] - m[1]) ** 2)  # type: ignore[misc]
        (x, y), half = frame.at(best[0], best[1]), width_of(text, _SIZE) / 2 + 2
        if any(abs(x - at) < half + room and abs(y - level) < 16 for at, level, room in taken):
            continue  # its tooltip still names it
        taken.append((x, y, half))
        parts.append(label(x, y + 4, text, size=_SIZE, anchor="middle", class_="value strong"))
    return parts
