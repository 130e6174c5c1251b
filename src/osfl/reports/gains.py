"""What taking part was worth to each client: the section of a run's page, and the pictures of a comparison."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from markupsafe import Markup

from osfl.reports.plots import bars, ranked
from osfl.reports.rendering import responsive
from osfl.reports.words import count, many, percent, signed
from osfl.result import Encounter, Gains, Result

_AXIS = "points over training alone"
_ALONE = "local_only"


def gains_section(result: Result) -> dict[str, Any]:
    """Nothing, where no run of clients that train alone stands beside this one."""
    gains = result.get("gains")
    if gains is None:
        return {"gains": None}
    return {"gains": {"hint": gains_words(gains), "chart": _chart(gains, result["method"])}}


def gains_words(gains: Gains) -> str:
    clients = len(gains["values"])
    winners, losers = (round(gains[key] * clients) for key in ("share", "share_that_loses"))  # type: ignore[literal-required]
    other = "" if gains["over"] == _ALONE else f" Compared with {gains['over']}."
    return (
        f"{count(winners)} of {many(clients, 'client')} gain over training alone ({percent(gains['share'], 0)}), "
        f"{count(losers)} lose. Mean {signed(gains['mean'])}, median {signed(gains['median'])}; least: "
        f"{gains['worst_client']}, {signed(gains['worst'])}. On the images of everybody: {signed(gains['everyone'])}.{other}"
    )


def gains_views(comparison: Mapping[str, Any], results: Sequence[Result]) -> list[dict[str, Any]]:
    """For a comparison: who gains by which method, with the first seed of each."""
    seen: dict[str, dict[str, Any]] = {}
    for name, result in zip((run["method"] for run in comparison.get("runs", [])), results, strict=False):
        if "gains" in result and name not in seen:
            gains = result["gains"]
            seen[name] = {"title": f"{name}, seed {result['seed']}", "hint": gains_words(gains), "chart": _chart(gains, name)}
    return list(seen.values())


def encounters_section(result: Result) -> dict[str, Any]:
    """How scores grew from one encounter to the next, where there was more than one."""
    rows: Sequence[Encounter] = result.get("encounters", [])
    if not rows:
        return {"encounters": ""}
    series = ("own distribution, mean over clients", "own distribution, worst client", "all images, mean over clients")
    groups = {f"encounter {row['encounter']}": _three(row) for row in rows}
    what = "Accuracy after each encounter"
    return {"encounters": responsive(lambda width: bars(groups, series, what=what, width=width), what)}


def _three(row: Encounter) -> list[tuple[float | None, float | None]]:
    own, everyone = row["own"], row["everyone"]
    return [(own["mean"], own["std"]), (own["worst"], None), (everyone["mean"], everyone["std"])]


def _chart(gains: Gains, method: str) -> Markup:
    what = f"Gain of each client by {method} over training alone, sorted"
    return responsive(lambda width: ranked(gains["values"], what=what, y_label=_AXIS, width=width), what)

