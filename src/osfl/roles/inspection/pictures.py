"""Figures of a bundle: images in it, images that its method can make from it, and histograms of its numbers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from osfl.core.method import Context
from osfl.core.tensors import RawTensor
from osfl.core.types import Json, Payload
from osfl.roles.inspection.findings import Finding, Material
from osfl.roles.inspection.numbers import chunks, histogram
from osfl.wire.bundle import Bundle
from osfl.wire.values import FLOATS

if TYPE_CHECKING:
    from osfl.core.types import Plan

Figures = dict[str, Json]
MOST_PICTURES = 24  # of one tensor
MOST_PIXELS = 4096 * 4096  # of one picture; nothing that medical images need is larger
_SHOWN = {
    "weights": "Weights",
    "statistics": "Averages and spreads over training images",
    "tokens": "Tokens",
    "features": "Sums of features",
    "pictures": "Pixels",
    "numbers": "Other numbers",
}


def histograms(m: Material) -> Figures:
    """One figure for each kind of numbers."""
    figures: Figures = {}
    for kind, title in _SHOWN.items():
        names = [name for name in m.named(kind) if m.seen.bundle.tensors[name].dtype in FLOATS or kind == "pictures"]
        figure = histogram([m.seen.bundle.tensors[name] for name in names], [m.numbers[name] for name in names])
        if figure is not None:
            many = sum(m.numbers[name].count for name in names)
            figures[title] = {**figure, "note": f"{many:,} numbers of {len(names)} tensors, how often each value occurs."}
    return figures


def galleries(m: Material) -> Figures:
    """Pictures that are in the bundle as they are."""
    return {
        f"Pictures in {name}": _gallery(m.seen.bundle, name, m.known.classes)
        for name in m.named("pictures")
        if _drawable(m.seen.bundle.tensors[name])
    }


def _drawable(raw: RawTensor) -> bool:
    return raw.shape[1] in (1, 3) and 0 < raw.shape[2] * raw.shape[3] <= MOST_PIXELS


def _gallery(bundle: Bundle, name: str, classes: Sequence[str]) -> Json:
    from osfl.models.pictures import png

    raw = bundle.tensors[name]
    many = raw.shape[0]
    chosen = sorted({round(i) for i in np.linspace(0, many - 1, min(many, MOST_PICTURES))})
    captions = _captions(bundle, many, classes)
    pictures = [_pixels(raw, place) for place in chosen]
    scale = max(1, 96 // max(raw.shape[2:]))
    images = [
        {"png": png(pixels, scale), "caption": captions.get(place, f"no. {place + 1}")}
        for place, pixels in zip(chosen, pictures, strict=True)
    ]
    return {"kind": "gallery", "images": images, "note": f"{len(chosen)} of {many:,}, from the first to the last."}


def _pixels(raw: RawTensor, place: int) -> Any:
    """One picture as uint8 (channels, height, width); floats are stretched from their least to their largest value."""
    import torch

    size = len(raw.data) // raw.shape[0]
    one = RawTensor(raw.dtype, raw.shape[1:], memoryview(raw.data)[place * size : (place + 1) * size])
    values = np.nan_to_num(np.concatenate(list(chunks(one))), posinf=0.0, neginf=0.0).reshape(raw.shape[1:])
    if raw.dtype != "U8":
        low, high = float(values.min()), float(values.max())
        values = (values - low) / (high - low) * 255 if high > low and np.isfinite(high - low) else values * 0
    return torch.from_numpy(np.rint(values).clip(0, 255).astype(np.uint8))


def _captions(bundle: Bundle, many: int, classes: Sequence[str]) -> dict[int, str]:
    """The class of each picture, where there is a tensor of as many labels."""
    whole = {name: raw for name, raw in bundle.tensors.items() if raw.shape == (many,) and raw.dtype not in FLOATS}
    labels = [raw for name, raw in whole.items() if "label" in name]
    if len(labels) != 1:
        return {}
    values = np.concatenate(list(chunks(labels[0]))).astype(np.int64)
    return {i: classes[label] if 0 <= label < len(classes) else f"class {label}" for i, label in enumerate(values.tolist())}


# --- with the method's help --------------------------------------------------------------------------------------------


def payload_of(bundle: Bundle) -> Payload:
    from osfl.runtime.payloads import from_raw

    return Payload(from_raw(bundle.tensors), dict(bundle.facts))


def cautions(bundle: Bundle, plan: Plan) -> list[Finding]:
    """What the method knows that a reader of this upload can find out. Ask only for a bundle that keeps the contract."""
    from osfl.core.registry import load

    if bundle.kind != "upload":
        return []
    found = load(plan.method)(plan.task, plan.settings).cautions(payload_of(bundle), plan)
    return [
        Finding("caution", "What a reader can compute", line, "Decide before you send it, with whoever made the plan.")
        for line in found
    ]


def previews(bundle: Bundle, plan: Plan) -> tuple[Figures, list[str]]:
    """What the method's `preview` draws, and why not if it cannot. Ask only for a bundle that keeps the contract."""
    import torch

    from osfl.core.registry import load

    method = load(plan.method)(plan.task, plan.settings)
    if not method.provides("preview"):
        return {}, []
    try:
        drawn: Mapping[str, Json] = method.preview(payload_of(bundle), Context(plan, torch.device("cpu")))
    except (ArithmeticError, LookupError, RuntimeError, TypeError, ValueError) as error:  # strange values, well formed
        return {}, [f"What the method can make of it: drawing failed ({type(error).__name__}: {error})."]
    return dict(drawn), []
