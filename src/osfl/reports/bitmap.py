"""Our own drawings as PNG: the few elements of SVG that reports use, painted with Pillow.

Not a reader of any SVG: what stands in a file of `osfl.reports.saved` is known here, and nothing else. Text is set in DejaVu
Sans where the system has it, else in the font that comes with Pillow, which lacks scripts other than Latin.
"""

from __future__ import annotations

import base64
import io
import re
from collections.abc import Mapping
from functools import cache
from itertools import pairwise
from xml.etree import ElementTree

from PIL import Image, ImageColor, ImageDraw, ImageFont

SCALE = 2  # pixels of a unit
_SPACE = "{http://www.w3.org/2000/svg}"
Attributes = Mapping[str, str]
Font = ImageFont.FreeTypeFont | ImageFont.ImageFont
Color = tuple[int, int, int, int]


def png(svg: str) -> bytes:
    root = ElementTree.fromstring(svg)
    left, top, width, height = (float(value) for value in root.attrib["viewBox"].split())
    image = Image.new("RGB", (round(width * SCALE), round(height * SCALE)), "white")
    style = root.find(f"{_SPACE}style")
    _Painter(image, (left, top), _classes(style.text or "" if style is not None else "")).paint(root)
    stream = io.BytesIO()
    image.save(stream, "PNG")
    return stream.getvalue()


def _classes(style: str) -> dict[str, dict[str, str]]:
    """class -> property -> value."""
    found = re.findall(r"\.(\w+) \{([^}]*)\}", style)
    return {name: dict(re.findall(r"([\w-]+): ([^;]+)", text)) for name, text in found}


