"""The generator section of a report: synthetic and real images, copies of training images, bound and measured gap."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from osfl.core.result import ClassOfImages, Generators, Result
from osfl.core.types import Json
from osfl.reports.columns import is_pooled
from osfl.reports.figures import figure_views
from osfl.reports.text import NOTHING, PERCENT, POINTS, count, decimal, percent, points

Row = dict[str, Any]


def generators_section(result: Result, references: Sequence[Result] = ()) -> dict[str, Any]:
    """What the template shows; nothing where the method showed no synthetic images."""
    found = result.get("generators")
    if found is None:
        return {"generators": None}
    rows = [_row(name, row) for name, row in found["classes"].items()]
    view = {
        "hint": _hint(found),
        "names": (found["frechet_name"], found["kernel_name"]),
        "warnings": found["warnings"],
        "rows": [*rows, _row("All classes", found["overall"])],
        "verdicts": rows,
        "bound": _bound(found, result, references),
        "clients": [(client, _nats(error)) for client, error in found["clients"].items()],
        "figures": figure_views(found["figures"]),
    }
    return {"generators": view}


def _hint(found: Generators) -> str:
    n = found["overall"]["compared"]
    return (
        f"{found['frechet_name']} and {found['kernel_name']} are the Fréchet and the kernel distance of synthetic and real "
        f"training images on {found['space']}; in brackets the floor, the same between held-out and training images, "
        f"which a perfect generator would reach. They were measured on as many images of each kind as the column “compared” "
        f"shows ({count(n)} in all), and compare only with figures on the same features and of as many images."
    )


def _row(name: str, row: ClassOfImages) -> Row:
    verdict = row["verdict"]
    return {
        "name": name,
        "synthetic": count(row["synthetic"]),
        "training": count(row["training"]),
        "compared": count(row["compared"]),
        "frechet": _beside(row["frechet"], row["frechet_floor"]),
        "kernel": _beside(row["kernel"], row["kernel_floor"]),
        "ratio": decimal(row["nearest_ratio"], 2),
        "copied": _shares(row["copied"], row["copied_floor"]),
        "verdict": verdict,
        "error": _nats(row["error"]),
        "mark": {"copies": "worst", "no sign of copying": "best"}.get(verdict, ""),
    }


def _short(value: float) -> str:
    """Three figures, whatever the unit of a feature space."""
    return f"{value:.0f}" if abs(value) >= 100 else f"{value:.1f}" if abs(value) >= 10 else f"{value:.2f}"


def _beside(value: float | None, floor: float | None) -> str:
    return NOTHING if value is None or floor is None else f"{_short(value)} ({_short(floor)})"


def _shares(value: float | None, floor: float | None) -> str:
    if value is None or floor is None:
        return NOTHING
    return f"{percent(value, 0).removesuffix(PERCENT)} ({percent(floor, 0).removesuffix(PERCENT)}){PERCENT}"


def _nats(value: float | None) -> str:
    return NOTHING if value is None else _short(value)


# --- the bound -------------------------------------------------------------------------------------------------------


def _bound(found: Generators, result: Result, references: Sequence[Result]) -> list[str]:
    """Sentences: the bound, what was measured, and what both leave out."""
    bound = found["bound"]
    texts = [_value(found)]
    pooled = next((other for other in references if is_pooled(other["method"])), None)
    if pooled is not None:
        best, own = (run["scores"]["global"]["accuracy"] for run in (pooled, result))
        texts.append(
            f"Measured: training on all images in one place reaches {percent(best)}, this run {percent(own)}: "
            f"a gap of {points(best - own)}."
        )
    if bound["left_out"]:
        texts.append(f"Too few images to estimate the error of {', '.join(bound['left_out'])}; left out.")
    if bound["prior_shift"]:
        texts.append(
            f"The synthetic images have other shares of classes than the real ones, {_short(bound['prior_shift'])} "
            "nats apart; the formula takes the real shares, so this is not in it."
        )
    texts.append(
        f"The error is Kullback-Leibler divergence, estimated with Gaussians on {bound['dimensions']} principal components of "
        "the features. What lies outside them can only add to it: this is an estimate of the bound, not a bound."
    )
    return texts


def _value(found: Generators) -> str:
    bound = found["bound"]
    if bound["infinite"]:
        return f"There is no bound: no variety, or no image at all, among synthetic {', '.join(bound['infinite'])}."
    if bound["value"] is None or bound["error"] is None:
        return "There are too few images to estimate how wrong the generators are."
    vacuous = " From 100 % on, it is vacuous." if bound["value"] >= 1 else ""
    return (
        f"With an estimated error of {_short(bound['error'])} nats, a classifier trained on these images loses at most about "
        f"2√(½ × {_short(max(0.0, bound['error']))}) = {percent(bound['value'], 0)} of accuracy against the best one.{vacuous}"
    )


def bound_rows(comparison: Mapping[str, Json]) -> list[Row]:
    """Methods of a comparison that have generators, with the gap where pooled training took part."""
    rows = []
    for name, metrics in comparison["methods"].items():
        error, bound = (metrics.get(f"generators.bound.{key}", {}) for key in ("error", "value"))
        if metrics.get("generators.overall.frechet", {}).get("mean") is None:
            continue
        gap = comparison.get("gaps", {}).get(name, {})
        rows.append(
            {
                "method": name,
                "error": _nats(error.get("mean")),
                "bound": percent(bound.get("mean"), 0),
                "gap": _with_spread(gap),
            }
        )
    return rows


def _with_spread(entry: Mapping[str, Json]) -> str:
    if entry.get("mean") is None:
        return NOTHING
    spread = f" ± {points(entry['std'])}" if entry["n"] > 1 else ""
    return f"{points(entry['mean'])}{spread}".replace(f"{POINTS} ±", " ±")
