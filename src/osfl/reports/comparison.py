"""The comparison page of several methods: one table, and accuracy against communication cost."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from markupsafe import Markup

from osfl.core.headline import NAMES, SMOKE
from osfl.core.result import Result
from osfl.core.types import Json
from osfl.reports.columns import Methods, headline_metric, is_pooled, mean, shown_columns, table_rows
from osfl.reports.course import course_view, equal_rows
from osfl.reports.gains import gains_views
from osfl.reports.generators import bound_rows
from osfl.reports.plots import Point, bars, heatmap, scatter
from osfl.reports.rendering import fact_rows, render, responsive, write_text
from osfl.reports.tables import Table, bars_table, grid_table, rows_table
from osfl.reports.text import flops_mark, judged_on, many, percent, size, size_mark

OWN, UP = "scores.clients.own.mean", "costs.upload_bytes"


def write_comparison(comparison: dict[str, Any], results: Sequence[Result], folder: Path) -> Path:
    """Write `folder/index.html` from `summarize(results)`; the results themselves add the label map and the majority line."""
    return write_text(folder / "index.html", comparison_page(comparison, results))


def comparison_page(comparison: dict[str, Any], results: Sequence[Result]) -> str:
    methods: Methods = comparison["methods"]
    judged = judged_on(comparison.get("data", {}))
    return render(
        "comparison.html",
        heading=_heading(comparison),
        chips=_chips(comparison),
        lede=_lede(methods),
        reading=reading_help(comparison, results),
        columns=shown_columns(comparison),
        banner=SMOKE if comparison.get("smoke") else "",
        headline=_metric_name(comparison),
        rows=table_rows(comparison),
        accuracy_chart=_bars(comparison, judged),
        cost_chart=_scatter(comparison, judged),
        judged=judged,
        runs=comparison.get("runs", []),
        data=fact_rows(comparison.get("data", {})),
        command=comparison.get("command", ""),
        compute_chart=_compute(methods),
        sample_chart=_samples(comparison, judged),
        generators=bound_rows(comparison),
        courses=course_view(comparison),
        equal=equal_rows(comparison),
        gains=gains_views(comparison, results),
        **_labels(results),
    )


def _heading(comparison: Mapping[str, Json]) -> str:
    dataset = comparison.get("data", {}).get("dataset")
    what = many(len(comparison["methods"]), "method").replace("\N{NO-BREAK SPACE}", " ")
    return f"{what} on {dataset}" if dataset else f"{what} compared"


def _lede(methods: Methods) -> str:
    runs = {entry.get("n") or 0 for metrics in methods.values() for entry in metrics.values()} - {0}
    if not runs or max(runs) == 1:
        return "One seed each: differences of a few points may be chance."
    upto = "" if len(runs) == 1 else "up to "
    return f"Means over {upto}{many(max(runs), 'seed')}; ± is the sample standard deviation over seeds."


def _chips(comparison: Mapping[str, Json]) -> list[tuple[str, str]]:
    data = comparison.get("data", {})
    keys = ("dataset", "partition", "clients", "samples", "test_samples", "evaluated_on", "train_images", "test_images")
    return [(key.replace("_", " "), str(data[key])) for key in keys if data.get(key) is not None]


# --- reading help ----------------------------------------------------------------------------------------------------


def reading_help(comparison: Mapping[str, Json], results: Sequence[Result]) -> list[str]:
    """Sentences about what the table shows; every number is one of the table's."""
    methods: Methods = comparison["methods"]
    judged = judged_on(comparison.get("data", {}))
    found = {name: mean(methods, name, headline_metric(comparison)) for name in methods}
    scores = {name: value for name, value in found.items() if value is not None}
    below = comparison.get("below", ())
    rivals = {name: value for name, value in scores.items() if not is_pooled(name) and name not in below}
    leader = _leader(rivals, scores, f"{_metric_name(comparison)} on the {judged}")
    beaten = [name for name in below if not is_pooled(name)]
    sentences = [
        leader,
        _rule(comparison),
        _constant(beaten, rivals),
        _cheapest(methods, rivals),
        _caution(comparison, results),
    ]
    sentences += [
        f"The code of {name} changed since this run was made, and it was not repeated: `osfl compare --fresh` repeats it."
        for name in comparison.get("changed", ())
    ]
    return [sentence for sentence in sentences if sentence]


