"""Numbers as people read them. Only wording: nothing is computed that results.json does not hold."""

from __future__ import annotations

import re
from collections.abc import Mapping

from osfl.core.types import Json

_NBSP = "\N{NO-BREAK SPACE}"
PERCENT = f"{_NBSP}%"
POINTS = f"{_NBSP}points"
NOTHING = "–"
_THOUSANDS = (("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3))


def percent(value: float | None, digits: int = 1) -> str:
    return NOTHING if value is None else f"{100 * value:.{digits}f}{PERCENT}"


def points(value: float) -> str:
    """A difference of two shares: 12.0 points, which 12 % would leave open."""
    return f"{100 * value:.1f}{POINTS}"


def signed(value: float | None) -> str:
    """The same where it matters which way it goes: +1.5 points."""
    return NOTHING if value is None else f"{'+' if value > 0 else ''}{points(value)}"


def decimal(value: float | None, digits: int = 3) -> str:
    return NOTHING if value is None else f"{value:.{digits}f}"


def count(value: float | None) -> str:
    """Thousands apart by a thin space: 12 345."""
    return NOTHING if value is None else f"{value:,.0f}".replace(",", "\N{NARROW NO-BREAK SPACE}")


def _scaled(value: float, units: tuple[str, ...]) -> str:
    place = 0
    while abs(value) >= 999.5 and place < len(units) - 1:
        value, place = value / 1000, place + 1
    digits = 0 if place == 0 or abs(value) >= 100 else 1 if abs(value) >= 10 else 2
    return f"{value:.{digits}f}{_NBSP}{units[place]}"


def size(value: float | None) -> str:
    """Bytes in decimal units, as networks and disks are sold: 1.24 MB is 1,240,000 bytes."""
    return NOTHING if value is None else _scaled(value, ("B", "kB", "MB", "GB", "TB", "PB"))


def size_mark(value: float) -> str:
    """Bytes at a mark of an axis: 10 MB rather than 10.0 MB."""
    return re.sub(r"\.0+(?=\D)", "", size(value))


def flops(value: float | None) -> str:
    if value is None:
        return NOTHING
    return _scaled(value, ("FLOP", "kFLOP", "MFLOP", "GFLOP", "TFLOP", "PFLOP", "EFLOP"))


def flops_mark(value: float) -> str:
    """Operations at a mark of an axis."""
    return re.sub(r"\.0+(?=\D)", "", flops(value))


def seconds(value: float | None) -> str:
    if value is None:
        return NOTHING
    if value == 0:
        return f"0{_NBSP}s"
    if value < 0.0995:
        return f"{1000 * value:.2g}{_NBSP}ms"
    if value < 100:
        return f"{value:.{2 if value < 10 else 1}f}{_NBSP}s"
    minutes, rest = divmod(round(value), 60)
    if minutes < 100:
        return f"{minutes}{_NBSP}min {rest:02d}{_NBSP}s"
    return f"{minutes // 60}{_NBSP}h {minutes % 60:02d}{_NBSP}min"


def compact(value: float, digits: int = 3) -> str:
    """A number for a small cell or an axis: 1.34k rather than 1341, 0.25 rather than 0.2500."""
    unit, factor = next((pair for pair in _THOUSANDS if abs(value) >= 0.9995 * pair[1]), ("", 1.0))
    scaled = value / factor
    return (f"{scaled:.0f}" if abs(scaled) >= 100 else f"{scaled:.{digits}g}") + unit


def many(number: int, one: str, more: str = "") -> str:
    """1 client, 5 clients."""
    return f"{count(number)}{_NBSP}{one if number == 1 else more or one + 's'}"


def judged_on(data: Mapping[str, Json]) -> str:
    """The images that all scores are about; where settings are chosen on validation images, this names them."""
    return "global validation set" if data.get("evaluated_on") == "val" else "global test set"
