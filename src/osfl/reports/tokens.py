"""The part of a report about synthetic features: how far they are from real ones, and what an attacker makes of them."""

from __future__ import annotations

from typing import Any

from osfl.reports.words import NOTHING, count
from osfl.result import ClassOfTokens, Result


def tokens_section(result: Result) -> dict[str, Any]:
    """What the template shows; nothing where the method showed no synthetic features."""
    found = result.get("tokens")
    if found is None:
        return {"tokens": None}
    shape = " × ".join(count(side) for side in found["shape"])
    hint = (
        f"MMD is the squared maximum mean discrepancy of synthetic and training features ({shape} numbers an image, all in one "
        "vector), unbiased, with a Gaussian kernel whose width is the median distance of training features; in brackets the "
        "floor, the same between held-out and training features. 0 is the same distribution; it may be a little below."
    )
    rows = [_row(name, row) for name, row in found["classes"].items()]
    return {"tokens": {"hint": hint, "rows": [*rows, _row("All classes", found["overall"])]}}


def _row(name: str, row: ClassOfTokens) -> dict[str, str]:
    return {
        "name": name, "synthetic": count(row["synthetic"]), "training": count(row["training"]),
        "compared": count(row["compared"]), "mmd": discrepancy(row["mmd"]), "floor": discrepancy(row["mmd_floor"]),
    }  # fmt: skip


def discrepancy(value: float | None) -> str:
    return NOTHING if value is None else f"{value:.4f}"
