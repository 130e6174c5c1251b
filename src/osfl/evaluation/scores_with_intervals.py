"""A finished model on labeled images: every score with its interval, by class and by group, calibration and confusion."""

from __future__ import annotations

from typing import TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from osfl.core.evaluated import Bin, ClassScores, GroupScores
from osfl.core.headline import headline
from osfl.core.types import Kind, one_by_one
from osfl.data.source import Part
from osfl.evaluation.intervals import BINS, LEVEL, RESAMPLES, Estimates, estimates
from osfl.evaluation.scores import Floats, confusion, probabilities

Probabilities: TypeAlias = Floats  # class probabilities (images, classes)


def probabilities_of(
    model: nn.Module, images: torch.Tensor, device: torch.device | str = "cpu", kind: Kind = "multiclass"
) -> Probabilities:
    return probabilities(model, images, torch.device(device), one_by_one, kind)


def score_probabilities(
    answers: Probabilities,
    part: Part,
    classes: tuple[str, ...],
    *,
    metric: str = "",
    resamples: int = RESAMPLES,
    cuts: Floats | None = None,
) -> dict[str, object]:
    """The scores of an `Evaluation`; what model and which data it was is for the caller to add. `cuts`: multi-label, the
    thresholds of the classes."""
    if cuts is not None:
        return _score_labels(answers, part, classes, metric, resamples, cuts)
    labels = part.labels
    found = estimates(answers, labels, groups=part.groups, resamples=resamples)
    counts = np.bincount(labels, minlength=len(classes))
    first, why = headline(counts.tolist(), metric)
    people = None if part.groups is None else len(set(part.groups.tolist()))
    return {
        "interval": {"level": LEVEL, "resamples": resamples, "of": "images" if people is None else "people"},
        "headline": first,
        "rule": why,
        "majority": float(counts.max() / len(labels)),
        "metrics": found.overall,
        "per_class": {name: _class_scores(found, c, int(counts[c])) for c, name in enumerate(classes)},
        "confusion": confusion(answers.argmax(1), labels, len(classes)).tolist(),
        "calibration": calibration(answers, labels),
        "groups": _by_group(answers, part, resamples),
    }


def _score_labels(
    answers: Probabilities, part: Part, classes: tuple[str, ...], metric: str, resamples: int, cuts: Floats
) -> dict[str, object]:
    """The same where an image may have several classes; there is no matrix of confusions then."""
    truth, counts = part.labels, part.labels.sum(0)
    found = estimates(answers, truth, groups=part.groups, resamples=resamples, cuts=cuts)
    first, why = headline(counts.tolist(), metric, several=True)
    rows = {name: _class_scores(found, c, int(counts[c])) for c, name in enumerate(classes)}
    for row, cut in zip(rows.values(), cuts.tolist(), strict=True):
        row["threshold"] = cut
    return {
        "interval": {"level": LEVEL, "resamples": resamples, "of": "images" if part.groups is None else "people"},
        "headline": first,
        "rule": why,
        "majority": constant_share(truth),
        "metrics": found.overall,
        "per_class": rows,
        "confusion": [],
        "calibration": bins(answers.ravel(), truth.ravel() == 1),
        "groups": _by_group(answers, part, resamples, cuts),
    }


def constant_share(truth: NDArray[np.int64]) -> float:
    """Multi-label: share of right answers where each class always gets its more frequent one, yes or no."""
    shares = truth.mean(0)
    return float(np.maximum(shares, 1 - shares).mean())


def _class_scores(found: Estimates, place: int, images: int) -> ClassScores:
    one = {name: estimates_by_class[place] for name, estimates_by_class in found.by_class.items()}
    return {"images": images, **one}  # type: ignore[typeddict-item]


def calibration(answers: Probabilities, labels: NDArray[np.int64]) -> list[Bin]:
    """How often the model is right when it is so sure."""
    return bins(answers.max(1), answers.argmax(1) == labels)


def bins(confidence: Floats, right: NDArray[np.bool_]) -> list[Bin]:
    """Ranges of equal width, without those that are empty."""
    bin_of = np.minimum((confidence * BINS).astype(int), BINS - 1)
    return [
        {
            "low": place / BINS,
            "high": (place + 1) / BINS,
            "images": int((bin_of == place).sum()),
            "confidence": float(confidence[bin_of == place].mean()),
            "accuracy": float(right[bin_of == place].mean()),
        }
        for place in sorted(set(bin_of.tolist()))
    ]


def _by_group(answers: Probabilities, part: Part, resamples: int, cuts: Floats | None = None) -> dict[str, GroupScores]:
    """The overall scores of the images of each domain: what is right on average may be wrong for one scanner."""
    if part.domains is None:
        return {}
    groups: dict[str, GroupScores] = {}
    for name in sorted(set(part.domains.tolist())):
        here = part.subset(np.flatnonzero(part.domains == name))
        labels = here.labels
        found = estimates(answers[part.domains == name], labels, groups=here.groups, resamples=resamples, cuts=cuts)
        groups[name or "(none)"] = {
            "images": len(here),
            "people": None if here.groups is None else len(set(here.groups.tolist())),
            "majority": float(np.bincount(labels).max() / len(here)) if cuts is None else constant_share(labels),
            "metrics": found.overall,
        }
    return groups
