"""Figures that methods provide: `result["figures"]` maps a title to one of six kinds, drawn without knowing the method.

    {"kind": "gallery", "images": [{"png": <base64>, "caption": "class 3"}, ...]}       optional: wide (pictures of pairs)
    {"kind": "heatmap", "rows": [...], "columns": [...], "values": [[...]]}      optional: row_title, column_title, unit
    {"kind": "lines", "x": [...], "series": {name: [... or None]}}               optional: x_label, y_label, percent (0 to 100)
    {"kind": "histogram", "bins": [n + 1 edges], "series": {name: [n counts]}}   optional: x_label, y_label
    {"kind": "groups", "groups": {name: [client, ...]}, "classes": [...]}        optional: counts (client: images of each class)
    {"kind": "scatter", "series": {group: {kind: [[x, y], ...]}}}                 color by group, shape by kind (two of them)

Each may have a "note", a sentence shown above it. A figure that is not of these forms costs a sentence, never the report.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from osfl.core.types import Json
from osfl.reports.galleries import Picture, gallery
from osfl.reports.plots import cloud, heatmap, histogram, lines
from osfl.reports.rendering import Drawing, is_drawn, responsive
from osfl.reports.tables import cloud_table, curves_table, grid_table, histogram_table

View = dict[str, Any]
_PNG = b"\x89PNG\r\n\x1a\n"


def figure_views(figures: Mapping[str, Json], counts: Mapping[str, Sequence[int]] | None = None) -> list[View]:
    """Each figure as what the template shows: a chart, a gallery, or the reason why there is none. `counts` are the clients'
    images of each class, which a simulation knows although no server does."""
    return [_view(title, figure, counts or {}) for title, figure in figures.items()]


def _view(title: str, figure: Any, counts: Mapping[str, Sequence[int]]) -> View:
    view: View = {"title": title, "note": "", "problem": "", "chart": "", "images": [], "wide": False}
    try:
        kind = figure["kind"]
        if kind not in _KINDS:
            raise ValueError(f"its kind is '{kind}', known are {', '.join(_KINDS)}")
        return {**view, "note": figure.get("note", ""), **_KINDS[kind](title, {"counts": counts, **figure})}
    except (KeyError, TypeError, ValueError, IndexError, AttributeError) as error:
        reason = f"it lacks {error}" if isinstance(error, KeyError) else str(error)
        return {**view, "problem": reason}


def _gallery(title: str, figure: Mapping[str, Json]) -> View:
    images: list[Picture] = [
        {"png": _checked_png(image["png"]), "caption": str(image.get("caption", ""))} for image in figure["images"]
    ]
    wide = bool(figure.get("wide"))
    if images:  # the page shows them as images of its own; in a file they are one drawing
        is_drawn(Drawing(title, lambda width: gallery(images, what=title, width=width, wide=wide), ()))
    return {"images": images, "wide": wide}


def _checked_png(text: str) -> str:
    try:
        data = base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        data = b""
    if not data.startswith(_PNG):
        raise ValueError("an image is not a PNG in base64")
    return text


def _heatmap(title: str, figure: Mapping[str, Json]) -> View:
    rows, columns = [str(name) for name in figure["rows"]], [str(name) for name in figure["columns"]]
    values = figure["values"]
    if len(values) != len(rows) or any(len(row) != len(columns) for row in values):
        raise ValueError(f"its values are not {len(rows)} rows of {len(columns)}")
    texts = _chosen(figure, "row_title", "column_title", "unit")
    table = grid_table(rows, columns, values, texts.get("row_title", ""))
    return {"chart": responsive(lambda width: heatmap(rows, columns, values, what=title, width=width, **texts), title, table)}


def _groups(title: str, figure: Mapping[str, Json]) -> View:
    """Clients, those of a group together, beside their label histograms where they are known."""
    members = [(str(group), str(client)) for group, clients in figure["groups"].items() for client in clients]
    rows = [f"{client} ({group})" for group, client in members]
    counts, classes, names = figure["counts"], [str(name) for name in figure["classes"]], [*map(str, figure["groups"])]
    if members and all(len(counts.get(client, ())) == len(classes) for _, client in members):
        values = [[float(n) for n in counts[client]] for _, client in members]
        texts: dict[str, Any] = {"row_title": "client", "column_title": "class", "unit": "images", "root": True}
        note = "Training images of each class; clients of one group stand together."
        columns = classes
    else:
        values, texts, columns = [[float(group == name) for name in names] for group, _ in members], {}, names
        note = "Who is in which group; how many images of each class the clients have is not known here."
    table = grid_table(rows, columns, values, "client")
    chart = responsive(lambda width: heatmap(rows, columns, values, what=title, width=width, **texts), title, table)
    return {"note": note, "chart": chart}


def _lines(title: str, figure: Mapping[str, Json]) -> View:
    x, series = figure["x"], _series(figure, len(figure["x"]))
    texts, percent = _chosen(figure, "x_label", "y_label"), bool(figure.get("percent"))
    table = curves_table(x, series, texts.get("x_label", ""))
    return {
        "chart": responsive(lambda width: lines(x, series, what=title, width=width, percent=percent, **texts), title, table)
    }


def _histogram(title: str, figure: Mapping[str, Json]) -> View:
    bins, series = figure["bins"], _series(figure, len(figure["bins"]) - 1)
    texts = _chosen(figure, "x_label", "y_label")
    table = histogram_table(bins, series)
    return {"chart": responsive(lambda width: histogram(bins, series, what=title, width=width, **texts), title, table)}


def _scatter(title: str, figure: Mapping[str, Json]) -> View:
    series = {
        str(group): {str(kind): [(float(x), float(y)) for x, y in points] for kind, points in kinds.items()}
        for group, kinds in figure["series"].items()
    }
    return {"chart": responsive(lambda width: cloud(series, what=title, width=width), title, cloud_table(series))}


def _series(figure: Mapping[str, Json], length: int) -> dict[str, Any]:
    series = {str(name): row for name, row in figure["series"].items()}
    wrong = [name for name, row in series.items() if len(row) != length]
    if wrong or length < 1:
        raise ValueError(f"series {wrong} do not have {length} values")
    return series


def _chosen(figure: Mapping[str, Json], *keys: str) -> dict[str, Any]:
    return {key: str(figure[key]) for key in keys if key in figure}


_KINDS: dict[str, Callable[[str, Mapping[str, Json]], View]] = {
    "gallery": _gallery,
    "heatmap": _heatmap,
    "lines": _lines,
    "histogram": _histogram,
    "scatter": _scatter,
    "groups": _groups,
}
