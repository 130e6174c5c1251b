"""Features of images in the plane, in which neighbors stay neighbors (t-SNE)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from osfl.core.types import Dataset, Json, RunMap
from osfl.evaluation.bound import principal_axes
from osfl.evaluation.generator_samples import Draw
from osfl.evaluation.scores import CHUNK
from osfl.models.inputs import to_input

POINTS = 480  # over all classes and both kinds
Part = tuple[str, str, torch.Tensor]  # class, kind, features

BY_MODEL = "Test images and synthetic images by the finished model (t-SNE)"


def each_of(classes: int) -> int:
    """How many points of one class and kind there are at most."""
    return max(5, min(60, POINTS // (2 * classes)))


def plane(parts: Sequence[Part], seed: int, note: str) -> Any:
    """A scatter of all parts together, or their places would not compare."""
    from sklearn.manifold import TSNE

    features = torch.cat([rows for _, _, rows in parts])
    reduced = (features - features.mean(0)) @ principal_axes(features, 50)
    perplexity = min(30.0, (len(features) - 1) / 3)
    places = TSNE(perplexity=perplexity, init="pca", random_state=seed, n_jobs=1, max_iter=500).fit_transform(reduced.numpy())
    series: dict[str, dict[str, list[list[float]]]] = {name: {} for name, _, _ in parts}
    start = 0
    for name, kind, rows in parts:
        series[name][kind] = [[round(float(x), 2), round(float(y), 2)] for x, y in places[start : start + len(rows)]]
        start += len(rows)
    return {"kind": "scatter", "series": series, "note": note}


def model_plane(
    model: nn.Module,
    synthetic: Dataset,
    test: Dataset,
    classes: Sequence[str],
    *,
    draw: Draw,
    device: torch.device,
    run_map: RunMap,
) -> dict[str, Json]:
    """Where the finished model itself puts test images and the synthetic images it learned from (FedMITR, Fig. 1)."""
    if not hasattr(model, "features"):
        return {}  # an ensemble has no one space
    each, parts = each_of(len(classes)), []
    for label, name in enumerate(classes):
        for kind, data in (("real test", test), ("synthetic", synthetic)):
            of_class = (data.labels == label).nonzero().squeeze(1)
            order = torch.randperm(len(of_class), generator=draw("plane", kind, label))[:each]
            if len(order):
                parts.append((name, kind, _features(model, data.images[of_class[order]], device, run_map)))
    if sum(len(rows) for _, _, rows in parts) < 10 or len({kind for _, kind, _ in parts}) < 2:
        return {}
    seed = int(torch.randint(2**31, (1,), generator=draw("plane", "t-sne")))
    note = (
        f"Features before the last layer of the released model, up to {each} images of each class and kind. Where synthetic "
        "images lie over the test images of their class, they taught the model something that carries over; distances "
        "between clouds and their sizes mean nothing."
    )
    return {BY_MODEL: plane(parts, seed, note)}


def _features(model: nn.Module, images: torch.Tensor, device: torch.device, run_map: RunMap) -> torch.Tensor:
    def describe(chunk: torch.Tensor) -> torch.Tensor:
        with torch.inference_mode():
            found: torch.Tensor = model.features(to_input(chunk, device)).cpu().double()  # type: ignore[operator]
            return found

    return torch.cat(run_map(describe, torch.split(images, CHUNK)))
