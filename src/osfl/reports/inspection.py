"""The inspection page of a bundle, from what `osfl.roles.inspection.look` found."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from osfl.core.types import Json
from osfl.reports.figures import figure_views
from osfl.reports.rendering import render, write_text
from osfl.reports.text import NOTHING, compact, count, many, size

_TITLES = {
    "upload": "What {sender} sends",
    "release": "What the server gives back",
    "personal": "What the server gives {receiver}",
}
_LEVELS = {"serious": "Serious", "caution": "Caution", "note": "Note", "good": "Checked"}


def inspection_page(look: Mapping[str, Json]) -> str:
    """The page as text; it holds everything it needs."""
    return render(
        "inspection.html",
        heading=_TITLES[look["kind"]].format(**look),
        summary=look["summary"],
        chips=_chips(look),
        tiles=_tiles(look),
        findings=[{**finding, "level": _LEVELS[finding["severity"]]} for finding in look["findings"]],
        not_checked=look["not_checked"],
        groups=[_group(row) for row in look["groups"]],
        tensors=[_tensor(row) for row in look["tensors"]],
        facts=[_fact(row) for row in look["facts"]],
        made_from=list(look["made_from"].items()),
        figures=figure_views(look["figures"]),
        digest=look["digest"],
        round=look["round"],
        total=size(look["bytes"]),
        exact=f"{count(look['bytes'])} bytes",
    )


def write_inspection(look: Mapping[str, object], path: Path) -> Path:
    return write_text(path, inspection_page(look))


def _chips(look: Mapping[str, Json]) -> list[tuple[str, str]]:
    method = [("method", f"{look['method']}: {look['description']}" if look["description"] else look["method"])]
    return [("from", look["sender"]), ("to", look["receiver"]), ("file", look["file"]), *(method if look["method"] else [])]


def _tiles(look: Mapping[str, Json]) -> list[dict[str, str]]:
    serious, caution = (sum(f["severity"] == level for f in look["findings"]) for level in ("serious", "caution"))
    signature = next(f for f in look["findings"] if f["check"] == "Signature")
    state = {"good": "valid", "caution": "unknown", "serious": "WRONG"}[signature["severity"]]
    numbers = sum(row["count"] for row in look["tensors"])
    leaves = "Leaves the building" if look["kind"] == "upload" else "Size"
    return [
        {"name": leaves, "figure": size(look["bytes"]), "why": f"{count(look['bytes'])} bytes in one file"},
        {
            "name": "Numbers",
            "figure": compact(numbers),
            "why": f"in {many(len(look['tensors']), 'tensor')}, and {many(len(look['facts']), 'fact')}",
        },
        {"name": "Signature", "figure": state, "why": "who made this file"},
        {"name": "Findings", "figure": f"{serious} + {caution}", "why": "serious + for somebody to decide"},
    ]


def _group(row: Mapping[str, Json]) -> dict[str, str]:
    return {
        "what": row["what"][:1].upper() + row["what"][1:],
        "tensors": count(row["tensors"]),
        "numbers": count(row["numbers"]),
        "bytes": size(row["bytes"]),
    }


def _tensor(row: Mapping[str, Json]) -> dict[str, str]:
    shown = {key: NOTHING if row[key] is None else compact(row[key]) for key in ("least", "mean", "most")}
    return {
        "name": row["name"],
        "what": row["what"],
        "shape": " × ".join(map(str, row["shape"])) or "one number",
        "dtype": row["dtype"],
        "bytes": count(row["bytes"]),
        **shown,
    }


def _fact(row: Mapping[str, Json]) -> dict[str, str]:
    value = row["value"]
    return {**row, "value": value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)}
