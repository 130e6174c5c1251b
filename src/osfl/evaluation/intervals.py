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


def draws(
    images: int, resamples: int, groups: NDArray[np.str_] | None = None, *, seed: int = 0, answers: int = 1
) -> Iterator[Floats]:
    """Blocks of weights (draws, images); with `groups` whole people are drawn, so that their images stay together. `answers` of
    each image that a score looks at one by one make blocks smaller."""
    rng = numpy_generator(seed, "bootstrap")
    codes = np.arange(images) if groups is None else np.unique(groups, return_inverse=True)[1]
    units = int(codes.max()) + 1 if images else 0
    block = max(1, _CELLS // max(1, images * answers))
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


def label_scores_of(probability: Floats, truth: NDArray[np.int64], cuts: Floats, weights: Floats) -> dict[str, Floats]:
    """The same where an image may have several classes: yes from the class's threshold on, `cuts` (classes,).

    With weights of one they are `osfl.evaluation.multilabel.metrics`.
    """
    shown, yes = (truth == 1).astype(float), (probability >= cuts).astype(float)
    classes, p = truth.shape[1], np.clip(probability, 1e-12, 1 - 1e-12)
    total, support, answered = weights.sum(1)[:, None], weights @ shown, weights @ yes
    right, likelihood = weights @ (yes * shown), np.where(shown == 1, np.log(p), np.log(1 - p))
    each, flat, flat_truth = np.repeat(weights, classes, axis=1), probability.ravel(), truth.ravel() == 1  # image by image
    with np.errstate(invalid="ignore", divide="ignore"):
        recall, precision, others = right / support, right / answered, total - support
        specificity = (others - (answered - right)) / others
        f1 = np.where(support > 0, 2 * right / (support + answered), np.nan)
        auroc = np.stack([_auroc(probability[:, c], shown[:, c] == 1, weights) for c in range(classes)], axis=1)
        ap = np.stack([_average_precision(probability[:, c], shown[:, c] == 1, weights) for c in range(classes)], axis=1)
        pairs, hits = total[:, 0] * classes, (yes == shown).astype(float)
        return {
            "accuracy": (weights @ hits).sum(1) / pairs,
            "balanced_accuracy": _mean((recall + specificity) / 2),
            "auroc": _mean(auroc),
            "f1": _mean(f1),
            "ece": _calibration_error(flat, flat_truth.astype(float), each) / pairs,
            "nll": -(weights @ likelihood).sum(1) / pairs,
            "ap": _mean(ap),
            "auroc_micro": _auroc(flat, flat_truth, each),
            "ap_micro": _average_precision(flat, flat_truth, each),
            "f1_micro": 2 * right.sum(1) / (support + answered).sum(1),
            "class_recall": recall,
            "class_precision": precision,
            "class_specificity": specificity,
            "class_f1": f1,
            "class_auroc": auroc,
            "class_ap": ap,
        }


def _average_precision(scores: Floats, positive: NDArray[np.bool_], weights: Floats) -> Floats:
    """The mean precision at the answers that are right, from the highest score on; equal scores are answered together."""
    order = np.argsort(-scores, kind="stable")
    ordered, sorted_weights = scores[order], weights[:, order]
    starts = np.flatnonzero(np.r_[True, ordered[1:] < ordered[:-1]])
    right = np.add.reduceat(sorted_weights * positive[order], starts, axis=1)
    answered = np.cumsum(np.add.reduceat(sorted_weights, starts, axis=1), axis=1)
    precision = np.cumsum(right, axis=1) / np.maximum(answered, 1e-12)
    found, every = (right * precision).sum(1), right.sum(1)
    return np.where(every > 0, found / np.where(every > 0, every, 1.0), np.nan)


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
    by_class: dict[str, list[Estimate]]  # recall, precision, specificity, f1, auroc; multi-label also ap


def estimates(
    probability: Floats,
    labels: NDArray[np.int64],
    *,
    groups: NDArray[np.str_] | None = None,
    resamples: int = RESAMPLES,
    seed: int = 0,
    cuts: Floats | None = None,
) -> Estimates:
    """`labels` (images,), or multi-label (images, classes) with the thresholds `cuts`, which are not drawn again."""

    def scored(weights: Floats) -> dict[str, Floats]:
        return scores_of(probability, labels, weights) if cuts is None else label_scores_of(probability, labels, cuts, weights)

    blocks = draws(len(labels), resamples, groups, seed=seed, answers=1 if cuts is None else probability.shape[1])
    point, drawn = scored(np.ones((1, len(labels)))), [scored(block) for block in blocks]
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