def _metric_name(comparison: Mapping[str, object]) -> str:
    return NAMES[headline_metric(comparison).rsplit(".", 1)[1]]


def _rule(comparison: Mapping[str, Json]) -> str:
    """Why another metric than accuracy is read first."""
    first = comparison.get("headline", {"metric": "accuracy"})
    if first["metric"] == "accuracy":
        return ""
    name = NAMES[first["metric"]]
    return f"{name[0].upper()}{name[1:]} is read first: {first['why']}."


def _constant(below: Sequence[str], rivals: Mapping[str, float]) -> str:
    if not below:
        return ""
    named = f"{', '.join(below)} {'is' if len(below) == 1 else 'are'} no better than always answering the most frequent class"
    return (
        f"{named}, so nothing of {'it' if len(below) == 1 else 'them'} is marked best." if rivals else f"{named}: none is best."
    )


def _leader(rivals: Mapping[str, float], scores: Mapping[str, float], metric: str) -> str:
    if not rivals:
        return ""
    best = max(rivals, key=lambda name: rivals[name])
    pooled = next((name for name in scores if is_pooled(name)), None)
    text = f"{best} has the highest {metric}, {percent(rivals[best])}"
    if pooled:
        text += f"; training on all images in one place ({pooled}) reaches {percent(scores[pooled])}"
    return text + "."


def _cheapest(methods: Methods, rivals: Mapping[str, float]) -> str:
    costs = {name: mean(methods, name, UP) or 0.0 for name in rivals}
    sending = {name: cost for name, cost in costs.items() if cost > 0}
    if len(sending) < 2:
        return ""
    least = size(min(sending.values()))
    cheap = [name for name in sending if size(sending[name]) == least]  # as read in the table
    best = max(cheap, key=lambda name: rivals[name])
    if len(cheap) == 1:
        return f"Of those that send anything, {best} uploads least, {least}, and reaches {percent(rivals[best])}."
    return f"{', '.join(cheap)} upload least, {least}; the best of them, {best}, reaches {percent(rivals[best])}."


def _caution(comparison: Mapping[str, Json], results: Sequence[Result]) -> str:
    data = comparison.get("data", {})
    if comparison["methods"] and data and ("dataset" not in data or "partition" not in data):
        return "These runs were not made on the same data: compare only rows with the same text in brackets."
    personal = dict.fromkeys(result["method"] for result in results if result["scores"]["personalized"])
    if personal:
        return f"For {', '.join(personal)}, accuracy on the {judged_on(data)} is the mean over the clients' own models."
    return ""


# --- pictures --------------------------------------------------------------------------------------------------------


def _constant_line(comparison: Mapping[str, Json]) -> tuple[str, float] | None:
    """What a constant answer reaches, where it is the same for all methods."""
    methods: Methods = comparison["methods"]
    text = comparison.get("headline", {}).get("constant", "always the most frequent class")
    if "headline" in comparison:
        value = comparison["headline"]["floor"]
    else:
        values = {mean(methods, name, "scores.majority") for name in methods}
        value = values.pop() if len(values) == 1 else None
    return None if value is None else (text, value)


def _bars(comparison: Mapping[str, Json], judged: str) -> Markup:
    methods, metric, name = comparison["methods"], headline_metric(comparison), _metric_name(comparison)
    groups = {method: [_with_error(methods, method, one) for one in (metric, OWN)] for method in methods}
    series = (f"{name}, {judged}", "own distribution, mean over clients")
    what = f"{name} of each method on the {judged}, and accuracy on the clients' own distributions"
    return responsive(
        lambda width: bars(groups, series, what=what, width=width, reference=_constant_line(comparison)),
        f"{name} by method",
        bars_table(groups, series),
    )


def _with_error(methods: Methods, name: str, metric: str) -> tuple[float | None, float | None]:
    return mean(methods, name, metric), methods[name].get(metric, {}).get("std")


