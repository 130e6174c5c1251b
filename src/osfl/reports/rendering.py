"""Templates to text: always escaped, always from inside the package."""

from __future__ import annotations

import contextlib
import json
import os
import re
from collections.abc import Callable, Iterator, Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from importlib.resources import files
from pathlib import Path

from jinja2 import Environment, FunctionLoader, StrictUndefined
from markupsafe import Markup

from osfl.core.types import Json
from osfl.reports.tables import Table

# The width inside a panel on a desktop, on half a screen or a tablet, and on a phone of 360 px; style.css picks one.
WIDTHS = {"wide": 890.0, "medium": 570.0, "narrow": 300.0}


def render(template: str, **values: object) -> str:
    environment = Environment(
        loader=FunctionLoader(template_text), autoescape=True, undefined=StrictUndefined, trim_blocks=True
    )
    environment.filters["breakable"] = _breakable
    environment.filters["labeled"] = _labeled
    return environment.get_template(template).render(version=_version(), **values)


def _breakable(method: str) -> Markup:
    """A variant's name may go on in the next line where a setting begins."""
    return Markup("<wbr>@").join(method.split("@"))


def _labeled(table: Markup) -> Markup:
    """A table whose cells have the name of their column: on a phone each row is a block of lines (style.css)."""
    head, end, rows = str(table).partition("</thead>")
    columns = re.findall(r'<th scope="col"[^>]*>(.*?)</th>', head)

    def label(row: re.Match[str]) -> str:
        names = iter(columns[1:])
        return re.sub(r"<td(?=[ >])(?! colspan)", lambda _: f'<td data-label="{next(names, "")}"', row[0])

    return Markup(head + end + re.sub(r"<tr>.*?</tr>", label, rows, flags=re.DOTALL))  # escaped by the template already


def template_text(name: str) -> str:
    return (files("osfl.reports") / "templates" / name).read_text(encoding="utf-8")


def _version() -> str:
    try:
        return version("osfl")
    except PackageNotFoundError:  # run from a source tree
        return ""


def write_text(path: Path, text: str) -> Path:
    """Whole or not at all; what cannot be written as UTF-8 becomes a question mark rather than a failure."""
    return write_bytes(path, text.encode("utf-8", errors="replace"))


def write_bytes(path: Path, content: bytes) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.part")  # two commands may draw one page at once
    try:
        temporary.write_bytes(content)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
    return path


@dataclass(frozen=True)
class Drawing:
    """A figure of a page: its SVG in a width, and the numbers behind it, none for pictures."""

    name: str
    draw: Callable[[float], str]
    table: Table


_drawn: ContextVar[list[Drawing] | None] = ContextVar("osfl_drawings", default=None)


@contextlib.contextmanager
def drawn() -> Iterator[list[Drawing]]:
    """Every figure of the pages that are rendered inside."""
    found: list[Drawing] = []
    token = _drawn.set(found)
    try:
        yield found
    finally:
        _drawn.reset(token)


def is_drawn(drawing: Drawing) -> None:
    """A page shows this figure."""
    found = _drawn.get()
    if found is not None:
        found.append(drawing)


def responsive(draw: Callable[[float], str], name: str, table: Table) -> Markup:
    """A drawing in every width; the page shows the one that fits, so that text keeps its size on a phone. `table`: the numbers
    behind it."""
    is_drawn(Drawing(name, draw, table))
    box = Markup('<div class="{} scroll" role="region" tabindex="0" aria-label="{}">{}</div>')  # drawings escape their texts
    return Markup("").join(box.format(kind, name, Markup(draw(width))) for kind, width in WIDTHS.items())


def fact_rows(facts: Mapping[str, Json]) -> list[tuple[str, str]]:
    """Settings and the like as (name, text); nested values as JSON."""
    return [(key, value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)) for key, value in facts.items()]
