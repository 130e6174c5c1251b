"""The figures of a page as files: SVG as the page draws them, PNG, and CSV with the numbers behind them.

An SVG file stands alone: with its namespace, its own style, the page's light colors and a white background. What a page shows
as images (synthetic ones, for example) is one figure of small pictures; it has no numbers, so no CSV file.
"""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path

from osfl.core.errors import UsageError, nearest
from osfl.reports.bitmap import png
from osfl.reports.rendering import WIDTHS, Drawing, drawn, template_text, write_bytes

FORMATS = ("svg", "png", "csv")
_MARGIN = 14.0  # around a drawing: on a page the panel has it
_FONT = 'system-ui, -apple-system, "Segoe UI", Roboto, "Noto Sans", "Helvetica Neue", Arial, sans-serif'


def save_figures(draw_page: Callable[[], str], folder: Path, formats: Sequence[str] = ("svg",)) -> list[Path]:
    """Each figure that `draw_page` draws, in `folder`, in each of the formats; the paths in the page's order."""
    checked(formats)
    with drawn() as found:
        draw_page()
    written = []
    for name, drawing in _named(found).items():
        for ending in formats:
            content = _CONTENT[ending](drawing)
            if content is not None:
                written.append(write_bytes(folder / f"{name}.{ending}", content))
    return written


def checked(formats: Sequence[str]) -> Sequence[str]:
    unknown = [name for name in formats if name not in FORMATS]
    if unknown or not formats:
        got = ", ".join(unknown) or "none"
        hint = nearest(unknown[0], FORMATS) if unknown else ""
        raise UsageError(f"figures are saved as {', '.join(FORMATS)}; got {got}.{hint}", field="as", fix="For example svg,csv.")
    return formats


def figure_names(draw_page: Callable[[], str]) -> dict[str, Drawing]:
    """The figures that `draw_page` draws, by the names that their files would have."""
    with drawn() as found:
        draw_page()
    return _named(found)


def _named(drawings: Sequence[Drawing]) -> dict[str, Drawing]:
    """By a file name for each: what the page calls it, numbered where several are called the same."""
    names: dict[str, Drawing] = {}
    for one in drawings:
        base = re.sub(r"\W+", "-", one.name.lower()).strip("-")[:80] or "figure"
        same = sum(name == base or re.fullmatch(re.escape(base) + r"-\d+", name) is not None for name in names)
        names[base if not same else f"{base}-{same + 1}"] = one
    return names


def stand_alone(drawing: Drawing) -> str:
    """The drawing as an SVG file. Colors are written out: not every program knows CSS variables."""
    svg = _with_colors(drawing.draw(WIDTHS["wide"]))
    width, height = (float(size) for size in re.findall(r' (?:width|height)="([\d.]+)"', svg[: svg.index(">")])[:2])
    wide, high = width + 2 * _MARGIN, height + 2 * _MARGIN
    box = f"{-_MARGIN:g} {-_MARGIN:g} {wide:g} {high:g}"
    head = f'<svg xmlns="http://www.w3.org/2000/svg" role="img" viewBox="{box}" width="{wide:g}" height="{high:g}">'
    style = "\n".join([f"svg {{ font-family: {_FONT}; font-variant-numeric: tabular-nums; }}", *rules().values()])
    back = f'<rect x="{-_MARGIN:g}" y="{-_MARGIN:g}" width="{wide:g}" height="{high:g}" fill="{_colors()["panel"]}"/>'
    title = re.search(r'aria-label="([^"]*)"', svg)
    name = f"<title>{title[1]}</title>" if title else ""
    return f"{head}{name}<style>{style}</style>{back}{svg[svg.index('>') + 1 :]}\n"


@cache
def rules() -> dict[str, str]:
    """The style sheet's rules for drawings, by class."""
    found = re.findall(r"svg \.(\w+) \{([^}]*)\}", template_text("style.css"))
    return {name: f".{name} {{{_with_colors(text)}}}" for name, text in found}


@cache
def _colors() -> dict[str, str]:
    """The page's colors in the light theme."""
    root = re.search(r":root \{(.*?)\}", template_text("style.css"), re.DOTALL)
    assert root is not None
    return dict(re.findall(r"--([\w-]+): (#\w+)", root[1]))


def _with_colors(text: str) -> str:
    found = re.sub(r"var\(--([\w-]+)(?:,[^)]*)?\)", lambda match: _colors()[match[1]], text)
    return found.replace("currentColor", _colors()["ink"])


def _csv(drawing: Drawing) -> bytes | None:
    if not drawing.table:
        return None
    stream = io.StringIO()
    csv.writer(stream, lineterminator="\n").writerows([[_cell(value) for value in row] for row in drawing.table])
    return stream.getvalue().encode("utf-8")


def _cell(value: str | float | None) -> str | float:
    """A name that begins like a formula is text in a spreadsheet, too."""
    if value is None:
        return ""
    return f"'{value}" if isinstance(value, str) and value[:1] in tuple("=+-@\t\r") else value


def _svg(drawing: Drawing) -> bytes:
    return stand_alone(drawing).encode("utf-8", errors="replace")


def as_png(drawing: Drawing) -> bytes:
    return png(stand_alone(drawing))


_CONTENT: dict[str, Callable[[Drawing], bytes | None]] = {"svg": _svg, "png": as_png, "csv": _csv}
