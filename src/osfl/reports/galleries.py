"""Small pictures with captions as one drawing, for files; a page shows them as images of its own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypedDict

from osfl.reports.svg import canvas, label, tag

_SIDE, _GAP, _CAPTION = 96.0, 12.0, 18.0


class Picture(TypedDict):
    png: str  # base64
    caption: str


def gallery(images: Sequence[Picture], *, what: str, width: float = 860, wide: bool = False) -> str:
    """As many in a row as fit; `wide`: pictures of pairs, twice as wide as high."""
    side = 1.6 * _SIDE if wide else _SIDE
    high = side / 2 if wide else side
    columns = max(1, int((width + _GAP) // (side + _GAP)))
    parts = []
    for place, image in enumerate(images):
        x, y = place % columns * (side + _GAP), place // columns * (high + _GAP + _CAPTION)
        source = f"data:image/png;base64,{image['png']}"
        parts.append(tag("image", x=x, y=y, width=side, height=high, href=source, class_="pixels"))
        parts.append(label(x, y + high + 13, image["caption"], size=11, room=side, class_="muted"))
    rows = -(-len(images) // columns)
    return canvas(min(len(images), columns) * (side + _GAP) - _GAP, rows * (high + _GAP + _CAPTION) - _GAP, what, *parts)
