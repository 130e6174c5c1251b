"""Pictures of synthetic images beside real ones, as figures that the report draws (kinds: see reports/figures.py)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.nn import functional as F

from osfl.core.types import Json
from osfl.evaluation.distances import nearest
from osfl.evaluation.embedding import Space
from osfl.evaluation.generator_samples import ByKind, Draw
from osfl.evaluation.planes import each_of, plane
from osfl.evaluation.privacy.memorization import Memorization, closest, views
from osfl.models.pictures import png

Figures = dict[str, Json]
_STEPS = 60  # of a curve
_BINS = 24
_PICTURED = 12  # classes in the gallery
_SIDE = 64  # pixels of a picture in the gallery


def figures_of(found: Mapping[str, ByKind], verdicts: Mapping[str, Memorization], space: Space, draw: Draw) -> Figures:
    """Every figure that the images allow, by title."""
    whole = {name: kinds for name, kinds in found.items() if all(len(kind.features) > 1 for kind in kinds.values())}
    if not whole:
        return {}
    return {
        "Synthetic images and the nearest training images": _pairs(whole, verdicts),
        **_curves(
            "Fidelity",
            "nearest training image of the class",
            _fidelity(whole),
            space,
            "A curve to the left of the held-out one is nearer to the training images than real images are; far to the "
            "right, the images are unlike the class.",
        ),
        **_curves(
            "Diversity",
            "nearest other image of its kind and class",
            _diversity(whole),
            space,
            "A curve to the left of the training images' means that synthetic images resemble each other more than "
            "real ones do.",
        ),
        "Real and synthetic images in the plane (t-SNE)": _plane(whole, space, draw),
    }


# --- nearest neighbors -----------------------------------------------------------------------------------------------


def _pairs(found: Mapping[str, ByKind], verdicts: Mapping[str, Memorization]) -> object:
    """Of each class the pair that is closest and one in the middle; the classes nearest to copying first."""
    order = sorted(found, key=lambda name: (verdicts[name].ratio is None, verdicts[name].ratio or 0.0))
    images = []
    for name in order[:_PICTURED]:
        shown, training = found[name]["synthetic"].shown, found[name]["training"].images
        neighbors = closest(shown, training)
        rank = neighbors.distance.argsort()
        for which, i in (("closest", int(rank[0])), ("median", int(rank[len(rank) // 2]))):
            pair = (views(shown[i : i + 1])[int(neighbors.turn[i])][0], training[int(neighbors.place[i])])
            caption = f"{name}, {which} pair: {float(neighbors.distance[i]):.3f}"
            images.append({"png": png(_side_by_side(*pair)), "caption": caption})
    note = (
        "Left: a synthetic image, turned or mirrored where that brings it closer. Right: the nearest real training image of "
        "the class. The number is the root mean square difference of their thumbnails, pixels from 0 to 1. "
        "These are images of clients: do not publish this page if they are private."
    )
    return {"kind": "gallery", "images": images, "note": note, "wide": True}


def _side_by_side(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    height, width = left.shape[-2:]
    scale = min(1.0, _SIDE / max(height, width))
    size = (max(1, round(height * scale)), max(1, round(width * scale)))
    pair = torch.stack([left, right]).float()
    small = F.interpolate(pair, size, mode="area").round().to(torch.uint8)
    gap = torch.full((left.shape[0], size[0], max(1, size[1] // 14)), 255, dtype=torch.uint8)
    return torch.cat([small[0], gap, small[1]], 2)


# --- fidelity and diversity ------------------------------------------------------------------------------------------


def _equal(kinds: ByKind) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    n = min(len(kind.features) for kind in kinds.values())
    return kinds["synthetic"].features[:n], kinds["training"].features[:n], kinds["held_out"].features[:n]


def _fidelity(found: Mapping[str, ByKind]) -> dict[str, torch.Tensor]:
    rows: dict[str, list[torch.Tensor]] = {"synthetic": [], "held-out real": []}
    for kinds in found.values():
        synthetic, training, held_out = _equal(kinds)
        rows["synthetic"].append(nearest(synthetic, training)[0])
        rows["held-out real"].append(nearest(held_out, training)[0])
    return {name: torch.cat(parts) for name, parts in rows.items()}


def _diversity(found: Mapping[str, ByKind]) -> dict[str, torch.Tensor]:
    rows: dict[str, list[torch.Tensor]] = {"synthetic": [], "real training": []}
    for kinds in found.values():
        synthetic, training, _ = _equal(kinds)
        rows["synthetic"].append(nearest(synthetic, synthetic, same=True)[0])
        rows["real training"].append(nearest(training, training, same=True)[0])
    return {name: torch.cat(parts) for name, parts in rows.items()}


def _curves(what: str, of: str, series: Mapping[str, torch.Tensor], space: Space, note: str) -> Figures:
    """The share of images whose distance is at most x, and the same distances as a histogram."""
    x_label = f"distance to the {of}, in {space.name}"
    sizes = ", ".join(f"{name} {len(values)}" for name, values in series.items())
    top = max(float(values.max()) for values in series.values()) or 1.0
    x = [*(top * step / _STEPS for step in range(_STEPS)), top]  # the last one exactly: curves end at 1
    shares = {n: [float((values <= edge).double().mean()) for edge in x] for n, values in series.items()}
    bins = torch.linspace(0, top, _BINS + 1, dtype=torch.float64)
    counts = {n: torch.histogram(values, bins).hist.int().tolist() for n, values in series.items()}
    note = f"{note} Images: {sizes}, as many of each class."
    return {
        f"{what}, cumulative": {
            "kind": "lines",
            "x": x,
            "series": shares,
            "x_label": x_label,
            "y_label": "share of images at most so far",
            "note": note,
        },
        f"{what}, histogram": {
            "kind": "histogram",
            "bins": bins.tolist(),
            "series": counts,
            "x_label": x_label,
            "y_label": "images",
        },
    }


# --- t-SNE -----------------------------------------------------------------------------------------------------------


def _plane(found: Mapping[str, ByKind], space: Space, draw: Draw) -> Any:
    """Two dimensions in which neighbors stay neighbors; real and synthetic together, or their places would not compare."""
    each = each_of(len(found))
    parts = [
        (name, kind, found[name][key].features[:each])
        for name in found
        for kind, key in (("real", "training"), ("synthetic", "synthetic"))
    ]
    seed = int(torch.randint(2**31, (1,), generator=draw("judge", "t-sne")))
    note = (
        f"Up to {each} real training images and as many synthetic ones of each class, by {space.name}. Clouds that lie "
        "over each other cannot be distinguished there; distances between clouds and their sizes mean nothing."
    )
    return plane(parts, seed, note)
