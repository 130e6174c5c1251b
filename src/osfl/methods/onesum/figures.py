"""What OneSum shows: class means as thumbnails, the eigenvalue spectrum, the GCV curve, and which features decide."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch

from osfl.core.types import Json
from osfl.ingredients.generators.pictures import gallery
from osfl.ingredients.statistics.shrinkage import Curve
from osfl.methods.onesum.features import CELLS
from osfl.methods.onesum.head import Head, Moments

_POINTS = 60  # of a spectrum's curve


def server_figures(
    found: Moments,
    head: Head,
    curve: Curve | None,
    shrinkage: float,
    thumbnails: torch.Tensor | None,
    classes: Sequence[str],
    filters: int,
    maps: int,
) -> Iterator[tuple[str, Json]]:
    """Figures of a finished server phase, by title."""
    if thumbnails is not None:
        yield (
            "Class means",
            thumbnail_figure(thumbnails, found.shares, classes, "Mean thumbnail of all sites' images of a class."),
        )
    if curve is not None:
        yield "Shrinkage by generalized cross-validation", _curve_figure(curve)
        yield "Eigenvalue spectrum", spectrum_figure(curve.eigenvalues, shrinkage)
    if maps and head.factors is None:
        yield "Which features decide", _places_figure(found, head, filters, maps)


def preview_figures(
    thumbnails: torch.Tensor | None, counts: torch.Tensor, classes: Sequence[str], gram: torch.Tensor
) -> Mapping[str, Json]:
    """The same for one upload."""
    values = torch.linalg.eigvalsh(gram / gram.trace().clamp_min(1e-300) * len(gram)).flip(0)
    shown = {"Second moments": spectrum_figure(values, None)}
    if thumbnails is None:
        return shown
    note = "Mean thumbnail of this site's images of a class: what anybody who has this message can compute."
    return {"Class means": thumbnail_figure(thumbnails, counts, classes, note), **shown}


def thumbnail_figure(thumbnails: torch.Tensor, counts: torch.Tensor, classes: Sequence[str], note: str) -> Json:
    """Class means (classes, channels, side, side) of pixels in [-1, 1] as pictures; classes without images are left out."""
    chosen = [c for c in range(len(classes)) if float(counts[c]) > 0]
    return gallery(thumbnails[chosen].float(), [classes[c] for c in chosen], note, scale=10)


def spectrum_figure(values: torch.Tensor, shrinkage: float | None) -> Json:
    """log10 of eigenvalues, largest first, at up to 60 ranks; and the shrinkage that is added to each."""
    ranks = (
        torch.logspace(0, torch.log10(torch.tensor(float(len(values)))).item(), _POINTS).round().long().clamp_max(len(values))
    )
    ranks = torch.unique(ranks)
    series = {"eigenvalue": [round(float(v), 4) for v in values[ranks - 1].clamp_min(1e-12).log10()]}
    if shrinkage:
        series["shrinkage"] = [round(float(torch.tensor(shrinkage).log10()), 4)] * len(ranks)
    return {
        "kind": "lines",
        "x": [round(float(r), 4) for r in ranks.double().log10()],
        "series": series,
        "x_label": "log10 of the rank",
        "y_label": "log10",
        "note": "Of features in units of their deviation. Directions below the shrinkage hardly count.",
    }


def _curve_figure(curve: Curve) -> Json:
    known = torch.isfinite(curve.scores)
    return {
        "kind": "lines",
        "x": [round(float(v), 4) for v in curve.candidates[known].log10()],
        "series": {"GCV": [float(f"{float(v):.6g}") for v in curve.scores[known]]},
        "x_label": "log10 of the shrinkage",
        "y_label": "estimated squared error",
        "note": f"Least at {curve.best:.3g}, computed from the sums alone.",
    }


def _places_figure(found: Moments, head: Head, filters: int, maps: int) -> Json:
    """The share of the mean separation sum_c p_c w_c . M_c that features of each cell of the image have."""
    weight = head.weight * found.scale  # on standardized features
    parts = (found.shares[:, None] * weight * found.means).sum(0)
    cells = parts[:maps].reshape(-1, filters, CELLS, CELLS).sum((0, 1)) / parts.sum().clamp_min(1e-300)
    names = ("top", "middle", "bottom"), ("left", "middle", "right")
    rest = float(parts[maps:].sum() / parts.sum().clamp_min(1e-300))
    return {
        "kind": "heatmap",
        "rows": list(names[0]),
        "columns": list(names[1]),
        "values": [[round(100 * float(v), 2) for v in row] for row in cells],
        "unit": "%",
        "note": f"Share of what separates classes that filters find there; the thumbnail has {100 * rest:.1f} %.",
    }
