"""Building blocks of the drawings: SVG tags, texts of known width, and the palette.

Drawings are inline SVG without a namespace or script. Colors are CSS variables with a fallback, and text uses
currentColor, so the page's light and dark themes both apply.
"""

from __future__ import annotations

import html
import re
import unicodedata

Attribute = str | int | float

# Hues after Paul Tol's schemes, ordered so that neighbors also differ in lightness: color-blind readers can distinguish them.
PALETTE = (
    "#4477aa",
    "#ee7733",
    "#228833",
    "#aa3377",
    "#33a5c9",
    "#b8a12b",
    "#cc3311",
    "#777777",
    "#7b4b2a",
    "#e36fb0",
    "#7cae00",
    "#3b3b98",
)
_ILLEGAL = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\ud800-\udfff\ufffe\uffff]")  # never allowed in XML
_NARROW, _WIDE = set("iljtfrI.,:;'|!()[]{}/ -·"), set("mwMW@%—<>&+=~#")


def color(index: int) -> str:
    """The color of a series: the page may override it for the dark theme."""
    place = index % len(PALETTE)
    return f"var(--s{place + 1},{PALETTE[place]})"


def escape(text: object) -> str:
    """Text that is harmless in HTML and legal in XML, whatever a client called itself."""
    return html.escape(_ILLEGAL.sub("\N{REPLACEMENT CHARACTER}", str(text)))


def number(value: float) -> str:
    """A coordinate, short and the same on every machine."""
    return f"{value:.2f}".rstrip("0").rstrip(".")


def tag(name: str, *children: str, **attributes: Attribute) -> str:
    """One element; children are SVG already, attributes are escaped (`stroke_width` is written stroke-width)."""
    parts = [name]
    for key, value in attributes.items():
        shown = number(value) if isinstance(value, float) else str(value)
        parts.append(f'{key.rstrip("_").replace("_", "-")}="{escape(shown)}"')
    return f"<{' '.join(parts)}>{''.join(children)}</{name}>"


def title(text: str) -> str:
    """The tooltip of the element it is put in."""
    return tag("title", escape(text))


def width_of(text: str, size: float) -> float:
    """About how many pixels a text takes in a system font; errs on the wide side, so that nothing overlaps."""
    return size * sum(_em(char) for char in text)


def _em(char: str) -> float:
    """Widths of DejaVu Sans, the widest of the usual system fonts."""
    if char in _NARROW:
        return 0.4
    if char in _WIDE:
        return 0.98
    if unicodedata.combining(char):
        return 0.0
    if unicodedata.east_asian_width(char) in "WF" or ord(char) > 0x2190:
        return 1.05
    return 0.77 if char.isupper() else 0.64


def fit(text: str, size: float, room: float) -> str:
    """The text, cut with an ellipsis to the given width."""
    if width_of(text, size) <= room:
        return text
    while text and width_of(text + "…", size) > room:
        text = text[:-1]
    return text.rstrip() + "…"


def fit_middle(text: str, size: float, room: float) -> str:
    """Cut in the middle: names of methods and their variants often differ only at the end."""
    if width_of(text, size) <= room:
        return text
    shorter = (f"{text[: kept - kept // 3]}…{text[len(text) - kept // 3 :]}" for kept in range(len(text) - 1, 2, -1))
    return next((short for short in shorter if width_of(short, size) <= room), "…")


def wrap(text: str, size: float, room: float, most: int = 3) -> list[str]:
    """The text on up to `most` lines, broken between words; what is left over is cut."""
    lines = [""]
    for word in text.split():
        longer = f"{lines[-1]} {word}".strip()
        if width_of(longer, size) <= room or not lines[-1]:
            lines[-1] = longer
        else:
            lines.append(word)
    if len(lines) > most:
        lines = [*lines[: most - 1], " ".join(lines[most - 1 :])]
    return [fit(line, size, room) for line in lines]


def label(
    x: float,
    y: float,
    text: str,
    *,
    size: float = 12,
    anchor: str = "start",
    room: float | None = None,
    upright: bool = False,
    class_: str = "",
    tip: str = "",
) -> str:
    """A text at a point; cut to `room` with the whole text as tooltip; `upright` reads from bottom to top."""
    shown = text if room is None else fit(text, size, room)
    tip = text if shown != text else tip
    look: dict[str, Attribute] = {"x": x, "y": y, "font_size": size, "text_anchor": anchor, "fill": "currentColor"}
    if upright:
        look["transform"] = f"rotate(-90 {number(x)} {number(y)})"
    if class_:
        look["class_"] = class_
    return tag("text", escape(shown), title(tip) if tip else "", **look)


def line(x1: float, y1: float, x2: float, y2: float, class_: str = "axis", **more: Attribute) -> str:
    return tag("line", x1=x1, y1=y1, x2=x2, y2=y2, class_=class_, stroke="currentColor", **more)


def canvas(width: float, height: float, what: str, *children: str, scales: bool = True) -> str:
    """The drawing itself. One that `scales` fills its column; one that does not keeps its size and may scroll."""
    return tag(
        "svg",
        *children,
        class_="plot" if scales else "plot natural",
        role="img",
        aria_label=what,
        viewBox=f"0 0 {number(width)} {number(height)}",
        width=float(width),
        height=float(height),
    )


def legend(names: list[str], x: float, y: float, width: float, size: float = 12) -> tuple[list[str], float]:
    """Swatches with names, in as many rows as they need; returns the elements and the y below them."""
    parts, left = [], x
    for index, name in enumerate(names):
        shown = fit(name, size, min(260, width - 20))
        step = width_of(shown, size) + 34
        if left > x and left + step - 16 > x + width:
            left, y = x, y + size + 8
        parts.append(tag("rect", x=left, y=y - size + 2, width=11, height=11, rx=2, fill=color(index)))
        parts.append(label(left + 17, y, name, size=size, room=min(260, width - 20)))
        left += step
    return parts, y + size + 6
