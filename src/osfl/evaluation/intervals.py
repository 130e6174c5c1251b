"""Bootstrap intervals of all scores: images (or the people on them) are drawn again with replacement, many times.

A draw is a row of weights: how often each image is in it. All scores are computed from weights, many draws at once.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from osfl.core.evaluated import Estimate
from osfl.core.seeds import numpy_generator

Floats = NDArray[np.float64]
RESAMPLES, LEVEL, BINS = 1000, 0.95, 15
_CELLS = 4_000_000  # of a block of weights: bounds the memory, whatever the number of images


def draws(images: int, resamples: int, groups: NDArray[np.str_] | None = None, *, seed: int = 0) -> Iterator[Floats]:
    """Blocks of weights (draws, images); with `groups` whole people are drawn, so that their images stay together."""
    rng = numpy_generator(seed, "bootstrap")
    codes = np.arange(images) if groups is None else np.unique(groups, return_inverse=True)[1]
    units = int(codes.max()) + 1 if images else 0
    block = max(1, _CELLS // max(1, images))
    for start in range(0, resamples, block):
        count = min(block, resamples - start)
        yield rng.multinomial(units, np.full(units, 1 / units), size=count).astype(np.float64)[:, codes]


def scores_of(probability: Floats, labels: NDArray[np.int64], weights: Floats) -> dict[str, Floats]:
    """Every score for each row of weights: overall ones (draws,), those by class (draws, classes); nan: it does not exist.

    With weights of one they are `osfl.evaluation.scores.metrics`.
    """
    classes, answers = probability.shape[1], probability.argmax(1)
    hits, confidence = (answers == labels).astype(float), probability.max(1)
    truth, answered = np.eye(classes)[labels], np.eye(classes)[answers]
    total = weights.sum(1)
    support, predicted, right = weights @ truth, weights @ answered, weights @ (truth * answered)
    likelihood = np.clip(probability[np.arange(len(labels)), labels], 1e-12, None)
    with np.errstate(invalid="ignore", divide="ignore"):
        recall, precision = right / support, right / predicted
        others = total[:, None] - support
        f1 = np.where(support > 0, 2 * right / (support + predicted), np.nan)
        auroc = np.stack([_auroc(probability[:, c], labels == c, weights) for c in range(classes)], axis=1)
        return {
            "accuracy": weights @ hits / total,
            "balanced_accuracy": _mean(recall),
            "auroc": _mean(auroc),
            "f1": _mean(f1),
            "ece": _calibration_error(confidence, hits, weights) / total,
            "nll": weights @ -np.log(likelihood) / total,
            "class_recall": recall,
            "class_precision": precision,
            "class_specificity": (others - (predicted - right)) / others,
            "class_f1": f1,
            "class_auroc": auroc,
        }


def _mean(by_class: Floats) -> Floats:
    """Over the classes that have a value; nan where none has."""
    known = np.isfinite(by_class)
    count = known.sum(1)
    return np.where(count > 0, np.where(known, by_class, 0.0).sum(1) / np.maximum(count, 1), np.nan)


def _auroc(scores: Floats, positive: NDArray[np.bool_], weights: Floats) -> Floats:
    """Chance that an image of the class scores higher than another one; ties count half."""
    order = np.argsort(scores, kind="stable")
    ordered = scores[order]
    starts = np.flatnonzero(np.r_[True, ordered[1:] > ordered[:-1]])
    sorted_weights = weights[:, order]
    yes = np.add.reduceat(sorted_weights * positive[order], starts, axis=1)
    no = np.add.reduceat(sorted_weights * ~positive[order], starts, axis=1)
    below = np.cumsum(no, axis=1) - no
    pairs = yes.sum(1) * no.sum(1)
    return np.where(pairs > 0, (yes * (below + 0.5 * no)).sum(1) / np.where(pairs > 0, pairs, 1.0), np.nan)


def _calibration_error(confidence: Floats, hits: Floats, weights: Floats) -> Floats:
    """Expected calibration error times the number of images."""
    bin_of = np.minimum((confidence * BINS).astype(int), BINS - 1)
    gaps: Floats = np.abs(weights @ ((hits - confidence)[:, None] * np.eye(BINS)[bin_of])).sum(1)
    return gaps


@dataclass(frozen=True)
class Estimates:
    """Each score with its percentile interval."""

    overall: dict[str, Estimate]
    by_class: dict[str, list[Estimate]]  # recall, precision, specificity, f1, auroc


def estimates(
    probability: Floats,
    labels: NDArray[np.int64],
    *,
    groups: NDArray[np.str_] | None = None,
    resamples: int = RESAMPLES,
    seed: int = 0,
) -> Estimates:
    point = scores_of(probability, labels, np.ones((1, len(labels))))
    drawn = [scores_of(probability, labels, block) for block in draws(len(labels), resamples, groups, seed=seed)]
    found = Estimates({}, {})
    for name, value in point.items():
        samples = np.concatenate([block[name] for block in drawn]) if drawn else np.empty((0, *value.shape[1:]))
        if value.ndim == 1:
            found.overall[name] = _estimate(value[0], samples)
        else:
            by_class = [_estimate(value[0, c], samples[:, c]) for c in range(value.shape[1])]
            found.by_class[name.removeprefix("class_")] = by_class
    return found


def _estimate(value: float, samples: Floats) -> Estimate:
    known = samples[np.isfinite(samples)]
    if not np.isfinite(value):
        return {"value": None, "low": None, "high": None}
    if not len(known):
        return {"value": float(value), "low": None, "high": None}
    low, high = np.quantile(known, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return {"value": float(value), "low": float(low), "high": float(high)}
