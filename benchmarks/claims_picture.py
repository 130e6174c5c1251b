"""The claims as a picture: a dot at each difference, a bar over its 95 % interval."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from benchmarks.claims import Judged
from osfl.reports.svg import Attribute, label, tag

WIDTH, TEXT, RIGHT, ROW, TOP = 960, 400, 228, 22, 64  # TEXT and RIGHT are the room for text beside the dots
TICKS = (-50, -20, -5, -1, 0, 1, 5, 20, 50)
INKS = {"yes": "#228833", "no": "#cc3311", "inconclusive": "#777777"}
STYLE: dict[str, Attribute] = {
    "xmlns": "http://www.w3.org/2000/svg",
    "color": "#222222",
    "font_family": "system-ui, sans-serif",
}
QUIET = ".grid { stroke: #dddddd } .axis { stroke: #777777 } .muted { fill: #555555 }"  # what reports say in their style sheet


def alone(width: float, height: float, *parts: str) -> str:
    """A file of its own: it brings its colors and its background."""
    ground = tag("rect", x=0, y=0, width=width, height=height, rx=8, fill="#ffffff")
    return (
        tag("svg", tag("style", QUIET), ground, *parts, width=width, height=height, viewBox=f"0 0 {width} {height}", **STYLE)
        + "\n"
    )


def _bent(points: float) -> float:
    """Straight below a point, logarithmic above: differences of tenths and of tens on one axis."""
    return math.asinh(points)


def picture(judged: Sequence[Judged]) -> str:
    """A row a claim, in the order given."""
    reach = [(one.above - one.reach, one.above + one.reach) for one in judged if math.isfinite(one.reach)]
    low = _bent(min([-1.0, *(pair[0] for pair in reach)]))
    high = _bent(max([1.0, *(pair[1] for pair in reach)]))

    def x(points: float) -> float:
        share = (min(max(_bent(points), low), high) - low) / (high - low)
        return TEXT + share * (WIDTH - TEXT - RIGHT)

    height = TOP + ROW * len(judged) + 12
    parts = [
        label(16, 26, "Claims of the papers, and the differences in our records", size=15),
        label(WIDTH - 16, 26, "accuracy, points above", size=11, anchor="end"),
    ]
    for tick in (tick for tick in TICKS if low <= _bent(tick) <= high):
        shade = "#222222" if tick == 0 else "#dddddd"
        parts.append(tag("line", x1=x(tick), y1=TOP, x2=x(tick), y2=height - 12, stroke=shade))
        parts.append(label(x(tick), TOP - 4, f"{tick:+d}" if tick else "0", size=10, anchor="middle"))
    for row, one in enumerate(judged):
        first = row == 0 or judged[row - 1].method != one.method
        parts += _row(one, TOP + ROW * row + ROW / 2 + 4, first, x)
    return alone(WIDTH, height, *parts)


def _row(one: Judged, y: float, first: bool, x: Callable[[float], float]) -> list[str]:
    """Method, claim, dot and bar, and the figures as text; a hair line where a method begins."""
    ink, text = INKS[one.holds], f"{one.above:+.1f} {' · '.join(one.scope)} · {one.holds}"
    bar = one.reach if math.isfinite(one.reach) else 0.0
    parts = [
        label(130, y, one.claim.text, size=11, room=TEXT - 140),
        label(WIDTH - RIGHT + 14, y, text, size=11),
        tag("line", x1=x(one.above - bar), y1=y - 4, x2=x(one.above + bar), y2=y - 4, stroke=ink, stroke_width=2),
        tag("circle", cx=x(one.above), cy=y - 4, r=4, fill=ink),
    ]
    if first:
        above = y - ROW / 2 - 4
        parts += [
            tag("line", x1=16, y1=above, x2=WIDTH - 16, y2=above, stroke="#eeeeee"),
            label(16, y, one.method, size=11, room=112),
        ]
    return parts
