"""How good classifiers are where an image may have several classes: each class is a yes or no of its own.

A class is answered with yes where its probability is at least a threshold. Thresholds are chosen on validation images of the
clients that use the model, where F1 is highest; no test image has a say. `scores` has the same for one class an image.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from sklearn.metrics import average_precision_score, precision_recall_curve, roc_auc_score
from torch import nn

from osfl.core.result import LabelScores, Metrics, Scores
from osfl.core.types import ClientId, Dataset, RunMap, Shard
from osfl.evaluation.scores import Floats, mean_metrics, mean_of, probabilities, spread

Truth = NDArray[np.int64]  # (images, classes) of 0 and 1
HALF = 0.5  # the threshold where nothing is known
BINS = 15


def thresholds(probability: Floats, truth: Truth) -> Floats:
    """(classes,) the probability from which on the answer is yes, such that F1 on these images is highest."""
    return np.array([_threshold(p, y) for p, y in zip(probability.T, truth.T, strict=True)])


def _threshold(probability: Floats, truth: NDArray[np.int64]) -> float:
    """Of several that are as good the highest; halfway to the next lower answer, since new images fall between."""
    if not truth.any() or truth.all():
        return HALF
    precision, recall, cuts = precision_recall_curve(truth, probability)
    score = 2 * precision * recall / np.maximum(precision + recall, 1e-12)
    best = int(len(cuts) - 1 - score[:-1][::-1].argmax())
    return float((cuts[best] + (cuts[best - 1] if best else cuts[best])) / 2)


def label_scores(probability: Floats, truth: Truth, cuts: Floats) -> list[LabelScores]:
    """One row a class."""
    return [_row(p, y, float(cut)) for p, y, cut in zip(probability.T, truth.T, cuts, strict=True)]


def _row(probability: Floats, truth: NDArray[np.int64], cut: float) -> LabelScores:
    yes, shown = probability >= cut, truth == 1
    mixed, some = bool(shown.any() and not shown.all()), bool(shown.any())
    return {
        "images": int(shown.sum()),
        "threshold": cut,
        "auroc": float(roc_auc_score(truth, probability)) if mixed else None,
        "ap": float(average_precision_score(truth, probability)) if some else None,
        "f1": _f1(yes, shown) if some else None,
        "sensitivity": float(yes[shown].mean()) if some else None,
        "specificity": float((~yes[~shown]).mean()) if not shown.all() else None,
    }


def _f1(yes: NDArray[np.bool_], shown: NDArray[np.bool_]) -> float:
    total = int(yes.sum()) + int(shown.sum())
    return 2 * int((yes & shown).sum()) / total if total else 0.0


def metrics(probability: Floats, truth: Truth, cuts: Floats) -> Metrics:
    """Means over the classes, and over all pairs of image and class at once (micro)."""
    rows, shown = label_scores(probability, truth, cuts), truth == 1
    yes, p = probability >= cuts, np.clip(probability, 1e-12, 1 - 1e-12)
    both = [(r["sensitivity"], r["specificity"]) for r in rows]
    mixed = bool(shown.any() and not shown.all())
    return {
        "accuracy": float((yes == shown).mean()),
        "balanced_accuracy": mean_of([(a + b) / 2 for a, b in both if a is not None and b is not None]) or 0.0,
        "auroc": mean_of([row["auroc"] for row in rows]),
        "f1": mean_of([row["f1"] for row in rows]) or 0.0,
        "ece": calibration_error(probability, truth),
        "nll": float(-np.where(shown, np.log(p), np.log(1 - p)).mean()),
        "ap": mean_of([row["ap"] for row in rows]),
        "auroc_micro": float(roc_auc_score(truth.ravel(), probability.ravel())) if mixed else None,
        "ap_micro": float(average_precision_score(truth.ravel(), probability.ravel())) if shown.any() else None,
        "f1_micro": _f1(yes.ravel(), shown.ravel()),
    }


def calibration_error(probability: Floats, truth: Truth) -> float:
    """Mean gap between probability and frequency over equal-width bins, all pairs of image and class together."""
    p, y = probability.ravel(), truth.ravel()
    bin_of = np.minimum((p * BINS).astype(int), BINS - 1)
    gaps = [abs(y[bin_of == b].mean() - p[bin_of == b].mean()) * (bin_of == b).mean() for b in np.unique(bin_of)]
    return float(sum(gaps))


def own_accuracy(right: Sequence[tuple[float | None, float | None]], counts: Sequence[int], images: int) -> float:
    """Expected share of right answers where each class is as frequent as at this client, from (sensitivity, specificity)."""
    found = []
    for (found_yes, found_no), count in zip(right, counts, strict=True):
        share = count / images
        if not (found_yes is None and share > 0) and not (found_no is None and share < 1):
            found.append(share * (found_yes or 0.0) + (1 - share) * (found_no or 0.0))
    return float(np.mean(found)) if found else 0.0


def score_labels(
    models: Mapping[ClientId, nn.Module],
    test: Dataset,
    classes: Sequence[str],
    shards: Sequence[Shard],
    *,
    device: torch.device,
    run_map: RunMap,
    domains: Mapping[ClientId, NDArray[np.bool_]] | None = None,
    personalized: bool | None = None,
) -> Scores:
    """All scores of a multi-label round. Clients that share one model object share its evaluation and its thresholds."""
    truth, users = test.labels.numpy(), _users(models, shards)

    def asked(model: nn.Module, images: torch.Tensor) -> Floats:
        return probabilities(model, images, device, run_map, "multilabel")

    answers, cuts = {}, {}
    for key, (model, mine) in users.items():
        answers[key] = asked(model, test.images)
        val = [shard.val for shard in mine if len(shard.val)]
        known = (torch.cat([v.images for v in val]), torch.cat([v.labels for v in val]).numpy()) if val else None
        cuts[key] = thresholds(asked(model, known[0]), known[1]) if known else np.full(len(classes), HALF)
    measured = {key: metrics(answers[key], truth, cuts[key]) for key in answers}
    rows = {key: label_scores(answers[key], truth, cuts[key]) for key in answers}
    right = {key: (answers[key] >= cuts[key]) == (truth == 1) for key in answers}
    key_of = {client: id(model) for client, model in models.items()}
    if domains is None:
        own = {shard.client: _own(rows[key_of[shard.client]], shard, len(classes)) for shard in shards}
    else:
        own = {client: float(right[key][domains[client]].mean()) for client, key in key_of.items()}
    everyone = {client: float(right[key].mean()) for client, key in key_of.items()}
    by_client = [rows[key] for key in key_of.values()]  # a model that several clients share counts once for each of them
    labels = {name: _mean_row([found[c] for found in by_client]) for c, name in enumerate(classes)}
    shares = truth.mean(0)
    return {
        "global": mean_metrics([measured[key] for key in key_of.values()]),
        "clients": {"own": spread(own), "everyone": spread(everyone)},
        "personalized": len(answers) > 1 if personalized is None else personalized,
        "majority": float(np.maximum(shares, 1 - shares).mean()),
        "per_class": {name: row["sensitivity"] for name, row in labels.items()},
        "confusion": [],
        "labels": labels,
    }


def _users(models: Mapping[ClientId, nn.Module], shards: Sequence[Shard]) -> dict[int, tuple[nn.Module, list[Shard]]]:
    """Each model once, with the shards of the clients that use it."""
    users: dict[int, tuple[nn.Module, list[Shard]]] = {}
    for shard in shards:
        model = models[shard.client]
        users.setdefault(id(model), (model, []))[1].append(shard)
    return users


def _own(rows: Sequence[LabelScores], shard: Shard, classes: int) -> float:
    """As often as the client's training and validation images have each class."""
    counts = sum(part.class_counts(classes) for part in (shard.train, shard.val))
    assert isinstance(counts, torch.Tensor)
    right = [(row["sensitivity"], row["specificity"]) for row in rows]
    return own_accuracy(right, counts.tolist(), len(shard.train) + len(shard.val))


def _mean_row(rows: Sequence[LabelScores]) -> LabelScores:
    means = {key: mean_of([row[key] for row in rows]) for key in rows[0] if key != "images"}  # type: ignore[literal-required]
    return {"images": rows[0]["images"], **means}  # type: ignore[typeddict-item]
