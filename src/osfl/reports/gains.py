"""What taking part was worth to each client: the section of a run's page, and the pictures of a comparison."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from markupsafe import Markup

from osfl.reports.plots import ranked
from osfl.reports.rendering import responsive
from osfl.reports.words import count, many, percent, signed
from osfl.result import Encounter, Gains, Result

_AXIS = "points of accuracy on the own distribution, over training alone; clients from most to least gain"


def gains_section(result: Result) -> dict[str, Any]:
    """Nothing, where no run of clients that train alone stands beside this one."""
    gains = result.get("gains")
    if gains is None:
        return {"gains": None}
    return {"gains": {"hint": gains_words(gains), "chart": _chart(gains, result["method"])}}


def gains_words(gains: Gains) -> str:
    clients = len(gains["values"])
    winners, losers = (round(gains[key] * clients) for key in ("share", "share_that_loses"))  # type: ignore[literal-required]
    return (
        f"{count(winners)} of {many(clients, 'client')} gain over training alone ({percent(gains['share'], 0)}), "
        f"{count(losers)} lose. Mean {signed(gains['mean'])}, median {signed(gains['median'])}; least: "
        f"{gains['worst_client']}, {signed(gains['worst'])}. On the images of everybody: {signed(gains['everyone'])}."
    )


def gains_views(comparison: Mapping[str, Any], results: Sequence[Result]) -> list[dict[str, Any]]:
    """For a comparison: who gains by which method, with the first seed of each."""
    seen: dict[str, dict[str, Any]] = {}
    for name, result in zip((run["method"] for run in comparison.get("runs", [])), results, strict=False):
        if "gains" in result and name not in seen:
            gains = result["gains"]
            seen[name] = {"title": f"{name}, seed {result['seed']}", "hint": gains_words(gains), "chart": _chart(gains, name)}
    return list(seen.values())


def encounter_figures(result: Result) -> dict[str, Any]:
    """How scores grew from one encounter to the next."""
    rows: Sequence[Encounter] = result.get("encounters", [])
    if len(rows) < 2:
        return {}
    series = {
        "own distribution, mean over clients": [row["own"]["mean"] for row in rows],
        "own distribution, worst client": [row["own"]["worst"] for row in rows],
        "all images, mean over clients": [row["everyone"]["mean"] for row in rows],
    }
    note = "Each encounter is a round of its own, and its models are where clients start in the next one."
    return {"Accuracy from one encounter to the next": {
        "kind": "lines", "x": [row["encounter"] for row in rows], "series": series, "x_label": "encounter",
        "y_label": "accuracy", "note": note}}  # fmt: skip


def _chart(gains: Gains, method: str) -> Markup:
    what = f"Gain of each client by {method} over training alone, sorted"
    return responsive(lambda width: ranked(gains["values"], what=what, y_label=_AXIS, width=width), what)