def _scatter(comparison: Mapping[str, Json], judged: str) -> Markup:
    methods, metric, called, points = comparison["methods"], headline_metric(comparison), _metric_name(comparison), []
    for name in methods:
        (value, error), cost = _with_error(methods, name, metric), mean(methods, name, UP)
        if value is not None and cost is not None:
            points.append(Point(name, cost, value, error, kind=1 if is_pooled(name) else 0))
    if not points:
        return Markup("")

    def draw(width: float) -> str:
        return scatter(
            points,
            what="Accuracy against uploaded bytes, by method",
            width=width,
            y_format=lambda v: percent(v, 0),
            x_format=size_mark,
            x_label="uploaded bytes (log scale)",
            y_label=f"{called} on the {judged}",
            share_y=True,
        )

    return responsive(draw, "Accuracy against bytes", _table(points, "uploaded bytes", called))


def _compute(methods: Methods) -> Markup:
    """Operations against bytes sent, both for the whole federation."""
    points = []
    for name in methods:
        work, sent = mean(methods, name, "costs.flops"), mean(methods, name, "costs.bytes")
        if work is not None and sent is not None:
            rounds = (mean(methods, name, "costs.messages_per_client") or 0) > 1
            points.append(Point(name, sent, work, kind=1 if is_pooled(name) else 2 if rounds else 0))
    if not any(point.y for point in points):
        return Markup("")
    kinds = ("one message a client, or none", "all images in one place", "many rounds")

    def draw(width: float) -> str:
        return scatter(
            points,
            what="Floating point operations against bytes, by method",
            width=width,
            x_format=size_mark,
            y_format=flops_mark,
            log_y=True,
            kinds=kinds,
            x_label="bytes sent up and down (log scale)",
            y_label="floating point operations (log scale)",
        )

    return responsive(draw, "Operations against bytes", _table(points, "bytes sent up and down", "floating point operations"))


def _samples(comparison: Mapping[str, Json], judged: str) -> Markup:
    """Accuracy against what one synthetic sample costs (FALCON, Fig. 5)."""
    methods, metric, called, points = comparison["methods"], headline_metric(comparison), _metric_name(comparison), []
    for name in methods:
        (value, error), cost = _with_error(methods, name, metric), mean(methods, name, "costs.flops_per_sample")
        if value is not None and cost is not None:
            points.append(Point(name, cost, value, error))
    if not points:
        return Markup("")

    def draw(width: float) -> str:
        return scatter(
            points,
            what="Accuracy against operations of one synthetic sample, by method",
            width=width,
            x_format=flops_mark,
            y_format=lambda v: percent(v, 0),
            x_label="operations of one synthetic sample (log scale)",
            y_label=f"{called} on the {judged}",
            share_y=True,
        )

    return responsive(draw, "Accuracy against the cost of a sample", _table(points, "operations of one sample", called))


def _table(points: Sequence[Point], x: str, y: str) -> Table:
    return rows_table(["method", x, y, f"{y}, standard deviation"], points, ("name", "x", "y", "error"))


def _labels(results: Sequence[Result]) -> dict[str, Any]:
    """The label map of the first seed, if all its runs hold the same labels at the same clients."""
    maps = [[(row["client"], row["class_counts"]) for row in result["clients"]] for result in results]
    same_seed = [found for found, result in zip(maps, results, strict=True) if result["seed"] == results[0]["seed"]]
    if not maps or any(other != maps[0] for other in same_seed):
        return {"label_chart": "", "label_note": ""}
    note = ", the same in every run" if maps.count(maps[0]) == len(maps) else f", with seed {results[0]['seed']}"
    names, counts = [client for client, _ in maps[0]], [row for _, row in maps[0]]
    classes = [str(name) for name in results[0]["task"]["classes"]]
    texts = {"row_title": "client", "column_title": "class", "unit": "images", "what": "Label counts by client and class"}
    table = grid_table(names, classes, counts, "client")

    def draw(width: float) -> str:
        return heatmap(names, classes, counts, width=width, root=True, **texts)

    return {"label_chart": responsive(draw, texts["what"], table), "label_note": note}
