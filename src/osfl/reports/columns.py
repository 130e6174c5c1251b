"""The columns of a comparison, shared by the page and the markdown table, and which value of each is marked best."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from osfl.core.types import Json
from osfl.reports.text import NOTHING, PERCENT, POINTS, count, decimal, percent, seconds, signed, size

POOLED = "centralized"  # trains on all images in one place: the bar to reach, so it never wins a column


@dataclass(frozen=True)
class Column:
    metric: str
    title: str
    text_of: Callable[[float | None], str]
    best: Callable[..., float] | None = None  # max, min, or no best
    when_first: bool = False  # shown only where it is the headline metric
    sent_only: bool = False  # the cheapest of those that sent anything; sending nothing is no saving

    @property
    def is_cost(self) -> bool:
        return self.metric.startswith("costs.")


COLUMNS = (
    Column("scores.global.accuracy", "Accuracy", percent, max),
    Column("scores.global.balanced_accuracy", "Balanced accuracy", percent, max, when_first=True),
    Column("scores.global.f1", "F1", decimal, max, when_first=True),
    Column("scores.global.auroc", "AUROC", decimal, max),
    Column("scores.global.ap", "Average precision", decimal, max),  # multi-label only
    Column("scores.clients.own.mean", "Own mean", percent, max),
    Column("scores.clients.own.median", "Own median", percent, max),
    Column("scores.clients.own.worst", "Worst client", percent, max),
    Column("gains.mean", "Gain", signed, max),
    Column("gains.share", "Clients that gain", percent, max),
    Column("tokens.overall.mmd", "MMD", lambda value: decimal(value, 4)),  # no best: methods may have other features
    Column("costs.upload_bytes", "Up", size, min, sent_only=True),
    Column("costs.download_bytes", "Down", size, min, sent_only=True),
    Column("costs.inference_bytes", "To answer", size),  # what experts exchange after the round
    Column("costs.messages_per_client", "Messages", count),
    Column("costs.client_seconds", "Client time", seconds, min),
    Column("costs.server_seconds", "Server time", seconds),
)


@dataclass(frozen=True)
class Cell:
    text: str
    spread: str = ""  # "± 1.2", in the unit of the value, only for scores of more than one run
    best: bool = False


@dataclass(frozen=True)
class Row:
    method: str
    cells: tuple[Cell, ...]
    runs: int


Methods = Mapping[str, Mapping[str, Mapping[str, Json]]]  # comparison["methods"]


def mean(methods: Methods, method: str, metric: str) -> float | None:
    value = methods[method].get(metric, {}).get("mean")
    return None if value is None else float(value)


def shown_columns(comparison: Mapping[str, Json]) -> list[Column]:
    """The headline metric, and then the columns that at least one method has a value for."""
    methods, first = comparison["methods"], headline_metric(comparison)
    ordered = sorted(COLUMNS, key=lambda column: column.metric != first)
    wanted = [column for column in ordered if column.metric == first or not column.when_first]
    return [column for column in wanted if any(mean(methods, name, column.metric) is not None for name in methods)]


def headline_metric(comparison: Mapping[str, Json]) -> str:
    """Its place in results.json; comparisons of earlier versions have none and read accuracy first."""
    return f"scores.global.{comparison.get('headline', {}).get('metric', 'accuracy')}"


def table_rows(comparison: Mapping[str, Json]) -> list[Row]:
    """Who is no better than a constant answer wins no column."""
    methods, columns = comparison["methods"], shown_columns(comparison)
    rivals = [name for name in methods if not is_pooled(name) and name not in comparison.get("below", ())]
    best = {column.metric: _best(methods, column, rivals) for column in columns}
    return [
        Row(
            name, tuple(_cell(methods, name, column, best[column.metric], name in rivals) for column in columns), _runs(metrics)
        )
        for name, metrics in methods.items()
    ]


def _runs(metrics: Mapping[str, Mapping[str, Json]]) -> int:
    return max((int(entry.get("n") or 0) for entry in metrics.values()), default=0)


def _best(methods: Methods, column: Column, rivals: Sequence[str]) -> float | None:
    """The winning value; None where fewer than two take part or all read the same, for then nothing was won."""
    if column.best is None:
        return None
    found = [mean(methods, name, column.metric) for name in rivals]
    values = [value for value in found if value is not None and (value > 0 or not column.sent_only)]
    return column.best(values) if len({column.text_of(value) for value in values}) > 1 else None


def _cell(methods: Methods, name: str, column: Column, best: float | None, rival: bool) -> Cell:
    entry = methods[name].get(column.metric, {})
    value, std = entry.get("mean"), entry.get("std")
    if value is None:
        return Cell(NOTHING)
    shown = std and (entry.get("n") or 0) > 1 and not column.is_cost  # the spread of costs would crowd out the table
    spread = f"± {column.text_of(std).removesuffix(PERCENT).removesuffix(POINTS).lstrip('+')}" if shown else ""
    # Compared as shown: two values that read the same are both best.
    wins = best is not None and rival and column.text_of(value) == column.text_of(best)
    return Cell(column.text_of(value), spread, wins)


def is_pooled(label: str) -> bool:
    """Labels are `method`, `method@key=value` or `method (what sets it apart)`."""
    return re.split("[@ ]", label, maxsplit=1)[0] in (POOLED, f"{POOLED}_tokens")
