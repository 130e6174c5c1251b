"""How a user's files are read, beyond their size: columns of a table, slices and gray values of volumes. Agreed in the plan."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from osfl.core.errors import UsageError
from osfl.core.types import Json

AXES = ("sagittal", "coronal", "axial")  # of a volume whose axes point right, to the front and up


@dataclass(frozen=True)
class Slices:
    """Which slices of a volume are images."""

    axis: int = 2  # 0, 1 or 2: as in AXES
    count: int | None = 1  # so many, evenly spaced around the middle; None: all


@dataclass(frozen=True)
class Reading:
    """Empty texts leave it to the files."""

    group: str = ""  # column of a table that names the person of an image
    by: str = ""  # column whose values are the sites of a simulation
    slices: str = ""  # axial, coronal or sagittal, and how many: axial:5, axial:all
    window: str = ""  # gray values shown, CENTER:WIDTH, such as 40:400

    def as_facts(self) -> dict[str, Json]:
        """What a plan says of it; `by` is in the partition."""
        facts = {"group": self.group, "slices": self.slices, "window": self.window}
        return {key: value for key, value in facts.items() if value}


def reading_of(data: Mapping[str, Json]) -> Reading:
    """What the data table of a plan says."""
    return Reading(**{key: str(data[key]) for key in ("group", "slices", "window") if data.get(key)})


def check_reading(reading: Reading) -> None:
    """Both mistakes at once."""
    problems = []
    for parse, text in ((parse_slices, reading.slices), (parse_window, reading.window)):
        try:
            parse(text)
        except UsageError as error:
            problems += error.problems
    if problems:
        raise UsageError(problems, field="reading")


def parse_slices(text: str) -> Slices:
    """`axial`, `coronal:5`, `sagittal:all`; nothing is one axial slice, the middle one."""
    axis, _, count = text.strip().lower().partition(":")
    wrong = axis not in ("", *AXES) or not (count in ("", "all") or (count.isdecimal() and int(count) > 0))
    if wrong:
        raise UsageError(f"slices {text!r}: expected {', '.join(AXES)} and perhaps a number or all, such as axial:5")
    number = None if count == "all" else int(count or 1)
    return Slices(AXES.index(axis) if axis else 2, number)


def parse_window(text: str) -> tuple[float, float] | None:
    """`40:400` as (center, width); nothing is None."""
    if not text.strip():
        return None
    try:
        center, width = (float(part) for part in text.split(":"))
    except ValueError:
        center = width = math.nan
    if not (math.isfinite(center) and math.isfinite(width) and width > 0):
        raise UsageError(f"window {text!r}: expected CENTER:WIDTH, such as 40:400")
    return center, width
