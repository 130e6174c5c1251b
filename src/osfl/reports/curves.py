"""Lines over a common x, and histograms over common bins."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from osfl.reports.axes import Frame, draw_axes, linear, mark_names, room_for, within_shares
from osfl.reports.svg import Attribute, canvas, color, legend, number, tag, title

_DASHES = ("", "7 4", "2 3", "9 3 2 3")  # lines differ by dash as well as by color
_HEIGHT = 230.0
_FEW = 12  # points that are marked, so that it is seen where the line is measured and where it is only drawn


def lines(
    x: Sequence[float],
    series: Mapping[str, Sequence[float | None]],
    *,
    what: str,
    width: float = 860,
    x_label: str = "",
    y_label: str = "",
    percent: bool = False,
) -> str:
    """One line a series; None leaves a gap. An isolated point is a dot, and so is each of a few. `percent`: the axis
    ends at 0 and at 100."""
    values = [value for row in series.values() for value in row if value is not None]
    frame, parts = _framed(list(x), values, list(series), width, x_label, y_label, percent)
    for index, (name, row) in enumerate(series.items()):
        found = _pieces(x, row)
        dots = [place for piece in found if len(piece) == 1 or len(x) <= _FEW for place in piece]
        drawn = [_stroke(frame, piece, index) for piece in found if len(piece) > 1] + [_dot(frame, *at, index) for at in dots]
        parts.append(tag("g", *drawn, title(name)))
    return canvas(width, frame.bottom + 52, what, *parts)


def histogram(
    bins: Sequence[float],
    series: Mapping[str, Sequence[float]],
    *,
    what: str,
    width: float = 860,
    x_label: str = "",
    y_label: str = "count",
) -> str:
    """Steps over bin edges (one edge more than values), see-through so that series may lie over each other."""
    values = [0.0, *(value for row in series.values() for value in row)]
    frame, parts = _framed(list(bins), values, list(series), width, x_label, y_label)
    for index, (name, row) in enumerate(series.items()):
        corners = [(bins[0], 0.0)]
        for left, right, value in zip(bins, bins[1:], row, strict=False):
            corners += [(left, value), (right, value)]
        corners.append((corners[-1][0], 0.0))
        shape: dict[str, Attribute] = {"fill": color(index), "fill_opacity": 0.28, "stroke": color(index), "stroke_width": 1.6}
        parts.append(tag("polygon", title(name), points=_points(frame, corners), **shape))
    return canvas(width, frame.bottom + 52, what, *parts)


def _framed(
    x: Sequence[float], y: Sequence[float], names: list[str], width: float, x_label: str, y_label: str, percent: bool = False
) -> tuple[Frame, list[str]]:
    head, top = legend(names, 0, 14, width)
    across, up = linear(x, 8 if width > 500 else 4), linear(y)
    up = within_shares(up, 100.0) if percent else up
    y_names = mark_names(up)
    left = room_for(y_names)
    frame = Frame(left, top + 26, width - left - 20, _HEIGHT, across, up)
    return frame, head + draw_axes(frame, mark_names(across), y_names, x_label, y_label)


def _pieces(x: Sequence[float], row: Sequence[float | None]) -> list[list[tuple[float, float]]]:
    pieces: list[list[tuple[float, float]]] = [[]]
    for at, value in zip(x, row, strict=False):
        if value is None:
            pieces.append([])
        else:
            pieces[-1].append((at, value))
    return [piece for piece in pieces if piece]


def _stroke(frame: Frame, piece: list[tuple[float, float]], index: int) -> str:
    dash = _DASHES[index // 2 % len(_DASHES)]
    look = {"stroke_dasharray": dash} if dash else {}
    points = _points(frame, piece)
    return tag("polyline", points=points, fill="none", stroke=color(index), stroke_width=2, stroke_linejoin="round", **look)


def _dot(frame: Frame, x: float, y: float, index: int) -> str:
    cx, cy = frame.at(x, y)
    return tag("circle", cx=cx, cy=cy, r=3, fill=color(index))


def _points(frame: Frame, corners: Sequence[tuple[float, float]]) -> str:
    places = (frame.at(*corner) for corner in corners)
    return " ".join(f"{number(x)},{number(y)}" for x, y in places)