class _Painter:
    """Paints elements in order; a color that lets others through is mixed with what is there."""

    def __init__(self, image: Image.Image, origin: tuple[float, float], classes: Mapping[str, Mapping[str, str]]) -> None:
        self.image, self.origin, self.classes = image, origin, classes
        self.draw = ImageDraw.Draw(image, "RGBA")

    def paint(self, element: ElementTree.Element) -> None:
        kind = element.tag.removeprefix(_SPACE)
        look = dict(element.attrib)
        for name in look.get("class", "").split():  # a rule of the style sheet is stronger than an attribute
            look |= self.classes.get(name, {})
        if kind in ("svg", "g"):
            for child in element:
                self.paint(child)
        elif kind == "text":
            self._text(element.text or "", look)
        elif kind not in ("title", "style"):
            getattr(self, f"_{kind}")(look)

    def _at(self, x: float, y: float) -> tuple[float, float]:
        return (x - self.origin[0]) * SCALE, (y - self.origin[1]) * SCALE

    def _points(self, look: Attributes) -> list[tuple[float, float]]:
        return [self._at(*map(float, pair.split(","))) for pair in look["points"].split()]

    def _rect(self, look: Attributes) -> None:
        x, y = self._at(float(look["x"]), float(look["y"]))
        right, bottom = x + SCALE * float(look["width"]), y + SCALE * float(look["height"])
        radius = SCALE * float(look.get("rx", 0))
        line = round(SCALE * float(look.get("stroke-width", 1)))
        self.draw.rounded_rectangle(
            (x, y, max(x, right - 1), max(y, bottom - 1)),
            radius,
            fill=_color(look, "fill"),
            outline=_color(look, "stroke"),
            width=line,
        )

    def _circle(self, look: Attributes) -> None:
        (x, y), radius = self._at(float(look["cx"]), float(look["cy"])), SCALE * float(look["r"])
        line = round(SCALE * float(look.get("stroke-width", 1)))
        box = (x - radius, y - radius, x + radius, y + radius)
        self.draw.ellipse(box, fill=_color(look, "fill"), outline=_color(look, "stroke"), width=line)

    def _polygon(self, look: Attributes) -> None:
        corners = self._points(look)
        self.draw.polygon(corners, fill=_color(look, "fill"))
        if _color(look, "stroke"):
            self._stroke([*corners, corners[0]], look)

    def _polyline(self, look: Attributes) -> None:
        self._stroke(self._points(look), look)

    def _line(self, look: Attributes) -> None:
        start, end = self._at(float(look["x1"]), float(look["y1"])), self._at(float(look["x2"]), float(look["y2"]))
        self._stroke([start, end], look)

    def _stroke(self, points: list[tuple[float, float]], look: Attributes) -> None:
        width = max(1, round(SCALE * float(look.get("stroke-width", 1))))
        pattern = [SCALE * float(length) for length in look.get("stroke-dasharray", "").split()]
        for piece in _dashes(points, pattern) if pattern else [points]:
            self.draw.line(piece, fill=_color(look, "stroke"), width=width, joint="curve")

    def _image(self, look: Attributes) -> None:
        x, y = self._at(float(look["x"]), float(look["y"]))
        with Image.open(io.BytesIO(base64.b64decode(look["href"].partition(",")[2]))) as found:
            shown = found.convert("RGB")
        room = (SCALE * float(look["width"]), SCALE * float(look["height"]))
        share = min(room[0] / shown.width, room[1] / shown.height)
        size = (max(1, round(shown.width * share)), max(1, round(shown.height * share)))
        place = (round(x + (room[0] - size[0]) / 2), round(y + (room[1] - size[1]) / 2))
        self.image.paste(shown.resize(size, Image.Resampling.NEAREST), place)

    def _text(self, text: str, look: Attributes) -> None:
        font = _font(SCALE * float(look["font-size"]))
        anchor = {"start": "ls", "middle": "ms", "end": "rs"}[look.get("text-anchor", "start")]
        ink = _color(look, "fill") or (0, 0, 0, 255)
        halo = round(SCALE * float(look["stroke-width"].removesuffix("px")) / 2) if "paint-order" in look else 0
        behind = _color(look, "stroke") if halo else None
        x, y = self._at(float(look["x"]), float(look["y"]))
        if "transform" not in look:
            self.draw.text((x, y), text, fill=ink, font=font, anchor=anchor, stroke_width=halo, stroke_fill=behind)
            return
        side = round(font.getlength(text)) + 8  # upright: painted flat, then turned
        flat = Image.new("RGBA", (2 * side, 2 * side))
        ImageDraw.Draw(flat).text((side, side), text, fill=ink, font=font, anchor=anchor)
        turned = flat.rotate(90)
        self.image.paste(turned, (round(x) - side, round(y) - side), turned)


def _color(look: Attributes, what: str) -> Color | None:
    name = look.get(what, "black" if what == "fill" else "none")
    if name == "none":
        return None
    red, green, blue = ImageColor.getrgb(name)[:3]
    return red, green, blue, round(255 * float(look.get(f"{what}-opacity", 1)) * float(look.get("opacity", 1)))


def _dashes(points: list[tuple[float, float]], pattern: list[float]) -> list[list[tuple[float, float]]]:
    """The drawn pieces of a broken line; the pattern goes on around corners."""
    found: list[list[tuple[float, float]]] = []
    place, left, on = 0, pattern[0], True
    for (x1, y1), (x2, y2) in pairwise(points):
        length, done = ((x2 - x1) ** 2 + (y2 - y1) ** 2) ** 0.5, 0.0
        while done < length:
            step = min(left, length - done)
            ends = [(x1 + (x2 - x1) * share / length, y1 + (y2 - y1) * share / length) for share in (done, done + step)]
            found += [ends] if on else []
            done, left = done + step, left - step
            if left <= 0:
                place, on = (place + 1) % len(pattern), not on
                left = pattern[place]
    return found


@cache
def _font(size: float) -> Font:
    try:
        return ImageFont.truetype("DejaVuSans.ttf", size)
    except OSError:
        return ImageFont.load_default(size)
