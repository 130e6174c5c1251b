"""How good finished classifiers are: on the global test set, and on each client's own distribution.

The own-distribution score is the accuracy to be expected under the client's class shares: per-class accuracy on the global test
set weighted by these shares, without drawing a test set for each client. It assumes that clients differ in their class shares
alone. Where clients are domains it is the accuracy on the test images of that domain.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from sklearn.metrics import roc_auc_score
from torch import nn

from osfl.core.errors import TrainingError
from osfl.core.result import Metrics, Scores, Spread
from osfl.core.types import ClientId, Dataset, Kind, RunMap
from osfl.models.flops import forward_flops
from osfl.models.folding import freeze
from osfl.models.inputs import to_input
from osfl.models.outputs import to_probabilities
from osfl.runtime.devices import place_for
from osfl.runtime.meter import spend

Floats = NDArray[np.float64]
CHUNK = 256  # fixed, so that the answers do not depend on the number of workers


def probabilities(
    model: nn.Module, images: torch.Tensor, device: torch.device, run_map: RunMap, kind: Kind = "multiclass"
) -> Floats:
    """Class probabilities (images, classes); chunks of images go to the workers."""
    device = place_for(model, device)
    model = freeze(model.to(device))
    spend(forward_flops(model, tuple(images.shape[1:])) * len(images))

    def answer(chunk: torch.Tensor) -> torch.Tensor:
        with torch.inference_mode():
            logits: torch.Tensor = model(to_input(chunk, device))
            return to_probabilities(logits.cpu().double(), kind)  # on the CPU: some devices have no 64-bit floats

    found = torch.cat(run_map(answer, torch.split(images, CHUNK)))
    if not bool(torch.isfinite(found).all()):
        raise TrainingError(
            "the finished model answers with numbers that are not finite",
            field="lr",
            fix="Training diverged although its losses stayed finite; lower the learning rate (`--set lr=...`).",
        )
    return found.numpy()


def metrics(probability: Floats, labels: NDArray[np.int64]) -> Metrics:
    answers = probability.argmax(1)
    recalls = [r for r in per_class_accuracy(answers, labels, probability.shape[1]) if r is not None]
    likelihood = probability[np.arange(len(labels)), labels]
    return {
        "accuracy": float((answers == labels).mean()),
        "balanced_accuracy": float(np.mean(recalls)),
        "auroc": auroc(probability, labels),
        "f1": f1(answers, labels),
        "ece": calibration_error(probability, labels),
        "nll": float(-np.log(np.clip(likelihood, 1e-12, None)).mean()),
    }


def per_class_accuracy(answers: NDArray[Any], labels: NDArray[Any], classes: int) -> list[float | None]:
    """None for a class that the labels lack."""
    return [float((answers[labels == c] == c).mean()) if (labels == c).any() else None for c in range(classes)]


def auroc(probability: Floats, labels: NDArray[np.int64]) -> float | None:
    """Macro one-vs-rest over the classes present; None when fewer than two are."""
    present = np.unique(labels)
    if len(present) < 2:
        return None
    return float(np.mean([roc_auc_score(labels == c, probability[:, c]) for c in present]))


def f1(answers: NDArray[Any], labels: NDArray[Any]) -> float:
    """Macro F1 over the classes present in the labels."""
    scores = []
    for c in np.unique(labels):
        hits = int(((answers == c) & (labels == c)).sum())
        scores.append(2 * hits / (int((answers == c).sum()) + int((labels == c).sum())))
    return float(np.mean(scores))


def calibration_error(probability: Floats, labels: NDArray[np.int64], bins: int = 15) -> float:
    """Expected calibration error: mean gap between confidence and accuracy over equal-width bins."""
    confidence, right = probability.max(1), probability.argmax(1) == labels
    bin_of = np.minimum((confidence * bins).astype(int), bins - 1)
    gaps = [abs(right[bin_of == b].mean() - confidence[bin_of == b].mean()) * (bin_of == b).mean() for b in set(bin_of)]
    return float(sum(gaps))


def own_accuracy(recall: Sequence[float | None], counts: Sequence[int]) -> float:
    """Expected accuracy when images come with this client's class shares; classes the test set lacks drop out."""
    known = [(r, n) for r, n in zip(recall, counts, strict=True) if r is not None and n > 0]
    total = sum(n for _, n in known)
    return float(sum(r * n for r, n in known) / total) if total else 0.0


def score(
    models: Mapping[ClientId, nn.Module],
    test: Dataset,
    classes: Sequence[str],
    counts: Mapping[ClientId, Sequence[int]],
    *,
    device: torch.device,
    run_map: RunMap,
    domains: Mapping[ClientId, NDArray[np.bool_]] | None = None,
    personalized: bool | None = None,
    weighed: Callable[[ClientId, Floats], Floats] | None = None,
) -> Scores:
    """All scores of a round. Clients that share one model object share its evaluation.

    `domains`: for each client, which test images are of its domain, where clients are domains. `weighed`: the scores
    (images, classes) of a client that weighs its model's probabilities by its own class shares.
    """
    labels = test.labels.numpy()
    answered: dict[int, Floats] = {}
    for model in models.values():
        if id(model) not in answered:
            answered[id(model)] = probabilities(model, test.images, device, run_map)
    measured = {key: metrics(p, labels) for key, p in answered.items()}
    by_client = {client: answered[id(model)] for client, model in models.items()}
    recalls = {client: per_class_accuracy(p.argmax(1), labels, len(classes)) for client, p in by_client.items()}

    def on_own(answers: Mapping[ClientId, Floats]) -> Spread:
        right = {client: p.argmax(1) for client, p in answers.items()}
        if domains is not None:
            return spread({c: float((answer == labels)[domains[c]].mean()) for c, answer in right.items()})
        found = {c: per_class_accuracy(answer, labels, len(classes)) for c, answer in right.items()}
        return spread({client: own_accuracy(found[client], counts[client]) for client in models})

    by_count = {} if weighed is None else {"weighed": on_own({c: weighed(c, p) for c, p in by_client.items()})}
    answers = list(by_client.values())  # a model that several clients share counts once for each of them
    everyone = {client: float((p.argmax(1) == labels).mean()) for client, p in by_client.items()}
    return {
        "global": mean_metrics([measured[id(models[client])] for client in models]),
        "clients": {"own": on_own(by_client), "everyone": spread(everyone), **by_count},  # type: ignore[typeddict-item]
        "personalized": len(answered) > 1 if personalized is None else personalized,
        "majority": float(np.bincount(labels).max() / len(labels)),
        "per_class": {name: mean_of([recalls[client][c] for client in models]) for c, name in enumerate(classes)},
        "confusion": np.mean([confusion(p.argmax(1), labels, len(classes)) for p in answers], axis=0).tolist(),
    }


def confusion(answers: NDArray[Any], labels: NDArray[Any], classes: int) -> Floats:
    """Counts; rows = truth, columns = answer."""
    return np.bincount(labels * classes + answers, minlength=classes**2).reshape(classes, classes).astype(float)


def spread(values: Mapping[ClientId, float]) -> Spread:
    worst = min(values, key=lambda client: (values[client], client))
    numbers = np.array(list(values.values()))
    return {
        "mean": float(numbers.mean()),
        "std": float(numbers.std()),
        "median": float(np.median(numbers)),
        "worst": values[worst],
        "worst_client": worst,
        "values": dict(values),
    }


def mean_of(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return float(np.mean(known)) if known else None


def mean_metrics(rows: Sequence[Metrics]) -> Metrics:
    return {key: mean_of([row[key] for row in rows]) for key in rows[0]}  # type: ignore[literal-required, return-value]
