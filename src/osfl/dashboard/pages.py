"""Templates to text, always escaped; colors and type are those of the reports."""

from __future__ import annotations

from functools import cache
from importlib.resources import files

from jinja2 import Environment, FunctionLoader, StrictUndefined

from osfl.reports.text import count, seconds, size


@cache
def _environment() -> Environment:
    made = Environment(loader=FunctionLoader(source), autoescape=True, undefined=StrictUndefined, trim_blocks=True)
    made.filters |= {"size": size, "count": count, "seconds": seconds}
    return made


def source(name: str) -> str:
    return (files("osfl.dashboard") / "templates" / name).read_text(encoding="utf-8")


def render(template: str, **values: object) -> str:
    return _environment().get_template(template).render(**values)


@cache
def style() -> str:
    """The reports' style sheet, and what only the dashboard needs."""
    return (files("osfl.reports") / "templates" / "style.css").read_text(encoding="utf-8") + source("dashboard.css")
