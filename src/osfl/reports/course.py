"""Accuracy curves over server epochs or rounds, and the bytes at equal accuracy: from a result or a comparison."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from osfl.core.result import Course, Result
from osfl.core.types import Json
from osfl.reports.figures import figure_views
from osfl.reports.text import NOTHING, count, decimal, judged_on, percent, size

PLURALS = {"server epoch": "server epochs", "round": "rounds"}


def course_figures(result: Result, references: Sequence[Result]) -> dict[str, Any]:
    """The run's own curve, beside those of multi-round references (FedMITR, Fig. 4)."""
    if "course" not in result:
        return {}
    own = {result["method"]: result["course"]}
    many = {other["method"]: other["course"] for other in references if other.get("course", {}).get("unit") == "round"}
    return _figure({**own, **many}, judged_on(result["data"]))


def course_view(comparison: Mapping[str, Json]) -> list[dict[str, Any]]:
    """The mean curves of all methods that have one, as a picture."""
    return figure_views(_figure(comparison.get("courses", {}), judged_on(comparison.get("data", {}))))


def _figure(courses: Mapping[str, Course], judged: str) -> dict[str, object]:
    """Curves of different steps on one axis: each is a straight line between the places where it was scored."""
    drawn = {name: course for name, course in courses.items() if len(course["at"]) > 1}
    if not drawn:
        return {}
    units = sorted({course["unit"] for course in drawn.values()}, reverse=True)
    x = sorted({at for course in drawn.values() for at in course["at"]})
    names = {name: f"{name} ({PLURALS[course['unit']]})" if len(units) > 1 else name for name, course in drawn.items()}
    series = {names[name]: [_percent(_between(course, at)) for at in x] for name, course in drawn.items()}
    title = f"Accuracy over {' and '.join(PLURALS[unit] for unit in units)}"
    note = "Each intermediate model was scored afterwards; nothing was selected by these curves."
    if len(units) > 1:
        note += " A server epoch sends nothing; in a round every client downloads a model and uploads one."
    return {
        title: {
            "kind": "lines",
            "x": x,
            "series": series,
            "x_label": " or ".join(units),
            "y_label": f"accuracy on the {judged}, %",
            "percent": True,
            "note": note,
        }
    }


def _percent(share: float | None) -> float | None:
    return None if share is None else 100 * share


def _between(course: Course, at: int) -> float | None:
    places, values = course["at"], course["accuracy"]
    if not places[0] <= at <= places[-1]:
        return None
    after = next(i for i, place in enumerate(places) if place >= at)
    if places[after] == at:
        return values[after]
    share = (at - places[after - 1]) / (places[after] - places[after - 1])
    return values[after - 1] + share * (values[after] - values[after - 1])


def equal_rows(comparison: Mapping[str, Json]) -> list[dict[str, str]]:
    """The table of communication at equal accuracy (FedMITR, Table V)."""
    return [_row(row) for row in comparison.get("equal_accuracy", [])]


def _row(row: Mapping[str, Json]) -> dict[str, str]:
    reached = row["rounds"] is not None
    never = f"not in {count(row['of_rounds'])} (best {percent(row['best'])})"
    some = f"in {row['reached']} of {row['n']} seeds" if row["reached"] and not reached else never
    return {
        "method": row["method"],
        "accuracy": percent(row["accuracy"]),
        "bytes": size(row["bytes"]),
        "reference": row["reference"] + (" (another network)" if row.get("other_network") else ""),
        "rounds": decimal(row["rounds"], 1).removesuffix(".0") if reached else some,
        "reference_bytes": size(row["reference_bytes"]),
        "ratio": f"{row['ratio']:.1f} ×" if row["ratio"] else NOTHING,
    }
