"""Gain of each client over local training: the section of a run's page, and the figures of a comparison."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from markupsafe import Markup

from osfl.core.result import Encounter, Gains, Result
from osfl.core.types import Json
from osfl.reports.plots import bars, differences, ranked
from osfl.reports.rendering import responsive
from osfl.reports.tables import bars_table, grid_table
from osfl.reports.text import count, many, percent, signed

_AXIS = "points over local training"
_LOCAL_ONLY = "local_only"
_FEW = 3  # methods whose clients are drawn one chart each; more of them share a table


def gains_section(result: Result) -> dict[str, object]:
    """Nothing, where there is no run of local training on the same shards."""
    gains = result.get("gains")
    if gains is None:
        return {"gains": None}
    return {"gains": {"hint": gains_text(gains), "chart": _chart(gains, result["method"])}}


def gains_text(gains: Gains) -> str:
    clients = len(gains["values"])
    winners, losers = (round(gains[key] * clients) for key in ("share", "share_that_loses"))
    other = "" if gains["over"] == _LOCAL_ONLY else f" Compared with {gains['over']}."
    return (
        f"{count(winners)} of {many(clients, 'client')} gain over local training ({percent(gains['share'], 0)}), "
        f"{count(losers)} lose. Mean {signed(gains['mean'])}, median {signed(gains['median'])}; least: "
        f"{gains['worst_client']}, {signed(gains['worst'])}. On the images of everybody: {signed(gains['everyone'])}.{other}"
    )


def gains_views(comparison: Mapping[str, Json], results: Sequence[Result]) -> dict[str, object]:
    """For a comparison: who gains by which method, with the first seed of each; many methods in one table, too."""
    first: dict[str, Result] = {}
    for name, result in zip((run["method"] for run in comparison.get("runs", [])), results, strict=False):
        if "gains" in result:
            first.setdefault(name, result)
    each = [
        {"title": f"{name}, seed {run['seed']}", "hint": gains_text(run["gains"]), "chart": _chart(run["gains"], name)}
        for name, run in first.items()
    ]
    return {"each": each, "table": _table(first) if len(each) > _FEW else ""}


def _table(first: Mapping[str, Result]) -> Markup:
    """Methods by clients. Empty where they were not run on the same clients."""
    clients = list(next(iter(first.values()))["gains"]["values"])
    if any(list(run["gains"]["values"]) != clients for run in first.values()):
        return Markup("")
    values = [[round(100 * run["gains"]["values"][client], 1) for client in clients] for run in first.values()]
    table = grid_table(list(first), clients, values)
    texts = {"what": "Gain of each client over local training, by method", "unit": "points", "column_title": "client"}
    return responsive(lambda width: differences(list(first), clients, values, width=width, **texts), texts["what"], table)


def encounters_section(result: Result) -> dict[str, object]:
    """How scores grew from one encounter to the next, where there was more than one."""
    rows: Sequence[Encounter] = result.get("encounters", [])
    if not rows:
        return {"encounters": ""}
    series = ("own distribution, mean over clients", "own distribution, worst client", "all images, mean over clients")
    groups = {f"encounter {row['encounter']}": _three(row) for row in rows}
    what = "Accuracy after each encounter"
    table = bars_table(groups, series)
    return {"encounters": responsive(lambda width: bars(groups, series, what=what, width=width), what, table)}


def _three(row: Encounter) -> list[tuple[float | None, float | None]]:
    own, everyone = row["own"], row["everyone"]
    return [(own["mean"], own["std"]), (own["worst"], None), (everyone["mean"], everyone["std"])]


def _chart(gains: Gains, method: str) -> Markup:
    what = f"Gain of each client by {method} over local training, sorted"
    table = [["client", "gain over local training"], *sorted(gains["values"].items(), key=lambda one: (-one[1], one[0]))]
    return responsive(lambda width: ranked(gains["values"], what=what, y_label=_AXIS, width=width), what, table)
