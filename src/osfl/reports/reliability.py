"""Calibration as a drawing: how often answers are right against how sure the model is. Both axes end at 100 %."""

from __future__ import annotations

from collections.abc import Sequence

from osfl.core.evaluated import Bin
from osfl.reports.axes import Axis, Frame, draw_axes, room_for
from osfl.reports.svg import canvas, color, line, tag, title
from osfl.reports.text import many, percent

_HEIGHT, _LARGEST = 260.0, 9.0
_SHARE = Axis(0.0, 1.0, (0.0, 0.25, 0.5, 0.75, 1.0))


def reliability(bins: Sequence[Bin], *, what: str, width: float = 860) -> str:
    """One disc a bin, its area the number of images; on the dashed line the model is as sure as it is right."""
    names = [percent(mark, 0) for mark in _SHARE.marks]
    left = room_for(names)
    frame = Frame(left, 34.0, min(width - left - 24, 1.6 * _HEIGHT), _HEIGHT, _SHARE, _SHARE)
    parts = draw_axes(frame, names, names, "highest probability", "share of right answers")
    (x1, y1), (x2, y2) = frame.at(0, 0), frame.at(1, 1)
    parts.append(line(x1, y1, x2, y2, "reference", stroke_dasharray="4 3"))
    most = max((one["images"] for one in bins), default=1)
    for one in bins:
        x, y = frame.at(one["confidence"], one["accuracy"])
        tip = f"{many(one['images'], 'image')}: {percent(one['confidence'])} sure, {percent(one['accuracy'])} right"
        radius = max(2.5, _LARGEST * (one["images"] / most) ** 0.5)
        parts.append(tag("g", tag("circle", cx=x, cy=y, r=radius, fill=color(0), fill_opacity=0.8, class_="mark"), title(tip)))
    return canvas(width, frame.bottom + 52, what, *parts)
